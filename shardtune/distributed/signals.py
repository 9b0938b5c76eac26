"""Signals: before training they end the process, during it they only ask for an end, on which all ranks agree."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import time
from types import FrameType

import psutil

from shardtune.errors import AGAIN, Aborted

_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# What was ignored when this process began stays so: `nohup` means it.
SIGNALS = tuple(number for number in _ALL if signal.getsignal(number) != signal.SIG_IGN)
_SAME_REQUEST_S = (
    2.0  # a scheduler signals every process, and the launch script and torchrun pass theirs on
)
_PR_SET_PDEATHSIG = 1  # prctl(2); Linux only, as are the launch scripts
LAUNCHER_PID = "SHARDTUNE_LAUNCHER_PID"  # of the launch script
TORCHRUN_PID = "SHARDTUNE_TORCHRUN_PID"  # the launch scripts' torchrun leaves it to its ranks
_TORCHRUN_KILLS_AFTER_S = 30.0  # its default, see `torchrun --help`


def end_with_torchrun() -> None:
    """Have the system kill this process when torchrun dies: a rank that outlives it would hold GPUs, and run.dir."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ.get(TORCHRUN_PID, str(os.getppid())) != str(
            os.getppid()
        ):  # it died while this one began
            os._exit(1)


def end_on_signal(when: str, code: int) -> None:
    """From now on a signal ends this process where it stands, with a line that says `<when> - <what to do>`."""

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Aborted(f"ended by {signal.Signals(number).name} {when}", code)

    for number in SIGNALS:
        signal.signal(number, end)


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """What of SIGTERM, SIGINT, SIGHUP or SIGUSR1 has come since this was made; a later second one raises Aborted.

    The handler only takes a note: signals reach the ranks at different steps, and a save needs all of them.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_s = 0.0
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            by = "the end of its launch script" if launcher_has_ended() else name
            self.received, self._received_s = f"{by} on {socket.gethostname()}", time.monotonic()
        elif time.monotonic() - self._received_s > _SAME_REQUEST_S:
            raise Aborted(f"ended by a second signal, {name}, without a save - {AGAIN}", code=1)


def launcher_has_ended() -> bool:
    """Whether the launch script was killed: torchrun, which ends with it, has another parent then."""
    launcher, torchrun = os.environ.get(LAUNCHER_PID), os.environ.get(TORCHRUN_PID)
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(launcher and torchrun and psutil.Process(int(torchrun)).ppid() != int(launcher))
    return False


def remark_on_kill_delay(save_s: float) -> str | None:
    """What to say if torchrun, once it is told to end, would kill the processes before a save of `save_s` has ended."""
    delay_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_KILLS_AFTER_S))
    if "TORCHELASTIC_RUN_ID" not in os.environ or 2 * save_s < delay_s:
        return None
    return (
        f"A save takes {save_s:.0f} s, and torchrun kills its processes {delay_s:.0f} s after a signal: start it with "
        f"--shutdown-timeout={math.ceil(4 * save_s)} or TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(4 * save_s)}"
    )
