"""Commands that run train_fsdp.py, and the machine and versions of a figure.

Imports the standard library alone.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# Uncommitted changes of these files make a result differ from its commit's.
_SOURCES = ("*.py", "requirements.txt", "benchmarks/requirements-peers.txt")


def absolute(path: str) -> Path:
    """Make a path of the command line absolute, for programs that start in another folder."""
    return Path(path).absolute()


def launch(program: Sequence[Any], ranks: int, python: Path | str = sys.executable) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return list(map(str, [python, *(launcher if ranks > 1 else []), *program]))


def train_command(settings: Mapping[str, Any], ways: str | None = None) -> list[str]:
    """Return the command of a run with these settings. `ways`: those of wrapped.py."""
    script = ["train_fsdp.py"] if ways is None else ["-m", "distTest.workloads.wrapped", ways]
    assignments = [f"{key}={value}" for key, value in settings.items()]
    return launch([*script, "--config", os.devnull, *assignments], ranks=1)


def offline(**more: str) -> dict[str, str]:
    """Return an environment that finds the repository and needs no network."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **ours, **more}


def environment(**more: str) -> dict[str, str]:
    return offline(OMP_NUM_THREADS="1", **more)


def output_of(*command: Any) -> str:
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def commit() -> str:
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
