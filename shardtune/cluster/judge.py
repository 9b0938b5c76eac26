"""Which failure ends a launch: its exit code, its last ERROR lines, and whether ranks start again.

Each agent reports the first failure of its ranks. Node 0's agent judges the reports of all nodes
and decides; the others do as it says.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cluster.control import Message
from shardtune.cluster.environment import Environment
from shardtune.cluster.stuck import RankStatus, stuck_ranks
from shardtune.config import Config
from shardtune.distributed.rank_record import Failure
from shardtune.errors import AGAIN

if TYPE_CHECKING:  # it imports torch, which takes seconds: the nodes meet before
    from shardtune.cluster.node_ranks import NodeRanks


def local_failure(ranks: NodeRanks, signalled: str | None) -> Failure | None:
    """Return the first failure of this node's ranks. A cause goes before a symptom.

    `signalled` names the signal that this node's agent has received.
    """
    symptom: Failure | None = None
    if ranks.ident is None:  # `start` was not called
        return Failure(1, [f"ended by {signalled} before a restart - run the same command again"])
    # The ranks that have ended come first, in the order of their ends.
    for index in [*ranks.exit_codes, *range(len(ranks.records))]:
        outcome = ranks.records[index].outcome
        if outcome is None and index in ranks.exit_codes:
            return _unexplained_end(ranks, index, signalled)
        if outcome is not None and outcome.code != 0:
            if not outcome.lost_connection:
                return outcome
            symptom = symptom or outcome
    if ranks.problem:
        what = f"the ranks of {ranks.statuses[0].host} did not start: {ranks.problem}"
        return Failure(1, [f"{what} - {AGAIN}"], may_restart=False)
    return symptom


def _unexplained_end(ranks: NodeRanks, index: int, signalled: str | None) -> Failure:
    record, status, code = ranks.records[index], ranks.statuses[index], ranks.exit_codes[index]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    if how == f"by {signalled}":
        line = f"ended {how} before the first step, with nothing to save"
        return Failure(1, [f"{line} - run the same command again"])
    remedy = "see its output above in the log of its node"
    if code == -signal.SIGKILL:
        remedy = "most often killed for memory, see the kernel's log there"
    when = f"last seen in {record.place}"
    if not record.has_started:
        when = "before it had met the others"
    return Failure(1, [f"{status.name}: ended {how}, {when} - {remedy}; {AGAIN}"])


class Judge:
    """Judges the messages of all nodes in one attempt after another of a launch.

    `sizes` are the numbers of ranks of all nodes. Node 0's agent receives the reports of all ranks;
    other agents only learn if node 0 is lost.
    """

    def __init__(self, environment: Environment, config: Config, sizes: Sequence[int]) -> None:
        self._environment, self._config, self._sizes = environment, config, sizes
        self._best_step = -1
        self.begin(0)

    def begin(self, attempt: int) -> None:
        self.attempt = attempt
        self._statuses: dict[int, list[RankStatus]] = {}  # the last ones of each node
        self._finished: set[int] = set()

    def judge(self, node: int, message: Message, ranks: NodeRanks) -> Failure | None:
        """Return how a node's message ends the attempt (code 0: success), or None."""
        if "lost" in message:
            return self._lost_node(node, message, ranks)
        if message.get("attempt") != self.attempt:
            return None
        if "failure" in message:
            return message["failure"]
        self._statuses[node] = message["status"]
        if message["finished"]:
            self._finished.add(node)
        if len(self._finished) == len(self._sizes):
            return Failure(0, [])
        if node != 0:  # with each report of node 0 it looks at the ranks of all nodes
            return None
        every = [status for node in sorted(self._statuses) for status in self._statuses[node]]
        # A rank that has ended has no status. Its node reports the cause.
        is_complete = len(every) == sum(self._sizes)
        return stuck_ranks(every, self._config.distributed) if is_complete else None

    def _lost_node(self, node: int, message: Message, ranks: NodeRanks) -> Failure:
        place = f" (while this node was in {ranks.statuses[0].place})"
        if statuses := self._statuses.get(node):
            numbers = f"rank {statuses[0].rank}"
            if len(statuses) > 1:
                numbers = f"ranks {statuses[0].rank} to {statuses[-1].rank}"
            place = f" ({numbers}, last seen in {statuses[0].place})"
        how = "lost"
        if node == 0:
            how = f"out of reach at {self._environment.master}:{self._environment.port}"
        what = f"{message['name']} is {how}: {message['lost']}{place}"
        remedy = "its launch has ended or is stopped, or it or the network is down: look there, or "
        remedy += "go on without it as docs/launch.md says (A node that stays dead)"
        return Failure(1, [f"{what} - {remedy}; {AGAIN}"], may_restart=False)

    def decide_restart(self, failure: Failure, signalled: str | None) -> None:
        """Set `restart` if ranks shall start again: the last restart must have gained a step."""
        steps = [s.step for statuses in self._statuses.values() for s in statuses]
        begun = [step for step in steps if step is not None]
        reached, best = max(begun, default=0), self._best_step
        self._best_step = max(reached, best)
        is_allowed = failure.code == 1 and failure.may_restart and signalled is None
        if not is_allowed or self.attempt >= self._environment.max_restarts:
            return
        if self.attempt > 0 and reached <= best:
            what, _, remedy = failure.lines[-1].partition(" - ")
            given_up = "given up, because no step was gained since the last restart"
            failure.lines[-1] = f"{what}; {given_up} - {remedy}"
            return
        failure.restart = self.attempt + 1
        run = self._config.run
        has_checkpoint = any((Path(run.dir) / "checkpoints").glob("checkpoint_*"))
        # Once a run has begun, all checkpoints of run.dir are its own: others are moved aside.
        if begun and (run.resume == "never" or has_checkpoint):
            failure.resume = "auto"
