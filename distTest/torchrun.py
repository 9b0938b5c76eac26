"""Runs torchrun for the launch script, and ends with it. Arguments are torchrun's.

A rank that is alone on its node has no neighbour that would notice when it is stopped: this process kills it, so that
torchrun ends.
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
_END_S = 40  # torchrun gives its processes 30 s to end, and may hang in a call that hears no signals
_OTHERS_SPEAK_S = 5  # the ranks of other nodes, which can say more


def _guard(folder: Path, launcher: int) -> None:
    orphaned, turns, unchanged = 0, dict[Path, int](), dict[Path, int]()
    while True:
        time.sleep(_TICK_S)
        orphaned += os.getppid() != launcher
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


def _stopped(place: str, seconds: int) -> str:
    return (
        f"{place}: no sign of life for {seconds} s, its process was stopped and has been killed - "
        "the same command resumes from the last checkpoint"
    )


if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)
    threading.Thread(target=_guard, args=(Path(os.environ["SHARDTUNE_LAUNCH_DIR"]), parent), daemon=True).start()
    runpy.run_module("torch.distributed.run", run_name="__main__")
