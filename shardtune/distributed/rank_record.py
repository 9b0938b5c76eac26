"""Where a rank is and how it ended, in memory that it shares with the agent of its node.

The agent allocates one record a rank in anonymous memory, which no full disk can take away. The
rank writes a few numbers whenever it gets further; the agent reads them once a second. This module
imports nothing heavy.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
from enum import StrEnum
from typing import Any

RECORDS = "SHARDTUNE_RANK_RECORDS"  # path of the node's records, set by the agent
STACK = "SHARDTUNE_STACK_FILE"  # path of the file that faulthandler writes this rank's stack to
RECORD_BYTES = 1 << 16
_MOST_LINES = 100


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


class RankRecord:
    """One rank's record. The rank is its only writer.

    `arrivals` counts how often the rank has come to a place where it needs the others. `thread`
    identifies the thread whose stack says where the rank is. `has_started`: faulthandler listens.
    `limits_steps`: a step has ended.
    """

    _FIELDS = struct.Struct("<IIqQQI")  # started, limits_steps, step, thread, arrivals, phase
    _OUTCOME = struct.Struct("<I")  # bytes of the outcome, which stands behind it

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory, self._at = memory, index * RECORD_BYTES
        self._outcome_at = self._at + 64
        self.has_started = self.limits_steps = False
        self.step: int | None = None
        self.thread = self.arrivals = 0
        self.phase = Phase.STARTING

    def write(self) -> None:
        """Publish the fields."""
        step = -1 if self.step is None else self.step
        values = (self.has_started, self.limits_steps, step, self.thread, self.arrivals)
        self._FIELDS.pack_into(self._memory, self._at, *values, _PHASES.index(self.phase))

    def read(self) -> None:
        """Take over the fields that the rank has published."""
        values = self._FIELDS.unpack_from(self._memory, self._at)
        self.has_started, self.limits_steps = bool(values[0]), bool(values[1])
        self.step = None if values[2] < 0 else values[2]
        self.thread, self.arrivals, self.phase = values[3], values[4], _PHASES[values[5]]

    @property
    def place(self) -> str:
        return place(self.phase, self.step)

    def write_outcome(self, outcome: dict[str, Any]) -> None:
        """Leave how this rank ends: JSON with `code` and `lines`. Only the first outcome counts."""
        if self.outcome() is not None:
            return
        outcome = outcome | {"lines": [line[:2000] for line in outcome["lines"][-_MOST_LINES:]]}
        text = json.dumps(outcome).encode()
        while len(text) > RECORD_BYTES - 128:
            outcome["lines"] = outcome["lines"][1:]
            text = json.dumps(outcome).encode()
        begin = self._outcome_at + self._OUTCOME.size
        self._memory[begin : begin + len(text)] = text
        self._OUTCOME.pack_into(self._memory, self._outcome_at, len(text))

    def outcome(self) -> dict[str, Any] | None:
        """How the rank has ended, if it has said so."""
        (size,) = self._OUTCOME.unpack_from(self._memory, self._outcome_at)
        begin = self._outcome_at + self._OUTCOME.size
        return json.loads(self._memory[begin : begin + size]) if size else None


@functools.cache
def this_rank() -> RankRecord:
    """Return this process's record: in the agent's memory, or one that nobody reads."""
    if RECORDS not in os.environ:
        return RankRecord(mmap.mmap(-1, RECORD_BYTES), 0)
    descriptor = os.open(os.environ[RECORDS], os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    return RankRecord(memory, int(os.environ["LOCAL_RANK"]))
