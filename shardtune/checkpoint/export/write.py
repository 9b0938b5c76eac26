"""Write a checkpoint as the model that `from_pretrained` opens, one tensor at a time.

The command `export` does it in one process, and a run at its end on all ranks.
"""

import contextlib
import json
import os
import socket
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import SOURCE, readme
from shardtune.checkpoint.export.adapter import (
    Adapter,
    MergedModel,
    why_not_merged,
    why_other_weights,
)
from shardtune.checkpoint.export.model_files import Export, Kind, WholeModel
from shardtune.checkpoint.load import read_tensor, transfer
from shardtune.checkpoint.manifest import (
    ASSETS,
    RESTORE,
    Checkpoint,
    DamagedCheckpoint,
    open_checkpoint,
)
from shardtune.checkpoint.run_dir import ADAPTER, RunDir
from shardtune.checkpoint.train_state import MODEL
from shardtune.checkpoint.verify import check_files
from shardtune.config import Config, LoraConfig
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, Aborted, RunFailed, UserError, first_line
from shardtune.log import logger
from shardtune.model.source.files import model_folder
from shardtune.run_files import METRICS
from shardtune.units import rounded_gb


def _stored(checkpoint: Checkpoint) -> dict[str, Kind]:
    return {
        name: (checkpoint.dtype(name), list(checkpoint.shape(name)))
        for name in checkpoint.chunks
        if name.startswith(MODEL)
    }


def _lora(checkpoint: Checkpoint) -> LoraConfig | None:
    lora = LoraConfig.model_validate(checkpoint.state["config"].get("lora", {}))
    return lora if lora.rank else None


def _whole_model(
    checkpoint: Checkpoint, dtype: str, assets: Mapping[str, bytes], folder: Path | None
) -> Export:
    """Return the export of a checkpoint's whole model; with adapters they are merged."""
    if lora := _lora(checkpoint):
        assert folder
        return MergedModel(lora, dtype, assets, folder)
    tied = checkpoint.manifest["tied_weights"]
    return WholeModel(_stored(checkpoint), tied, dtype, assets, folder)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    name = {"name": checkpoint.name, "xxh3_128": checkpoint.digest}
    return {"checkpoint": name, "step": checkpoint.step}


