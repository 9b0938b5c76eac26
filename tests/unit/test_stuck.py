"""Which rank node 0's agent takes for stuck, and its judgement of an attempt."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import load

from shardtune.cluster.control import Message
from shardtune.cluster.environment import read_environment
from shardtune.cluster.judge import Judge
from shardtune.cluster.stuck import FIRST_STEP_TIMEOUT_S, IdleClock, RankStatus, stuck_ranks
from shardtune.config import DistributedConfig
from shardtune.distributed.rank_record import RECORD_BYTES, Failure, Phase, RankRecord, this_rank

LIMITS = DistributedConfig(step_timeout_s=600, save_timeout_s=3600)
STEP, DATA = Phase.FORWARD_BACKWARD, Phase.DATA


def ranks(*facts: tuple[Phase, int, float], limits_steps: bool = True) -> list[RankStatus]:
    """Phase, arrivals and idle seconds of each rank."""
    return [
        RankStatus(rank, "host", phase, 7, arrivals, limits_steps, idle_s, frame=f"frame{rank}")
        for rank, (phase, arrivals, idle_s) in enumerate(facts)
    ]


@pytest.mark.parametrize(
    ("statuses", "blamed", "words"),
    [
        (ranks((STEP, 9, 600), (DATA, 8, 600)), None, ""),
        (ranks((STEP, 9, 601), (DATA, 8, 601)), [1], "did not arrive within 600 s (at frame1)"),
        # Outside of steps a rank that works may take its time.
        (ranks((Phase.LOADING, 9, 700), (Phase.LOADING, 8, 3)), None, ""),
        (ranks((Phase.LOADING, 9, 700), (Phase.LOADING, 8, 700)), [1], "in step 7 (loading"),
        # One that has just been let go is not behind because it waited for long.
        (ranks((Phase.LOADING, 9, 0), (Phase.LOADING, 8, 700)), None, ""),
        (ranks((STEP, 9, 601), (STEP, 9, 601)), [0], "nothing moved for 600 s, with no rank"),
        (ranks((Phase.SAVING, 9, 3700), (Phase.SAVING, 8, 3700)), None, ""),
        (ranks((Phase.SAVING, 9, 3800), (Phase.SAVING, 8, 3800)), [1], "distributed.save_timeout"),
        (ranks((STEP, 9, 601), *[(DATA, 8, 601)] * 5), [1, 2, 3, 4, 5], "(and rank 2 on host, "),
        (ranks((STEP, 9, 601), (STEP, 8, 601), limits_steps=False), None, ""),
        (
            ranks((STEP, 9, FIRST_STEP_TIMEOUT_S + 1), (STEP, 8, 1), limits_steps=False),
            [1],
            "did not arrive within 1800 s",
        ),
    ],
)
def test_the_rank_behind_the_others_is_blamed(statuses, blamed, words):
    verdict = stuck_ranks(statuses, LIMITS)
    assert (verdict and verdict.stuck) == blamed
    assert verdict is None or words in verdict.lines[0], verdict


def of_stages(*facts: tuple[int, int, bool]) -> list[RankStatus]:
    """Two ranks a stage: meetings, arrivals and whether it waits for another stage."""
    return [
        replace(status, meetings=meetings, stage=number // 2, waits_for_stage=waits)
        for number, (meetings, arrivals, waits) in enumerate(facts)
        for status in [ranks(*[(STEP, arrivals, 601)] * (number + 1))[number]]
    ]


@pytest.mark.parametrize(
    ("statuses", "blamed", "words"),
    [
        # A stage has fewer waits than another, and is not behind for that.
        (of_stages((3, 9, False), (3, 8, False), (3, 40, True), (3, 40, True)), [1], "not arrive"),
        (of_stages((3, 9, True), (3, 9, True), (3, 40, False), (3, 41, False)), [2], "not arrive"),
        # One that lacks a message is behind its stage and not the cause.
        (of_stages((3, 9, True), (3, 10, False), (3, 40, False), (3, 41, False)), [2], "not arr"),
        # A stage that has finished its step meets all others.
        (of_stages((3, 7, False), (3, 8, False), (4, 2, False), (4, 2, False)), [0], "not arrive"),
        (of_stages((4, 7, False), (4, 7, False), (3, 2, False), (3, 2, False)), [2, 3], "not arr"),
        (of_stages(*[(3, 9, True)] * 4), [0], "nothing moved for 600 s, with no rank behind"),
        (of_stages(*[(3, 9, False)] * 4), [0], "nothing moved for 600 s, with no rank behind"),
    ],
)
def test_a_rank_that_waits_for_another_stage_is_not_blamed(statuses, blamed, words):
    verdict = stuck_ranks(statuses, LIMITS)
    assert verdict and verdict.stuck == blamed and words in verdict.lines[0], verdict


@pytest.mark.parametrize(
    ("facts", "stopped_s", "limit_s"),
    # Whatever it does, and before those that wait for it.
    [([(STEP, 9, 40), (DATA, 8, 40)], 40, 600), ([(STEP, 9, 21), (STEP, 9, 21)], 20, 20)],
)
def test_a_stopped_process_is_blamed(facts, stopped_s, limit_s):
    statuses = ranks(*facts)
    statuses[1].stopped_s = stopped_s
    limits = DistributedConfig(step_timeout_s=limit_s, save_timeout_s=3600)
    verdict = stuck_ranks(statuses, limits)
    assert verdict and verdict.stuck == [1]
    assert f"no sign of life for {stopped_s} s" in verdict.lines[0]


def test_work_outside_of_steps_is_progress_and_within_them_it_is_not():
    record, status = this_rank(), RankStatus(0, "host")
    clock = IdleClock(os.getpid())

    def ticks_after_work(phase: Phase) -> float:
        record.phase = phase
        for _ in range(3):
            clock.tick(record, status)
        busy_until = time.process_time() + 0.2
        while time.process_time() < busy_until:
            pass
        clock.tick(record, status)
        return status.idle_s

    record.arrivals += 1
    assert ticks_after_work(Phase.LOADING) == 0
    record.arrivals += 1
    assert ticks_after_work(Phase.DATA) == 3
    record.arrivals += 1
    clock.tick(record, status)
    assert status.idle_s == 0


def test_a_record_keeps_its_first_outcome_and_fits_its_memory():
    import mmap

    memory = mmap.mmap(-1, 2 * RECORD_BYTES)
    writer, reader = (RankRecord.from_buffer(memory, RECORD_BYTES) for _ in range(2))
    writer.step, writer.phase, writer.arrivals, writer.thread = 3, Phase.SAVING, 17, 1 << 47
    assert (reader.place, reader.arrivals, reader.thread) == ("step 3 (saving)", 17, 1 << 47)
    assert reader.outcome is None and RankRecord.from_buffer(memory, 0).outcome is None
    writer.outcome = Failure(2, [f"{number} {'ü' * 5000}" for number in range(200)])
    writer.outcome = Failure(1, ["later"])
    outcome = reader.outcome
    assert outcome is not None and outcome.code == 2
    assert outcome.lines[-1].startswith("199 ü") and RankRecord.from_buffer(memory).outcome is None


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
