"""What the run says of each step: a line for people, an object in `metrics.jsonl` for programs."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from shardtune.distributed.world import World
from shardtune.log import logger


class Metrics:
    """`metrics.jsonl` of the run, written by rank 0. Opening it after a resume drops what lies behind that step.

    Lines that the disk does not take, such as a full one, are kept and written with the next that it takes.
    """

    def __init__(self, path: Path, world: World, resumed_step: int | None) -> None:
        self._file: IO[bytes] | None = None
        self._world, self._lock = world, threading.Lock()
        self._unwritten, self._is_said = b"", False
        if not world.is_main:
            return
        kept = _lines_up_to(path, resumed_step) if resumed_step is not None else []
        temporary = path.with_suffix(".tmp")
        self._file = temporary.open("wb", buffering=0)
        self._append(b"".join(kept))
        self.sync()
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)

    def write(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            try:
                line = (
                    json.dumps(
                        {"kind": kind} | {key: _finite(value) for key, value in values.items()}
                    )
                    + "\n"
                )
                self._append(line.encode())
            except OSError as error:
                if not self._is_said:
                    logger.info(
                        f"metrics.jsonl cannot be written now ({error.strerror}): its lines wait in memory"
                    )
                self._is_said = True

    def sync(self) -> None:
        """Bring what was written to the disk: a checkpoint that follows must not know more steps than the file.

        Raises:
            OSError: lines wait that the disk has not taken, or it fails now.
        """
        if self._file is not None:
            self._append(b"")
            os.fsync(self._file.fileno())

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        with self._lock:
            self._unwritten += lines
            while self._unwritten:  # a write may be short
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def _finite(value: Any) -> Any:
    """`value`, or None for a float that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """The whole lines of steps up to `step`; a line that a crash cut short, or garbled, is not one."""
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            continue
        if is_kept:
            kept.append(line)
    return kept


def has_evaluation(path: Path, step: int) -> bool:
    """Whether the lines hold the evaluation of this step."""
    entries = map(json.loads, _lines_up_to(path, step))
    return any(entry.get("kind") == "eval" and entry["step"] == step for entry in entries)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


class StepLines:
    """Says every so many steps, and at the last one, where the run is and the mean speed since the line before."""

    def __init__(self, world: World, total_steps: int, every_steps: int) -> None:
        self._world, self._total_steps, self._every_steps = world, total_steps, every_steps
        self._steps, self._seconds, self._tokens, self._mfu_seconds = 0, 0.0, 0.0, 0.0

    def step_ended(self, step: int, told: Mapping[str, Any]) -> None:
        """`told`: what `metrics.jsonl` gets of the step."""
        seconds, mfu = told["seconds"], told["mfu"]
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._tokens += told["tokens"]
        self._mfu_seconds += (mfu or 0.0) * seconds
        if step % self._every_steps and step != self._total_steps:
            return
        left = (self._total_steps - step) * self._seconds / self._steps
        utilisation = f"MFU {self._mfu_seconds / self._seconds:.1%} | " if mfu is not None else ""
        memory = f"{told['memory_bytes'] / 1e9:.1f} GB"
        logger.info(
            f"Step {step}/{self._total_steps} | Loss: {told['loss']:.4f} | Grad Norm: {told['grad_norm']:.3f} | "
            f"LR: {told['lr']:.2e} | {self._steps / self._seconds:.2f} it/s | "
            f"{self._tokens / self._seconds:.0f} tok/s | {utilisation}{memory} | ETA {_duration(left)}"
        )
        self._steps, self._seconds, self._tokens, self._mfu_seconds = 0, 0.0, 0.0, 0.0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
