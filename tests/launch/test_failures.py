"""A rank that ends a run which is under way: on every node all processes are gone within a minute,
the last line names it, and the same commands resume.

The launch scripts run as two nodes on this machine's loopback.
"""

import re
import time
from pathlib import Path

import pytest
from helpers.documented import error_line
from helpers.launches import (
    DATA,
    FORWARD,
    HOST,
    KILL,
    KILLED,
    RANK,
    STEP,
    break_rank,
    one_node,
    resumes,
    two_nodes,
    while_it_imports,
    write_run,
)

FULL = pytest.mark.full
LATER = "time.sleep(3); "  # once somebody has looked at the processes
LOADING = ("shardtune.model.build", "build_model")
ENDED = RANK + rf"ended with code 0, {STEP} - .*"
RAISED = RANK + r"\w+: .*, in step 5 \(forward and backward\) - see the traceback there; .*"
STOPPED = RANK + rf"no sign of life for \d+ s, {STEP} - its process is stopped .*"


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


@FULL
def test_a_rank_that_ends_while_it_imports_is_named(folder):
    effect = f"threading.Timer(1, lambda: {KILL}).start()"
    fault = while_it_imports(folder, "1", effect)
    with two_nodes(folder, GPUS_PER_NODE="1", **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        line = f"rank 1 on {HOST}: ended by SIGKILL, before it had met the others - .*"
        nodes.require_end(1, line)
        assert "Training Configuration" not in nodes.texts()[0]


@FULL
def test_a_rank_that_hangs_while_it_imports_is_named_as_absent(folder):
    """Slow or stuck, nobody can know before the time to meet is over."""
    fault = while_it_imports(folder, "1", "time.sleep(3600)")
    with two_nodes(folder, GPUS_PER_NODE="1", JOIN_TIMEOUT="40", **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        time.sleep(40)
        line = r"rank 1 of 2 did not come within 40.0 s - start every node within that time, .*"
        nodes.require_end(2, line)


@pytest.mark.parametrize(
    ("ranks_per_node", "rank", "where", "effect", "line"),
    [
        (1, 1, DATA, KILL, KILLED),
        *(
            pytest.param(*case, marks=FULL)
            for case in [
                (1, 1, DATA, "os.kill(os.getpid(), signal.SIGSTOP)", STOPPED),
                (1, 1, FORWARD, f"{LATER}raise ValueError('no such token')", RAISED),
                (1, 1, FORWARD, f"{LATER}sys.exit(0)", ENDED),
            ]
        ),
    ],
)
def test_a_rank_that_ends_or_stops_is_named(ranks_per_node, rank, where, effect, line, folder):
    """One line says it: a rank that only lost a connection prints no traceback.

    No process of the launch has the secret of the agents.
    """
    fault = break_rank(folder, rank, where, effect) | {"JOIN_SECRET": "the secret word"}
    with two_nodes(folder, GPUS_PER_NODE=str(ranks_per_node), **fault) as nodes:
        nodes.wait_for_step(2)
        assert nodes.ranks(0) and not nodes.processes_with("the secret word")
        nodes.require_end(1, line.format(rank=rank, host=HOST))
        if where == DATA:
            assert not any("Traceback" in text for text in nodes.texts()), nodes.texts()
    if ranks_per_node == 2:
        resumes(folder, GPUS_PER_NODE="1")


@FULL
def test_the_rank_that_ended_first_is_the_one_named(folder):
    """All others are killed behind it, before they can tell of it."""
    siblings = "$(cat /proc/%d/task/*/children)"
    others = f"os.system('(sleep 0.3; kill -9 {siblings} 2> /dev/null) &' % os.getppid())"
    fault = break_rank(folder, 1, DATA, f"{others}; {KILL}")
    code, _, errors = one_node(folder, **fault)
    line = KILLED.format(rank=1, host=HOST)
    assert code == 1 and re.fullmatch(f"ERROR: {line}", errors.splitlines()[-1]), errors


@pytest.mark.parametrize(
    ("rank", "ranks_per_node", "mesh", "where", "phase", "at"),
    [
        (1, 1, "replicate=1", DATA, "data", "build_batch"),
        # All others wait for a message of that rank's stage, or in that stage.
        pytest.param(3, 2, "stages=2", FORWARD, "forward and backward", "summed_loss", marks=FULL),
    ],
)
def test_a_rank_that_does_not_arrive_is_named(rank, ranks_per_node, mesh, where, phase, at, folder):
    """Its own log shows its stack."""
    micro_batches = 2 if "stages" in mesh else 1
    fault = break_rank(folder, rank, where, "time.sleep(3600)", nth=4 * micro_batches + 1)
    limits = ("distributed.step_timeout_s=12", f"parallel.{mesh}")
    limits += (f"train.gradient_accumulation_steps={micro_batches}",)
    with two_nodes(folder, *limits, GPUS_PER_NODE=str(ranks_per_node), **fault) as nodes:
        nodes.wait_for_step(4)
        behind = rf"did not arrive within 12 s \(at {at}, sitecustomize.py:\d+\), in step 5"
        name = f"rank {rank} on {HOST}"
        nodes.require_end(1, rf"{name}: {behind} \({phase}\) - see its traceback there, .*")
        its_log = nodes.texts()[rank // ranks_per_node]
        assert "time.sleep(3600)" in its_log.partition(f"{name} is here:")[2], its_log


@FULL
@pytest.mark.parametrize(
    ("effect", "code"),
    [
        ("time.sleep(3600)", 1),
        ("exec('for _ in range(2 * 10**8): pass')", 0),
    ],
)
def test_a_rank_may_take_long_outside_of_steps_while_it_works(effect, code, folder):
    """It may take its time as long as it works. One node is watched as two are."""
    fault = break_rank(folder, 1, LOADING, effect, nth=1)
    given = ("distributed.step_timeout_s=4", "train.max_steps=1")
    actual, _, errors = one_node(folder, *given, **fault)
    assert actual == code, errors
    if code:
        last = error_line(errors)
        at = r"\(at build_model, sitecustomize.py:\d+\)"
        line = rf"rank 1 on {HOST}: did not arrive within 4 s {at}, in loading the model"
        assert re.match(f"ERROR: {line} - see its traceback there, or raise ", last), errors
