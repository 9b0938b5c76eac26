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
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cluster.child import Child
from shardtune.cluster.control import Control, printable, say
from shardtune.cluster.environment import (
    HELP,
    REPOSITORY,
    Environment,
    banner,
    read_environment,
    set_defaults,
)
from shardtune.cluster.judge import Judge, local_failure
from shardtune.cluster.node_info import agents_digest
from shardtune.cluster.preflight import check_nodes, help_agent
from shardtune.cluster.rendezvous import meet
from shardtune.cluster.stuck import TICK_S
from shardtune.config_io import read_run_arguments
from shardtune.distributed.rank_record import SHORT_START, Failure
from shardtune.distributed.signals import SIGNALS
from shardtune.errors import UserError, first_line, print_errors
from shardtune.log import logger, setup_logging

if TYPE_CHECKING:  # it imports torch, which takes seconds: the nodes meet before
    from shardtune.cluster.node_ranks import NodeRanks

_POLL_S = 0.1
_FRAMES = 12  # the innermost frames of a stuck rank's stack that a line shows
_SILENT_S = 40.0  # silence of an agent, while ranks run
# A lost connection is a symptom: node 0 waits this long for a report of the cause.
_CAUSE_WITHIN_S = 15.0
_END_BY_THEMSELVES_S = 3.0
_KILLED_WITHIN_S = 15.0


def main(arguments: Sequence[str], checks_only: bool = False) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    setup_logging(is_main=True, is_node_main=True)
    if {"-h", "--help"} & set(arguments):
        print(HELP, flush=True)
        read_run_arguments(["--help"], REPOSITORY / "config.yaml")
    environment = read_environment(os.environ, arguments)
    set_defaults(environment)
    if not checks_only and SHORT_START not in os.environ:
        logger.info(banner(environment))
    agent = Agent(environment, arguments, checks_only)
    failure = asyncio.run(agent.launch())
    print_errors(*map(printable, failure.lines))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(failure.code)


def _show(text: str) -> None:
    with contextlib.suppress(OSError):  # `tee` may have ended before
        print(text, file=sys.stderr, flush=True)


