"""The rehearsal with real launches: both modes, refusals, failures, and its cleaning up."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, completed, needs_namespaces, piped
from helpers.documented import QUOTES, is_in
from helpers.pinned import on_path

from distTest.rehearse.__main__ import main
from distTest.rehearse.node_processes import processes_of
from shardtune.errors import UserError

CHECKS = ["rendezvous", "a node lost", "sharding", "resume", "steps", "repeated steps"]


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """The environment of a rehearsal, whose every file is under `tmp_path`."""
    ours = {"TMPDIR": str(tmp_path), "VIRTUAL_ENV": sys.prefix}
    return os.environ | ours | on_path(REPOSITORY)


def run(
    *command: str, cwd: Path, env: dict[str, str], timeout_s: float = 500
) -> subprocess.CompletedProcess[str]:
    return completed(command, cwd=cwd, env=env, timeout_s=timeout_s)


def rehearsal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distTest.rehearse", *arguments]


def passed(output: str) -> list[str]:
    return re.findall(r"^PASSED ([^:]+): ", output, re.MULTILINE)


@needs_namespaces
@pytest.mark.full
def test_a_rehearsal_in_namespaces_passes(tmp_path, here):
    """config.yaml as it is shipped, but for its 16 ranks; they say what users grep for."""
    command = rehearsal("--procs-per-node", "2", "--", "parallel.expert=2")
    done = run(*command, cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == CHECKS
    assert "network namespace, with enp26s0np0: 10.11.7.50, 10.11.7.51\n" in done.stdout
    assert "2 nodes of 4 ranks met at 10.11.7.50:29600\n" in done.stdout
    assert "[node 1]   Hostname: node1\n" in done.stdout
    model = r"^Model: glm4_moe, 2 layers, \d+ random parameters, as zai-org/GLM-4.5-Air$"
    assert re.search(model, done.stdout, re.MULTILINE)
    for said in (r"Baseline Perplexity: \d+\.\d+ \| Loss: \d", r"Step \d+/\d+ \| Loss: \d"):
        assert re.search(rf"^\[node 0\] {said}", done.stdout, re.MULTILINE)


@pytest.mark.full
def test_three_nodes_over_loopback_rehearse_a_configuration_of_ones_own(tmp_path, here, models):
    """A dense model, evaluation data taken from train, few lines, and no resume.

    A value of the user's reaches the scripts; variables of the real cluster do not.
    """
    config = {
        "run": {"resume": "never"},
        "model": {"path": str(models["llama"])},
        "data": {"train": "nowhere.jsonl", "eval_fraction": 0.3, "columns": {"messages": "chat"}},
        "train": {"epochs": 1},
        "logging": {"every_steps": 5},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config), encoding="utf-8")
    options = f"--loopback --nodes 3 --procs-per-node 1 --config {tmp_path}/mine.yaml"
    options += " -- optimizer.lr=2e-3 data.max_length=99"
    there = here | {"MASTER_ADDR": "192.0.2.1", "NNODES": "7"}
    make = ["make", "--no-print-directory", "rehearse", f"REHEARSE_ARGS={options}"]
    done = run(*make, cwd=REPOSITORY, env=there)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert passed(output) == CHECKS
    assert "All nodes are this host, over loopback: --loopback\n" in output
    assert f"as {models['llama']}\n" in output
    assert " data.max_length=99 " in output and " data.max_length=64 " in output
    assert re.search(r"^\[node 0\] Step 1/\d+ .* LR: 2\.00e-03 ", output, re.MULTILINE)
    assert "\n[node 2] Launching WORKER NODE (Node 2)\n" in output
    assert "others ended with [1, 1], " in output
    assert output.splitlines()[-1].startswith("Rehearsed: every check passed.")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    assert not list(tmp_path.glob("shardtune-rehearsal-*"))
    assert all(is_in(quote, output) for quote in QUOTES["check"])


@pytest.mark.full
def test_a_rehearsal_that_fails_names_its_logs(tmp_path, here):
    """Its logs are kept and named."""
    there = here | {"VIRTUAL_ENV": str(tmp_path / "nothing")}
    done = run(*rehearsal("--loopback", "--procs-per-node", "1"), cwd=tmp_path, env=there)
    assert done.returncode == 1 and not passed(done.stdout)
    last = done.stderr.splitlines()[-1]
    what = "ERROR: Training Configuration: on node 0 did not come .+"
    failed = re.fullmatch(rf"{what} - see (\S+)/\*/node\*\.log", last)
    assert failed, last
    (log,) = Path(failed[1]).glob("*/node0.log")
    assert f"ERROR: {there['VIRTUAL_ENV']}/bin/python " in log.read_text(encoding="utf-8")


@needs_namespaces
def test_ctrl_c_ends_all_that_it_started(tmp_path, here):
    command = rehearsal("--procs-per-node", "1", "--", "parallel.expert=1")
    process = piped(command, tmp_path, here)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("[node 1] Launching WORKER"))
    assert processes_of(process.pid, 0) and processes_of(process.pid, 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "ERROR: ended by SIGINT with all that it had started - "
    )
    assert not processes_of(process.pid, 0) + processes_of(process.pid, 1)
    assert not list(tmp_path.glob("shardtune-rehearsal-*"))
    namespaces = run("ip", "netns", "list", cwd=tmp_path, env=here).stdout
    assert f"shardtune-{process.pid}-" not in namespaces


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "1"], "--nodes is from 2 to 200, "),
        (["--procs-per-node", "0"], "--nodes is from 2 to 200, and --procs-per-node at least 1 - "),
        (["--loopback", "--", "train.epoch=1"], "train.epoch (command line) is not known - "),
    ],
)
def test_a_rehearsal_that_is_refused(arguments, problem, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("distTest.rehearse.__main__.end_on_signal", lambda *_, **__: None)
    with pytest.raises(UserError) as refused:
        main(arguments)
    assert str(refused.value).startswith(problem)
    assert not list(tmp_path.iterdir())
