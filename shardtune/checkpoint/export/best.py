"""`best/`: the model of the lowest evaluation loss, written from the sharded weights themselves.

On rank 0's disk `.best.writing` becomes `best`; meanwhile the previous `best` is `.best.old`. Each
checkpoint has step and loss of the best model, since rank 0 may have another disk later.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.listing import read_listing
from shardtune.checkpoint.export.live import LiveModel
from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.run_dir import BEST, RunDir
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.metrics_schema import BestEntry, EvalEntry
from shardtune.units import gb

_RESULT = ("step", "loss", "perplexity")


class Best:
    """Keeps the best model of a run. All methods are collective.

    `lowest`: step, loss and perplexity of the best model so far, empty before the first one.
    """

    def __init__(self, run_dir: RunDir, live: LiveModel, world: World) -> None:
        self._out, self._live, self._world = run_dir.path / BEST, live, world
        self._is_leader = run_dir.is_leader(world)
        self.lowest: dict[str, Any] = {}
        self._is_first_write = True
        logger.info(
            f"Best model: {gb(live.n_bytes, 2)} GB, written to {self._out} at each "
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
        speed = ""
        if self._is_first_write:
            speed = f": {gb(self._live.n_bytes, 2)} GB in {seconds:.1f} s, as each later one"
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
