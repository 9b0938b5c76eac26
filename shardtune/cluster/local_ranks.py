"""What a launch's torchrun knows of the ranks of its node, and how they end.

They leave it in the folder of the launch, which may fill up or be removed while they run: so what was read there once
is kept, and a last word that finds no place there is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from shardtune.distributed.watchdog import described_end, leave_last_word
from shardtune.distributed.world import speak_for

# Added to torchrun's exit code where the last line of the node stands already, and the folder does not have it.
SAID = 32
_OTHERS_SPEAK_S = 5  # the ranks of other nodes, which can say more
SEE_ABOVE = "see what it said above"


class Place(NamedTuple):
    """Where a rank is: `rank <r> on <host>, last seen in <phase>`, as of `turn`, a time of the system's clock."""

    rank: int
    words: str
    silent_s: int
    turn: int


class LocalRanks:
    """`folder` is described in torchrun.py; `have_met`: the ranks of all nodes watch each other."""

    def __init__(self, folder: Path) -> None:
        self.have_met = False
        self._folder = folder
        self._begun = set[int]()
        self._places = dict[int, Place]()  # by process id, of those that have not ended with a word
        self._ended = dict[
            int, tuple[int, int]
        ]()  # by process id in their order: kind and status of waitid(2)
        self._code: int | None = None  # of the last word that was printed here
        self._turns = dict[int, int]()
        self._silent = Counter[int]()

    @property
    def has_outcome(self) -> bool:
        """Whether the launch script finds a last word."""
        with contextlib.suppress(OSError):
            return (self._folder / "outcome").stat().st_size > 0
        return False

    @property
    def have_finished(self) -> bool:
        return bool(self._ended) and all(end == (os.CLD_EXITED, 0) for end in self._ended.values())

    @property
    def exit_code(self) -> int | None:
        """torchrun's own; None where nobody has said why this node ends."""
        if self.has_outcome:
            return 1
        codes = [self._code] if self._code is not None else self._spoken_codes()
        return SAID + codes[-1] if codes else None

    def look(self) -> None:
        """Keep what stands in the folder."""
        if not self._folder.is_dir():
            return
        self.have_met |= (self._folder / "watched").exists()
        with contextlib.suppress(OSError, ValueError):
            self._begun |= {
                *map(int, (self._folder / "processes").read_text(encoding="utf-8").split())
            }
        places = {}
        for file in self._folder.glob("rank_*[0-9]"):
            with contextlib.suppress(OSError, ValueError):
                words, limits = file.read_text(encoding="utf-8").splitlines()
                pid, silent_s = map(int, limits.split())
                places[pid] = Place(
                    int(file.name.removeprefix("rank_")), words, silent_s, file.stat().st_mtime_ns
                )
        self._places = places

    def note_ends(self) -> None:
        """Leave for the other ranks how one has ended; torchrun will hear of it, and tells nobody."""
        self.look()
        for number, child in enumerate(
            psutil.Process().children()
        ):  # several ends may be one signal
            with contextlib.suppress(OSError):
                ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if ended is not None and ended.si_pid not in self._ended:
                    self._ended[ended.si_pid] = ended.si_code, ended.si_status
                    self._note_end(number, ended.si_pid)
        if not has_process():
            self._speak_for_the_lost()

    def _note_end(self, number: int, pid: int) -> None:
        kind, status = self._ended[pid]
        with (
            contextlib.suppress(OSError),
            (self._folder / "ends").open("a", encoding="utf-8") as ends,
        ):
            ends.write(f"{pid} {kind} {status}\n")
        could_have_met = (
            self.have_met
            or not self._folder.is_dir()
            or {"--nnodes=1", "--nproc_per_node=1"} <= {*sys.argv}
        )
        if (kind, status) == (os.CLD_EXITED, 0) and not could_have_met:
            # torchrun takes it for success, and would wait for the others.
            who = f"local rank {number} of node {os.environ['NODE_RANK']}"
            self.conclude(1, f"{who} on {how_it_ended('with code 0')}")
            os.kill(os.getpid(), signal.SIGTERM)

    def conclude(self, code: int, line: str) -> None:
        """This is the node's last word, if it has none."""
        if self._code is None and not self.has_outcome and not leave_last_word(code, line):
            self._code = code
            with contextlib.suppress(OSError):
                print(f"ERROR: {line}", file=sys.stderr, flush=True)

    def _spoken_codes(self) -> list[int]:
        """With which ranks have ended that have printed why, since the folder did not take it."""
        exited = [
            (pid, status) for pid, (kind, status) in self._ended.items() if kind == os.CLD_EXITED
        ]
        spoken = (
            (2, 75) if self._takes_words() else (1, 2, 75)
        )  # 1 is also the end of an import that fails
        return [
            status
            for pid, status in exited
            if status in spoken and (status != 1 or pid in self._begun)
        ]

    def _takes_words(self) -> bool:
        with contextlib.suppress(OSError):
            (self._folder / "room").write_text("room\n", encoding="utf-8")
            (self._folder / "room").unlink()
            return True
        return False

    def _speak_for_the_lost(self) -> None:
        """If a rank has ended without a word, and none of this node is left that could say how: to the others too."""
        if self.exit_code is not None:
            return
        if lost := [pid for pid in self._ended if pid in self._places and self._is_lost(pid)]:
            places = [self._places[pid] for pid in lost]
            who, _, phase = places[0].words.partition(", last seen in ")
            what, remedy = described_end(*self._ended[lost[0]])
            line = f"{who}: {what}, last seen in {phase} - {remedy}"
            self.conclude(*speak_for([place.rank for place in places], line))
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # torchrun would wait for the other nodes if all ended with 0

    def _is_lost(self, pid: int) -> bool:
        """Who ends with a word takes its place away, where there is still a folder."""
        kind, status = self._ended[pid]
        return self._folder.is_dir() or kind != os.CLD_EXITED or status not in (0, 1, 2, 75)

    def end_the_silent(self, tick_s: float) -> None:
        """Kill a rank that was stopped, or hangs with all its threads. One that is alone on its node has no neighbour
        that would notice, and torchrun would wait for it.

        A rank touches its file every second. That says nothing while the filesystem does not let this process do so.
        """
        can_touch = False
        with contextlib.suppress(OSError):
            os.utime(self._folder / "torchrun.pid")
            can_touch = True
        for pid, place in self._places.items():
            if pid in self._ended:  # another process may have its number now
                continue
            is_silent = _is_stopped(pid) or (can_touch and self._turns.get(pid) == place.turn)
            self._silent[pid] = self._silent[pid] + 1 if is_silent else 0
            self._turns[pid] = place.turn
            if self._silent[pid] * tick_s > place.silent_s + _OTHERS_SPEAK_S and is_silent:
                what = f"no sign of life for {self._silent[pid] * tick_s:.0f} s"
                did = "its process was stopped or hung, and has been killed"
                self.conclude(1, f"{place.words}: {what}, {did} - {os.environ['SHARDTUNE_AGAIN']}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def has_process() -> bool:
    """Whether a process that this one has started lives; one that waits for its parent to hear of its end does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())
    return False


def how_it_ended(how: str, remedy: str = SEE_ABOVE, have_met: bool = False) -> str:
    early = "" if have_met else ", before it had met the others"
    again = os.environ["SHARDTUNE_AGAIN"] if have_met else "run the same command again"
    return f"{socket.gethostname()}: ended {how}{early} - {remedy}; {again}"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
