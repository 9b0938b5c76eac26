"""Ranks forked from a server that has torch and transformers loaded: a run in seconds, where torchrun pays the import
of both in every rank. What a rank executes, and the environment it finds, are torchrun's."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from conftest import REPOSITORY

from shardtune.config import Config, load_config
from shardtune.world import World

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "datasets",
        "transformers.integrations.moe",
        "pytest",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "glm4_moe", "mamba")),
    ]
)


def on_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    cwd: Path,
    timeout_s: float = 240,
    grace_s: float = 0,
) -> subprocess.CompletedProcess[str]:
    """Run `work(*arguments)`, a function of a module, on every rank; as torchrun does, the first failure ends all:
    they get SIGTERM, and SIGKILL after `grace_s`.

    The exit code is that of this first failure, standard output is rank 0's, standard error that of all.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [cwd / f"rank{rank}" for rank in range(ranks)]
    started = [
        _FORKS.Process(target=_be_rank, args=(rank, ranks, store.port, str(cwd), str(log), work, arguments))
        for rank, log in enumerate(logs)
    ]
    for log, process in zip(logs, started, strict=True):
        log.with_suffix(".err").touch()
        process.start()
    deadline = time.monotonic() + timeout_s
    while running := [process for process in started if process.exitcode is None]:
        wait([process.sentinel for process in running], max(0, deadline - time.monotonic()))
        if any(process.exitcode for process in started) or time.monotonic() > deadline:
            break
    code = next((process.exitcode for process in started if process.exitcode), 0)
    for process in running if grace_s else ():
        process.terminate()
    ended_by = time.monotonic() + grace_s
    for process in running:
        process.join(max(0, ended_by - time.monotonic()))
        process.kill()
        process.join()
    errors = "".join(log.with_suffix(".err").read_text(encoding="utf-8") for log in logs)
    assert code or not running, f"the ranks did not end within {timeout_s} s: {errors}"
    return subprocess.CompletedProcess([], code, logs[0].with_suffix(".out").read_text(encoding="utf-8"), errors)


def train(ranks: int, *assignments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run train_fsdp.py on forked ranks, with these `section.key=value` and the defaults for the rest."""
    config = cwd / "config.yaml"
    config.touch()
    return on_ranks(ranks, run_script, ["--config", str(config), *map(str, assignments)], cwd=cwd)


def config_for(model: Path, folder: Path, *assignments: str) -> Config:
    """The configuration of a run in `folder`, with its `train.jsonl`."""
    (folder / "config.yaml").touch()
    required = [f"model.path={model}", f"data.train={folder / 'train.jsonl'}"]
    return load_config(folder / "config.yaml", [*required, *assignments], {})


def run_script(arguments: list[str]) -> None:
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), *arguments]
    sys.path.insert(0, str(REPOSITORY))
    runpy.run_path(sys.argv[0], run_name="__main__")


def world_of(rank: int, size: int, store: dist.Store) -> World:
    """A rank, each a node of its own, that can agree with the others of the store, and do nothing else with them."""
    return World(rank, size, 0, 1, rank, torch.device("cpu"), cast(Any, None), store)


def _be_rank(
    rank: int,
    ranks: int,
    port: int,
    cwd: str,
    log: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    multiprocessing.set_start_method("fork", force=True)  # what a process that torchrun started has
    os.chdir(cwd)
    work(*arguments)
