"""A checkpoint as the model that `from_pretrained` opens, in the layout of its source: one tensor at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from shardtune.checkpoint import (
    ASSETS,
    DTYPES,
    TRANSFER_TIMEOUT,
    Checkpoint,
    Chunk,
    DamagedCheckpoint,
    move_aside,
    read_chunk,
    read_tensor,
    transfer,
    write_safetensors,
)
from shardtune.checkpoint import durable_fs as disk
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config import ExportConfig
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed, UserError
from shardtune.log import logger

_FILE_BYTES = 5_000_000_000
_MARK = ".exported"


def model_assets(config: PreTrainedConfig, source: str, tokenizer: Any) -> dict[str, bytes]:
    """The files beside the weights, by name, as the source has them: configuration, generation settings, tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        _write_generation_config(source, Path(folder))
        assets = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    values = config.to_dict() | {"dtype": str(source_dtype(config)).removeprefix("torch.")}
    return assets | {"config.json": (json.dumps(values, indent=2) + "\n").encode()}


def source_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the source's configuration names, else float32."""
    dtype = config.dtype
    return dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype), torch.float32)


def _write_generation_config(source: str, out: Path) -> None:
    """The source's own, so that the model answers like the original; it may hold what transformers will not write."""
    own = Path(source) / "generation_config.json"
    if own.is_file():
        (out / own.name).write_bytes(own.read_bytes())
        return
    try:
        GenerationConfig.from_pretrained(source).save_pretrained(out)
    except OSError:
        return  # the source has none, and transformers derives it from the configuration


@dataclass(frozen=True)
class _Unit:
    """Stored tensors that become exported ones together: mostly one of each, or the experts that were stacked."""

    stored: list[str]
    exported: dict[str, tuple[torch.dtype, list[int]]]

    @property
    def bytes(self) -> int:
        return sum(
            dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.exported.values()
        )


