"""Signals: before training they end the process; in training all ranks agree to save and stop."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from types import FrameType

from shardtune.errors import AGAIN, Aborted

_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A signal that was ignored when this process began stays ignored: `nohup` means it.
SIGNALS = tuple(number for number in _ALL if signal.getsignal(number) != signal.SIG_IGN)
# A scheduler signals every process, and the agent passes its own signal on: both mean one request.
_SAME_REQUEST_S = 2.0
_AGAIN_S = 0.05
_PR_SET_PDEATHSIG = 1  # prctl(2); Linux only, as are the launch scripts


def die_with_parent(parent: int) -> None:
    """Have the system kill this process once `parent`, which started it, has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def end_on_signal(when: str, code: int) -> None:
    """Have a signal end this process where it stands, with a line `<when> - <what to do>`."""
    raised_s = -_SAME_REQUEST_S

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal raised_s
        if time.monotonic() - raised_s >= _SAME_REQUEST_S:  # else this process ends already
            raised_s = time.monotonic()
            raise Aborted(f"ended by {signal.Signals(number).name} {when}", code=code)

    sys.unraisablehook = _raise_again
    for number in SIGNALS:
        signal.signal(number, end)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise Aborted again where Python dropped it: a signal may have arrived in a finalizer."""
    ending = lost.exc_value

    def again(number: int, frame: FrameType | None) -> None:
        assert isinstance(ending, Aborted)
        raise Aborted(*ending.problems, code=ending.code)

    if isinstance(ending, Aborted):
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


def ignore_signals() -> None:
    """Ignore all signals from now on: this process ends already."""
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Takes a note of SIGTERM, SIGINT, SIGHUP or SIGUSR1; a later second signal raises Aborted.

    The handler only takes a note: signals reach the ranks at different steps, and a save needs all
    ranks.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_s = 0.0
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received = f"{name} on {socket.gethostname()}"
            self._received_s = time.monotonic()
        elif time.monotonic() - self._received_s > _SAME_REQUEST_S:
            raise Aborted(f"ended by a second signal, {name}, without a save - {AGAIN}", code=1)
