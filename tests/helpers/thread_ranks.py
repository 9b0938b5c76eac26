"""Ranks as threads of this process, which save and resume a tiny model without a collective."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from helpers.ranks import world_of
from shardtune.checkpoint import Saver
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.train_state import random_state, training_state
from shardtune.config import CheckpointConfig
from shardtune.distributed.meshes import Meshes
from shardtune.distributed.world import World
from shardtune.optimizers.rules import FusedAdamW
from shardtune.run_files import METRICS
from shardtune.training.observers.metrics import Metrics
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

T = TypeVar("T")
State = dict[str, torch.Tensor]
ASSET_FILES = {"config.json": b"{}\n", "tokenizer.json": b"{1}\n"}


CONFIG = {"model": {"path": "source"}, "run": {"dir": "runs/threads"}}


class TinyConfig(PreTrainedConfig):
    model_type = "tiny"


class Tiny(PreTrainedModel):
    """A model of fifteen numbers, unless it is given another width."""

    config_class = TinyConfig

    def __init__(self, config: PreTrainedConfig, width: int = 4) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(width, 3)
        self.post_init()


def optimizer_of(model: PreTrainedModel) -> ShardedOptimizer:
    groups: Any = [{"params": list(model.named_parameters())}]
    return ShardedOptimizer(groups, FusedAdamW, 1, lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def on_threads(worlds: Sequence[World], work: Callable[[World], T]) -> list[T]:
    """Run `work` on every rank at the same time."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(work, worlds))


def thread_worlds(size: int) -> list[World]:
    """Ranks that can agree through a store, and nothing else."""
    store, mesh = dist.HashStore(), SimpleNamespace(mesh_dim_names=("shard",), shape=(size,))
    return [
        replace(world_of(rank, size, store), meshes=Meshes(cast(Any, mesh))) for rank in range(size)
    ]


class Run:
    """Two ranks that save a tiny model with mode `async`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        model = Tiny(TinyConfig())
        self.weight = model.linear.weight
        optimizer = optimizer_of(model)
        training_state(model, optimizer)
        self.worlds = thread_worlds(2)
        config = CheckpointConfig(mode="async")
        self.savers = on_threads(
            self.worlds,
            lambda world: Saver(
                RunDir(directory, [0, 0], None), config, 60, model, optimizer, {}, world
            ),
        )

    def save(self, step: int) -> None:
        """Save weights that are all `step`."""
        self.weight.data.fill_(step)
        state = {"step": step, "config": CONFIG}
        on_threads(self.worlds, lambda world: self.savers[world.rank].save(state))

    def finish(self) -> None:
        on_threads(self.worlds, lambda world: self.savers[world.rank].finish())

    def saved(self, step: int) -> torch.Tensor:
        files = (self.directory / f"checkpoints/checkpoint_{step:07d}").glob("rank_*")
        return {k: v for file in files for k, v in load_file(file).items()}["model.linear.weight"]


def save_steps(
    steps: Sequence[int],
    ranks: int,
    run_dirs: Sequence[Path],
    keep: int,
    model: PreTrainedModel | None = None,
    assets: Mapping[str, bytes] = ASSET_FILES,
) -> dict[int, State]:
    """Save after each of these steps, which change every weight; return what was saved.

    Rank r is on the disk of `run_dirs[r % len(run_dirs)]`, and writes its share of the tensors.
    """
    model = model or Tiny(TinyConfig())
    optimizer = optimizer_of(model)
    training_state(model, optimizer)  # creates Adam's state, once for all ranks
    worlds = thread_worlds(ranks)
    leader_of = [rank % len(run_dirs) for rank in range(ranks)]
    for directory in run_dirs:
        directory.mkdir(exist_ok=True)

    def make_saver(world: World) -> Saver:
        run_dir = RunDir(run_dirs[leader_of[world.rank]], leader_of, None)
        config = CheckpointConfig(keep=keep, mode="sync", mirror=False)
        return Saver(run_dir, config, 60, model, optimizer, assets, world)

    savers = on_threads(worlds, make_saver)
    saved: dict[int, State] = {}
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        tensors = training_state(model, optimizer)
        saved[step] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for world in worlds:
            saved[step] |= random_state(world.rank, world.device)
        # As runs of one save each, every one resumed from the one before.
        path, resumed = run_dirs[0] / METRICS, max(saved.keys() - {step}, default=None)
        metrics = [Metrics(path, world, resumed) for world in worlds]
        for each in metrics:
            each.write({"kind": "step", "step": step})
        state = {"step": step, "config": CONFIG}
        on_threads(
            worlds,
            lambda world, state=state, metrics=metrics: savers[world.rank].save(
                state, metrics[world.rank].sync
            ),
        )
    on_threads(worlds, lambda world: savers[world.rank].finish())
    return saved
