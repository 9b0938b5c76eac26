"""The models that a run writes of its weights as they are now: `best/` and `models/step_0000500/`.

On rank 0's disk `.best.writing` becomes `best`; meanwhile the previous `best` is `.best.old`.
"""

import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import read_listing, readme
from shardtune.checkpoint.export.adapter import Adapter
from shardtune.checkpoint.export.model_files import Export, WholeModel
from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.run_dir import BEST, MODELS, RunDir
from shardtune.checkpoint.train_state import masters_by_name, model_kinds, model_state
from shardtune.config import Config
from shardtune.distributed.progress import Phase
from shardtune.distributed.tensors import sharded_as
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.log import logger
from shardtune.metrics_schema import BestEntry, EvalEntry
from shardtune.model.source.files import model_folder
from shardtune.run_files import METRICS
from shardtune.units import gb

_RESULT = ("step", "loss", "perplexity")
_NAME = re.compile(r"step_(\d{7,})")
_MARK = "models"  # a folder that a run has written here; a copy of another model lacks it


class LiveModel:
    """Writes the model, or with LoRA the adapter, on rank 0's disk. All methods are collective."""

    def __init__(
        self,
        run_dir: RunDir,
        config: Config,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        whole: PreTrainedModel,
        assets: Mapping[str, bytes],
        run_state: Mapping[str, Any],
        world: World,
    ) -> None:
        """`whole`: the model of all stages, on meta. `run_state`: as in a checkpoint."""
        self._world = world
        self._tensors = partial(model_state, model, masters_by_name(optimizer))
        source = model_folder(config.model.path)
        self._kinds, tied = model_kinds(whole), whole.all_tied_weights_keys
        self._export: Export
        if config.lora.rank is None:
            self._export = WholeModel(self._kinds, tied, config.export.dtype, assets, source)
        else:
            self._export = Adapter(self._kinds, config.lora, assets)
        self._card = partial(readme, run_state, assets, run_dir.path / METRICS)
        names = world.all_gather_json([*self._tensors()] if world.stage_rank == 0 else [])
        # A tied weight, which two stages have, comes from the first of them.
        self._holder = {name: rank for rank in reversed(range(world.size)) for name in names[rank]}
        self.n_bytes = self._export.bytes

    def write(self, out: Path, about: Mapping[str, Any], remedy: str) -> str:
        """Replace `out` by the model, from tensors that all ranks gather.

        Return on every rank why it cannot be written, with `remedy` where room is missing, or "".
        `about`, with the model's step, goes into its export.json.
        """
        self._world.progress.enter(Phase.EXPORTING, about["step"])
        tensors, names = self._tensors(), iter(self._export.stored)

        def gather(name: str) -> torch.Tensor:
            with torch.no_grad(), self._world.progress.waiting():
                return self._gather(name, tensors.get(name))

        problem = ""
        if self._world.is_main:
            try:
                folder = durable_fs.make_unfinished(out)
                entries = self._export.write_files(folder, lambda _: gather(next(names)))
                self._export.write_rest(folder, entries, about, self._card)
                durable_fs.replace(out)
            except (OSError, RunFailed) as error:
                part = durable_fs.unfinished(out)
                problem = str(error)
                if missing := durable_fs.missing_room(error, "it", self.n_bytes, part):
                    problem += f"{missing} - {remedy}"
                with contextlib.suppress(OSError):
                    durable_fs.recover_replaced(out)
        for name in names:  # each gather needs every rank, also after rank 0 has failed
            gather(name)
        return cast(str, self._world.all_gather_json(problem)[0])

    def _gather(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """Gather a tensor within its stage, and send it from the stage's first rank to rank 0.

        Only rank 0 may use the returned tensor.
        """
        world, holder = self._world, self._holder[name]
        whole = torch.empty(0)
        if tensor is not None and holder // world.layout.stage_ranks == world.stage:
            if isinstance(tensor, DTensor):  # parts of masters are in host memory
                local = tensor.to_local().to(world.device)
                tensor = cast(DTensor, sharded_as(tensor, local)).full_tensor()
            whole = tensor
        if world.rank == holder:
            whole = whole.cpu()
        if world.is_main and holder:
            dtype, shape = self._kinds[name]
            whole = torch.empty(shape, dtype=dtype)
            with world.progress.message():
                dist.recv(whole.view(-1).view(torch.uint8), holder)
        elif world.rank == holder and holder:
            with world.progress.message():
                dist.send(whole.contiguous().view(-1).view(torch.uint8), 0)
        return whole


class Best:
    """Keeps the model of the lowest evaluation loss. All methods are collective.

    `lowest`: step, loss and perplexity of the best model so far, empty before the first one. Each
    checkpoint has it, since rank 0 may have another disk later.
    """

    def __init__(self, run_dir: RunDir, live: LiveModel, world: World) -> None:
        self._out, self._live, self._world = run_dir.path / BEST, live, world
        self._is_leader = run_dir.is_leader(world)
        self.lowest: dict[str, Any] = {}

    def resume(self, resumed: Checkpoint) -> BestEntry | None:
        """Take the lowest loss that the checkpoint or a disk has; say where, if not on node 0.

        If the kept model is of a later step than the checkpoint, the run takes that step again,
        perhaps with another loss, and only a better model replaces the kept one. Log this, and
        return the model's line.
        """
        listing = (self._is_leader and read_listing(self._out)) or {}
        own = {key: listing[key] for key in _RESULT} if "loss" in listing else {}
        per_rank = self._world.all_gather_json([self._world.node_name, own])
        # A checkpoint of an older version has none, nor has one that was saved without keep_best.
        results = [resumed.state.get("best"), *(result for _, result in per_rank)]
        self.lowest = min(filter(None, results), key=lambda result: result["loss"], default={})
        if not self.lowest:
            return None
        step, perplexity = self.lowest["step"], self.lowest["perplexity"]
        if per_rank[0][1] != self.lowest:
            places = [f"of step {result['step']} on {node}" for node, result in per_rank if result]
            logger.warning(
                f"Best model: that of step {step}, perplexity {perplexity:.4f}, is not on node 0: "
                f"best/ is {', '.join(places) or 'on none of the disks of this run'}"
            )
        if step <= resumed.step:
            return None
        logger.info(
            f"Best model: kept from step {step}, perplexity {perplexity:.4f}, which comes after "
            f"{resumed.name}"
        )
        kept: Any = {"kind": "best", **self.lowest, "seconds": 0.0}
        return kept

    def offer(self, evaluation: EvalEntry) -> BestEntry | None:
        """Write the model if this evaluation's loss is the lowest so far; return its line.

        Return None if another model is better, or if this one cannot be written: the reason is
        logged, and training goes on.
        """
        result: dict[str, Any] = {key: value for key, value in evaluation.items() if key in _RESULT}
        if result["step"] == 0 or not result["loss"] < self.lowest.get("loss", torch.inf):
            return None
        started = time.perf_counter()
        remedy = "make room, and the next one with a lower loss is kept"
        problem = self._live.write(self._out, result, remedy)
        seconds = time.perf_counter() - started
        if problem:
            logger.info(f"Best model of step {result['step']} not kept: {problem}")
            return None
        self.lowest = result
        if self._is_leader and not self._world.is_main:  # a model from when this disk was node 0's
            with contextlib.suppress(OSError):
                durable_fs.delete_hidden(self._out)
        logger.info(
            f"Saved the best model so far, of step {result['step']}, perplexity "
            f"{result['perplexity']:.4f}: {gb(self._live.n_bytes, 2)} GB in {seconds:.1f} s"
        )
        entry: Any = {"kind": "best", **result, "tokens": evaluation["tokens"], "seconds": seconds}
        return entry


def step_model(run_dir: RunDir, step: int) -> Path:
    return run_dir.path / MODELS / f"step_{step:07d}"


def is_step_model(folder: Path) -> bool:
    return (read_listing(folder) or {}).get(_MARK) == folder.parent.name


class StepModels:
    """Writes the models of steps, and keeps the newest of them. All methods are collective."""

    def __init__(self, run_dir: RunDir, live: LiveModel, keep: int, world: World) -> None:
        self._run_dir, self._folder = run_dir, run_dir.path / MODELS
        self._live, self._keep, self._world = live, keep, world

    def write(self, step: int) -> Path | None:
        """Write the model of this step; return its folder, or None where it cannot be written."""
        out = step_model(self._run_dir, step)
        if self._world.is_main and out.exists() and not is_step_model(out):
            with contextlib.suppress(OSError):  # then the model cannot be written either
                logger.info(f"Another folder moved aside: {durable_fs.move_aside(out)}")
        about = {"step": step, _MARK: self._folder.name}
        remedy = "make room, and that of a later step is written"
        if problem := self._live.write(out, about, remedy):
            logger.info(f"Model of step {step} not written: {problem}")
            return None
        logger.info(f"Saved the model of step {step} in {out}, {gb(self._live.n_bytes, 2)} GB")
        return out

    def delete_old(self, step: int, in_use: Iterable[Path]) -> None:
        """Delete on rank 0's disk all but the newest models up to this step, the run's own alone.

        Models of later steps, from before a resume, go first. Those `in_use` stay.
        """
        kept = {folder.name for folder in in_use}
        with contextlib.suppress(OSError):  # the next model tries again
            found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
            own = {int(name[1]): path for name, path in found if name and is_step_model(path)}
            newest = sorted(number for number in own if number <= step)[-self._keep :]
            for number, folder in own.items() if self._world.is_main else ():
                if number not in newest and folder.name not in kept:
                    durable_fs.delete_hidden(folder)
