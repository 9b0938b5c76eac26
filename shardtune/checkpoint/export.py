"""Write a checkpoint as the model that `from_pretrained` opens, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.load import read_tensor, transfer
from shardtune.checkpoint.manifest import (
    ASSETS,
    RESTORE,
    Checkpoint,
    DamagedCheckpoint,
    open_checkpoint,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.checkpoint.verify import check_files
from shardtune.config import ExportConfig
from shardtune.distributed.progress import Phase
from shardtune.distributed.tensors import DTYPES, dtype_name
from shardtune.distributed.world import World
from shardtune.errors import RunFailed, UserError
from shardtune.log import logger

_FILE_BYTES = 5_000_000_000
_MARK = ".exported"  # names the checkpoint and the dtype


def model_assets(config: PreTrainedConfig, source: str, tokenizer: Any) -> dict[str, bytes]:
    """Return the source's files beside the weights, by name.

    These are the configuration, the generation settings and the tokenizer.
    """
    dtype = config.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = DTYPES.get(str(dtype), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        _write_generation_config(source, Path(folder))
        assets = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return assets | {"config.json": _config_json(config.to_dict(), dtype)}


def _config_json(values: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    return (json.dumps({**values, "dtype": dtype_name(dtype)}, indent=2) + "\n").encode()


def _write_generation_config(source: str, out: Path) -> None:
    """Copy the source's own file, which may hold settings that transformers does not write."""
    local = Path(source) / "generation_config.json"
    if local.is_file():
        (out / local.name).write_bytes(local.read_bytes())
        return
    # A source may have none, and transformers derives it from the configuration.
    with contextlib.suppress(OSError):
        GenerationConfig.from_pretrained(source).save_pretrained(out)


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
    """The exported files and what each holds, the same on every rank.

    Raises:
        UserError: transformers does not know the checkpoint's configuration.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, assets: Mapping[str, bytes]) -> None:
        values = json.loads(assets["config.json"])
        to = DTYPES[values["dtype"] if dtype == "source" else dtype]
        self._mark = f"{checkpoint.name} {checkpoint.digest} {dtype_name(to)}"
        self._assets = {**assets, "config.json": _config_json(values, to)}
        self._model = _on_meta(self._assets["config.json"])
        self._files = _into_files(_units(self._model, checkpoint, to))

    @property
    def stored(self) -> list[str]:
        """The stored tensors in the order in which all files take them."""
        return [name for units in self._files.values() for unit in units for name in unit.stored]

    def write_files(
        self, out: Path, read: Callable[[str], torch.Tensor], share: slice = slice(None)
    ) -> None:
        """Write a share of the files from the stored tensors that `read` returns."""
        for file_name, units in list(self._files.items())[share]:
            layout = {name: kind for unit in units for name, kind in unit.exported.items()}
            exported = (tensor for unit in units for tensor in self._convert(unit, read))
            write_safetensors(out / file_name, layout, exported, {"format": "pt"})

    def _convert(
        self, unit: _ExportUnit, read: Callable[[str], torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        dtype = next(iter(unit.exported.values()))[0]
        stored = {name.removeprefix("model."): read(name).to(dtype) for name in unit.stored}
        converted = revert_weight_conversion(self._model, stored)
        yield from (converted.pop(name) for name in unit.exported)

    def write_rest(self, out: Path) -> None:
        """Write everything but the weights, once all weights are written."""
        files = {**self._assets, _MARK: self._mark.encode()}
        if len(self._files) > 1:
            places = {
                name: file_name
                for file_name, units in self._files.items()
                for unit in units
                for name in unit.exported
            }
            total = sum(unit.bytes for units in self._files.values() for unit in units)
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            files["model.safetensors.index.json"] = index.encode()
        for name, content in files.items():
            durable_fs.write_file(out / name, [memoryview(content)])
        durable_fs.sync_directory(out)

    def is_in(self, out: Path) -> bool:
        """Whether `out` is this model already."""
        mark = out / _MARK
        return mark.is_file() and mark.read_text(encoding="utf-8") == self._mark


def export_checkpoint(directories: Sequence[Path], out: Path, dtype: str) -> None:
    """Write the model of a checkpoint to `out`, which appears when it is whole.

    `directories` are all parts of the checkpoint, one on each disk.

    Raises:
        UserError: `out` exists or cannot be created, or there is no checkpoint or one that lacks a
            file.
        RunFailed: a file is damaged, or the export was not written to its end and is deleted.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists - name a directory that does not")
    try:
        checkpoint = open_checkpoint(*directories)
        if missing := [name for name in checkpoint.files if checkpoint.find(name) is None]:
            problem = checkpoint.why_missing(missing[0])
            raise UserError(f"{problem} - name all parts of the checkpoint")
        export = Export(checkpoint, dtype, _read_assets(checkpoint))
        with _new_folder(out) as folder:
            export.write_files(folder, partial(read_tensor, checkpoint))
            export.write_rest(folder)
    except DamagedCheckpoint as error:
        raise RunFailed(f"{error} - {RESTORE}") from error
    except OSError as error:
        raise RunFailed(
            f"{out} was not written: {error} - make room and run the same command again"
        ) from error


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
        OSError, DamagedCheckpoint: on the rank that cannot write or read.
    """
    if not config.final:
        return
    world.progress.enter(Phase.EXPORTING, last.step)
    export, out = Export(last, config.dtype, assets), run_dir.path / "model"
    if world.on_rank0(lambda: export.is_in(out)):
        return
    hidden = contextlib.nullcontext(_unfinished(out))
    with _new_folder(out) if world.is_main else hidden as folder:
        world.all_gather_json("created")
        if run_dir.is_shared:
            share = slice(world.rank, None, world.size)
            export.write_files(folder, partial(read_tensor, last), share)
        else:
            _write_on_rank0(export, last, folder, run_dir, world)
        world.all_gather_json("written")
        if world.is_main:
            export.write_rest(folder)
    logger.info(f"Saved the final model in {out}")


def _write_on_rank0(
    export: Export, last: Checkpoint, out: Path, run_dir: RunDir, world: World
) -> None:
    chunks = [chunk for name in export.stored for chunk in last.chunks[name]]
    received = transfer(last, [(0, chunk, chunk.whole) for chunk in chunks], run_dir, world)
    if world.is_main:
        export.write_files(out, partial(read_tensor, last, chunks=received))
    list(received)  # the other ranks only send


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Make a hidden folder, which gets the name `out` at the end, or is deleted after an error."""
    folder = _unfinished(out)
    try:
        durable_fs.delete(folder)  # of an export that was killed
        durable_fs.make_directory(folder)
    except OSError as error:
        raise UserError(
            f"{out} cannot be created: {error.strerror} ({error.filename}) - name another directory"
        ) from error
    try:
        yield folder
        if aside := durable_fs.rename(folder, out):
            logger.info(f"Moved aside, an earlier model: {aside}")
    except BaseException:
        durable_fs.delete(folder)
        raise


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.writing")


