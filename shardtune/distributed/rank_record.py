"""Where a rank is and how it ended, in memory that it shares with the agent of its node.

The agent allocates one record a rank in anonymous memory, which no full disk can take away, and
reads them once a second. This module imports nothing heavy.
"""

import ctypes
import faulthandler
import functools
import json
import mmap
import os
import signal
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

RECORDS = "SHARDTUNE_RANK_RECORDS"  # path of the node's records, set by the agent
FIRST_STEP_TIMEOUT_S = 1800.0  # it also compiles, warms up disks and evaluates
SHORT_START = "SHARDTUNE_SHORT_START"  # set by `shardtune train`: no block says that it is alone
STACK = "SHARDTUNE_STACK_FILE"  # path of the file that faulthandler writes this rank's stack to
STACK_SIGNAL = signal.SIGUSR2  # asks for the stack
_MOST_LINES, _LINE_CHARACTERS = 100, 1000
_OUTCOME_BYTES = 1 << 20  # JSON takes at most 6 bytes a character; unused pages are free


class Phase(StrEnum):
    """What a rank does."""

    STARTING = "start-up"
    PREPARING_DATA = "preparing the data"
    LOADING = "loading the model"
    EVALUATING = "evaluation"
    DATA = "data"
    FORWARD_BACKWARD = "forward and backward"
    OPTIMIZER = "optimizer"
    REPORTING = "reporting"
    SAVING = "saving"
    EXPORTING = "writing the final model"


STEP_PHASES = (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.OPTIMIZER)
_PHASES = list(Phase)


def place(phase: Phase, step: int | None) -> str:
    """`step 5 (data)`, or the phase alone before the first step."""
    return str(phase) if step is None else f"step {step} ({phase})"


@dataclass
class Failure:
    """Why a rank or a launch ends: its exit code and its last lines. Code 0 is a success.

    `lost_connection`: the connection to another rank broke, so that rank may be the cause.
    `may_restart`: the same ranks may go on after a restart. An agent adds the rest. `stuck`: ranks
    that hold up the run. `restart`: the number of the restart that follows, or 0; `resume` is its
    run.resume where that changes.
    """

    code: int
    lines: list[str]
    lost_connection: bool = False
    may_restart: bool = True
    stuck: list[int] = field(default_factory=list)
    restart: int = 0
    resume: str = ""


class RankRecord(ctypes.Structure):
    """One rank's record, in which the agent sees every assignment. The rank is its only writer.

    `arrivals` counts the places at which the rank needed other ranks, and `meetings` the places at
    which it needed all. Ranks of one `stage` have the same places. `waits_for_stage`: the rank
    waits for a message of another stage. `thread`: the thread whose stack says where the rank is.
    `has_started`: faulthandler listens. `limits_steps`: a step has ended, and from now on none may
    take longer than its time limit.
    """

    _fields_ = (
        ("has_started", ctypes.c_bool),
        ("limits_steps", ctypes.c_bool),
        ("_phase", ctypes.c_uint8),
        ("_next_step", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("arrivals", ctypes.c_uint64),
        ("meetings", ctypes.c_uint64),
        ("stage", ctypes.c_uint64),
        ("waits_for_stage", ctypes.c_bool),
        ("_has_outcome", ctypes.c_bool),
        ("_outcome", ctypes.c_char * _OUTCOME_BYTES),
    )
    _has_outcome: bool
    _outcome: bytes

    @property
    def phase(self) -> Phase:
        return _PHASES[self._phase]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = _PHASES.index(phase)

    @property
    def step(self) -> int | None:
        """The step or the evaluation that runs; None before the first one."""
        return self._next_step - 1 if self._next_step else None

    @step.setter
    def step(self, step: int) -> None:
        self._next_step = step + 1

    @property
    def place(self) -> str:
        return place(self.phase, self.step)

    @property
    def outcome(self) -> Failure | None:
        """How the rank has ended, if it has said so; code 0 is a success.

        Only the first outcome counts, and of its lines the last ones.
        """
        return Failure(**json.loads(self._outcome)) if self._has_outcome else None

    @outcome.setter
    def outcome(self, outcome: Failure) -> None:
        if not self._has_outcome:
            lines = [line[:_LINE_CHARACTERS] for line in outcome.lines[-_MOST_LINES:]]
            self._outcome = json.dumps(asdict(outcome) | {"lines": lines}).encode()
            # Last, and never taken back: the agent may read at any moment.
            self._has_outcome = True

    def show_stack_when_asked(self) -> None:
        """Write all stacks of this process to the agent's file at each STACK_SIGNAL."""
        stack = os.open(os.environ[STACK], os.O_WRONLY | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
        self.has_started = True


RECORD_BYTES = ctypes.sizeof(RankRecord)


@functools.cache
def this_rank() -> RankRecord:
    """Return this process's record: in the agent's memory, or one that nobody reads."""
    if RECORDS not in os.environ:
        return RankRecord()
    with Path(os.environ[RECORDS]).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return RankRecord.from_buffer(memory, int(os.environ["LOCAL_RANK"]) * RECORD_BYTES)
