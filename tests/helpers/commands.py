"""The real commands, started as a user does, and what a run leaves."""

import contextlib
import datetime
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter

from distTest.rehearse import namespaces
from shardtune.metrics_schema import KINDS

REPOSITORY = Path(__file__).resolve().parent.parent.parent

needs_namespaces = pytest.mark.skipif(
    namespaces.obstacle() is not None,
    reason=f"network namespaces cannot be made: {namespaces.obstacle()}",
)


def a_free_port() -> str:
    """Choose a port below `net.ipv4.ip_local_port_range`, so that no connection takes it."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", random.randrange(20_000, 29_000)))
            return str(listener.getsockname()[1])


def completed(
    command: Sequence[str | Path],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 500,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return what it said."""
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def piped(
    command: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[str]:
    """Start a command whose output and errors are text in pipes."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, **pipes | how)


def finish(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a command has succeeded, and return its standard output."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launch(
    processes: int,
    *arguments: Any,
    cwd: Path,
    timeout_s: float = 500,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run train_fsdp.py as a user does: under torchrun, or by itself (`processes=0`)."""
    script = [str(REPOSITORY / "train_fsdp.py"), *map(str, arguments)]
    runner = (
        []
        if processes == 0
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    )
    return completed(
        [sys.executable, *runner, *script],
        cwd=cwd,
        env=os.environ | (env or {}),
        timeout_s=timeout_s,
    )


def wait_until(is_time: Callable[[], object], within_s: float = 480) -> None:
    deadline = time.monotonic() + within_s
    while not is_time():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_steps(run_dir: Path, count: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(read_metrics(run_dir, "step")) >= count)


def read_metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The objects of this kind, without their time, which has to be in UTC.

    All objects must have the fields of their kind.
    """
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = list(map(json.loads, lines))
    for entry in entries:
        TypeAdapter(KINDS[entry["kind"]]).validate_python(entry, strict=True)
        assert entry.keys() <= get_type_hints(KINDS[entry["kind"]]).keys(), entry
    entries = [entry for entry in entries if entry["kind"] == kind]
    times = [datetime.datetime.fromisoformat(entry.pop("time")) for entry in entries]
    assert all(time.utcoffset() == datetime.timedelta(0) for time in times)
    return entries
