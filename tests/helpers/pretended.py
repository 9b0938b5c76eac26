"""Runs of train_fsdp.py on pretended GPUs, in forked ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretend_gpu
import pytest
from conftest import REPOSITORY
from pretend_gpu.waits import HostWait, host_waits

from helpers.ranks import on_ranks

needs_compiler = pytest.mark.skipif(pretend_gpu.lacks_compiler(), reason="no C++ compiler (g++)")


def on_gpus(
    gpus: int, work: Any, *arguments: Any, cwd: Path, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `work(*arguments)` on so many ranks, each with a GPU of its own."""
    pretend_gpu.build()  # once, not in each rank
    return on_ranks(gpus, _install_and, gpus, work, arguments, cwd=cwd, timeout_s=timeout_s)


def train_on_gpus(
    gpus: int, *assignments: Any, cwd: Path, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run train_fsdp.py on so many ranks; `waits_of` then has what each waited for."""
    (cwd / "config.yaml").touch()
    arguments = ["--config", "config.yaml", *map(str, assignments)]
    return on_gpus(gpus, _train, arguments, cwd=cwd, timeout_s=timeout_s)


def waits_of(folder: Path, rank: int) -> list[list[HostWait]]:
    """Return the host's waits in each step of the last run, with its evaluation and its save."""
    lines = (folder / f"waits{rank}").read_text(encoding="utf-8").splitlines()
    return [[HostWait(*wait) for wait in json.loads(line)] for line in lines]


def _install_and(gpus: int, work: Any, arguments: tuple[Any, ...]) -> None:
    pretend_gpu.install(gpus, gb=4.0)
    work(*arguments)


def _train(arguments: list[str]) -> None:
    sys.path.insert(0, str(REPOSITORY))
    import train_fsdp
    from shardtune.distributed.exit import run

    prefetch = train_fsdp.prefetch

    def counted(*given: Any) -> Iterator[Any]:
        with Path(f"waits{os.environ['RANK']}").open("w", encoding="utf-8") as file:
            for step in prefetch(*given):
                with host_waits() as waits:
                    yield step
                file.write(json.dumps(waits) + "\n")

    train_fsdp.prefetch = counted
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), *arguments]
    run(train_fsdp.main)
