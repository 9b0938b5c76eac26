"""Ends this process when another rank fails, stops or does not arrive, and says which one, where, in what and why.

A rank that is blocked in a collective hears of nothing. So in each process a thread has a connection of its own to the
store of the launcher: every second it posts a heartbeat, looks whether the processes of its own node live, whether the
heartbeat of the next rank moves, and whether the run has failed. The first failure of a run is everybody's: all ranks
end with it. A second thread, which never touches the store, ends the process when the store does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from shardtune.distributed.progress import STEP_PHASES, Progress
from shardtune.distributed.signals import TORCHRUN_PID, launcher_has_ended
from shardtune.errors import AGAIN

_PREFIX = "watchdog"  # of its keys in the store
_TICK_S = 1.0
# Steps before the first has ended wait for whatever a rank sets up: compilation, slow disks, a first evaluation.
FIRST_STEP_TIMEOUT_S = 1800
_SILENT_S = 40  # a heartbeat, or the store, that stands still so long is taken for lost
_SILENT_AFTER_ERROR_S = 6  # once a collective failed, somebody is gone
_BLAME_S = 15  # for the watchdog of any rank to say who, before a rank takes its own failed collective for the cause
_END_NOTED_S = 0.5  # for the launch script's torchrun to note how a process ended
_LEAVE_S = 4  # for the others to hear of a failure, before the store may end with node 0
_END_S = 15  # for a process that has failed to end by itself
_UNWATCHABLE = -1
_WITHIN_STEPS = (*STEP_PHASES, "evaluation")
_WHILE_SAVING = ("saving", "writing the final model")
_SAVER_GIVES_UP_S = (
    180  # past save_timeout_s: it has an end of its own, after which the run may go on
)
# A process that does less than this, on average, is stuck; what the watchdog itself does is below it.
_WORKING_CPUS = 0.01
_WORKING_BYTES_PER_S = 100e3
_LOOK_AT_ALL_EVERY = 15  # turns, where a rank that waits may wait for hours


class Peer(NamedTuple):
    """A rank as the others know it."""

    rank: int
    node: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Failure(NamedTuple):
    """Why the run ends: `<what> - <what to do>`, the ranks to blame, and the rank that says so."""

    line: str
    code: int
    author: int
    blamed: list[int]


class Beat(NamedTuple):
    """What a rank says of itself every second."""

    turn: int
    arrivals: int
    place: str
    frame: str
    idle_s: float


class Idleness:
    """For how long a rank has come no further. Outside of steps it may take its time, as long as it works."""

    def __init__(self) -> None:
        self.ticks = 0
        self._arrivals, self._work = -1, 0.0

    def tick(self, arrivals: int, may_work: bool) -> None:
        work = _work_s() if may_work else 0.0
        if arrivals != self._arrivals or work - self._work > max(1, self.ticks * _TICK_S):
            self.ticks, self._arrivals, self._work = 0, arrivals, work
        else:
            self.ticks += 1


class Watchdog:
    """`start` starts its threads, once all ranks have made theirs. The rest is for a main thread that ends.

    `step_timeout_s` holds within steps when `limits_steps` is set, before that at least FIRST_STEP_TIMEOUT_S; elsewhere
    it and `save_timeout_s` hold for a rank that is behind the others and does nothing.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        store: dist.Store,
        progress: Progress,
        step_timeout_s: float,
        save_timeout_s: float,
    ) -> None:
        self.me, self._peers, self._progress = peers[rank], peers, progress
        self._step_timeout_s, self._save_timeout_s = step_timeout_s, save_timeout_s
        self._store = dist.PrefixStore(_PREFIX, store)  # the main thread's
        self._channel = dist.PrefixStore(_PREFIX, cast(Any, store).clone())  # the talking thread's
        self._siblings = {
            peer.rank: _handle(peer)
            for peer in peers
            if peer.node == self.me.node and peer != self.me
        }
        self._turns = 0
        self._last_seen: dict[int, int] = {}
        self._unchanged: Counter[int] = Counter()
        self._idleness = Idleness()
        self.limits_steps = False
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._is_suspicious = False
        self._has_spoken = False
        self._main_ends = threading.Event()
        self._own: Failure | None = (
            None  # of a main thread that ends, to be the run's if no other comes before
        )
        self._own_counts_at_s = 0.0
        self._store_answers = True
        self._exit_code: int | None = None
        self._post_beat(self._store)

    def start(self) -> None:
        tell_launcher("watched", "")
        for work in (self._talk, self._guard):
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True).start()

    @property
    def place(self) -> str:
        return self._progress.place

    # What the main thread asks for, when it ends.

    def settle(self, line: str, code: int, may_be_innocent: bool) -> Failure:
        """The failure with which this process ends: its own, unless another one came before.

        A rank that lost its connection to another, or a sibling, waits for the word on who that is. The other threads
        decide: this one must end, also where the store never answers.
        """
        self._is_suspicious = may_be_innocent
        self._own_counts_at_s = time.monotonic() + _BLAME_S * may_be_innocent
        self._own = Failure(line, code, self.me.rank, [self.me.rank])
        self._main_ends.set()
        while self._failure is None:
            time.sleep(0.1)
        return self._failure

    def speaks(self, failure: Failure) -> bool:
        """Whether this process is the one of its node that prints a failure."""
        author = self._peers[failure.author]
        first = min({self.me.rank, *self._siblings} - set(self._gone()))
        is_speaker = author == self.me or (author.node != self.me.node and first == self.me.rank)
        return is_speaker and not self._has_spoken

    @property
    def first_has_ended(self) -> bool:
        """Whether the process of this node's first rank is gone."""
        return min({self.me.rank, *self._siblings}) in self._gone()

    def leave(self, code: int) -> None:
        """Say that this process ends. One that failed gives the others time to hear why: with node 0 the store ends."""
        if self._exit_code is not None:
            return
        self._main_ends.set()
        with self._lock:
            self._exit_code = code
        if self._store_answers:
            with contextlib.suppress(RuntimeError):
                _leave(
                    self._store, len(self._peers), [self.me.rank], wait_s=_LEAVE_S if code else 0
                )
        _write_place(self.me, None)

    # The thread that talks to the store.

    def _talk(self) -> None:
        try:
            while self._exit_code is None:
                self._look()
                self._turns += 1
                time.sleep(_TICK_S)
        except RuntimeError as error:
            self._lose_store(f"closed the connection ({str(error).splitlines()[0]})")

    def _look(self) -> None:
        store = self._channel
        self._idleness.tick(
            self._progress.arrivals, may_work=self._progress.phase not in _WITHIN_STEPS
        )
        self._post_beat(store)
        # Both before the look at what the others said: a sibling that ended without a word may be the cause.
        own = self._own
        lost = [rank for rank in self._gone() if not store.check([f"ended/{rank}"])]
        if store.check(["failure"]):
            self._fail(Failure(*json.loads(store.get("failure"))))
            return
        if lost:
            self._blame(lost, *end_of(self._peers[lost[0]].pid))
        elif silent := self._silent():
            self._blame(
                silent,
                f"no sign of life for {max(self._unchanged[rank] for rank in silent)} s",
                f"its process is stopped or gone, its node or the network down: look there; {AGAIN}",
            )
        elif own is not None and time.monotonic() >= self._own_counts_at_s:
            self._fail(_report(store, own))
        else:
            self._look_at_the_last()

    def _post_beat(self, store: dist.Store) -> None:
        progress = self._progress
        idle_s = self._idleness.ticks * _TICK_S
        beat = Beat(
            self._turns, progress.arrivals, progress.place, _named_frame(progress.frame()), idle_s
        )
        store.set(f"beat/{self.me.rank}", json.dumps(beat))

    def _beats(self, ranks: Sequence[int]) -> list[Beat]:
        """Their heartbeats; each posted one before any thread started."""
        return [
            Beat(*json.loads(beat))
            for beat in self._channel.multi_get([f"beat/{rank}" for rank in ranks])
        ]

    def _gone(self) -> list[int]:
        """The siblings whose processes have ended."""
        ends = select.poll()  # one for each thread that asks
        for handle in self._siblings.values():
            if handle not in (None, _UNWATCHABLE):
                ends.register(handle, select.POLLIN)
        ended = [None, *(handle for handle, _ in ends.poll(0))]
        return [rank for rank, handle in self._siblings.items() if handle in ended]

    def _silent(self) -> list[int]:
        """The ranks whose heartbeats have stood still for too long.

        Each rank watches the next one, and all of them once that one hesitates: traffic grows with the ranks, and not
        with their square. Turns are counted, not time, so that a process that was stopped itself accuses nobody.
        """
        size, me = len(self._peers), self.me.rank
        neighbour = (me + 1) % size
        everyone = self._is_suspicious or self._unchanged[neighbour] >= _SILENT_AFTER_ERROR_S
        watched = [rank for rank in range(size) if rank != me] if everyone else [neighbour]
        limit = _SILENT_AFTER_ERROR_S if self._is_suspicious else _SILENT_S
        for rank, beat in zip(watched, self._beats(watched), strict=True):
            self._unchanged[rank] = (
                self._unchanged[rank] + 1 if self._last_seen.get(rank) == beat.turn else 0
            )
            self._last_seen[rank] = beat.turn
        if not any(self._unchanged[rank] >= limit for rank in watched):
            return []
        # Those that fell silent with it are named with it.
        return [rank for rank in watched if self._unchanged[rank] >= limit / 2]

    def _limit(self) -> tuple[str, float]:
        """For how long this rank may come no further in its phase, and the key that says so."""
        if self._progress.phase in _WHILE_SAVING:
            return "save_timeout_s", self._save_timeout_s + _SAVER_GIVES_UP_S
        is_first = not self.limits_steps and self._progress.phase in _WITHIN_STEPS
        return "step_timeout_s", max(self._step_timeout_s, FIRST_STEP_TIMEOUT_S * is_first)

    def _look_at_the_last(self) -> None:
        """If this rank has come no further for too long, blame those that it waits for, or itself."""
        (key, limit_s), ticks = self._limit(), self._idleness.ticks
        is_in_step = self._progress.phase in _WITHIN_STEPS
        if ticks * _TICK_S <= limit_s or (not is_in_step and ticks % _LOOK_AT_ALL_EVERY):
            return
        beats = self._beats(range(len(self._peers)))
        arrivals = [beat.arrivals for beat in beats]
        last = [rank for rank, number in enumerate(arrivals) if number == min(arrivals)]
        raising = f"or raise distributed.{key} if that may take so long; {AGAIN}"
        if len(last) == len(self._peers):
            if is_in_step:
                what = f"nothing moved for {limit_s:g} s, with no rank behind the others"
                self._blame([self.me.rank], what, raising)
        elif is_in_step or (last := [rank for rank in last if beats[rank].idle_s > limit_s]):
            what = f"did not arrive within {limit_s:g} s (at {beats[last[0]].frame})"
            self._blame(last, what, f"see its traceback there, {raising}", "in")

    def _blame(self, ranks: list[int], what: str, remedy: str, seen: str = "last seen in") -> None:
        (beat,) = self._beats(ranks[:1])
        others = f" (and {_named(ranks[1:], self._peers)})" if ranks[1:] else ""
        line = f"{self._peers[ranks[0]]}{others}: {what}, {seen} {beat.place} - {remedy}"
        self._fail(_report(self._channel, Failure(line, 1, self.me.rank, ranks)))

    # The thread that keeps off the store.

    def _guard(self) -> None:
        turns, stuck, ending = -1, 0, 0
        while True:
            with self._lock:
                if self._exit_code is None:
                    _write_place(self.me, self._progress)
            time.sleep(_TICK_S)
            stuck = stuck + 1 if turns == self._turns and self._failure is None else 0
            turns = self._turns
            if stuck * _TICK_S >= _SILENT_S:
                self._lose_store(f"has not answered for {_SILENT_S} s")
            ending += self._exit_code is not None or self._failure is not None
            if ending * _TICK_S >= _END_S:
                os._exit(self._exit_code if self._exit_code is not None else 1)

    def _lose_store(self, what: str) -> None:
        self._store_answers = False
        if self.me.node == 0 and TORCHRUN_PID in os.environ:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it holds the store, is stopped, and would outlast its ranks
                os.kill(int(os.environ[TORCHRUN_PID]), signal.SIGCONT)
        if self._exit_code is not None:
            return
        if self._own is not None and not self._is_suspicious:
            self._fail(self._own)
            return
        host = next(peer.host for peer in self._peers if peer.node == 0)
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = (
            f"{self.me}: node 0 ({host}) is out of reach, its torchrun ended or is stopped, it or the network is down, "
            f"or a firewall has closed its port: {address} {what}, in {self._progress.place} - look there; {AGAIN}"
        )
        self._fail(Failure(line, 1, self.me.rank, []))

    def _fail(self, failure: Failure) -> None:
        """End this process with a failure, unless another was found before; the main thread may be doing it already."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        if self._main_ends.is_set():
            return
        is_left = leave_last_word(failure.code, failure.line)
        with contextlib.suppress(OSError):
            if self.me.rank in failure.blamed:
                stack = traceback.format_stack(self._progress.frame())
                print(f"{self.me} is here:\n{''.join(stack)}", file=sys.stderr, flush=True)
            if self.speaks(failure):
                self._has_spoken = (
                    True  # a signal may yet end the main thread, which would speak too
                )
                if not is_left:
                    print(f"ERROR: {failure.line}", file=sys.stderr, flush=True)
        if self._store_answers:
            with contextlib.suppress(RuntimeError):
                _leave(self._channel, len(self._peers), [self.me.rank], _LEAVE_S)
                for rank in {*failure.blamed} & {*self._siblings} - {*self._gone()}:
                    if not self._channel.check(
                        [f"ended/{rank}"]
                    ):  # stopped: torchrun would wait for it
                        os.kill(self._peers[rank].pid, signal.SIGKILL)
        _write_place(self.me, None)
        os._exit(failure.code)


def _report(store: dist.Store, failure: Failure) -> Failure:
    """Make it the failure of the run, unless another one is; the one that is."""
    return Failure(*json.loads(store.compare_set("failure", "", json.dumps(failure))))


def fail_for(ranks: list[int], size: int, store: dist.Store, line: str) -> Failure:
    """The failure of the run: that of these ranks, which have ended without a word, if there is no other."""
    store = dist.PrefixStore(_PREFIX, store)
    failure = _report(store, Failure(line, 1, ranks[0], ranks))
    _leave(store, size, ranks, _LEAVE_S)
    return failure


def _leave(store: dist.Store, size: int, ranks: list[int], wait_s: float) -> None:
    """Say that these ranks have ended; return when all of the run have, or `wait_s` later."""
    for rank in ranks:
        store.set(f"ended/{rank}", "")
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not store.check(
        [f"ended/{rank}" for rank in range(size)]
    ):
        time.sleep(0.1)


def _handle(peer: Peer) -> int | None:
    """Something that becomes readable when the process ends; None if it has ended."""
    try:
        return os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return None
    except OSError:  # this system has no such thing, and its silence will tell
        return _UNWATCHABLE


def end_of(pid: int) -> tuple[str, str]:
    """How a rank's process ended, as far as the launch script's torchrun has left it, and what to do."""
    deadline = time.monotonic() + _END_NOTED_S * ("SHARDTUNE_LAUNCH_DIR" in os.environ)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # a line that is not whole
            for line in (
                Path(os.environ["SHARDTUNE_LAUNCH_DIR"], "ends")
                .read_text(encoding="utf-8")
                .splitlines()
            ):
                ended, kind, status = map(int, line.split())
                if ended == pid:
                    return described_end(kind, status)
        time.sleep(0.05)
    return described_end(os.CLD_KILLED, signal.SIGKILL)


def described_end(kind: int, status: int) -> tuple[str, str]:
    """How a process ended of which waitid(2) says this, and what to do."""
    with contextlib.suppress(ValueError):  # a signal without a name
        if kind == os.CLD_EXITED or status != signal.SIGKILL:
            how = (
                f"with code {status}"
                if kind == os.CLD_EXITED
                else f"by {signal.Signals(status).name}"
            )
            return f"ended {how}", f"see what it said above in the log of its node; {AGAIN}"
    return (
        "ended without a word",
        f"most often killed for memory, see the kernel's log there; {AGAIN}",
    )


def _named(ranks: Sequence[int], peers: Sequence[Peer]) -> str:
    """The first few of some ranks."""
    return ", ".join(str(peers[rank]) for rank in ranks[:3]) + (
        f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    )


def _named_frame(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _work_s() -> float:
    """How long this process would have worked by now at the rates below which one is stuck; it grows by the clock."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(OSError):
        fields = dict(
            line.split(": ")
            for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        )
        moved = sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
        return (usage.ru_utime + usage.ru_stime) / _WORKING_CPUS + moved / _WORKING_BYTES_PER_S
    return time.monotonic() * 2  # who cannot be measured is taken for working


