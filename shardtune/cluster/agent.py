"""The agent of one node: it owns a launch from its banner to its exit code.

It meets the other agents, makes the checks with them, starts the ranks through torchrun's agent
class and looks at them once a second. Node 0's agent decides how the run ends; every agent prints
that and ends its ranks. The connection between the agents stays open all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
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
from shardtune.cluster.control import Control, LaunchEnded, Message, Peer, printable, say
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
from shardtune.cluster.watch import TICK_S, Limits, RankStatus, stuck_ranks
from shardtune.config_io import read_run_arguments
from shardtune.distributed.signals import SIGNALS
from shardtune.errors import AGAIN, first_line
from shardtune.log import logger, setup_logging

if TYPE_CHECKING:  # it imports torch, which takes seconds that the agents use to meet
    from shardtune.cluster.node_ranks import NodeRanks

_POLL_S = 0.1
_SILENT_S = 40.0  # between agents, while ranks run
# A rank that lost a connection waits for the rank or node that is the cause; so does its agent.
_CAUSE_WITHIN_S = 15.0
_VERDICT_WITHIN_S = 15.0
_END_BY_THEMSELVES_S = 3.0
_KILLED_WITHIN_S = 15.0


@dataclass
class Failure:
    """Why the ranks end: exit code and last lines.

    `is_symptom`: a rank lost its connection to another one, which may be the cause. `may_restart`:
    the same ranks may go on after a restart. `blamed`: ranks that are stuck. `restart`: the number
    of the restart that follows, or 0; `resume` is its run.resume where that changes.
    """

    code: int
    lines: list[str]
    is_symptom: bool = False
    is_lost_node: bool = False
    may_restart: bool = True
    blamed: list[int] = field(default_factory=list)
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
    code, lines = _launch(environment, arguments, checks_only)
    with contextlib.suppress(OSError):
        for line in lines:
            print(f"ERROR: {printable(line)}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # a thread may wait for another node's store


def _launch(
    environment: Environment, arguments: Sequence[str], checks_only: bool
) -> tuple[int, list[str]]:
    helper: Child | None = None
    try:
        # Until the loop handles them: none ends this process with the folder left behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            folder = os.environ.get("TMPDIR") or "/tmp"
            logs = tempfile.TemporaryDirectory("", "shardtune.", folder, ignore_cleanup_errors=True)
            (Path(logs.name) / "room").write_bytes(bytes(1 << 16))
        except OSError as error:
            what = f"no temporary folder can be made in {folder} ({error.strerror})"
            raise LaunchEnded(2, [f"{what} - make room there, or set TMPDIR"]) from error
        with logs:
            if not environment.problems:
                helper = start_helper(environment)  # before there is a socket
            agent = Agent(environment, arguments, helper, Path(logs.name), checks_only)
            return asyncio.run(agent.launch())
    except LaunchEnded as ended:
        return ended.code, ended.lines
    except Exception as error:
        traceback.print_exc()
        return 1, [f"{type(error).__name__}: {first_line(error)} - see the traceback above"]


class Agent:
    """One launch of this node. See the module."""

    def __init__(
        self,
        environment: Environment,
        arguments: Sequence[str],
        helper: Child | None,
        logs: Path,
        checks_only: bool,
    ) -> None:
        self._environment, self._arguments = environment, list(arguments)
        self._helper, self._logs, self._checks_only = helper, logs, checks_only
        self._control: Control | None = None
        self._ranks: NodeRanks | None = None
        self._signalled: str | None = None
        self._work: asyncio.Task[tuple[int, list[str]]] | None = None
        # Of node 0: the last status of every rank by node, and the nodes whose ranks have finished.
        self._statuses: dict[int, list[RankStatus]] = {}
        self._finished: set[int] = set()
        self._best_step = -1

    async def launch(self) -> tuple[int, list[str]]:
        """The exit code and the last lines."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        self._work = asyncio.get_running_loop().create_task(self._prepare_and_run())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return await self._work
        except LaunchEnded as ended:
            return ended.code, ended.lines
        except asyncio.CancelledError:
            problem = (
                f"ended by {self._signalled} during the preflight - run the same command again"
            )
            if self._control is not None and len(self._control.nodes) > 1:
                named = f"{self._environment.name}: {problem}"
                await self._control.tell({"problems": [named], "code": 1})
            return 1, [problem]
        finally:
            if self._helper is not None:
                self._helper.end()
            await asyncio.sleep(0.2 * (self._environment.nodes != 1))  # for the last message

    async def _prepare_and_run(self) -> tuple[int, list[str]]:
        started = time.monotonic()
        self._control, listener = await meet(self._environment, agents_digest())
        assert self._helper is not None  # with problems no nodes meet
        facts = await check_nodes(
            self._control, listener, self._environment, self._helper, self._logs
        )
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
        return await self._run([fact["processes"] for fact in facts])

    def _on_signal(self, number: int) -> None:
        """Pass it on to the ranks; before there are any, this launch ends."""
        self._signalled = signal.Signals(number).name
        if self._ranks is not None and self._ranks.pids:
            self._ranks.signal(number)
            return
        assert self._work is not None
        if self._ranks is None:
            self._work.cancel()
        # Again and again: asyncio.wait_for may swallow a cancellation (python/cpython#86296).
        if not self._work.done():
            asyncio.get_running_loop().call_later(_POLL_S, self._on_signal, number)

    # The ranks of all nodes, once for each attempt.

    async def _run(self, sizes: list[int]) -> tuple[int, list[str]]:
        environment, control = self._environment, self._control
        assert control is not None and environment.config is not None
        await asyncio.to_thread(import_module, "shardtune.cluster.node_ranks")
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):  # it reports less than the agents
                logging.getLogger(name).setLevel(logging.CRITICAL)
        from shardtune.cluster.node_ranks import NodeRanks, StaticTCPRendezvous

        distributed = environment.config.distributed
        limits = Limits(distributed.step_timeout_s, distributed.save_timeout_s)
        assert environment.store_port is not None
        rendezvous = StaticTCPRendezvous(
            environment.master,
            environment.store_port,
            control.node,
            len(sizes),
            "",  # each attempt has its own
            int(distributed.join_timeout_s),
        )
        command = [str(REPOSITORY / "train_fsdp.py"), *self._arguments]
        first_rank = sum(sizes[: control.node])
        attempt = 0
        while True:
            rendezvous.run_id = f"attempt{attempt}"
            self._ranks = NodeRanks(
                command,
                first_rank,
                sizes[control.node],
                rendezvous,
                socket.gethostname(),
                Path(environment.config.run.dir),
                self._logs / f"torchrun{attempt}",
            )
            self._statuses, self._finished = {}, set()
            self._ranks.start()
            end = await self._watch(self._ranks, limits, sum(sizes), attempt)
            await self._end_ranks(self._ranks, end)
            if not end.restart:
                return end.code, end.lines
            logger.info(
                f"Restart {end.restart} of {environment.max_restarts} after: {end.lines[-1]}"
            )
            attempt = end.restart
            rendezvous.run_id = f"attempt{attempt}"
            if end.resume:
                kept = [a for a in self._arguments if not a.startswith("run.resume=")]
                command[1:] = [*kept, f"run.resume={end.resume}"]

    async def _watch(self, ranks: NodeRanks, limits: Limits, size: int, attempt: int) -> Failure:
        """Wait for the end of this attempt; a failure with code 0 is success.

        Node 0 decides. Another node reports its own failure and waits for node 0's word, for some
        time.
        """
        control = self._control
        assert control is not None
        pending: Failure | None = None  # node 0's symptom without a cause, or another node's report
        pending_until = next_tick = time.monotonic()
        while True:
            received = await control.next(_POLL_S)
            failure = None
            if received is not None:
                if "end" in received[1]:
                    return Failure(**received[1]["end"])
                failure = self._take(*received)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                await asyncio.to_thread(ranks.tick, limits)
                failure = failure or await self._report(ranks, limits, size)
            failure = failure or self._local_failure(ranks)
            if failure is None and control.node not in self._finished and _have_finished(ranks):
                self._finished.add(control.node)
                await control.tell({"finished": True})
            if control.node == 0 and len(self._finished) == len(control.nodes):
                return await self._decide(Failure(0, []), attempt)
            if failure is not None and control.node != 0 and failure.is_lost_node:
                return pending if pending is not None and not pending.is_symptom else failure
            if failure is not None and control.node == 0 and not failure.is_symptom:
                return await self._decide(failure, attempt)
            if failure is not None and (pending is None or failure.is_symptom < pending.is_symptom):
                pending = failure
                waits_s = _CAUSE_WITHIN_S * failure.is_symptom
                if control.node != 0:
                    waits_s += _VERDICT_WITHIN_S
                    await control.tell({"failure": asdict(failure)})
                pending_until = now + waits_s
            if pending is not None and now >= pending_until:
                return await self._decide(pending, attempt) if control.node == 0 else pending

    def _take(self, peer: Peer | None, message: Message) -> Failure | None:
        """What a message of another agent means for this attempt."""
        control = self._control
        assert control is not None
        if peer is None:
            return None
        node = int(peer.hello.node or 0)
        if "status" in message:
            self._statuses[node] = [RankStatus(**status) for status in message["status"]]
        elif message.get("finished"):
            self._finished.add(node)
        elif "failure" in message:
            return Failure(**message["failure"])
        elif isinstance(message.get("problems"), list):
            return Failure(int(message.get("code", 2)), list(map(str, message["problems"])))
        elif "lost" in message:
            return self._lost_node(peer, message["lost"])
        return None

    def _lost_node(self, peer: Peer, why: str) -> Failure:
        place = ""
        if statuses := self._statuses.get(int(peer.hello.node or 0)):
            ranks = f"rank {statuses[0].rank}"
            if len(statuses) > 1:
                ranks = f"ranks {statuses[0].rank} to {statuses[-1].rank}"
            place = f" ({ranks}, last seen in {statuses[0].place})"
        elif self._ranks is not None:
            place = f" (while this node was in {self._ranks.statuses[0].place})"
        if peer.hello.node == 0:
            address = f"{self._environment.master}:{self._environment.port}"
            line = (
                f"node 0 ({peer.hello.host}) is out of reach at {address}: {why}{place} - its "
                f"launch has ended or is stopped, or it or the network is down: look there; {AGAIN}"
            )
        else:
            line = (
                f"{peer.name} is lost: {why}{place} - its launch has ended or is stopped, or it or "
                f"the network is down: look there; {AGAIN}"
            )
        return Failure(1, [line], may_restart=False, is_lost_node=True)

    def _local_failure(self, ranks: NodeRanks) -> Failure | None:
        """The first failure of this node's ranks, a cause before a symptom."""
        symptom: Failure | None = None
        for index in [*ranks.exit_codes, *range(len(ranks.records))]:
            outcome = ranks.records[index].outcome
            if outcome is not None and outcome["code"] != 0:
                failure = Failure(
                    outcome["code"],
                    outcome["lines"],
                    is_symptom=outcome["lost_connection"],
                    may_restart=outcome["may_restart"],
                )
                if not failure.is_symptom:
                    return failure
                symptom = symptom or failure
            elif outcome is None and index in ranks.exit_codes:
                return self._unexplained_end(ranks, index)
        if ranks.problem is not None:
            node = f"node {self._environment.node} on {socket.gethostname()}"
            return Failure(
                1,
                [
                    f"{node} started no process: {ranks.problem} - "
                    "see the logs of the other nodes, and start every node again"
                ],
                may_restart=False,
            )
        return symptom

    def _unexplained_end(self, ranks: NodeRanks, index: int) -> Failure:
        """A rank that ended without an outcome."""
        record, status, code = ranks.records[index], ranks.statuses[index], ranks.exit_codes[index]
        how, remedy = f"with code {code}", "see its output above in the log of its node"
        if code < 0:
            try:
                how = f"by {signal.Signals(-code).name}"
            except ValueError:  # a signal without a name
                how = f"by signal {-code}"
            if how == f"by {self._signalled}":
                line = f"ended by {self._signalled} before the first step, with nothing to save"
                return Failure(1, [f"{line} - run the same command again"], may_restart=False)
        if code == -signal.SIGKILL:
            remedy = "most often killed for memory, see the kernel's log there"
        if not record.has_started:
            when, again = "before it had met the others", "run the same command again"
            return Failure(1, [f"{status.name}: ended {how}, {when} - {remedy}; {again}"])
        place = f"last seen in {record.place}"
        return Failure(1, [f"{status.name}: ended {how}, {place} - {remedy}; {AGAIN}"])

    async def _report(self, ranks: NodeRanks, limits: Limits, size: int) -> Failure | None:
        """Send what this node sees of its ranks to node 0, which looks for stuck ones."""
        control = self._control
        assert control is not None
        statuses = [
            status
            for index, status in enumerate(ranks.statuses)
            if index in ranks.pids and index not in ranks.exit_codes
        ]
        if control.node != 0:
            await control.tell({"status": [status.message() for status in statuses]})
            return None
        self._statuses[0] = statuses
        every = [status for node in sorted(self._statuses) for status in self._statuses[node]]
        if len(every) < size:
            return None
        if stuck := stuck_ranks(every, limits):
            return Failure(1, [stuck[1]], blamed=stuck[0])
        return None

    async def _decide(self, failure: Failure, attempt: int) -> Failure:
        """Node 0's decision for every node."""
        control = self._control
        assert control is not None
        if control.node == 0:
            self._allow_restart(failure, attempt)
        await control.tell({"end": asdict(failure)})
        return failure

    def _allow_restart(self, failure: Failure, attempt: int) -> None:
        """Set `restart` where the ranks are to start again: unless no step was gained since."""
        environment = self._environment
        steps = [s.step or 0 for statuses in self._statuses.values() for s in statuses]
        reached, best = max(steps, default=0), self._best_step
        self._best_step = max(reached, best)
        if failure.code != 1 or not failure.may_restart or self._signalled is not None:
            return
        if attempt >= environment.max_restarts:
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
            if status.rank in end.blamed:
                frames = await asyncio.to_thread(ranks.stack, index)
                stack = "".join(traceback.format_list(frames))
                with contextlib.suppress(OSError):
                    if stack:  # a stopped process shows none
                        print(f"{status.name} is here:\n{stack}", file=sys.stderr, flush=True)
        if end.blamed:
            for path in await asyncio.to_thread(ranks.dump_flight_recorders):
                print(f"NCCL's flight recorder: {path}", file=sys.stderr, flush=True)
        if end.code != 1:
            await asyncio.to_thread(ranks.join, _END_BY_THEMSELVES_S)
        if await asyncio.to_thread(ranks.kill, _KILLED_WITHIN_S):
            ranks.close()


def _have_finished(ranks: NodeRanks) -> bool:
    outcomes = [record.outcome for record in ranks.records]
    all_ended = len(ranks.exit_codes) == len(ranks.records)
    return all_ended and all(outcome and outcome["code"] == 0 for outcome in outcomes)
