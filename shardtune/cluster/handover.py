"""Between the preflight and the watchdogs of the ranks: the nodes stay connected until those watch each other.

torchrun starts, imports take their time, and ranks meet: whoever is lost meanwhile would leave the others waiting for
it until their join timeout.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

from shardtune.cluster.children import Child, is_running
from shardtune.cluster.control import Link
from shardtune.cluster.meeting import Meeting
from shardtune.errors import UserError

_LONGEST_S = 24 * 3600.0  # the launch scripts and the ranks have limits of their own
_LOOK_EVERY_S = 0.2


def stay_connected(meeting: Meeting, name: str, folder: Path) -> None:
    """Return at once; a process in the background stays, and ends this node's torchrun when another node fails.

    `folder` is described in torchrun.py. The launch script is the parent of this process.
    """
    launcher = os.getppid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launch script
    meeting.be_quiet()
    try:
        meeting.gather(
            "the start of the ranks", Child(name, _look, name, folder, launcher), _LONGEST_S
        )
    except UserError as refused:
        _end_torchrun(folder, *_code_and_line(refused.problems[0]))
        if not is_running(launcher):  # and has left it behind
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _look(link: Link, name: str, folder: Path, launcher: int) -> None:
    """Say when the ranks of this node watch the others, or how its launch has ended before."""
    while not (folder / "watched").exists():
        is_launching = is_running(launcher)
        if (told := _told(folder)).endswith("\n"):
            code, line = _code_and_line(told.strip())
            who = "" if socket.gethostname() in line else f"{name}: "
            link.send({"problems": [f"{code} {who}{line}"]})
            return
        if not is_launching:
            line = (
                "its launch script was killed before its ranks had met the others, or found no room in TMPDIR for why "
                "it ended - see its log, and start every node again"
            )
            link.send({"problems": [f"1 {name}: {line}"]})
            return
        time.sleep(_LOOK_EVERY_S)
    link.send({})


def _told(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "told").read_text(encoding="utf-8")
    return ""


def _code_and_line(told: str) -> tuple[int, str]:
    """Of a line that may begin with an exit code; a lost node says none."""
    match = re.fullmatch(r"(?:(\d+) )?(.*)", told)
    assert match is not None
    return int(match[1] or 1), match[2]


def _end_torchrun(folder: Path, code: int, line: str) -> None:
    """It and its ranks at once, which have nothing to save or to say; the launch script says the line."""
    if (
        folder / "told"
    ).exists():  # by the launch of this node, which has ended and removes the folder
        return
    with contextlib.suppress(OSError), (folder / "outcome").open("a", encoding="utf-8") as outcome:
        outcome.write(f"{code}\n{line}\n")
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        torchrun = psutil.Process(int((folder / "torchrun.pid").read_text(encoding="utf-8")))
        for process in (torchrun, *torchrun.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