def leave_last_word(code: int, line: str) -> bool:
    """Whether the launch script says this line, when all processes have ended: so it stands last, and once."""
    tell_launcher("outcome", f"{code}\n{line}\n")
    with contextlib.suppress(KeyError, OSError):
        outcome = Path(os.environ["SHARDTUNE_LAUNCH_DIR"], "outcome").read_text(encoding="utf-8")
        return outcome.splitlines()[:2] == [str(code), line] and not launcher_has_ended()
    return False


def tell_launcher(file_name: str, text: str) -> None:
    """Append to a file of the launch script; the first process of the node to fail has the first word there."""
    if folder := os.environ.get("SHARDTUNE_LAUNCH_DIR"):
        with (
            contextlib.suppress(OSError),
            (Path(folder) / file_name).open("a", encoding="utf-8") as file,
        ):
            file.write(text)


def _write_place(me: Peer, progress: Progress | None) -> None:
    """Leave for the launch script where this rank is, should it be killed; nothing when it ends with a word."""
    if not (folder := os.environ.get("SHARDTUNE_LAUNCH_DIR")):
        return
    file = Path(folder) / f"rank_{me.rank}"
    with contextlib.suppress(OSError):
        if progress is None:
            file.unlink(missing_ok=True)
            return
        try:
            new = file.with_suffix(".new")
            new.write_text(
                f"{me}, last seen in {progress.place}\n{me.pid} {_SILENT_S}\n", encoding="utf-8"
            )
            new.replace(file)
        except OSError:  # no room: a time it takes still, for a sign of life
            os.utime(file)
