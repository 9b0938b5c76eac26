"""Runs torchrun for the launch script, and ends with it. Arguments are torchrun's.

A rank that is alone on its node has no neighbour that would notice when it is stopped: this process kills it, so that
torchrun ends. After a signal, of a scheduler that asks every process, the ranks have the time that they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_TICK_S = 1.0
_END_S = 40  # without a process it may hang in a call that hears no signals
# From a signal to torchrun's SIGKILL. How long a save takes is not known before the first: the ranks have deadlines of
# their own for a step and for a save, watch one another, and end at once when they are asked a second time.
_SHUTDOWN_TIMEOUT_S = 2 * 24 * 3600
_OTHERS_SPEAK_S = 5  # the ranks of other nodes, which can say more


def _guard(folder: Path, launcher: int) -> None:
    orphaned, turns, unchanged = 0, dict[Path, int](), dict[Path, int]()
    while True:
        time.sleep(_TICK_S)
        orphaned = orphaned + 1 if os.getppid() != launcher and not _has_process(folder) else 0
        if orphaned * _TICK_S > _END_S:
            os._exit(1)
        for file in folder.glob("rank_*[0-9]"):
            with contextlib.suppress(OSError, ValueError):
                turn = file.stat().st_mtime_ns
                unchanged[file] = unchanged[file] + 1 if turns.get(file) == turn else 0
                turns[file] = turn
                place, limits = file.read_text(encoding="utf-8").splitlines()
                pid, silent_s = map(int, limits.split())
                if unchanged[file] * _TICK_S > silent_s + _OTHERS_SPEAK_S:
                    with (folder / "outcome").open("a", encoding="utf-8") as outcome:
                        outcome.write(f"1\n{_stopped(place, unchanged[file])}\n")
                    os.kill(pid, signal.SIGKILL)


def _has_process(folder: Path) -> bool:
    """Whether one of the processes that came to run lives."""
    with contextlib.suppress(FileNotFoundError):
        for pid in (folder / "processes").read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
                    return True
    return False


def _stopped(place: str, seconds: int) -> str:
    return (
        f"{place}: no sign of life for {seconds} s, its process was stopped and has been killed - "
        + os.environ["SHARDTUNE_AGAIN"]
    )


if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    # It would end torchrun, and the ranks with it. Not ignored: they would inherit that.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    threading.Thread(target=_guard, args=(Path(os.environ["SHARDTUNE_LAUNCH_DIR"]), parent), daemon=True).start()
    runpy.run_module("torch.distributed.run", run_name="__main__")
