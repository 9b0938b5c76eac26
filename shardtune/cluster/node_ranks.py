"""The ranks of one node, started with the variables that torchrun sets."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardtune.cluster.watch import IdleClock, Limits, RankStatus
from shardtune.distributed.rank_record import RECORD_BYTES, RECORDS, STACK, STACK_SIGNAL, RankRecord

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PIPE_VARIABLE, _DUMP_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
_DUMPED_WITHIN_S = 5.0
_STACK_WITHIN_S = 2.0
_STACK_BEFORE_S = 3.0  # another node's clock may reach the limit first


class NodeRanks:
    """One attempt of a run on this node.

    `sizes` are the numbers of ranks of all nodes, `node` is this one's index. `exit_codes` has the
    ranks that have ended, by local rank, in the order of their ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        node: int,
        sizes: Sequence[int],
        attempt: int,
        run_dir: Path,
        temporary: Path,
    ) -> None:
        first_rank, local_size = sum(sizes[:node]), sizes[node]
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        os.environ.setdefault(_DUMP_VARIABLE, str(run_dir.absolute() / "nccl_trace_rank_"))
        os.environ.setdefault(_PIPE_VARIABLE, str(temporary / "nccl_pipe_rank_"))
        records = os.memfd_create("shardtune ranks")
        os.ftruncate(records, local_size * RECORD_BYTES)
        memory = mmap.mmap(records, local_size * RECORD_BYTES)
        self._stacks = os.memfd_create("shardtune stacks")
        self._descriptors = (records, self._stacks)
        at = range(0, local_size * RECORD_BYTES, RECORD_BYTES)
        self.records = [RankRecord.from_buffer(memory, offset) for offset in at]
        self.statuses = [
            RankStatus(first_rank + index, socket.gethostname()) for index in range(local_size)
        ]
        self.exit_codes: dict[int, int] = {}
        shared = os.environ | {
            "WORLD_SIZE": str(sum(sizes)),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(sizes)),
            "TORCHELASTIC_RUN_ID": "shardtune",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            RECORDS: f"/proc/{os.getpid()}/fd/{records}",
            STACK: f"/proc/{os.getpid()}/fd/{self._stacks}",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-u", *command],
                env=shared | {"RANK": str(status.rank), "LOCAL_RANK": str(index)},
                start_new_session=True,  # a terminal's Ctrl-C is the agent's to pass on
            )
            for index, status in enumerate(self.statuses)
        ]
        self._clocks = [IdleClock(process.pid) for process in self._processes]

    @property
    def have_finished(self) -> bool:
        outcomes = [record.outcome for record in self.records]
        all_ended = len(self.exit_codes) == len(self.records)
        return all_ended and all(outcome and outcome["code"] == 0 for outcome in outcomes)

    def note_ends(self) -> None:
        """Bring `exit_codes` up to date."""
        for index, process in enumerate(self._processes):
            if index not in self.exit_codes and (code := process.poll()) is not None:
                self.exit_codes[index] = code

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, by_themselves_s: float, killed_s: float) -> None:
        """Wait until all ranks have ended; kill those that have not by then."""
        kill_at = time.monotonic() + by_themselves_s
        while time.monotonic() < kill_at + killed_s:
            self.note_ends()
            if len(self.exit_codes) == len(self._processes):
                break
            if time.monotonic() >= kill_at:
                for process in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def tick(self, limits: Limits) -> None:
        """Bring `statuses` up to date, once a second."""
        for index, (record, status) in enumerate(zip(self.records, self.statuses, strict=True)):
            self._clocks[index].tick(record, status)
            _, limit_s = limits.of(status)
            if status.idle_s <= limit_s - _STACK_BEFORE_S:
                status.frame = ""
            elif not status.frame and (frames := self.stack(index)):
                last = frames[-1]
                status.frame = f"{last.name}, {Path(last.filename).name}:{last.lineno}"

    def stack(self, index: int) -> list[traceback.FrameSummary]:
        """Where the Python code of a rank is, outermost call first; empty if it does not answer."""
        record = self.records[index]
        if not record.has_started:
            return []
        os.ftruncate(self._stacks, 0)
        self._processes[index].send_signal(STACK_SIGNAL)
        deadline, text, before = time.monotonic() + _STACK_WITHIN_S, "", None
        while time.monotonic() < deadline and (not text or text != before):
            before = text
            time.sleep(0.05)
            text = os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")
        return _frames(text, record.thread)

    def dump_flight_recorders(self) -> list[str]:
        """Ask NCCL in each rank for its last collectives; return the files that it has written."""
        asked = []
        for status in self.statuses:
            with contextlib.suppress(OSError):  # no NCCL in this rank
                path = f"{os.environ[_PIPE_VARIABLE]}{status.rank}.pipe"
                descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1\n")
                os.close(descriptor)
                asked.append(Path(f"{os.environ[_DUMP_VARIABLE]}{status.rank}"))
        deadline = time.monotonic() + _DUMPED_WITHIN_S
        while time.monotonic() < deadline and not all(path.exists() for path in asked):
            time.sleep(0.1)
        return [str(path) for path in asked if path.exists()]


def _frames(text: str, thread: int) -> list[traceback.FrameSummary]:
    """The frames of one thread in what faulthandler writes, outermost call first."""
    threads: dict[int, list[traceback.FrameSummary]] = {}
    frames: list[traceback.FrameSummary] = []
    for line in text.splitlines():
        if head := re.search(r"[Tt]hread 0x([0-9a-f]+)", line):
            frames = threads.setdefault(int(head[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.insert(0, traceback.FrameSummary(frame[1], int(frame[2]), frame[3]))
    return threads.get(thread, frames)
