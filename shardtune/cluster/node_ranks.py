"""The ranks of one node: torchrun's agent class starts and watches them in a thread of this
process."""

import contextlib
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from shardtune.cluster.stuck import IdleClock, RankStatus, limit_of
from shardtune.config import Config
from shardtune.distributed.rank_record import RECORD_BYTES, RECORDS, STACK, STACK_SIGNAL, RankRecord
from shardtune.errors import first_line

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PIPE_VARIABLE, _DUMP_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
_DUMPED_WITHIN_S = 5.0
_STACK_WITHIN_S = 2.0
_STACK_BEFORE_S = 3.0  # another node's clock may reach the limit first


class _TorchrunAgent(LocalElasticAgent):
    """torchrun's agent, which notes how each process ended before it ends the others."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs, start_method="spawn")
        self.exit_codes: dict[int, int] = {}

    @property
    def pids(self) -> dict[int, int]:
        return self._pcontext.pids() if self._pcontext is not None else {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.note_ends()
        return super()._monitor_workers(worker_group)

    def note_ends(self) -> None:
        for local_rank in self.pids:
            handler = cast(SubprocessContext, self._pcontext).subprocess_handlers[local_rank]
            code = handler.proc.poll()
            if code is not None:
                self.exit_codes.setdefault(local_rank, code)


class NodeRanks(threading.Thread):
    """One attempt of a run on this node.

    `sizes` are the numbers of ranks of all nodes. `exit_codes` has the ranks that have ended, by
    local rank, in the order of their ends. `problem` says why torchrun's agent started none.
    """

    def __init__(
        self,
        command: Sequence[str],
        sizes: Sequence[int],
        rendezvous: StaticTCPRendezvous,
        config: Config,
        temporary: Path,
    ) -> None:
        super().__init__(name="ranks", daemon=True)
        first_rank, local_size = sum(sizes[: rendezvous.rank]), sizes[rendezvous.rank]
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        os.environ.setdefault(
            _DUMP_VARIABLE, str(Path(config.run.dir).absolute() / "nccl_trace_rank_")
        )
        os.environ.setdefault(_PIPE_VARIABLE, str(temporary / "nccl_pipe_rank_"))
        records = os.memfd_create("shardtune ranks")
        os.ftruncate(records, local_size * RECORD_BYTES)
        memory = mmap.mmap(records, local_size * RECORD_BYTES)
        self._stacks = os.memfd_create("shardtune stacks")
        self._descriptors = (records, self._stacks)
        os.environ[RECORDS] = f"/proc/{os.getpid()}/fd/{records}"
        os.environ[STACK] = f"/proc/{os.getpid()}/fd/{self._stacks}"
        at = range(0, local_size * RECORD_BYTES, RECORD_BYTES)
        self.records = [RankRecord.from_buffer(memory, offset) for offset in at]
        self.statuses = [
            RankStatus(first_rank + index, socket.gethostname()) for index in range(local_size)
        ]
        self.problem = ""
        self._config = config.distributed
        self._clocks: dict[int, IdleClock] = {}
        spec = WorkerSpec(
            role="default",
            local_world_size=local_size,
            entrypoint=sys.executable,
            args=("-u", *command),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=rendezvous.master_addr,
            master_port=rendezvous.master_port,
        )
        self._agent = _TorchrunAgent(spec, DefaultLogsSpecs(log_dir=str(temporary / "torchrun")))
        self.exit_codes = self._agent.exit_codes

    def run(self) -> None:
        try:
            self._agent.run()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {first_line(error)}"

    @property
    def run_now(self) -> bool:
        """Whether there is a process to send a signal to."""
        return len(self._agent.pids) > len(self.exit_codes)

    @property
    def have_finished(self) -> bool:
        outcomes = [record.outcome for record in self.records]
        all_ended = len(self.exit_codes) == len(self.records)
        return all_ended and all(outcome and outcome.code == 0 for outcome in outcomes)

    def signal(self, number: int) -> None:
        for local_rank, pid in self._agent.pids.items():
            if local_rank not in self.exit_codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end(self, by_themselves_s: float, killed_s: float) -> None:
        kill_at = time.monotonic() + by_themselves_s
        while self.is_alive() and time.monotonic() < kill_at + killed_s:
            self._agent.note_ends()
            if len(self.exit_codes) == len(self.records):
                break
            if time.monotonic() >= kill_at:
                self.signal(signal.SIGKILL)
            self.join(0.1)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def tick(self) -> None:
        for index, pid in self._agent.pids.items():
            record, status = self.records[index], self.statuses[index]
            if index not in self._clocks:
                with contextlib.suppress(psutil.Error):  # it has ended
                    self._clocks[index] = IdleClock(pid)
            if clock := self._clocks.get(index):
                clock.tick(record, status)
            _, limit_s = limit_of(status, self._config)
            if status.idle_s <= limit_s - _STACK_BEFORE_S:
                status.frame = ""
            elif not status.frame and (frames := self.stack(index)):
                last = frames[-1]
                status.frame = f"{last.name}, {Path(last.filename).name}:{last.lineno}"

    def stack(self, index: int) -> list[traceback.FrameSummary]:
        """Return the calls in which a rank is, outermost first; none if it does not answer."""
        record = self.records[index]
        if not record.has_started or index in self.exit_codes:
            return []
        os.ftruncate(self._stacks, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._agent.pids[index], STACK_SIGNAL)
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
    """Parse the frames of one thread from faulthandler's text, outermost call first."""
    threads: dict[int, list[traceback.FrameSummary]] = {}
    frames: list[traceback.FrameSummary] = []
    for line in text.splitlines():
        if head := re.search(r"[Tt]hread 0x([0-9a-f]+)", line):
            frames = threads.setdefault(int(head[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.insert(0, traceback.FrameSummary(frame[1], int(frame[2]), frame[3]))
    return threads.get(thread, frames)