class Agent:
    """One launch of this node. See the module."""

    _control: Control  # set when the nodes have met

    def __init__(
        self, environment: Environment, arguments: Sequence[str], checks_only: bool
    ) -> None:
        self._environment, self._arguments = environment, list(arguments)
        self._checks_only = checks_only
        self._helper: Child | None = None
        if not environment.problems:
            # It forks, so no socket may be open yet.
            self._helper = Child(environment.name, help_agent, environment)
        self._ranks: NodeRanks | None = None
        self._signalled: str | None = None

    async def launch(self) -> Failure:
        work = asyncio.get_running_loop().create_task(self._prepare_and_run())
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, work)
        try:
            return await work
        except UserError as refusal:
            return Failure(refusal.code, list(dict.fromkeys(refusal.problems)))
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
        return Failure(1, [problem])

    async def _prepare_and_run(self) -> Failure:
        started = time.monotonic()
        self._control = await meet(self._environment, agents_digest())
        assert self._helper is not None  # nodes with problems do not meet
        with tempfile.TemporaryDirectory(prefix="shardtune.", ignore_cleanup_errors=True) as name:
            facts = await check_nodes(self._control, self._environment, self._helper, Path(name))
            size = len(self._control.nodes)
            alone = "NNODES=1, so this node waits for no other"
            who = f"all {size} nodes agree" if size > 1 else alone
            if SHORT_START not in os.environ:
                say(f"{who} ({time.monotonic() - started:.0f} s)")
            if self._checks_only:
                return Failure(0, [])
            self._helper.end()
            self._helper = None
            self._control.silent_s = _SILENT_S
            return await self._run([fact["processes"] for fact in facts], Path(name))

    def _on_signal(self, number: int, work: asyncio.Task[Failure]) -> None:
        """Pass the signal on to the ranks; before they exist, end this launch."""
        self._signalled = signal.Signals(number).name
        if self._ranks is None:
            work.cancel()
        elif self._ranks.run_now:
            self._ranks.signal(number)
        else:  # they start
            loop = asyncio.get_running_loop()
            loop.call_later(_POLL_S, self._on_signal, number, work)

    async def _run(self, sizes: list[int], temporary: Path) -> Failure:
        """Start the ranks of this node, once for each attempt, and return how the last one ends."""
        environment, control = self._environment, self._control
        assert environment.config is not None and environment.store_port is not None
        judge = Judge(environment, environment.config, sizes)
        node_ranks = await asyncio.to_thread(import_module, "shardtune.cluster.node_ranks")
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):  # it reports less than the agents
                logging.getLogger(name).setLevel(logging.CRITICAL)
        rendezvous = node_ranks.StaticTCPRendezvous(
            environment.master,
            environment.store_port,
            control.node,
            len(sizes),
            "attempt0",
            int(environment.join_timeout_s),
        )
        command = [str(REPOSITORY / "train_fsdp.py"), *self._arguments]
        while True:
            self._ranks = node_ranks.NodeRanks(
                command, sizes, rendezvous, environment.config, temporary
            )
            if self._signalled is None or judge.attempt == 0:
                self._ranks.start()
            end = await self._watch(self._ranks, judge)
            await self._end_ranks(self._ranks, end)
            if not end.restart:
                return end
            logger.info(
                f"Restart {end.restart} of {environment.max_restarts} after: {end.lines[-1]}"
            )
            judge.begin(end.restart)
            rendezvous.run_id = f"attempt{end.restart}"  # its part of the store
            if end.resume:
                kept = [a for a in self._arguments if not a.startswith("run.resume=")]
                command[1:] = [*kept, f"run.resume={end.resume}"]

    async def _watch(self, ranks: NodeRanks, judge: Judge) -> Failure:
        """Report to node 0 and return its decision; code 0 is a success."""
        control, attempt = self._control, judge.attempt
        reported: Failure | None = None
        chosen: Failure | None = None  # by node 0, which decides at this time
        decide_at = next_tick = 0.0
        while True:
            failure = local_failure(ranks, self._signalled)
            if failure is not None and self._signalled:
                failure.may_restart = False  # whoever sent the signal wants the launch to end
            if failure is not None and failure != reported:
                reported = failure
                control.report({"attempt": attempt, "failure": failure})
            if time.monotonic() >= next_tick or ranks.have_finished:
                next_tick = time.monotonic() + TICK_S
                await asyncio.to_thread(ranks.tick)
                running = [
                    replace(status)
                    for index, status in enumerate(ranks.statuses)
                    if index not in ranks.exit_codes
                ]
                finished = ranks.have_finished
                control.report({"attempt": attempt, "status": running, "finished": finished})
            received = await control.next(_POLL_S)
            if received and "end" in received[1]:
                return received[1]["end"]
            failure = received and judge.judge(*received, ranks)
            if failure and control.node != 0:  # node 0 is lost
                return reported if reported and not reported.lost_connection else failure
            if failure and not failure.lost_connection:
                chosen, decide_at = failure, 0.0
            elif failure and chosen is None:
                # The lost rank's own node may know the cause.
                chosen, decide_at = failure, time.monotonic() + _CAUSE_WITHIN_S
            if chosen and time.monotonic() >= decide_at:
                judge.decide_restart(chosen, self._signalled)
                control.tell({"end": chosen})
                return chosen

    async def _end_ranks(self, ranks: NodeRanks, end: Failure) -> None:
        """Show where stuck ranks are, and end all that have not ended by themselves."""
        for index, status in enumerate(ranks.statuses):
            if status.rank in end.stuck:
                frames = await asyncio.to_thread(ranks.stack, index)
                stack = "".join(traceback.format_list(frames[-_FRAMES:]))
                if stack:  # a stopped process shows none
                    _show(f"{status.name} is here:\n{stack}")
        if end.stuck:
            dumps = await asyncio.to_thread(ranks.dump_flight_recorders)
            for path in dumps:
                _show(f"NCCL's flight recorder: {path}")
            if dumps:  # hosts run ahead of their GPUs: only NCCL's records tell whose GPU is behind
                prefix = Path(dumps[0]).name.rstrip("0123456789")
                _show(f"`torchfrtrace -p {prefix} FOLDER` compares those of all nodes")
        by_themselves_s = 0.0 if end.code == 1 else _END_BY_THEMSELVES_S
        await asyncio.to_thread(ranks.end, by_themselves_s, _KILLED_WITHIN_S)
