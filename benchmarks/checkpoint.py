"""Time saving and loading a training state, beside torch.distributed.checkpoint (DCP).

Writes a Markdown table. Each round runs all variants on the same state, in another order each time.
Figures are medians over the rounds, with the smallest and the largest. The processes:
torchrun --nproc_per_node=2 -m benchmarks.checkpoint MODEL RESULTS ROUNDS [DISK]
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.peak_memory import PeakMemory
from benchmarks.tables import table
from distTest.workloads.batch import flat_batch
from distTest.workloads.script import REPOSITORY, absolute, environment, launch
from shardtune import checkpoint
from shardtune.checkpoint.run_dir import RunDir, open_run_dir
from shardtune.checkpoint.train_state import training_state
from shardtune.config_io import load_config, to_dict
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.log import quiet_libraries
from shardtune.model.build import build_model
from shardtune.model.files import read_model_config
from shardtune.model.loss import summed_loss
from shardtune.training.optim import build_optimizer
from shardtune.training.replica_shards import OwnedParameters

TOKENS_PER_RANK = 512
SHORT = {"rounds": 1}
_RANKS = 2
_HEADER = (
    "| | loop waits, s | of the save | of a step | until durable, s | save, GB/s | load, s "
    "| extra GB of a rank |"
)


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=absolute, required=True)
    add("--rounds", type=int, default=5)
    add("--results", type=absolute, default=REPOSITORY / "benchmarks/checkpoint.md")
    add("--disk", type=absolute, help="a directory on the disk to measure; else temporary files")


def main(options: Namespace) -> None:
    given = (options.model, options.results, options.rounds)
    disk = [options.disk] * bool(options.disk)
    command = launch(["-m", "benchmarks.checkpoint", *given, *disk], _RANKS)
    sys.exit(subprocess.run(command, env=environment(), cwd=REPOSITORY, check=False).returncode)


def worker() -> None:
    model, results, rounds, *disk = sys.argv[1:]
    assignments = [f"model.path={model}", "model.init=random", "eval.baseline=false"]
    config = load_config(REPOSITORY / "examples/demo.yaml", assignments, {})
    world = join_world(config.distributed)
    quiet_libraries(world.is_main)
    folder = disk[0] if disk else None
    scratch = Path(world.on_rank0(lambda: tempfile.mkdtemp(prefix="bench", dir=folder)))
    try:
        text = measure(config, world, scratch, int(rounds))
        if world.is_main:
            Path(results).write_text(text, encoding="utf-8")
    finally:
        if world.is_main:
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass
class Subject:
    """A training state on this rank, and the means to save and load it in each way."""

    config: Any
    model: Any
    optimizer: torch.optim.Optimizer
    tensors: dict[str, torch.Tensor]
    world: World
    scratch: Path
    run_dir: RunDir
    group: dist.ProcessGroup

    def save_shardtune(self, mode: str) -> dict[str, float]:
        self._clear(self.run_dir.path / "checkpoints")
        saving = self.config.checkpoint.model_copy(update={"mode": mode})
        saver = checkpoint.Saver(
            self.run_dir, saving, 600, self.model, self.optimizer, {}, self.world
        )
        state = {"step": 1, "epoch": 0, "row": 0, "config": to_dict(self.config)}
        return _save(lambda: saver.save(state), lambda _: saver.finish())

    def save_dcp(self, mode: str) -> dict[str, float]:
        folder = self.scratch / "dcp"
        self._clear(folder)
        given: dict[str, Any] = {"checkpoint_id": folder, "process_group": self.group}
        if mode == "sync":
            return _save(lambda: dcp.save(self.tensors, **given), lambda _: None)
        return _save(lambda: dcp.async_save(self.tensors, **given), lambda saved: saved.result())

    def stage(self) -> dict[str, float]:
        def copy() -> list[torch.Tensor]:
            local = map(to_local, self.tensors.values())
            return [tensor.detach().to("cpu", copy=True) for tensor in local]

        copied = _save(copy, lambda _: None)
        return {key: copied[key] for key in ("stall", "memory")}  # nothing is durable

    def load_shardtune(self) -> dict[str, float]:
        def load() -> None:
            saved = checkpoint.agree_on_checkpoint(self.run_dir, "auto", self.world)
            assert saved
            checkpoint.load_checkpoint(
                saved, self.model, self.optimizer, 1, self.run_dir, self.world
            )

        return {"load": _timed(load)}

    def load_dcp(self) -> dict[str, float]:
        given: dict[str, Any] = {"checkpoint_id": self.scratch / "dcp", "process_group": self.group}
        return {"load": _timed(lambda: dcp.load(self.tensors, **given))}

    def _clear(self, folder: Path) -> None:
        if self.world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier(self.group)


def _save(begin: Callable[[], Any], end: Callable[[Any], Any]) -> dict[str, float]:
    """Measure a save; `end`, which waits until it is durable, gets the result of `begin`."""
    with PeakMemory() as memory:
        started = time.perf_counter()
        begun = begin()
        stall_s = time.perf_counter() - started
        end(begun)
        total_s = time.perf_counter() - started
    return {"stall": stall_s, "total": total_s, "memory": memory.extra}


def build_subject(config: Any, world: World, scratch: Path) -> Subject:
    """A model and its moments, none of them zero."""
    model = build_model(config, read_model_config(config.model, config.data.max_length), world)
    optimizer = build_optimizer(OwnedParameters(model, config, world), config)
    tensors = training_state(model, optimizer)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor.detach())
    run_dir, group = open_run_dir(scratch / "shardtune", world), dist.new_group(backend="gloo")
    return Subject(config, model, optimizer, tensors, world, scratch, run_dir, group)


def measure(config: Any, world: World, scratch: Path, rounds: int) -> str:
    subject = build_subject(config, world, scratch)
    step_s = median([_timed(lambda: forward_and_backward(subject.model, world)) for _ in range(3)])
    variants: dict[str, list[Callable[[], dict[str, float]]]] = {
        "shardtune, async": [lambda: subject.save_shardtune("async")],
        "shardtune, sync": [lambda: subject.save_shardtune("sync"), subject.load_shardtune],
        "DCP, async": [lambda: subject.save_dcp("async")],
        "DCP, sync": [lambda: subject.save_dcp("sync"), subject.load_dcp],
        "a copy of the state alone": [subject.stage],
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            merged: dict[str, float] = {}
            for part in variants[name]:
                dist.barrier(subject.group)
                merged |= part()
            per_rank = world.all_gather_json(merged)
            results[name].append({key: max(rank[key] for rank in per_rank) for key in merged})
    size_gb = sum(to_local(tensor).nbytes for tensor in subject.tensors.values()) * world.size / 1e9
    return report(results, size_gb, step_s, world.size, rounds)


def forward_and_backward(model: Any, world: World) -> None:
    batch = flat_batch([torch.randint(10, 1000, (TOKENS_PER_RANK,))])
    summed_loss(model, batch.to(world.device)).backward()
    model.zero_grad()


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(
    results: dict[str, list[dict[str, float]]],
    size_gb: float,
    step_s: float,
    ranks: int,
    rounds: int,
) -> str:
    def cell(name: str, key: str, scale: float = 1) -> str:
        values = [result[key] * scale for result in results[name] if key in result]
        return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else ""

    rows = []
    for name in results:
        totals = [result["total"] for result in results[name] if "total" in result]
        stall_s = median(result["stall"] for result in results[name])
        of_save = f"{stall_s / median(totals):.0%}" if totals else ""
        speed = f"{size_gb / median(totals):.2f}" if totals else ""
        rows.append(
            f"| {name} | {cell(name, 'stall')} | {of_save} | {stall_s / step_s:.0%} | "
            f"{cell(name, 'total')} | {speed} | {cell(name, 'load')} | "
            f"{cell(name, 'memory', 1e-9)} |"
        )
    lines = [
        f"State: {size_gb:.2f} GB on {ranks} ranks; {rounds} rounds; torch {torch.__version__}.",
        f"A forward and backward of {TOKENS_PER_RANK} tokens on each rank takes {step_s:.2f} s.",
        "",
        *table(_HEADER, rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run(worker)
