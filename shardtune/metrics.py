"""What the run says of each step: a line for people, an object in `metrics.jsonl` for programs."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import torch

from .world import World


class Metrics:
    """`metrics.jsonl` of the run, written by rank 0. Opening it after a resume drops what lies behind that step."""

    def __init__(self, path: Path, world: World, resumed_step: int | None) -> None:
        self._path = path if world.is_main else None
        if self._path is None:
            return
        kept = _lines_up_to(self._path, resumed_step) if resumed_step is not None else []
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, kind: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind} | {key: _finite(value) for key, value in values.items()}) + "\n")

    def sync(self) -> None:
        """Bring what was written to the disk: a checkpoint that follows must not know more steps than the file."""
        if self._path is not None and self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """`value`, or None for a float that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The whole lines of steps up to `step`; a line that a crash cut short is not one."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and entry["step"] <= step:
            kept.append(line)
    return kept


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_line(
    step: int,
    total_steps: int,
    *,
    loss: float,
    grad_norm: float,
    lr: float,
    seconds: float,
    tokens: float,
    memory_bytes: float,
) -> str:
    """The line of one step, or the mean speed of the steps since the last line (`seconds` and `tokens` per step)."""
    return (
        f"Step {step}/{total_steps} | Loss: {loss:.4f} | Grad Norm: {grad_norm:.3f} | LR: {lr:.2e} | "
        f"{1 / seconds:.2f} it/s | {tokens / seconds:.0f} tok/s | {memory_bytes / 1e9:.1f} GB | "
        f"ETA {_duration((total_steps - step) * seconds)}"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
