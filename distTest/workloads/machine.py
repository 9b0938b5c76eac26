"""The machine and the versions of a figure. Imports the standard library alone."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distTest.workloads.script import REPOSITORY

# Uncommitted changes of these files make a result differ from its commit's.
_SOURCES = ("*.py", "requirements.txt", "benchmarks/requirements-peers.txt")


def output_of(*command: Any) -> str:
    """Return the output of a command, or an empty text if it fails."""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Return the commit of this tree, with `-dirty` if its code has changed since."""
    git = ("git", "-C", REPOSITORY)
    changed = output_of(*git, "status", "--porcelain", "-uno", "--", *_SOURCES)
    return output_of(*git, "describe", "--always") + ("-dirty" if changed else "")


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    installed = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **installed}
