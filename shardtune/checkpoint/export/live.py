"""The run's model as it is now, written from the sharded weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.adapter import Adapter
from shardtune.checkpoint.export.model_files import Export, WholeModel
from shardtune.checkpoint.export.readme import readme
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.train_state import masters_by_name, model_kinds, model_state
from shardtune.config import Config
from shardtune.distributed.tensors import sharded_as
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.model.source.files import model_folder
from shardtune.run_files import METRICS


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
        self._export.readme = partial(readme, run_state, assets, run_dir.path / METRICS)
        names = world.all_gather_json([*self._tensors()] if world.stage_rank == 0 else [])
        # A tied weight, which two stages have, comes from the first of them.
        self._holder = {name: rank for rank in reversed(range(world.size)) for name in names[rank]}
        self.n_bytes = self._export.bytes

    def write(self, out: Path, about: Mapping[str, Any], remedy: str) -> str:
        """Replace `out` by the model, from tensors that all ranks gather.

        Return on every rank why it cannot be written, with `remedy` where room is missing, or "".
        `about`, with the model's step, goes into its export.json.
        """
        tensors, names = self._tensors(), iter(self._export.stored)

        def gather(name: str) -> torch.Tensor:
            with torch.no_grad(), self._world.progress.waiting():
                return self._gather(name, tensors.get(name))

        problem = ""
        if self._world.is_main:
            try:
                folder = durable_fs.make_unfinished(out)
                entries = self._export.write_files(folder, lambda _: gather(next(names)))
                self._export.write_rest(folder, entries, about)
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
