"""Write a checkpoint as the model that `from_pretrained` opens, one tensor at a time."""

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

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.load import TRANSFER_TIMEOUT, read_chunk, read_tensor, transfer
from shardtune.checkpoint.manifest import (
    ASSETS,
    RESTORE,
    Checkpoint,
    DamagedCheckpoint,
    StoredChunk,
    open_checkpoint,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.config import ExportConfig
from shardtune.distributed.progress import Phase
from shardtune.distributed.tensors import DTYPES, dtype_name
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed, UserError
from shardtune.log import logger

_FILE_BYTES = 5_000_000_000
_MARK = ".exported"  # names the checkpoint, the dtype and the size of every file


def model_assets(config: PreTrainedConfig, source: str, tokenizer: Any) -> dict[str, bytes]:
    """Return the source's files beside the weights, by name.

    These are the configuration, the generation settings and the tokenizer.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        _write_generation_config(source, Path(folder))
        assets = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return assets | {"config.json": _config_json(config.to_dict(), source_dtype(config))}


def source_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype that the source's configuration names, else float32."""
    dtype = config.dtype
    return dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype), torch.float32)


def _config_json(values: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    return (json.dumps({**values, "dtype": dtype_name(dtype)}, indent=2) + "\n").encode()


def _write_generation_config(source: str, out: Path) -> None:
    """Copy the source's own file, which may hold settings that transformers does not write."""
    local = Path(source) / "generation_config.json"
    if local.is_file():
        (out / local.name).write_bytes(local.read_bytes())
        return
    try:
        GenerationConfig.from_pretrained(source).save_pretrained(out)
    except OSError:
        return  # the source has none, and transformers derives it from the configuration


@dataclass(frozen=True)
class _ExportUnit:
    """Stored tensors that are converted together; mostly one, or the experts of a layer."""

    stored: list[str]
    exported: dict[str, tuple[torch.dtype, list[int]]]

    @property
    def bytes(self) -> int:
        kinds = self.exported.values()
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in kinds)


