"""`best/`: the model of the lowest evaluation loss, written from the sharded weights themselves.

On rank 0's disk `.best.writing` becomes `best`; meanwhile the previous `best` is `.best.old`. Each
checkpoint has step and loss of the best model, since rank 0 may have another disk later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.adapter import Adapter
from shardtune.checkpoint.export.listing import read_listing
from shardtune.checkpoint.export.model_files import Export, WholeModel
from shardtune.checkpoint.export.readme import readme
from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.run_dir import BEST, RunDir
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


class Best:
    """Keeps the best model of a run. All methods are collective.

    `lowest`: step, loss and perplexity of the best model so far, empty before the first one.
    """

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
        self._out, self._world = run_dir.path / BEST, world
        self._is_leader = run_dir.is_leader(world)
        self._tensors = partial(model_state, model, masters_by_name(optimizer))
        self._readme = partial(
            readme,
            run_state,
            assets,
            run_dir.path / METRICS,
            is_adapter=config.lora.rank is not None,
        )
        source = model_folder(config.model.path)
        self._kinds, tied = model_kinds(whole), whole.all_tied_weights_keys
        self._export: Export
        if config.lora.rank is None:
            self._export = WholeModel(self._kinds, tied, config.export.dtype, assets, source)
        else:
            self._export = Adapter(self._kinds, config.lora, assets)
        names = world.all_gather_json([*self._tensors()] if world.stage_rank == 0 else [])
        # A tied weight, which two stages have, comes from the first of them.
        self._holder = {name: rank for rank in reversed(range(world.size)) for name in names[rank]}
        self.lowest: dict[str, Any] = {}
        self._is_first_write = True
        logger.info(
            f"Best model: {gb(self._export.bytes, 2)} GB, written to {self._out} at each "
            "evaluation with a lower loss than before, while training waits"
        )

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
        return BestEntry(
            kind="best", step=step, loss=self.lowest["loss"], perplexity=perplexity, seconds=0.0
        )

    def offer(self, evaluation: EvalEntry) -> BestEntry | None:
        """Write the model if this evaluation's loss is the lowest so far; return its line.

        Return None if another model is better, or if this one cannot be written: the reason is
        logged, and training goes on.
        """
        result: dict[str, Any] = {key: value for key, value in evaluation.items() if key in _RESULT}
        if result["step"] == 0 or not result["loss"] < self.lowest.get("loss", torch.inf):
            return None
        self._world.progress.enter(Phase.EXPORTING, result["step"])
        started = time.perf_counter()
        problems = self._world.all_gather_json(self._write(result))
        seconds = time.perf_counter() - started
        if problems[0]:
            logger.info(f"Best model of step {result['step']} not kept: {problems[0]}")
            return None
        self.lowest = result
        if self._is_leader and not self._world.is_main:  # a model from when this disk was node 0's
            with contextlib.suppress(OSError):
                durable_fs.rename(self._out, durable_fs.unfinished(self._out))
                durable_fs.delete(durable_fs.unfinished(self._out))
        speed = ""
        if self._is_first_write:
            speed = f": {gb(self._export.bytes, 2)} GB in {seconds:.1f} s, as each later one"
        self._is_first_write = False
        logger.info(
            f"Saved the best model so far, of step {result['step']}, perplexity "
            f"{result['perplexity']:.4f}{speed}"
        )
        return BestEntry(
            kind="best",
            step=evaluation["step"],
            loss=evaluation["loss"],
            perplexity=evaluation["perplexity"],
            tokens=evaluation["tokens"],
            seconds=seconds,
        )

    def _write(self, result: Mapping[str, Any]) -> str:
        """Write the files on rank 0, from tensors that all ranks gather; return its problem."""
        tensors, names = self._tensors(), iter(self._export.stored)

        def gather(name: str) -> torch.Tensor:
            with torch.no_grad(), self._world.progress.waiting():
                return self._gather(name, tensors.get(name))

        problem = ""
        if self._world.is_main:
            try:
                folder = durable_fs.make_unfinished(self._out)
                entries = self._export.write_files(folder, lambda _: gather(next(names)))
                card = self._readme(step=result["step"])
                self._export.write_rest(folder, entries, result, card)
                durable_fs.replace(self._out)
            except (OSError, RunFailed) as error:
                size, part = self._export.bytes, durable_fs.unfinished(self._out)
                problem = str(error)
                if missing := durable_fs.missing_room(error, "it", size, part):
                    problem += f"{missing} - make room, and the next one with a lower loss is kept"
                with contextlib.suppress(OSError):
                    durable_fs.recover_replaced(self._out)
        for name in names:  # each gather needs every rank, also after rank 0 has failed
            gather(name)
        return problem

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
