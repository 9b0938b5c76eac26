"""Which rank is stuck: node 0 decides it, and every agent looks at its ranks once a second."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from shardtune.config import DistributedConfig
from shardtune.distributed.rank_record import (
    FIRST_STEP_TIMEOUT_S,
    STEP_PHASES,
    Failure,
    Phase,
    RankRecord,
    place,
)
from shardtune.errors import AGAIN, first_few

TICK_S = 1.0
# Until the first step has ended, these also wait for compilation and slow disks.
_WITHIN_STEPS = (*STEP_PHASES, Phase.EVALUATING)
_WHILE_SAVING = (Phase.SAVING, Phase.EXPORTING)
# A save ends by itself after save_timeout_s, and the run may go on.
_SAVER_GIVES_UP_S = 180.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_STOPPED_S = 40  # a process that was stopped (SIGSTOP) for so long is taken for lost
# A process that does less than this, on average, is stuck.
_WORKING_CPUS = 0.01
_WORKING_BYTES_PER_S = 100e3


@dataclass
class RankStatus:
    """The status of a rank, as the agent of its node sees it.

    `idle_s`: the time since its last progress. Outside of steps CPU time and I/O count as progress.
    `stopped_s`: the time since a signal stopped its process. `frame`: the place of its Python code,
    read when it has been idle for long. Other fields copy its record.
    """

    rank: int
    host: str
    phase: Phase = Phase.STARTING
    step: int | None = None
    arrivals: int = 0
    limits_steps: bool = False
    idle_s: float = 0.0
    stopped_s: float = 0.0
    frame: str = ""
    meetings: int = 0
    stage: int = 0
    waits_for_stage: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> str:
        return place(self.phase, self.step)

    @property
    def is_in_step(self) -> bool:
        return self.phase in _WITHIN_STEPS


def limit_of(status: RankStatus, config: DistributedConfig) -> tuple[str, float]:
    if status.phase in _WHILE_SAVING:
        return "save_timeout_s", config.save_timeout_s + _SAVER_GIVES_UP_S
    if status.is_in_step and not status.limits_steps:
        return "step_timeout_s", max(config.step_timeout_s, FIRST_STEP_TIMEOUT_S)
    return "step_timeout_s", config.step_timeout_s


class IdleClock:
    """Measures the time since a rank's last progress."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._work_s = 0.0

    def tick(self, record: RankRecord, status: RankStatus) -> None:
        status.phase, status.step = record.phase, record.step
        status.limits_steps, status.meetings = record.limits_steps, record.meetings
        status.stage, status.waits_for_stage = record.stage, record.waits_for_stage
        is_stopped, work_s = False, 0.0
        with contextlib.suppress(psutil.Error):  # the process has ended
            is_stopped = self._process.status() in _STOPPED
            work_s = 0.0 if status.is_in_step else self._worked_s()
        status.stopped_s = status.stopped_s + TICK_S if is_stopped else 0.0
        if record.arrivals != status.arrivals or work_s - self._work_s > max(1.0, status.idle_s):
            status.arrivals, status.idle_s, self._work_s = record.arrivals, 0.0, work_s
        else:
            status.idle_s += TICK_S

    def _worked_s(self) -> float:
        """Return how long this process's work would take at the lowest rates that count as work."""
        cpu, io = self._process.cpu_times(), self._process.io_counters()
        moved = io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
        return (cpu.user + cpu.system) / _WORKING_CPUS + moved / _WORKING_BYTES_PER_S


def stuck_ranks(statuses: Sequence[RankStatus], config: DistributedConfig) -> Failure | None:
    """Return a failure that names the ranks that hold up the run, or None.

    Ranks behind the others hold it up once another rank has waited too long for them.
    """
    stopped = [s for s in statuses if s.stopped_s >= min(_STOPPED_S, limit_of(s, config)[1])]
    if stopped:
        what = f"no sign of life for {stopped[0].stopped_s:.0f} s, last seen in"
        remedy = f"its process is stopped (SIGSTOP or a debugger): look there; {AGAIN}"
        return _blame(stopped, what, remedy)
    behind = _behind(statuses)
    numbers = {status.rank for status in behind}
    ahead = [status for status in statuses if status.rank not in numbers]
    for status in ahead or statuses:
        key, limit_s = limit_of(status, config)
        if status.idle_s <= limit_s:
            continue
        remedy = f"raise distributed.{key} if that may take so long; {AGAIN}"
        if ahead and behind:
            stuck = [s for s in behind if status.is_in_step or s.idle_s > limit_s]
            if stuck:
                frame = f" (at {stuck[0].frame})" if stuck[0].frame else ""
                what = f"did not arrive within {limit_s:g} s{frame}, in"
                return _blame(stuck, what, f"see its traceback there, or {remedy}")
        elif status.is_in_step:
            what = f"nothing moved for {limit_s:g} s, with no rank behind the others, in"
            return _blame([status], what, remedy)
    return None


def _behind(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that wait for none.

    They have the fewest meetings of all ranks and the fewest arrivals of their stage, and no
    message of another stage is what they lack.
    """
    meetings = min(status.meetings for status in statuses)
    arrivals: dict[int, int] = {}
    for status in statuses:
        fewest = arrivals.get(status.stage, status.arrivals)
        arrivals[status.stage] = min(fewest, status.arrivals)
    return [
        status
        for status in statuses
        if status.meetings == meetings
        and status.arrivals == arrivals[status.stage]
        and not status.waits_for_stage
    ]


def _blame(stuck: Sequence[RankStatus], what: str, remedy: str) -> Failure:
    first, *others = stuck
    more = f" (and {first_few([other.name for other in others], 3)})" if others else ""
    line = f"{first.name}{more}: {what} {first.place} - {remedy}"
    return Failure(1, [line], stuck=[status.rank for status in stuck])
