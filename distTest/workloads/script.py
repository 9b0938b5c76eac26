"""Commands that run train_fsdp.py, from the root of the repository."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def absolute(path: str) -> Path:
    """Make a path of the command line absolute, for programs that start in another folder."""
    return Path(path).absolute()


def launch(program: Sequence[Any], ranks: int, python: Path | str = sys.executable) -> list[str]:
    """Return the command of one process, or of several under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return list(map(str, [python, *(launcher if ranks > 1 else []), *program]))


def train_command(
    settings: Mapping[str, Any],
    *,
    ways: str | None = None,
    ranks: int = 1,
    config: Path | str = os.devnull,
) -> list[str]:
    """Return the command of a run with these settings. `ways`: those of wrapped.py."""
    script = ["train_fsdp.py"] if ways is None else ["-m", "distTest.workloads.wrapped", ways]
    assignments = [f"{key}={value}" for key, value in settings.items()]
    return launch([*script, "--config", config, *assignments], ranks)


def offline(**more: str) -> dict[str, str]:
    """Return an environment that finds the repository and needs no network."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **ours, **more}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a run that needs no network: one thread for each process."""
    return offline(OMP_NUM_THREADS="1", **more)
