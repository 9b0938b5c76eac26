"""`best/`: the model of the lowest evaluation loss, written from the sharded weights themselves.

`.best.writing` becomes `best`, and the one before it `.best.old` in between, on rank 0's disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.adapter import Adapter
from shardtune.checkpoint.export.layout import Export, WholeModel
from shardtune.checkpoint.export.listing import read_listing
from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.run_dir import BEST, RunDir
from shardtune.checkpoint.train_state import model_kinds, model_state
from shardtune.config import Config
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.log import logger
from shardtune.metrics_schema import BestEntry, EvalEntry
from shardtune.model.files import model_folder

_RESULT = ("step", "loss", "perplexity")


class Best:
    """Keeps the best model of a run. The constructor and `offer` are collective."""

    def __init__(
        self,
        run_dir: RunDir,
        config: Config,
        model: PreTrainedModel,
        assets: Mapping[str, bytes],
        world: World,
    ) -> None:
        self._out, self._model, self._world = run_dir.path / BEST, model, world
        source = model_folder(config.model.path)
        kinds, tied = model_kinds(model), model.all_tied_weights_keys
        self._export: Export
        if config.lora.rank is None:
            self._export = WholeModel(kinds, tied, config.export.dtype, assets, source)
        else:
            self._export = Adapter(kinds, config.lora, assets)
        self._best = world.on_rank0(lambda: read_listing(self._out) or {})
        self._is_first_write = True
        logger.info(
            f"Best model: {self._export.bytes / 1e9:.2f} GB, written to {self._out} at each "
            "evaluation with a lower loss than before, while training waits"
        )

    def undone_by(self, resumed: Checkpoint) -> BestEntry | None:
        """Return the line of the model that is kept if its step comes after the checkpoint.

        The run takes that step again, perhaps otherwise, and replaces the model by a better one
        alone: this is logged.
        """
        if self._best.get("step", 0) <= resumed.step:
            return None
        logger.info(
            f"Best model: kept from step {self._best['step']}, perplexity "
            f"{self._best['perplexity']:.4f}, which comes after {resumed.name}"
        )
        return BestEntry(
            kind="best",
            step=self._best["step"],
            loss=self._best["loss"],
            perplexity=self._best["perplexity"],
            seconds=0.0,
        )

    def offer(self, evaluation: EvalEntry) -> BestEntry | None:
        """Write the model if this evaluation's loss is the lowest so far; return its line.

        Return None for one that is not the best, or where the model cannot be written, which is
        logged: training goes on.
        """
        result: dict[str, Any] = {key: value for key, value in evaluation.items() if key in _RESULT}
        if result["step"] == 0 or not result["loss"] < self._best.get("loss", torch.inf):
            return None
        self._world.progress.enter(Phase.EXPORTING, result["step"])
        started = time.perf_counter()
        problems = self._world.all_gather_json(self._write(result))
        seconds = time.perf_counter() - started
        if problems[0]:
            logger.info(f"Best model of step {result['step']} not kept: {problems[0]}")
            return None
        self._best = result
        speed = ""
        if self._is_first_write:
            speed = f": {self._export.bytes / 1e9:.2f} GB in {seconds:.1f} s, as each later one"
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
        tensors, names = model_state(self._model), iter(self._export.stored)

        @torch.no_grad()
        def gather(name: str) -> torch.Tensor:
            with self._world.progress.waiting():
                tensor = tensors[name]
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return whole.cpu() if self._world.is_main else whole

        problem = ""
        if self._world.is_main:
            try:
                folder = durable_fs.make_unfinished(self._out)
                entries = self._export.write_files(folder, lambda _: gather(next(names)))
                self._export.write_rest(folder, entries, result)
                durable_fs.replace(self._out)
            except (OSError, RunFailed) as error:
                problem = str(error)
                with contextlib.suppress(OSError):
                    durable_fs.recover_replaced(self._out)
        for name in names:  # each gather needs every rank, also after rank 0 has failed
            gather(name)
        return problem