class Export:
    """What is written where: the same on every rank that makes one of the same checkpoint.

    Raises:
        UserError: transformers does not know the checkpoint's configuration.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, assets: Mapping[str, bytes]) -> None:
        self.checkpoint, self.assets = checkpoint, dict(assets)
        values = json.loads(self.assets["config.json"])
        self.dtype = DTYPES[values["dtype"] if dtype == "source" else dtype]
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        self.assets["config.json"] = (json.dumps(values, indent=2) + "\n").encode()
        self._model = _on_meta(self.assets["config.json"])
        self._files = _into_files(_units(self._model, checkpoint, self.dtype))

    @property
    def mark(self) -> str:
        """Of what checkpoint and dtype the exported model is."""
        return f"{self.checkpoint.name} {self.checkpoint.digest} {str(self.dtype).removeprefix('torch.')}"

    def names(self, share: slice = slice(None)) -> list[str]:
        """The stored tensors in the order in which these files take them."""
        return [
            f"model.{name}"
            for units in self._files[share]
            for unit in units
            for name in unit.stored
        ]

    def write_files(
        self, out: Path, tensors: Iterator[torch.Tensor], share: slice = slice(None)
    ) -> None:
        """Write these of the files from the stored tensors, which come in the order of `names`."""
        count = len(self._files)
        for number, units in list(enumerate(self._files))[share]:
            layout = {name: kind for unit in units for name, kind in unit.exported.items()}
            exported = (tensor for unit in units for tensor in self._convert(unit, tensors))
            write_safetensors(out / _file_name(number, count), layout, exported, {"format": "pt"})

    def write_rest(self, out: Path) -> None:
        """Everything but the weights."""
        for name, content in self.assets.items():
            disk.write_file(out / name, [memoryview(content)])
        if len(self._files) > 1:
            places = {
                name: _file_name(number, len(self._files))
                for number, units in enumerate(self._files)
                for unit in units
                for name in unit.exported
            }
            total = sum(unit.bytes for units in self._files for unit in units)
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            disk.write_file(out / "model.safetensors.index.json", [memoryview(index.encode())])
        lines = [self.mark, *(_size_and_name(path) for path in sorted(out.iterdir()))]
        disk.write_file(out / _MARK, [memoryview("\n".join(lines).encode())])
        disk.sync_directory(out)

    def _convert(self, unit: _Unit, tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        dtype = next(iter(unit.exported.values()))[0]
        stored = {name: next(tensors).to(dtype) for name in unit.stored}
        converted = revert_weight_conversion(self._model, stored)
        yield from (converted.pop(name) for name in unit.exported)


def export_checkpoint(checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """Write the model of a checkpoint to `out`, which appears when it is whole.

    Raises:
        UserError: `out` exists, cannot be made or is being written, or a file of the checkpoint does not exist.
        RunFailed: it could not be written to its end; what was written is deleted.
        DamagedCheckpoint: a tensor or a file is not what was saved.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists - name a directory that does not")
    if absent := [name for name in checkpoint.files if checkpoint.find(name) is None]:
        raise UserError(f"{checkpoint.why_missing(absent[0])} - name all parts of the checkpoint")
    names = [name for name in checkpoint.files if name.startswith(f"{ASSETS}/")]
    assets = {name.removeprefix(f"{ASSETS}/"): _read_asset(checkpoint, name) for name in names}
    export, unfinished = Export(checkpoint, dtype, assets), _unfinished(out)
    try:
        disk.make_directory(unfinished)
        lock = os.open(unfinished, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"{out} cannot be made: {error.strerror} ({error.filename}) - name another directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"another export writes {out} - wait for it, or name another directory"
        ) from error
    try:
        for left_behind in unfinished.iterdir():  # by an export that was killed
            disk.delete(left_behind)
        export.write_files(
            unfinished, (read_tensor(checkpoint, name, read_chunk) for name in export.names())
        )
        export.write_rest(unfinished)
        disk.rename(unfinished, out)
    except BaseException as error:
        disk.delete(unfinished)
        if isinstance(error, OSError):
            raise RunFailed(
                f"{out} was not written: {error} - make room and run the same command again"
            ) from error
        raise
    finally:
        os.close(lock)


def write_final_model(
    last: Checkpoint,
    config: ExportConfig,
    assets: Mapping[str, bytes],
    run_dir: RunDir,
    world: World,
) -> None:
    """Write `model/` of the run unless it is there: all ranks in parallel where they share the disk, else rank 0, to
    which the others send what it does not have. An earlier model is set aside.

    Raises:
        RunFailed: on every rank, if one could not write.
    """
    if not config.final:
        return
    world.progress.enter("writing the final model", last.step)
    export, out = Export(last, config.dtype, assets), run_dir.path / "model"
    if world.on_rank0(lambda: is_exported(export, out)):
        return
    unfinished = _unfinished(out)

    def together(work: Callable[[], None]) -> None:
        problem = None
        try:
            work()
        except (OSError, DamagedCheckpoint) as error:
            problem = f"the final model was not written to {out}: {error} - make room; {AGAIN}"
        if problems := [found for found in world.all_gather_json(problem) if found]:
            if world.is_main:
                disk.delete(unfinished)
            raise RunFailed(problems[0])

    def begin() -> None:
        disk.delete(unfinished)
        disk.make_directory(unfinished)

    def end() -> None:
        export.write_rest(unfinished)
        if os.path.lexists(out):  # with files that are the user's, perhaps
            logger.info(f"Set aside, an earlier model: {move_aside(out)}")
        disk.rename(unfinished, out)

    together(begin if world.is_main else lambda: None)
    if run_dir.is_shared:
        share = slice(world.rank, None, world.size)
        stored = (read_tensor(export.checkpoint, name, read_chunk) for name in export.names(share))
        together(lambda: export.write_files(unfinished, stored, share))
    else:
        together(lambda: _stream_to_main(export, unfinished, run_dir, world))
    together(end if world.is_main else lambda: None)
    logger.info(f"Saved the final model in {out}")


