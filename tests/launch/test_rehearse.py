"""The rehearsal with real launches: both modes, refusals, failures, and its cleaning up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, needs_namespaces
from helpers.documented import QUOTES, is_in

from distTest.rehearse import __main__ as rehearse
from distTest.rehearse.node_processes import mark, processes_with

CHECKS = [
    *("rendezvous", "baseline", "steps", "checkpoint", "sharding", "a node lost"),
    *("resume", "steps", "repeated steps", "final model"),
]


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """The environment of a rehearsal, whose every file is under `tmp_path`."""
    return os.environ | {
        "TMPDIR": str(tmp_path),
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": str(REPOSITORY),
    }


def run(
    *command: str, cwd: Path, env: dict[str, str], timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def rehearsal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distTest.rehearse", *arguments]


def passed(output: str) -> list[str]:
    return re.findall(r"^PASSED ([^:]+): ", output, re.MULTILINE)


def marked_processes(pid: int) -> list[int]:
    return [
        process
        for node in range(3)
        for process in processes_with(f"SHARDTUNE_REHEARSED_NODE={mark(pid, node)}")
    ]


@pytest.mark.full
def test_over_loopback(tmp_path: Path, here: dict[str, str]) -> None:
    """A value of the user's reaches the scripts; variables of the real cluster do not."""
    options = "--loopback --procs-per-node 1 -- optimizer.lr=2e-3 data.max_length=99"
    there = here | {"MASTER_ADDR": "192.0.2.1", "NNODES": "7"}
    done = run(
        "make",
        "--no-print-directory",
        "rehearse",
        f"REHEARSE_ARGS={options}",
        cwd=REPOSITORY,
        env=there,
    )
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert passed(output) == CHECKS
    assert (
        "All nodes are this host, over loopback: --loopback\nSet for them: MASTER_ADDR=127.0.0.1 "
        in output
    )
    assert "Not used, the rehearsal has its own: MASTER_ADDR, NNODES\n" in output
    assert re.search(
        r"^Model: glm4_moe, 3 layers, \d+ random parameters, as zai-org/GLM-4.5-Air$",
        output,
        re.MULTILINE,
    )
    assert "  data.max_length=64 (was 99)\n" in output
    assert re.search(r"^\[node 0\] Step 1/\d+ .* LR: 2\.00e-03 ", output, re.MULTILINE)
    assert re.search(r"^\[node 1\] Launching WORKER NODE \(Node 1\)$", output, re.MULTILINE)
    assert re.search(r"^Rehearsed in \d+ s: every check passed\.", output.splitlines()[-1])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    assert not list(tmp_path.glob("shardtune-rehearsal-*"))
    assert all(is_in(quote, output) for quote in QUOTES["check"])


@needs_namespaces
def test_in_namespaces(tmp_path: Path, here: dict[str, str]) -> None:
    done = run(*rehearsal("--procs-per-node", "2"), cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == CHECKS
    assert "which no packet leaves, with enp26s0np0: 10.11.7.50, 10.11.7.51\n" in done.stdout
    assert (
        "PASSED rendezvous: 2 nodes met at 10.11.7.50:29600 and are one world of 4 ranks\n"
        in done.stdout
    )
    assert "[node 1]   Hostname: node1\n" in done.stdout


@pytest.mark.full
def test_the_production_shape(tmp_path: Path, here: dict[str, str]) -> None:
    """2 nodes of 8 processes."""
    done = run(*rehearsal(), cwd=tmp_path, env=here, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == CHECKS
    assert (
        "one world of 16 ranks\n" in done.stdout
        and "PASSED sharding: 16 ranks saved a part each" in done.stdout
    )


@pytest.mark.full
def test_three_nodes_with_a_configuration_of_ones_own(
    tmp_path: Path, here: dict[str, str], models: dict[str, Path]
) -> None:
    """A dense model, evaluation data taken from train, few lines, no final model, and no resume."""
    config = {
        "run": {"resume": "never"},
        "model": {"path": str(models["llama"])},
        "data": {"train": "nowhere.jsonl", "eval_fraction": 0.3},
        "train": {"epochs": 1},
        "logging": {"every_steps": 5},
        "export": {"final": False},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config), encoding="utf-8")
    arguments = ("--loopback", "--nodes", "3", "--procs-per-node", "1", "--config", "mine.yaml")
    done = run(*rehearsal(*arguments), cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == [check for check in CHECKS if check != "final model"]
    assert f"as {models['llama']}\n" in done.stdout
    assert "[node 2] Launching WORKER NODE (Node 2)\n" in done.stdout
    assert "nodes 0 to 1 ended " in done.stdout


def test_a_launch_that_fails(tmp_path: Path, here: dict[str, str]) -> None:
    """Its logs are kept and named."""
    there = here | {"VIRTUAL_ENV": str(tmp_path / "nothing")}
    done = run(*rehearsal("--loopback", "--procs-per-node", "1"), cwd=tmp_path, env=there)
    assert done.returncode == 1 and not passed(done.stdout)
    last = done.stderr.splitlines()[-1]
    failed = re.fullmatch(
        r"ERROR: Training Configuration: on every node did not come: .+ - see (\S+) (\S+)", last
    )
    assert failed, last
    assert [Path(log).name for log in failed.groups()] == ["node0.log", "node1.log"]
    assert "ERROR: there is no /" in Path(failed[1]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [["--loopback"], pytest.param([], marks=needs_namespaces)],
    ids=["loopback", "spaces"],
)
def test_ctrl_c_ends_all_that_it_started(
    options: list[str], tmp_path: Path, here: dict[str, str]
) -> None:
    process = subprocess.Popen(
        rehearsal("--procs-per-node", "1", *options),
        cwd=tmp_path,
        env=here,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[node 1] Launching WORKER"):
            break
    time.sleep(1)
    assert marked_processes(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "ERROR: ended by SIGINT with all that it had started - "
    )
    assert not marked_processes(process.pid) and not list(tmp_path.glob("shardtune-rehearsal-*"))
    if not options:
        assert (
            f"shardtune-{process.pid}-"
            not in run("ip", "netns", "list", cwd=tmp_path, env=here).stdout
        )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "1"], "--nodes 1 --procs-per-node 8: "),
        (["--procs-per-node", "0"], "--nodes 2 --procs-per-node 0: "),
        (["train.epochs=1"], "unrecognized arguments: train.epochs=1 - "),
        (["--loopback", "--", "train.epoch=1"], "train.epoch (command line) is not known - "),
    ],
)
def test_a_rehearsal_that_is_refused(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        assert rehearse.run(arguments) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err.startswith(f"ERROR: {problem}")
    assert not list(tmp_path.iterdir())
