"""Every command and every YAML of README.md, run as it stands there, in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, a_free_port, chats, write_jsonl

from shardtune.config_io import load_config, write_config

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [text.strip() for language, text in BLOCKS if language == "bash"]
NODES = [command for command in COMMANDS if command.startswith("./launch_node")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """What a clone holds, with a tiny model and tiny data in the places that the configurations name."""
    copy = tmp_path_factory.mktemp("clone") / "shardtune"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "models", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, copy, ignore=ignored)
    shutil.copytree(models["llama"], copy / "models" / "SmolLM2-135M-Instruct")
    for name, count in (("train", 40), ("eval", 5)):
        (copy / "data").mkdir(exist_ok=True)
        write_jsonl(copy / "data" / f"{name}.jsonl", chats(count, seed=count))
    production = load_config(
        copy / "config.yaml",
        [
            f"model.path={models['glm']}",
            "data.max_length=256",
            "train.epochs=1",
            "model.compute_dtype=float32",
        ],
        {},
    )
    write_config(production, copy / "config.yaml")
    return copy


def environment(**more: str) -> dict[str, str]:
    binaries = str(Path(sys.executable).parent)
    return (
        os.environ
        | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
        }
        | more
    )


def run(command: str, cwd: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_two_nodes_and_then_their_log(repository: Path) -> None:
    here = environment(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=a_free_port(),
        NCCL_SOCKET_IFNAME="lo",
        GPUS_PER_NODE="1",
    )
    worker = repository.parent / "worker"
    worker.mkdir()
    for entry in repository.iterdir():
        (worker / entry.name).symlink_to(entry)
    (repository / "runs").mkdir(exist_ok=True)
    (worker / "runs").symlink_to(repository / "runs")
    assert len(NODES) == 2
    processes = [
        subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=cwd,
            env=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, cwd in zip(NODES, (repository, worker), strict=True)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    (greps,) = [command for command in COMMANDS if command.startswith("grep")]
    found = run(greps, repository)
    assert re.search(r"^Baseline Perplexity: \d", found, re.MULTILINE)
    assert re.search(r"^Step \d+/\d+ \| Loss: \d", found, re.MULTILINE)
    assert re.search(r"^Eval Perplexity: \d", found, re.MULTILINE)


def test_the_configuration_and_the_commands_on_one_machine(repository: Path) -> None:
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    (repository / "mine.yaml").write_text(text, encoding="utf-8")
    load_config(repository / "mine.yaml", [], {})
    assert set(yaml.safe_load(text)) <= {"model", "data", "train", "optimizer"}
    ran = [c for c in COMMANDS if c.startswith(("torchrun", "python -m shardtune", "accelerate"))]
    outputs = [run(command, repository) for command in ran]
    assert len(outputs) == 4
    assert outputs[-1].startswith("checkpoint_0000001: intact, ")
    assert sum("Step 1/1 | Loss:" in output for output in outputs) == 2


def test_the_record(tmp_path: Path) -> None:
    (text,) = [text for language, text in BLOCKS if language == "json"]
    assert [message["role"] for message in json.loads(text)["messages"]] == ["user", "assistant"]


def test_make_demo(tmp_path: Path) -> None:
    """The target as it stands, for two steps, with the real weights that `make test` has fetched."""
    run_dir = tmp_path / "demo"
    assert "make demo" in COMMANDS
    done = subprocess.run(
        [
            "make",
            "demo",
            f"RUN={run_dir}",
            "DEMO_ARGS=train.max_steps=2 data.max_length=256 eval.baseline=false",
        ],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "\r" not in done.stdout + done.stderr
    for said in (
        "Step 2/2 | Loss:",
        "Question (held out):",
        "Before:",
        "After:",
        str(run_dir / "model"),
    ):
        assert said in done.stdout


@pytest.mark.full
def test_the_rehearsal(repository: Path) -> None:
    """Its command with options; test_rehearse.py runs the make target."""
    assert "make rehearse" in COMMANDS
    (command,) = [
        command for command in COMMANDS if command.startswith("python -m distTest.rehearse")
    ]
    assert "Rehearsed in " in run(command, repository).splitlines()[-1]


def test_the_ways_to_start_all_nodes(tmp_path: Path) -> None:
    """An ssh that stays here, an sbatch that says what it is given, and a Python that only prints its arguments."""
    (tmp_path / "bin").mkdir()
    stubs = {
        "ssh": '[ "$1 $2" = "-n worker" ] && exec sh -c "$3"',
        "sbatch": 'ls "$1"',
        "python": 'echo "$*"',
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    copy = tmp_path / "clone"
    shutil.copytree(REPOSITORY / "distTest", copy / "distTest")
    for file in REPOSITORY.glob("launch_*"):
        shutil.copy(file, copy)
    stubbed = environment(
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", VIRTUAL_ENV=str(tmp_path)
    )
    (by_ssh,) = [command for command in COMMANDS if command.startswith("ssh")]
    subprocess.run(
        ["bash", "-c", by_ssh], cwd=copy, env=stubbed, check=True, timeout=60, capture_output=True
    )
    for file_name, node in (("multinode_training.log", 0), ("worker.log", 1)):
        assert f"--nnodes=2 --node_rank={node} " in (copy / file_name).read_text(encoding="utf-8")
    (by_slurm,) = [command for command in COMMANDS if command.startswith("sbatch")]
    subprocess.run(
        ["bash", "-c", by_slurm], cwd=copy, env=stubbed, check=True, timeout=60, capture_output=True
    )


def test_every_command_is_run() -> None:
    """A new command in the README needs a test here."""
    known = (
        "make demo",
        "make rehearse",
        "python -m distTest",
        "./launch_node",
        "ssh",
        "sbatch",
        "grep",
        "torchrun",
        "accelerate launch",
        "python -m shardtune",
    )
    assert all(command.startswith(known) for command in COMMANDS)


def test_the_transcript_is_of_a_real_run() -> None:
    (transcript,) = [
        text for language, text in BLOCKS if language == "text" and "Training Configuration" in text
    ]
    for said in (
        "Effective batch size: ",
        "Baseline Perplexity: ",
        "Step 16/16 | Loss: ",
        "Eval Perplexity: ",
        "After:",
    ):
        assert said in transcript
