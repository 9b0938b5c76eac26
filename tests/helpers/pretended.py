"""Runs of train_fsdp.py on pretended GPUs, in forked ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretend_gpu
import pytest
from pretend_gpu.waits import HostWait, host_waits

from helpers.commands import REPOSITORY, read_metrics
from helpers.ranks import on_ranks

needs_compiler = pytest.mark.skipif(pretend_gpu.lacks_compiler(), reason="no C++ compiler (g++)")
_GB = 4.0  # of each GPU
_ROUNDING = 2.0**-8  # of bfloat16, relative


def on_gpus(
    gpus: int, work: Any, *arguments: Any, cwd: Path, timeout_s: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run `work(*arguments)` on so many ranks, each with a GPU of its own."""
    pretend_gpu.build()  # once, not in each rank
    return on_ranks(gpus, _install_and, gpus, work, arguments, cwd=cwd, timeout_s=timeout_s)


def train_on_gpus(gpus: int, *assignments: Any, cwd: Path) -> str:
    """Run train_fsdp.py on so many ranks with these assignments; return its standard output.

    Packages in `cwd` are found.
    """
    (cwd / "config.yaml").touch()
    done = on_gpus(gpus, train_script, list(map(str, assignments)), cwd=cwd)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def waits_of(run_dir: Path, rank: int = 0) -> list[list[HostWait]]:
    """Return the host's waits in each step of a run, its evaluation and its save included."""
    lines = (run_dir / f"waits{rank}").read_text(encoding="utf-8").splitlines()
    return [[HostWait(*wait) for wait in json.loads(line)] for line in lines]


def assert_close(run_dir: Path, expected: Path) -> None:
    """Losses within bfloat16's rounding; norms, of sums of such numbers, within eight of it."""
    for kind in ("step", "eval"):
        of_gpu, of_cpu = (read_metrics(path, kind) for path in (run_dir, expected))
        assert [e["step"] for e in of_gpu] == [e["step"] for e in of_cpu] != []
        for gpu, cpu in zip(of_gpu, of_cpu, strict=True):
            assert gpu["loss"] == pytest.approx(cpu["loss"], rel=_ROUNDING / 4), (kind, gpu, cpu)
            if kind == "step":
                assert gpu["tokens"] == cpu["tokens"]
                assert gpu["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=8 * _ROUNDING)


def _install_and(gpus: int, work: Any, arguments: tuple[Any, ...]) -> None:
    pretend_gpu.install(gpus, gb=_GB)
    work(*arguments)


def train_script(assignments: list[str]) -> None:
    sys.path[:0] = [str(REPOSITORY), str(Path.cwd())]
    import train_fsdp
    from shardtune.distributed.exit_code import run

    take_steps = train_fsdp.prefetch

    def counted(context: Any, *rest: Any) -> Iterator[Any]:
        path = context.run.directory.path / f"waits{context.run.world.rank}"
        with path.open("a", encoding="utf-8") as file:
            for step in take_steps(context, *rest):
                with host_waits() as waits:
                    yield step
                file.write(json.dumps(waits) + "\n")

    train_fsdp.prefetch = counted
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), "--config", "config.yaml", *assignments]
    run(train_fsdp.main)
