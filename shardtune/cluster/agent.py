"""The agent of one node: it owns a launch from its banner to its exit code.

It meets the other agents, makes the checks with them, starts the ranks and looks at them once a
second. Every agent reports to node 0's, which decides how the run ends; every agent prints that and
ends its ranks. The connection between the agents stays open all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cluster.child import Child
from shardtune.cluster.control import Control, LaunchEnded, Message, printable, say
from shardtune.cluster.environment import (
    HELP,
    REPOSITORY,
    Environment,
    banner,
    read_environment,
    set_defaults,
)
from shardtune.cluster.node_info import agents_digest
from shardtune.cluster.preflight import check_nodes, start_helper
from shardtune.cluster.rendezvous import meet
from shardtune.cluster.stuck import TICK_S, Limits, RankStatus, stuck_ranks
from shardtune.config_io import read_run_arguments
from shardtune.distributed.signals import SIGNALS
from shardtune.errors import AGAIN, first_line
from shardtune.log import logger, setup_logging

if TYPE_CHECKING:  # it imports torch, which takes seconds: the nodes meet before
    from shardtune.cluster.node_ranks import NodeRanks

_POLL_S = 0.1
_FRAMES = 12  # of the stack of a stuck rank: those next to where it is
_SILENT_S = 40.0  # between agents, while ranks run
# A rank that lost a connection waits for the rank or node that is the cause; so does node 0.
_CAUSE_WITHIN_S = 15.0
_END_BY_THEMSELVES_S = 3.0
_KILLED_WITHIN_S = 15.0


@dataclass
class Failure:
    """Why the ranks end: exit code and last lines, as a rank or an agent has left them.

    `lost_connection`: a rank lost its connection to another one, which may be the cause.
    `may_restart`: the same ranks may go on after a restart. `stuck`: ranks that hold up the run.
    `restart`: the number of the restart that follows, or 0; `resume` is its run.resume where that
    changes.
    """

    code: int
    lines: list[str]
    lost_connection: bool = False
    may_restart: bool = True
    stuck: list[int] = field(default_factory=list)
    restart: int = 0
    resume: str = ""


def main(arguments: Sequence[str], checks_only: bool = False) -> None:
    """Launch this node and end the process with the exit code of the launch."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    setup_logging(is_main=True, is_node_main=True)
    if {"-h", "--help"} & set(arguments):
        print(HELP, flush=True)
        read_run_arguments(["--help"], REPOSITORY / "config.yaml")
    environment = read_environment(os.environ, arguments)
    set_defaults(environment)
    if not checks_only:
        logger.info(banner(environment))
    agent = Agent(environment, arguments, checks_only)
    code, lines = asyncio.run(agent.launch())
    for line in lines:
        _print_error(f"ERROR: {printable(line)}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # `tee` may have ended before
        print(text, file=sys.stderr, flush=True)


class Agent:
    """One launch of this node. See the module."""

    _control: Control  # since the nodes have met

    def __init__(
        self, environment: Environment, arguments: Sequence[str], checks_only: bool
    ) -> None:
        self._environment, self._arguments = environment, list(arguments)
        self._checks_only = checks_only
        self._helper: Child | None = None
        if not environment.problems:
            self._helper = start_helper(environment)  # a fork, before there is a socket
        self._ranks: NodeRanks | None = None
        self._signalled: str | None = None
        self._best_step = -1

    async def launch(self) -> tuple[int, list[str]]:
        """The exit code and the last lines."""
        work = asyncio.get_running_loop().create_task(self._prepare_and_run())
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, work)
        try:
            return await work
        except LaunchEnded as ended:
            return ended.code, ended.lines
        except asyncio.CancelledError:
            how = f"ended by {self._signalled} during the preflight"
            problem = f"{how} - run the same command again"
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {first_line(error)} - see the traceback there"
        finally:
            if self._helper is not None:
                self._helper.end()
            await asyncio.sleep(0.2 * (self._environment.nodes != 1))  # for the last message
        return 1, [problem]

    async def _prepare_and_run(self) -> tuple[int, list[str]]:
        started = time.monotonic()
        self._control = await meet(self._environment, agents_digest())
        assert self._helper is not None  # with problems no nodes meet
        with tempfile.TemporaryDirectory(prefix="shardtune.", ignore_cleanup_errors=True) as name:
            facts = await check_nodes(self._control, self._environment, self._helper, Path(name))
            size = len(self._control.nodes)
            who = f"all {size} nodes agree"
            if size == 1:
                who = "NNODES=1, so this node waits for no other"
            say(f"{who} ({time.monotonic() - started:.0f} s)")
            if self._checks_only:
                return 0, []
            self._helper.end()
            self._helper = None
            self._control.silent_s = _SILENT_S
            return await self._run([fact["processes"] for fact in facts], Path(name))

    def _on_signal(self, number: int, work: asyncio.Task[tuple[int, list[str]]]) -> None:
        """Pass it on to the ranks; before there are any, this launch ends."""
        self._signalled = signal.Signals(number).name
        if self._ranks is None:
            work.cancel()
        elif self._ranks.run_now:
            self._ranks.signal(number)
        else:  # they start
            loop = asyncio.get_running_loop()
            loop.call_later(_POLL_S, self._on_signal, number, work)

    async def _run(self, sizes: list[int], temporary: Path) -> tuple[int, list[str]]:
        """Start the ranks of this node, once for each attempt; the exit code and the last lines."""
        environment, control = self._environment, self._control
        assert environment.config is not None
        distributed, run_dir = environment.config.distributed, Path(environment.config.run.dir)
        self._limits = Limits(distributed.step_timeout_s, distributed.save_timeout_s)
        node_ranks = await asyncio.to_thread(import_module, "shardtune.cluster.node_ranks")
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):  # it reports less than the agents
                logging.getLogger(name).setLevel(logging.CRITICAL)
        assert environment.store_port is not None
        rendezvous = node_ranks.StaticTCPRendezvous(
            environment.master,
            environment.store_port,
            control.node,
            len(sizes),
            "attempt0",
            int(distributed.join_timeout_s),
        )
        command = [str(REPOSITORY / "train_fsdp.py"), *self._arguments]
        attempt = 0
        while True:
            self._ranks = node_ranks.NodeRanks(command, sizes, rendezvous, run_dir, temporary)
            # Of node 0: the last status of each node's ranks, and the nodes whose ranks have ended.
            self._statuses: dict[int, list[RankStatus]] = {}
            self._finished: set[int] = set()
            if self._signalled is None or attempt == 0:
                self._ranks.start()
            end = await self._watch(self._ranks, attempt, sum(sizes))
            await self._end_ranks(self._ranks, end)
            if not end.restart:
                return end.code, end.lines
            logger.info(
                f"Restart {end.restart} of {environment.max_restarts} after: {end.lines[-1]}"
            )
            attempt = end.restart
            rendezvous.run_id = f"attempt{attempt}"  # its part of the store
            if end.resume:
                kept = [a for a in self._arguments if not a.startswith("run.resume=")]
                command[1:] = [*kept, f"run.resume={end.resume}"]

    async def _watch(self, ranks: NodeRanks, attempt: int, size: int) -> Failure:
        """Report to node 0 and wait for its decision; a failure with code 0 is success."""
        control = self._control
        reported: Failure | None = None
        symptom: Failure | None = None  # of node 0: without a cause yet
        decide_at = math.inf
        next_tick = 0.0
        while True:
            failure = self._local_failure(ranks)
            if failure is not None and self._signalled:
                failure.may_restart = False  # whoever sent the signal wants the launch to end
            if failure is not None and failure != reported:
                reported = failure
                control.report({"attempt": attempt, "failure": asdict(failure)})
            if time.monotonic() >= next_tick or ranks.have_finished:
                next_tick = time.monotonic() + TICK_S
                await asyncio.to_thread(ranks.tick, self._limits)
                running = [
                    asdict(status)
                    for index, status in enumerate(ranks.statuses)
                    if index not in ranks.exit_codes
                ]
                finished = ranks.have_finished
                control.report({"attempt": attempt, "status": running, "finished": finished})
            received = await control.next(_POLL_S)
            if received and "end" in received[1]:
                return Failure(**received[1]["end"])
            failure = received and self._judge(*received, attempt, size)
            if failure and control.node != 0:  # node 0 is lost
                return reported if reported and not reported.lost_connection else failure
            if failure and not failure.lost_connection:
                return self._decide(failure, attempt)
            if failure and symptom is None:
                symptom, decide_at = failure, time.monotonic() + _CAUSE_WITHIN_S
            if symptom and time.monotonic() >= decide_at:
                return self._decide(symptom, attempt)

    def _judge(self, node: int, message: Message, attempt: int, size: int) -> Failure | None:
        """The end of this attempt that a message means, if any."""
        if "lost" in message:
            return self._lost_node(node, message)
        if message.get("attempt") != attempt:
            return None
        if "failure" in message:
            return Failure(**message["failure"])
        self._statuses[node] = [RankStatus(**status) for status in message["status"]]
        if message["finished"]:
            self._finished.add(node)
        if len(self._finished) == len(self._control.nodes):
            return Failure(0, [])
        every = [status for node in sorted(self._statuses) for status in self._statuses[node]]
        if len(every) == size and (stuck := stuck_ranks(every, self._limits)):
            return Failure(1, [stuck[1]], stuck=stuck[0])
        return None

    def _lost_node(self, node: int, message: Message) -> Failure:
        place = ""
        if statuses := self._statuses.get(node):
            ranks = f"rank {statuses[0].rank}"
            if len(statuses) > 1:
                ranks = f"ranks {statuses[0].rank} to {statuses[-1].rank}"
            place = f" ({ranks}, last seen in {statuses[0].place})"
        elif self._ranks is not None:
            place = f" (while this node was in {self._ranks.statuses[0].place})"
        how = "lost"
        if node == 0:
            how = f"out of reach at {self._environment.master}:{self._environment.port}"
        what = f"{message['name']} is {how}: {message['lost']}{place}"
        remedy = "its launch has ended or is stopped, or it or the network is down: look there"
        return Failure(1, [f"{what} - {remedy}; {AGAIN}"], may_restart=False)

    def _local_failure(self, ranks: NodeRanks) -> Failure | None:
        """The first failure of this node's ranks, a cause before a symptom."""
        symptom: Failure | None = None
        if not ranks.were_started:
            line = f"ended by {self._signalled} before a restart"
            return Failure(1, [f"{line} - run the same command again"], may_restart=False)
        for index in [*ranks.exit_codes, *range(len(ranks.records))]:
            outcome = ranks.records[index].outcome
            if outcome is not None and outcome["code"] != 0:
                failure = Failure(**outcome)
                if not failure.lost_connection:
                    return failure
                symptom = symptom or failure
            elif outcome is None and index in ranks.exit_codes:
                return self._unexplained_end(ranks, index)
        if ranks.problem:
            what = f"the ranks of {ranks.statuses[0].host} did not start: {ranks.problem}"
            return Failure(1, [f"{what} - {AGAIN}"], may_restart=False)
        return symptom

    def _unexplained_end(self, ranks: NodeRanks, index: int) -> Failure:
        """A rank that ended without an outcome."""
        record, status, code = ranks.records[index], ranks.statuses[index], ranks.exit_codes[index]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        if how == f"by {self._signalled}":
            line = f"ended {how} before the first step, with nothing to save"
            return Failure(1, [f"{line} - run the same command again"], may_restart=False)
        remedy = "see its output above in the log of its node"
        if code == -signal.SIGKILL:
            remedy = "most often killed for memory, see the kernel's log there"
        when = f"last seen in {record.place}"
        if not record.has_started:
            when = "before it had met the others"
        return Failure(1, [f"{status.name}: ended {how}, {when} - {remedy}; {AGAIN}"])

    def _decide(self, failure: Failure, attempt: int) -> Failure:
        """Tell every node of node 0's decision."""
        self._allow_restart(failure, attempt)
        self._control.tell({"end": asdict(failure)})
        return failure

    def _allow_restart(self, failure: Failure, attempt: int) -> None:
        """Set `restart` where the ranks are to start again: unless no step was gained since."""
        environment = self._environment
        steps = [s.step or 0 for statuses in self._statuses.values() for s in statuses]
        reached, best = max(steps, default=0), self._best_step
        self._best_step = max(reached, best)
        is_allowed = failure.code == 1 and failure.may_restart and self._signalled is None
        if not is_allowed or attempt >= environment.max_restarts:
            return
        if attempt > 0 and reached <= best:
            what, _, remedy = failure.lines[-1].partition(" - ")
            given_up = "given up, because no step was gained since the last restart"
            failure.lines[-1] = f"{what}; {given_up} - {remedy}"
            return
        failure.restart = attempt + 1
        assert environment.config is not None
        run = environment.config.run
        has_begun = any(s.step is not None for each in self._statuses.values() for s in each)
        has_checkpoint = any((Path(run.dir) / "checkpoints").glob("checkpoint_*"))
        # Once a run has begun, run.dir holds nothing but its own: what it found is moved aside.
        if has_begun and (run.resume == "never" or has_checkpoint):
            failure.resume = "auto"

    async def _end_ranks(self, ranks: NodeRanks, end: Failure) -> None:
        """Show where stuck ranks are, and end all that have not ended by themselves."""
        for index, status in enumerate(ranks.statuses):
            if status.rank in end.stuck:
                frames = await asyncio.to_thread(ranks.stack, index)
                stack = "".join(traceback.format_list(frames[-_FRAMES:]))
                if stack:  # a stopped process shows none
                    _print_error(f"{status.name} is here:\n{stack}")
        if end.stuck:
            dumps = await asyncio.to_thread(ranks.dump_flight_recorders)
            for path in dumps:
                _print_error(f"NCCL's flight recorder: {path}")
            if dumps:  # the hosts run ahead of GPUs, so only these tell whose GPU is behind
                prefix = Path(dumps[0]).name.rstrip("0123456789")
                _print_error(f"`torchfrtrace -p {prefix} FOLDER` compares those of all nodes")
        by_themselves_s = 0.0 if end.code == 1 else _END_BY_THEMSELVES_S
        await asyncio.to_thread(ranks.end, by_themselves_s, _KILLED_WITHIN_S)