def _read_assets(checkpoint: Checkpoint) -> dict[str, bytes]:
    names = [name for name in checkpoint.files if name.startswith(f"{ASSETS}/")]
    for problem in filter(None, check_files(checkpoint, names).values()):
        raise DamagedCheckpoint(problem)
    paths = [path for name in names if (path := checkpoint.find(name))]
    return {path.name: path.read_bytes() for path in paths}


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
    exact, ignored = model._keep_in_fp32_modules_strict or (), model._keys_to_ignore_on_save or ()
    stored = {}
    for name in checkpoint.chunks:
        if name.startswith("model.") and name.removeprefix("model.") not in ignored:
            kept = checkpoint.dtype(name)
            is_exact = not kept.is_floating_point or any(part in name for part in exact)
            to = kept if is_exact else dtype
            stored[name] = torch.empty(checkpoint.shape(name), dtype=to, device="meta")

    def exported(names: Sequence[str]) -> dict[str, tuple[torch.dtype, list[int]]]:
        tensors = {name.removeprefix("model."): stored[name] for name in names}
        converted = revert_weight_conversion(model, tensors)
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


def _into_files(units: list[_ExportUnit]) -> dict[str, list[_ExportUnit]]:
    """Divide the units into files of at most _FILE_BYTES, each with its wide dtypes first."""
    files: list[list[_ExportUnit]] = [[]]
    for unit in units:
        if files[-1] and sum(other.bytes for other in files[-1]) + unit.bytes > _FILE_BYTES:
            files.append([])
        files[-1].append(unit)

    def width(unit: _ExportUnit) -> int:
        return -max(dtype.itemsize for dtype, _ in unit.exported.values())

    count = len(files)
    parts = [f"-{number:05d}-of-{count:05d}" if count > 1 else "" for number in range(1, count + 1)]
    return {
        f"model{part}.safetensors": sorted(file_units, key=width)
        for part, file_units in zip(parts, files, strict=True)
    }
