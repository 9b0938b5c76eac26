"""Every command and every YAML of README.md and docs/, run as it stands there in a copy."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
from helpers.commands import REPOSITORY, a_free_port, needs_namespaces
from helpers.documented import TEXTS, blocks, environment, run
from helpers.image import image_files

from distTest.rehearse.namespaces import joined_nodes
from shardtune.config_io import load_config

COMMANDS = blocks("bash")


def starting(*prefixes: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(prefixes)]


# Those that other tests run: `make demo` and the rest of the targets, the preflight alone, what
# drops duplicates, what reads exported chats, plans, whose pages are computed, other launchers, and
# a rehearsal.
ELSEWHERE = starting(
    *("make ", "python -m distTest.preflight", "python -m tests.pretend_gpu", "python -c", "jq "),
    *("shardtune plan zai-org/", "python -m shardtune plan", "accelerate ", "python train_fsdp.py"),
    "python -m distTest.rehearse",
)
NODES, ALONE, GREPS = starting("MASTER_ADDR="), starting("NNODES=1 "), starting("grep")
(BY_SSH,), (BY_SLURM,) = starting("ssh"), starting("sbatch")
OTHER_WAYS = starting("tmux", "nohup", "docker", "kubectl")
(ASKING,) = starting("python examples/ask")
TORCHRUN_AND_TOOLS = starting("torchrun", "python -m shardtune", "shardtune ")
TORCHRUN_AND_TOOLS = [command for command in TORCHRUN_AND_TOOLS if command not in ELSEWHERE]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """What an image has of the repository, with tiny models and data where configurations name
    them."""
    copy = tmp_path_factory.mktemp("clone") / "shardtune"
    copy.mkdir()
    for name in image_files():
        source, target = REPOSITORY / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.copytree(models["llama"], copy / "models/SmolLM2-135M-Instruct")
    settings = copy / "models/SmolLM2-135M-Instruct/config.json"
    longer = json.loads(settings.read_text(encoding="utf-8")) | {"max_position_embeddings": 1024}
    settings.write_text(json.dumps(longer), encoding="utf-8")
    (copy / "mine.jsonl").write_text(blocks("json")[0], encoding="utf-8")
    # A plan needs the model's config.json alone: a folder stands for the hub.
    shutil.copytree(REPOSITORY / "tests/data/configs/glm-4.5-air", copy / "zai-org/GLM-4.5-Air")
    (text,) = [block for block in blocks("yaml") if block.startswith("model:")]
    (copy / "mine.yaml").write_text(text, encoding="utf-8")
    return copy


def test_every_command_is_run_by_a_test():
    tested = {*NODES, *ALONE, *GREPS, BY_SSH, BY_SLURM, *OTHER_WAYS, ASKING}
    assert set(COMMANDS) == tested | {*TORCHRUN_AND_TOOLS, *ELSEWHERE}


@needs_namespaces
@pytest.mark.full
def test_two_nodes_train_and_the_documented_greps_find_their_lines(repository):
    """Both commands as they stand, at their address and on their interface, then the greps."""
    worker = repository.parent / "worker"
    worker.mkdir()
    (repository / "runs").mkdir(exist_ok=True)
    for entry in repository.iterdir():
        (worker / entry.name).symlink_to(entry)
    assert len(NODES) == 2
    assert all(" run.dir=" in node for node in NODES)  # the demo's has a finished run
    settings = r"^MASTER_ADDR=(\S+) NCCL_SOCKET_IFNAME=(\S+) ./launch_node\d.sh --config "
    ((address, interface),) = {*re.findall(settings, "\n".join(NODES), re.MULTILINE)}
    shell = partial(subprocess.Popen, text=True, stdout=PIPE, stderr=subprocess.STDOUT)
    with joined_nodes([address, "10.0.0.2"], interface) as places:
        nodes = [
            shell(
                [*place.prefix, "bash", "-o", "pipefail", "-c", command],
                cwd=cwd,
                env=environment(GPUS_PER_NODE="1"),
            )
            for place, command, cwd in zip(places, NODES, (repository, worker), strict=True)
        ]
        outputs = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    for greps in GREPS:
        found = run(greps, repository)
        assert re.search(r"^Baseline Perplexity: \d+\.\d+ \| Loss: \d", found, re.MULTILINE)
        assert re.search(r"^Step \d+/\d+ \| Loss: \d", found, re.MULTILINE)
    assert re.search(r"^Eval Perplexity: \d", found, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_run_on_one_machine_resumed_verified_and_exported(repository):
    load_config(repository / "mine.yaml", [], {})
    outputs = {command: run(command, repository, 900) for command in TORCHRUN_AND_TOOLS}
    trained = [output for output in outputs.values() if "Saved checkpoint_" in output]
    assert len(trained) == 4
    (resumed,) = [output for output in trained if "Resumed from checkpoint_0000001" in output]
    assert "Step 2/2 | Loss:" in resumed
    (verified,) = [output for command, output in outputs.items() if " verify " in command]
    assert verified.startswith("checkpoint_0000001: intact, ")
    assert (repository / "runs/exported/model.safetensors").exists()


@pytest.mark.full
def test_the_documented_question_is_answered(repository, models):
    run_dir = repository / "runs/demo"
    shutil.copytree(models["llama"], run_dir / "model", dirs_exist_ok=True)
    config = f"model: {{path: {models['llama']}}}\ndata: {{template_options: {{}}}}\n"
    (run_dir / "config.yaml").write_text(config, encoding="utf-8")
    assert "Exact match" in run(ASKING, repository)


@pytest.mark.full
def test_one_node_and_one_device_train_as_documented(repository):
    """With the rung of the ladder in docs/troubleshooting.md that needs one device."""
    rungs = re.findall(r"^\| one .+? \| `(.+?)` \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    assert len(rungs) == 2 and len(ALONE) == 1
    for command in (*rungs, *ALONE):
        said = run(command, repository, MASTER_PORT=a_free_port(), GPUS_PER_NODE="2")
        assert "Step 2/2 | Loss" in said


def test_documented_ways_start_the_nodes(tmp_path):
    """An ssh and a tmux that stay here; an sbatch and a kubectl that list their file, a docker that
    runs its command, and a Python that prints its arguments."""
    (tmp_path / "bin").mkdir()
    stubs = {
        "ssh": '[ "$1 $2" = "-n worker" ] && exec sh -c "$3"',
        "sbatch": 'ls "$1"',
        "kubectl": 'ls "$3"',
        "tmux": '[ "$1 $2 $3" = "new -d -s" ] && exec sh -c "$5"',
        "docker": (
            '[ "$1" = build ] && exec ls Dockerfile\n'
            "for each; do\n"
            '  case "$each" in *=*) export "$each";; ./*) break;; esac; shift\n'
            'done\nexec "$@"'
        ),
        "python": 'echo "rank=$NODE_RANK" "$*"',
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    copy = tmp_path / "clone"
    shutil.copytree(REPOSITORY / "distTest", copy / "distTest")
    for file in (*REPOSITORY.glob("launch_*"), REPOSITORY / "Dockerfile"):
        shutil.copy(file, copy)
    (copy / "examples").mkdir()
    shutil.copy(REPOSITORY / "examples/kubernetes.yaml", copy / "examples")
    stubbed = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path)}
    run(BY_SSH, copy, **stubbed)
    for file_name, node in (("multinode_training.log", 0), ("worker.log", 1)):
        assert f"rank={node} " in (copy / file_name).read_text(encoding="utf-8")
    assert "launch_slurm.sbatch" in run(BY_SLURM, copy, **stubbed)
    by_tmux, by_nohup, by_docker, by_kubectl = OTHER_WAYS
    for command in (by_tmux, by_nohup):
        (copy / "multinode_training.log").unlink()
        run(f"{command}; wait", copy, **stubbed)
        assert (copy / "multinode_training.log").read_text(encoding="utf-8").startswith("rank=0 ")
    built, started = run(by_docker, copy, **stubbed).splitlines()
    assert built == "Dockerfile" and started.startswith("rank=0 ")
    assert started.endswith(" --config /work/config.yaml run.dir=/work/runs/mine")
    assert "examples/kubernetes.yaml" in run(by_kubectl, copy, **stubbed)
