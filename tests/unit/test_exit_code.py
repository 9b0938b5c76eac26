"""Node 0's judgement of an attempt: success, the cause of a failure, and whether ranks restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import load

from shardtune.cluster.control import Message
from shardtune.cluster.environment import read_environment
from shardtune.cluster.judge import Judge
from shardtune.cluster.stuck import RankStatus
from shardtune.distributed.rank_record import Failure, Phase

LOST_RANK = Failure(1, ["rank 1: ended by SIGKILL - look there"])
RANKS: Any = None  # only a lost node needs this node's own


def new_judge(folder: Path, max_restarts: int = 9) -> Judge:
    """Return the judge of two nodes of one rank each."""
    environment = replace(read_environment({}, []), max_restarts=max_restarts)
    return Judge(environment, load(folder, f"run.dir={folder}/run"), [1, 1])


def status(rank: int, step: int, attempt: int = 0, finished: bool = False, **more: Any) -> Message:
    """Return the message of a node whose only rank is in this step."""
    seen = RankStatus(rank, "host", Phase.DATA, step, limits_steps=True, **more)
    return {
        "attempt": attempt,
        "status": [] if finished else [seen],
        "finished": finished,
    }


def test_a_run_succeeds_when_all_nodes_have_finished(tmp_path):
    judge = new_judge(tmp_path)
    assert judge.judge(0, status(0, 9, finished=True), RANKS) is None
    assert judge.judge(1, status(1, 9, finished=True), RANKS) == Failure(0, [])


def test_stuck_ranks_are_looked_for_once_all_are_seen(tmp_path):
    """One that has not been seen may be the one that is behind."""
    judge = new_judge(tmp_path)
    waiting = status(0, 5, arrivals=7, idle_s=601.0)
    assert judge.judge(0, waiting, RANKS) is None
    assert judge.judge(1, status(1, 5, arrivals=6, idle_s=601.0), RANKS) is None
    verdict = judge.judge(0, waiting, RANKS)
    assert verdict is not None and (verdict.code, verdict.stuck) == (1, [1])


def test_a_message_of_the_attempt_before_is_not_judged(tmp_path):
    judge = new_judge(tmp_path)
    message = {"attempt": 0, "failure": LOST_RANK}
    assert judge.judge(1, message, RANKS) == LOST_RANK
    judge.begin(1)
    assert judge.judge(1, message, RANKS) is None


@pytest.mark.parametrize(
    ("failure", "signalled", "max_restarts", "restart"),
    [
        (LOST_RANK, None, 2, 1),
        (LOST_RANK, None, 0, 0),
        (LOST_RANK, "SIGTERM", 2, 0),
        (replace(LOST_RANK, code=2), None, 2, 0),
        (replace(LOST_RANK, code=75), None, 2, 0),
        (replace(LOST_RANK, may_restart=False), None, 2, 0),
    ],
)
def test_ranks_start_again_after_a_failure_that_may_not_come_again(
    failure, signalled, max_restarts, restart, tmp_path
):
    judge = new_judge(tmp_path, max_restarts)
    decided = replace(failure)
    judge.decide_restart(decided, signalled)
    assert decided.restart == restart


def test_ranks_that_gain_no_step_are_not_started_again(tmp_path):
    judge, restarts = new_judge(tmp_path), []
    for attempt, step in enumerate([4, 5, 5]):
        judge.begin(attempt)
        judge.judge(0, status(0, step, attempt), RANKS)
        failure = replace(LOST_RANK, lines=[*LOST_RANK.lines])
        judge.decide_restart(failure, None)
        restarts.append(failure.restart)
    assert restarts == [1, 2, 0]
    assert "given up, because no step was gained since the last restart - " in failure.lines[-1]


@pytest.mark.parametrize(("has_checkpoint", "resume"), [(True, "auto"), (False, "")])
def test_a_restart_resumes_where_the_run_itself_has_saved(has_checkpoint, resume, tmp_path):
    judge = new_judge(tmp_path)
    if has_checkpoint:
        (tmp_path / "run/checkpoints/checkpoint_0000003").mkdir(parents=True)
    before = replace(LOST_RANK)
    judge.decide_restart(before, None)
    assert (before.restart, before.resume) == (1, ""), "no rank has begun a step"
    judge.judge(0, status(0, 4), RANKS)
    after = replace(LOST_RANK)
    judge.decide_restart(after, None)
    assert (after.restart, after.resume) == (1, resume)