class Export:
    """The layout of the exported files, the same on every rank.

    Raises:
        UserError: transformers does not know the checkpoint's configuration.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, assets: Mapping[str, bytes]) -> None:
        values = json.loads(assets["config.json"])
        self.checkpoint = checkpoint
        self.dtype = DTYPES[values["dtype"] if dtype == "source" else dtype]
        self.assets = {**assets, "config.json": _config_json(values, self.dtype)}
        self._model = _on_meta(self.assets["config.json"])
        self._files = _into_files(_units(self._model, checkpoint, self.dtype))

    @property
    def mark(self) -> str:
        """The checkpoint and the dtype of the exported model."""
        return f"{self.checkpoint.name} {self.checkpoint.digest} {dtype_name(self.dtype)}"

    def names(self, share: slice = slice(None)) -> list[str]:
        """Return the stored tensors in the order in which these files take them."""
        units = (unit for file_units in self._files[share] for unit in file_units)
        return [f"model.{name}" for unit in units for name in unit.stored]

    def write_files(
        self, out: Path, tensors: Iterator[torch.Tensor], share: slice = slice(None)
    ) -> None:
        """Write a share of the files from the stored tensors, in the order of `names`."""
        for number, units in list(enumerate(self._files))[share]:
            layout = {name: kind for unit in units for name, kind in unit.exported.items()}
            exported = (tensor for unit in units for tensor in self._convert(unit, tensors))
            write_safetensors(out / self._file_name(number), layout, exported, {"format": "pt"})

    def write_rest(self, out: Path) -> None:
        """Write everything but the weights, once all weights are written."""
        files = dict(self.assets)
        if len(self._files) > 1:
            places = {
                name: self._file_name(number)
                for number, units in enumerate(self._files)
                for unit in units
                for name in unit.exported
            }
            total = sum(unit.bytes for units in self._files for unit in units)
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            files["model.safetensors.index.json"] = index.encode()
        for name, content in files.items():
            durable_fs.write_file(out / name, [memoryview(content)])
        lines = [self.mark, *(_size_and_name(path) for path in sorted(out.iterdir()))]
        durable_fs.write_file(out / _MARK, [memoryview("\n".join(lines).encode())])
        durable_fs.sync_directory(out)

    def is_in(self, out: Path) -> bool:
        """Whether `out` is this model already, with all its files."""
        if not (out / _MARK).is_file():
            return False
        mark, *files = (out / _MARK).read_text(encoding="utf-8").splitlines()
        is_whole = all(line == _size_and_name(out / line.partition(" ")[2]) for line in files)
        return mark == self.mark and is_whole

    def _convert(
        self, unit: _ExportUnit, tensors: Iterator[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        dtype = next(iter(unit.exported.values()))[0]
        stored = {name: next(tensors).to(dtype) for name in unit.stored}
        converted = revert_weight_conversion(self._model, stored)
        yield from (converted.pop(name) for name in unit.exported)

    def _file_name(self, number: int) -> str:
        count = len(self._files)
        part = "" if count == 1 else f"-{number + 1:05d}-of-{count:05d}"
        return f"model{part}.safetensors"


def export_checkpoint(directories: Sequence[Path], out: Path, dtype: str) -> None:
    """Write the model of a checkpoint to `out`, which appears when it is whole.

    `directories` are all parts of the checkpoint, one on each disk.

    Raises:
        UserError: `out` exists, cannot be created or is being written, or there is no checkpoint or
            one that lacks a file.
        RunFailed: a file is damaged, or the export was not written to its end and is deleted.
    """
    try:
        _export_to(out, open_checkpoint(*directories), dtype)
    except DamagedCheckpoint as error:
        raise RunFailed(f"{error} - {RESTORE}") from error


def _export_to(out: Path, checkpoint: Checkpoint, dtype: str) -> None:
    if os.path.lexists(out):
        raise UserError(f"{out} exists - name a directory that does not")
    if missing := [name for name in checkpoint.files if checkpoint.find(name) is None]:
        raise UserError(f"{checkpoint.why_missing(missing[0])} - name all parts of the checkpoint")
    names = [name for name in checkpoint.files if name.startswith(f"{ASSETS}/")]
    assets = {name.removeprefix(f"{ASSETS}/"): _read_asset(checkpoint, name) for name in names}
    export, unfinished = Export(checkpoint, dtype, assets), _unfinished(out)
    try:
        durable_fs.make_directory(unfinished)
        lock = os.open(unfinished, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"{out} cannot be created: {error.strerror} ({error.filename}) - name another directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"another export writes {out} - wait for it, or name another directory"
        ) from error
    try:
        for left_behind in unfinished.iterdir():  # by an export that was killed
            durable_fs.delete(left_behind)
        tensors = (read_tensor(checkpoint, name, read_chunk) for name in export.names())
        export.write_files(unfinished, tensors)
        export.write_rest(unfinished)
        durable_fs.rename(unfinished, out)
    except BaseException as error:
        durable_fs.delete(unfinished)
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
    """Write `model/` of the run unless it is there; an earlier model is moved aside. Collective.

    Ranks that share the disk write in parallel. Otherwise rank 0 writes, and the others send it the
    tensors that its disk does not have.

    Raises:
        RunFailed: on every rank, if one could not write.
    """
    if not config.final:
        return
    world.progress.enter(Phase.EXPORTING, last.step)
    export, out = Export(last, config.dtype, assets), run_dir.path / "model"
    if world.on_rank0(lambda: export.is_in(out)):
        return
    unfinished = _unfinished(out)

    def on_all_ranks(work: Callable[[], None]) -> None:
        problem = None
        try:
            work()
        except (OSError, DamagedCheckpoint) as error:
            problem = f"the final model was not written to {out}: {error} - make room; {AGAIN}"
        if problems := list(filter(None, world.all_gather_json(problem))):
            if world.is_main:
                durable_fs.delete(unfinished)
            raise RunFailed(problems[0])

    def begin() -> None:
        durable_fs.delete(unfinished)
        durable_fs.make_directory(unfinished)

    def write_share() -> None:
        share = slice(world.rank, None, world.size)
        stored = (read_tensor(last, name, read_chunk) for name in export.names(share))
        export.write_files(unfinished, stored, share)

    def end() -> None:
        export.write_rest(unfinished)
        if os.path.lexists(out):  # it may hold files of the user
            logger.info(f"Moved aside, an earlier model: {durable_fs.move_aside(out)}")
        durable_fs.rename(unfinished, out)

    on_all_ranks(begin if world.is_main else lambda: None)
    if run_dir.is_shared:
        on_all_ranks(write_share)
    else:
        on_all_ranks(lambda: _stream_to_main(export, unfinished, run_dir, world))
    on_all_ranks(end if world.is_main else lambda: None)
    logger.info(f"Saved the final model in {out}")


def _stream_to_main(export: Export, out: Path, run_dir: RunDir, world: World) -> None:
    group = dist.new_group(backend="gloo", timeout=TRANSFER_TIMEOUT)
    remaining = deque(chunk for name in export.names() for chunk in export.checkpoint.chunks[name])

    def fetch(checkpoint: Checkpoint, chunk: StoredChunk) -> torch.Tensor:
        """Return the chunk on rank 0, nothing on the others."""
        remaining.popleft()
        part = transfer(checkpoint, chunk, chunk.whole, 0, run_dir, world, group)
        return torch.empty(0) if part is None else part

    problems: list[Exception] = []
    try:
        if world.is_main:
            names = export.names()
            tensors = (read_tensor(export.checkpoint, name, fetch) for name in names)
            export.write_files(out, tensors)
    finally:
        # The other ranks send every chunk: receive the rest even after a failure.
        while remaining:
            try:
                fetch(export.checkpoint, remaining[0])
            except (OSError, DamagedCheckpoint) as error:
                problems.append(error)
    if problems:
        raise problems[0]


def _size_and_name(path: Path) -> str:
    return f"{path.stat().st_size if path.is_file() else 'no'} {path.name}"


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.writing")


def _read_asset(checkpoint: Checkpoint, name: str) -> bytes:
    path = checkpoint.find(name)
    assert path
    content = path.read_bytes()
    if xxhash.xxh3_128(content).hexdigest() != checkpoint.files[name]["xxh3_128"]:
        raise DamagedCheckpoint(f"{path}: is damaged")
    return content


def _on_meta(config: bytes) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            values = AutoConfig.from_pretrained(folder)
        except ValueError as error:
            raise UserError(
                f"this transformers does not know the checkpoint's model: {error} "
                "- install the version that the manifest names"
            ) from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(values)


def _units(model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> list[_ExportUnit]:
    """Group the stored tensors: each by itself where that converts alone, else by module."""
    exact = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "(?!)")
    stored = {}
    for stored_name in checkpoint.chunks:
        name = stored_name.removeprefix("model.")
        if name != stored_name and name not in (model._keys_to_ignore_on_save or ()):
            kept = checkpoint.dtype(stored_name)
            to = dtype if kept.is_floating_point and not exact.search(stored_name) else kept
            stored[name] = torch.empty(checkpoint.shape(stored_name), dtype=to, device="meta")

    def exported(names: Sequence[str]) -> dict[str, tuple[torch.dtype, list[int]]]:
        converted = revert_weight_conversion(model, {name: stored[name] for name in names})
        return {name: (tensor.dtype, list(tensor.shape)) for name, tensor in converted.items()}

    together = exported(list(stored))
    units, by_module = [], dict[str, list[str]]()
    for name in stored:
        alone = exported([name])
        if alone.items() <= together.items():
            units.append(_ExportUnit([name], alone))
        else:
            by_module.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    return units + [_ExportUnit(names, exported(names)) for names in by_module.values()]


def _into_files(units: list[_ExportUnit]) -> list[list[_ExportUnit]]:
    """Divide the units into files of at most _FILE_BYTES, each with its wide dtypes first."""
    files: list[list[_ExportUnit]] = [[]]
    for unit in units:
        if files[-1] and sum(other.bytes for other in files[-1]) + unit.bytes > _FILE_BYTES:
            files.append([])
        files[-1].append(unit)

    def width(unit: _ExportUnit) -> int:
        return -max(dtype.itemsize for dtype, _ in unit.exported.values())

    return [sorted(file_units, key=width) for file_units in files]