def is_exported(export: Export, out: Path) -> bool:
    """Whether `out` is that model already, with all its files."""
    if not (out / _MARK).is_file():
        return False
    mark, *files = (out / _MARK).read_text(encoding="utf-8").splitlines()
    return mark == export.mark and all(
        line == _size_and_name(out / line.partition(" ")[2]) for line in files
    )


def _size_and_name(path: Path) -> str:
    return f"{path.stat().st_size if path.is_file() else 'no'} {path.name}"


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.writing")


def _stream_to_main(export: Export, out: Path, run_dir: RunDir, world: World) -> None:
    group = dist.new_group(backend="gloo", timeout=TRANSFER_TIMEOUT)
    left = deque(chunk for name in export.names() for chunk in export.checkpoint.chunks[name])

    def fetch(checkpoint: Checkpoint, chunk: Chunk) -> torch.Tensor:
        """The chunk on rank 0, nothing on the others."""
        left.popleft()
        box = [slice(0, length) for length in chunk.sizes]
        part = transfer(checkpoint, chunk, box, 0, run_dir, world, group)
        return torch.empty(0) if part is None else part

    problems: list[Exception] = []
    try:
        if world.is_main:
            export.write_files(
                out, (read_tensor(export.checkpoint, name, fetch) for name in export.names())
            )
    finally:
        while left:  # whoever sends must be rid of it, although nothing is done with it any more
            try:
                fetch(export.checkpoint, left[0])
            except (OSError, DamagedCheckpoint) as error:
                problems.append(error)
    if problems:
        raise problems[0]


def _read_asset(checkpoint: Checkpoint, name: str) -> bytes:
    path = checkpoint.find(name)
    assert path
    content = path.read_bytes()
    if xxhash.xxh3_128(content).hexdigest() != checkpoint.files[name]["xxh3_128"]:
        raise DamagedCheckpoint(f"{path}: its bytes are not those that were saved")
    return content


def _on_meta(config: bytes) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            values = AutoConfig.from_pretrained(folder)
        except ValueError as error:
            raise UserError(
                f"the checkpoint's model is not known to this transformers: {error}"
            ) from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(values)


def _units(model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> list[_Unit]:
    """Each stored tensor by itself, unless only several together make what is exported: then those of one module."""
    exact = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "(?!)")
    stored = {}
    for name, entry in checkpoint.manifest["tensors"].items():
        if name.startswith("model."):
            own = DTYPES[entry["dtype"]]
            to = dtype if own.is_floating_point and not exact.search(name) else own
            stored[name.removeprefix("model.")] = torch.empty(
                entry["shape"], dtype=to, device="meta"
            )
    for name in model._keys_to_ignore_on_save or ():
        stored.pop(name, None)

    def exported(names: Sequence[str]) -> dict[str, tuple[torch.dtype, list[int]]]:
        converted = revert_weight_conversion(model, {name: stored[name] for name in names})
        return {name: (tensor.dtype, list(tensor.shape)) for name, tensor in converted.items()}

    whole = exported(list(stored))
    units, together = [], dict[str, list[str]]()
    for name in stored:
        alone = exported([name])
        if alone.items() <= whole.items():
            units.append(_Unit([name], alone))
        else:
            together.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    return units + [_Unit(names, exported(names)) for names in together.values()]


def _into_files(units: list[_Unit]) -> list[list[_Unit]]:
    """Files of about _FILE_BYTES, each with its wide dtypes first."""
    files: list[list[_Unit]] = [[]]
    for unit in units:
        if files[-1] and sum(other.bytes for other in files[-1]) + unit.bytes > _FILE_BYTES:
            files.append([])
        files[-1].append(unit)

    def width(unit: _Unit) -> int:
        return -max(dtype.itemsize for dtype, _ in unit.exported.values())

    return [sorted(of_file, key=width) for of_file in files]


def _file_name(number: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    )