def export_checkpoint(directories: Sequence[Path], out: Path, dtype: str) -> None:
    """Write the model of a checkpoint to `out`, which appears when it is whole.

    `directories` are all parts of the checkpoint, one on each disk. Adapters go to `out/adapter`
    in peft's format, and to `out` merged with the weights that they were trained on.

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
        assets = _read_assets(checkpoint)
        source = json.loads(assets[SOURCE])["path"] if SOURCE in assets else ""
        exports: dict[str, Export] = {}
        lora, problem = _lora(checkpoint), ""
        if lora:
            exports[ADAPTER] = Adapter(_stored(checkpoint), lora, assets)
            problem = why_not_merged(assets)
            if not problem and (changed := why_other_weights(assets)):
                remedy = "bring the same files back, or move these away to export the adapter alone"
                raise UserError(f"{changed} - {remedy}")
        if not problem:
            exports["."] = _whole_model(checkpoint, dtype, assets, model_folder(source))
        metrics = checkpoint.directories[0].absolute().parent.with_name(METRICS)
        card = partial(readme, checkpoint.state, assets, metrics)
        with _new_folder(out) as folder:
            for name, export in exports.items():
                durable_fs.make_directory(folder / name)
                entries = export.write_files(folder / name, partial(read_tensor, checkpoint))
                export.write_rest(folder / name, entries, _about(checkpoint), card)
        for export in exports.values():
            if export.remark:
                print(export.remark)
        if lora:
            print(f"Saved the adapter in {out / ADAPTER}, which peft opens")
        print(f"Merged model left out: {problem}" if problem else f"Saved the model in {out}")
    except DamagedCheckpoint as error:
        raise RunFailed(f"{error} - {RESTORE}") from error
    except OSError as error:
        raise RunFailed(
            f"{out} was not written: {error} - make room and run the same command again"
        ) from error


def write_final_model(
    last: Checkpoint,
    config: Config,
    assets: Mapping[str, bytes],
    run_dir: RunDir,
    world: World,
) -> Path | None:
    """Write `model/` of the run unless it is there; move an earlier one aside. Collective.

    Return its folder if it is new, or with `export.merge=false` that of the adapter.

    Adapters are written to `adapter/`, and merged to `model/` where every node can do so.

    Ranks that share the disk write in parallel. Otherwise rank 0 writes, and the others send it the
    tensors that its disk does not have.

    Raises:
        Aborted: on the rank that finds the disk full.
        OSError, DamagedCheckpoint: on the rank that cannot write or read.
    """
    if not config.export.final:
        return None
    world.progress.enter(Phase.EXPORTING, last.step)
    problem, written = "", None
    card = partial(readme, last.state, assets, run_dir.path / METRICS)
    if lora := _lora(last):
        adapter = Adapter(_stored(last), lora, assets)
        written = _write(adapter, last, run_dir.path / ADAPTER, card, run_dir, world)
        if not config.export.merge:
            return written
        # Whether one rank writes or all do, every rank must have the same answer here.
        problem = world.on_local_rank0(lambda: why_not_merged(assets) or why_other_weights(assets))
        reports = world.all_gather_json([problem, world.node_name])
        problem = next((f"{problem} ({node})" for problem, node in reports if problem), "")
    if problem:
        logger.info(f"Merged model left out: {problem}")
        return written
    source = model_folder(config.model.path)
    export = _whole_model(last, config.export.dtype, assets, source)
    return _write(export, last, run_dir.path / "model", card, run_dir, world)


def _write(
    export: Export,
    last: Checkpoint,
    out: Path,
    card: Callable[[int, str], str],
    run_dir: RunDir,
    world: World,
) -> Path | None:
    """Write a model on all ranks unless it is there; return its folder if it is new."""
    if world.on_rank0(lambda: export.is_in(out, _about(last))):
        return None
    received, share = None, slice(world.rank, None, world.size)
    hidden = contextlib.nullcontext(durable_fs.unfinished(out))
    try:
        with _new_folder(out) if world.is_main else hidden as folder:
            world.all_gather_json("created")
            if not run_dir.is_shared:
                chunks = [chunk for name in export.stored for chunk in last.chunks[name]]
                wanted = [(0, chunk, chunk.whole) for chunk in chunks]
                received = transfer(last, wanted, run_dir, world)
                share = slice(None if world.is_main else 0)
            read = partial(read_tensor, last, chunks=received)
            entries = export.write_files(folder, read, share)
            list(received or ())  # the other ranks only send
            all_entries = dict(ChainMap(*world.all_gather_json(entries)))
            if world.is_main:
                export.write_rest(folder, all_entries, _about(last), card)
    except OSError as error:
        part = durable_fs.unfinished(out)
        if not (missing := durable_fs.missing_room(error, "it", export.bytes, part)):
            raise
        place = f"rank {world.rank} on {socket.gethostname()}"
        problem = f"{place}: the final {out.name} was not written: {first_line(error)}{missing}"
        raise Aborted(f"{problem} - free it; {AGAIN}, and writes it", code=1) from error
    if export.remark:
        logger.info(export.remark)
    logger.info(f"Saved the final {out.name} in {out}")
    return out


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Make a hidden folder, which gets the name `out` at the end, or is deleted after an error."""
    try:
        folder = durable_fs.make_unfinished(out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be created: {error.strerror} ({error.filename}) - name another directory"
        ) from error
    try:
        yield folder
        if aside := durable_fs.rename(folder, out):
            size = rounded_gb(durable_fs.size(aside))
            logger.info(f"Earlier model moved aside: {aside} ({size}; you may delete it)")
    except BaseException:
        durable_fs.delete(folder)
        raise


def _read_assets(checkpoint: Checkpoint) -> dict[str, bytes]:
    names = [name for name in checkpoint.files if name.startswith(f"{ASSETS}/")]
    for problem in filter(None, check_files(checkpoint, names).values()):
        raise DamagedCheckpoint(problem)
    paths = [path for name in names if (path := checkpoint.find(name))]
    return {path.name: path.read_bytes() for path in paths}
