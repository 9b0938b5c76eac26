"""The launch scripts: two nodes on this machine's loopback, their banners, their choices and their exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, a_free_port, chats, read_metrics, write_jsonl
from helpers.documented import require_documented
from helpers.launches import children, end, environment, start

from shardtune.cluster.environment import DEFAULTS

BANNER = """========================================
Launching {role} NODE (Node {node})
Master: 127.0.0.1:{port}
Total Nodes: {nodes}
GPUs per Node: {gpus}
========================================
"""
BLOCK = """
Training Configuration:
  Hostname: {host}
  World Size: {world}
  Number of Nodes: {nodes}
  GPUs per Node: {gpus}
  Master: 127.0.0.1:{port}
"""
LINES = re.compile(r"^(Effective|Steps per epoch|Baseline|Step |Eval|Saved|Resumed)", re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(12))
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {models['llama']}, compute_dtype: float32}}\ntrain: {{max_steps: 2}}\n"
        "data: {train: train.jsonl, eval: train.jsonl, max_length: 128}\n",
        encoding="utf-8",
    )
    return tmp_path


def test_one_node(folder: Path) -> None:
    """Through a symbolic link, from another directory; nothing stays in the folder of temporary files."""
    (folder / "elsewhere").mkdir()
    (folder / "temporary").mkdir()
    script = folder / "elsewhere/train"
    script.symlink_to(REPOSITORY / "launch_node0.sh")
    port = a_free_port()
    code, output, errors = end(
        start(
            script,
            "--config",
            "../config.yaml",
            "data.train=../train.jsonl",
            "data.eval=../train.jsonl",
            cwd=folder / "elsewhere",
            NNODES="1",
            GPUS_PER_NODE="2",
            MASTER_PORT=port,
            TMPDIR=str(folder / "temporary"),
        )
    )
    assert code == 0, errors
    assert not list((folder / "temporary").iterdir())
    assert output.startswith(BANNER.format(role="MASTER", node=0, port=port, nodes=1, gpus=2))
    assert BLOCK.format(host=socket.gethostname(), world=2, nodes=1, gpus=2, port=port) in output
    assert [step["step"] for step in read_metrics(folder / "elsewhere/runs/config", "step")] == [
        1,
        2,
    ]


def test_two_nodes_of_different_size(folder: Path) -> None:
    """The worker comes first; only node 0 tells the run, and one process a node where it runs."""
    port = a_free_port()
    worker = start("launch_node1.sh", "--config", "config.yaml", cwd=folder, MASTER_PORT=port)
    time.sleep(1)
    master = start(
        "launch_node0.sh",
        "--config",
        "config.yaml",
        cwd=folder,
        MASTER_PORT=port,
        GPUS_PER_NODE="2",
    )
    (code0, output0, errors0), (code1, output1, errors1) = end(master), end(worker)
    assert (code0, code1) == (0, 0), errors0 + errors1
    host = socket.gethostname()
    for output, role, node, gpus in ((output0, "MASTER", 0, 2), (output1, "WORKER", 1, 1)):
        assert output.startswith(BANNER.format(role=role, node=node, port=port, nodes=2, gpus=gpus))
        assert output.count(BLOCK.format(host=host, world=3, nodes=2, gpus=gpus, port=port)) == 1
    assert "x 3 (ranks) = 3" in output0 and "Saved the final model" in output0
    assert {match[1] for match in LINES.finditer(output0)} == {
        "Effective",
        "Steps per epoch",
        "Baseline",
        "Step ",
        "Eval",
        "Saved",
    }
    assert not LINES.search(output1 + errors0 + errors1)


def test_a_refusal_ends_both_nodes_with_its_code(folder: Path) -> None:
    """The master comes first; the data is broken, which is known when both have met."""
    (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
    port = a_free_port()
    master = start("launch_node0.sh", "--config", "config.yaml", cwd=folder, MASTER_PORT=port)
    time.sleep(1)
    worker = start("launch_node1.sh", "--config", "config.yaml", cwd=folder, MASTER_PORT=port)
    for code, output, errors in (end(master), end(worker)):
        assert code == 2, errors
        assert "Training Configuration:" in output
        assert re.search(r"^ERROR: .*train.jsonl:1: has no field", errors, re.MULTILINE)
        assert re.fullmatch(r"ERROR: data.eval: 1 of 1 record broken - .*", errors.splitlines()[-1])
        assert errors.count("ERROR: data.eval: 1 of 1 record broken - ") == 1


def test_a_process_that_is_killed_ends_both_nodes(folder: Path) -> None:
    """It can say nothing itself, as when memory ran out: the torchrun of its node does, to node 0 as well."""
    port, endless = (
        a_free_port(),
        ("--config", "config.yaml", "train.max_steps=9999", "train.epochs=9999"),
    )
    master = start("launch_node0.sh", *endless, cwd=folder, MASTER_PORT=port)
    worker = start("launch_node1.sh", *endless, cwd=folder, MASTER_PORT=port)
    assert master.stdout is not None
    for line in master.stdout:
        if line.startswith("Step 2/"):
            break
    (torchrun,) = children(worker.pid)
    (rank,) = children(torchrun)
    os.kill(rank, signal.SIGKILL)
    for node in (worker, master):
        code, _, errors = end(node)
        last = errors.splitlines()[-1]
        said = f"rank 1 on {socket.gethostname()}: ended without a word, last seen in "
        assert code == 1 and last.startswith(f"ERROR: {said}"), errors
        require_documented("running", last)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "launch_node0.sh",
            "node 1 of 2 did not come to node 0 within 2 s - start launch_node1.sh on it with MASTER_ADDR=127.0.0.1 "
            "MASTER_PORT={port}; if it runs, its own log says what it sees, and `nc -vz 127.0.0.1 {port}` there",
        ),
        (
            "launch_node1.sh",
            "no node 0 came to 127.0.0.1:{port} within 2 s, 127.0.0.1 refuses connections to node 1",
        ),
    ],
)
def test_a_node_that_waits_in_vain(script: str, words: str, folder: Path) -> None:
    port = a_free_port()
    code, _, errors = end(
        start(script, "--config", "config.yaml", cwd=folder, MASTER_PORT=port, JOIN_TIMEOUT="2")
    )
    (line,) = errors.splitlines()
    assert code == 2 and line.startswith(f"ERROR: {words.format(port=port)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_is_ended_while_it_waits(number: signal.Signals, folder: Path) -> None:
    here = {"MASTER_PORT": a_free_port(), "TMPDIR": str(folder)}  # what SIGKILL leaves behind
    node = start("launch_node0.sh", "--config", "config.yaml", cwd=folder, **here)
    assert node.stdout is not None
    while "waiting for node 1 of 2" not in node.stdout.readline():
        assert node.poll() is None
    (preflight,) = children(node.pid)
    helpers = children(preflight)
    node.send_signal(number)
    code, _, errors = end(node)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        line = f"ERROR: ended by {number.name} during the preflight - run the same command again\n"
        assert (code, errors) == (1, line)
        require_documented("preflight", line.strip())
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{process}").exists() for process in (preflight, *helpers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launch_that_is_ended_before_its_preflight_hears(
    number: signal.Signals, folder: Path
) -> None:
    """While Python looks at its version, and while the preflight imports, which this one never ends to do."""
    (folder / "begins").mkdir()
    (folder / "begins/sitecustomize.py").write_text(
        "import sys, time\nif any('distTest.preflight' in a for a in sys.orig_argv):\n"
        "    print('imports', flush=True)\n    time.sleep(60)\n",
        encoding="utf-8",
    )
    line = f"ERROR: ended by {number.name} during the preflight - run the same command again\n"
    for said in ("GPUs per Node: 1\n", "imports\n"):
        here = {
            "MASTER_PORT": a_free_port(),
            "PYTHONPATH": str(folder / "begins"),
            "TMPDIR": str(folder),
        }
        node = start("launch_node0.sh", "--config", "config.yaml", cwd=folder, **here)
        assert node.stdout is not None
        while node.stdout.readline() != said:
            assert node.poll() is None
        node.send_signal(number)
        code, _, errors = end(node)
        assert (code, errors) == (1, line), said
        assert not list(folder.glob("shardtune.*"))


def test_a_preflight_that_is_killed(folder: Path) -> None:
    node = start(
        "launch_node0.sh", "--config", "config.yaml", cwd=folder, MASTER_PORT=a_free_port()
    )
    assert node.stdout is not None
    while "waiting for node 1 of 2" not in node.stdout.readline():
        assert node.poll() is None
    (preflight,) = children(node.pid)
    os.kill(preflight, signal.SIGKILL)
    code, _, errors = end(node)
    last = errors.splitlines()[-1]
    assert code == 1 and last.startswith("ERROR: the preflight ended without a word (code 137) - ")
    require_documented("preflight", last)


def refused(cwd: Path, **settings: str) -> list[str]:
    """The errors of a node 0 that refuses by itself, and has the shortest time to tell the others."""
    alone = {"JOIN_TIMEOUT": "1", "MASTER_PORT": a_free_port()}
    code, output, errors = end(
        start("launch_node0.sh", "--config", "config.yaml", cwd=cwd, **alone | settings)
    )
    lines = errors.splitlines()
    assert (
        code == 2
        and "Training" not in output
        and all(re.fullmatch(r"ERROR: .+ - .+", line) for line in lines)
    )
    return [re.sub(r"^ERROR: (node \S+ \(.+?\): )?", "", line) for line in lines]


def test_bad_settings_are_refused_together(folder: Path) -> None:
    lines = refused(
        folder, NNODES="two", GPUS_PER_NODE="0", MASTER_PORT="29600x", JOIN_TIMEOUT="soon"
    )
    assert [line.split()[0] for line in lines] == [
        "MASTER_PORT",
        "NNODES",
        "GPUS_PER_NODE",
        "JOIN_TIMEOUT",
    ]
    assert "NODE_RANK is '2' and NNODES '2'" in refused(folder, NODE_RANK="2")[0]
    assert "NODE_RANK is 'one'" in refused(folder, NODE_RANK="one")[0]
    (line,) = refused(folder, MASTER_ADDR="0.0.0.0")
    assert line.startswith("MASTER_ADDR is '0.0.0.0', which is no machine's address - ")


def test_help(folder: Path) -> None:
    code, output, errors = end(start("launch_node1.sh", "--help", cwd=folder))
    assert (code, errors) == (0, "") and "usage: " in output and "Launching" not in output
    contract = {**DEFAULTS, "JOIN_TIMEOUT": "300"}
    said = dict(re.findall(r"^  ([A-Z_]+)(?:=(\S+))?  ", output, re.MULTILINE))
    assert said == contract | {"NODE_RANK": ""}
    alone = subprocess.run(
        [sys.executable, "-m", "distTest.preflight", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (alone.returncode, alone.stdout) == (0, output)
    code, output, errors = end(
        start("launch_node1.sh", "-h", cwd=folder, VIRTUAL_ENV=str(folder / "gone"))
    )
    assert code == 2 and "MASTER_ADDR=" in output and errors.startswith("ERROR: there is no ")


def test_an_interface_that_this_node_lacks(folder: Path) -> None:
    (line,) = refused(folder, NCCL_SOCKET_IFNAME="eth77", NNODES="1")
    assert "NCCL_SOCKET_IFNAME is 'eth77'" in line
    assert all(name in line for _, name in socket.if_nameindex())
    for value in ("=eth0", "^docker0", "eth0,eth1"):
        (line,) = refused(folder, NCCL_SOCKET_IFNAME=value, NNODES="1")
        assert line.startswith(
            f"NCCL_SOCKET_IFNAME is '{value}', and exactly one interface's name is wanted - "
        ), line
        require_documented("preflight", f"ERROR: {line}")
    (line,) = refused(
        folder, NCCL_SOCKET_IFNAME="eth77"
    )  # and nothing of an address that only another makes wrong
    assert "NCCL_SOCKET_IFNAME is 'eth77'" in line


def test_a_carriage_return_in_the_settings(folder: Path) -> None:
    """As a file of settings from another system leaves one: it is shown, and not obeyed."""
    settings = {
        "MASTER_ADDR": "127.0.0.1\r",
        "NCCL_SOCKET_IFNAME": "lo\r",
        "MASTER_PORT": "1\r",
        "JOIN_TIMEOUT": "1",
    }
    code, output, errors = end(
        start("launch_node0.sh", "--config", "config.yaml", cwd=folder, **settings)
    )
    assert (
        code == 2
        and "\nMaster: $'127.0.0.1\\r':$'1\\r'\n" in output
        and "\r" not in output + errors
    )
    assert "ERROR: " in errors.splitlines()[-1] and "MASTER_ADDR is '127.0.0.1?'" in errors


def test_a_directory_that_is_gone(folder: Path) -> None:
    """As when a checkout was moved, and the terminal stayed."""
    (folder / "gone").mkdir()
    gone = f"cd {folder}/gone && rmdir {folder}/gone && exec {REPOSITORY}/launch_node0.sh"
    done = subprocess.run(
        ["bash", "-c", gone],
        env=environment(NNODES="1"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    line = "ERROR: the directory that this was started in does not exist any more - `cd` into one that does"
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("name", ["preflight", "rehearse"])
def test_a_tool_that_is_run_as_a_file(name: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / f"distTest/{name}.py", "--help"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and "usage: " in done.stdout.lower()


def test_no_room_for_temporary_files(folder: Path) -> None:
    code, _, errors = end(start("launch_node0.sh", cwd=folder, TMPDIR=str(folder / "nowhere")))
    line = f"ERROR: no temporary folder can be made in {folder}/nowhere - make room there, or set TMPDIR"
    assert code == 2 and errors.splitlines()[-1] == line
    require_documented("preflight", line)


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_environment_that_is_gone(name: str, folder: Path) -> None:
    gone = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""} | {name: str(folder / "gone")}
    code, output, errors = end(start("launch_node1.sh", cwd=folder, **gone))
    assert code == 2 and output.count("\n") == 6
    assert (
        errors.startswith(f"ERROR: there is no {folder}/gone/bin/python - ")
        and errors.count("\n") == 1
    )
    require_documented("preflight", errors.strip())


def test_a_python_that_is_too_old(folder: Path) -> None:
    old = a_python(folder / "bin", "python")
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    code, output, errors = end(start("launch_node1.sh", cwd=folder, VIRTUAL_ENV=str(folder)))
    assert code == 2 and output.count("\n") == 6
    assert re.fullmatch(rf"ERROR: {old} is older than Python 3\.11, .+ - activate .+\n", errors)
    require_documented("preflight", errors.strip())


def a_python(path: Path, name: str) -> Path:
    """A Python that says which one it is and what it was asked to do, and ends with 0."""
    path.mkdir(parents=True)
    file = path / name
    file.write_text('#!/bin/sh\necho "$0 $*"\n', encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_the_choice_of_python(tmp_path: Path) -> None:
    """The active environment's, else .venv beside the script, else python3; and what torchrun is told."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("launch_node0.sh", "distTest/launch.sh"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, copy / name)
    active = a_python(tmp_path / "active/bin", "python")
    conda = a_python(tmp_path / "conda/bin", "python")
    beside = a_python(copy / ".venv/bin", "python")
    found = a_python(tmp_path / "path", "python3")

    def said(**settings: str) -> str:
        without = {name: value for name, value in environment(**settings).items() if value}
        without["PATH"] = f"{found.parent}:{without['PATH']}"
        done = subprocess.run(
            [copy / "launch_node0.sh", "--config", "my own.yaml", "train.epochs=1"],
            env=without,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.splitlines()[-1]

    assert said(
        VIRTUAL_ENV=str(tmp_path / "active"), CONDA_PREFIX=str(tmp_path / "conda")
    ).startswith(f"{active} ")
    assert said(VIRTUAL_ENV="", CONDA_PREFIX=str(tmp_path / "conda")).startswith(f"{conda} ")
    command = said(
        VIRTUAL_ENV="",
        JOIN_TIMEOUT="7",
        MASTER_PORT="29601",
        GPUS_PER_NODE="4",
        NNODES="3",
        NODE_RANK="2",
    )
    assert re.sub(r" --log_dir=\S+/torchrun", "", command) == (
        f"{beside} -P -m shardtune.cluster.torchrun --nnodes=3 --node_rank=2 --nproc_per_node=4 --master_addr=127.0.0.1 "
        f"--master_port=29601 --rdzv_conf=timeout=7 {copy}/train_fsdp.py --config my own.yaml train.epochs=1"
    )
    beside.unlink()
    assert said(VIRTUAL_ENV="").startswith(f"{found} ")


def test_the_defaults_are_the_guides(tmp_path: Path) -> None:
    """Nothing is sent anywhere: the Python that is found only prints its arguments. `sh` may start the script too."""
    a_python(tmp_path / "bin", "python")
    known = {
        name: value
        for name, value in environment(VIRTUAL_ENV=str(tmp_path)).items()
        if name not in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "GPUS_PER_NODE")
    }
    done = subprocess.run(
        ["sh", "launch_node1.sh"],
        cwd=REPOSITORY,
        env=known,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(
        BANNER.format(role="WORKER", node=1, port=29600, nodes=2, gpus=8).replace(
            "127.0.0.1", "10.11.7.50"
        )
    )
    assert (
        "--nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=10.11.7.50 --master_port=29600"
        in done.stdout
    )


def test_a_slurm_job(tmp_path: Path) -> None:
    """What `sbatch` and `srun` do, on two nodes of different size; a Python that only prints its arguments."""
    a_python(tmp_path / "bin", "python")
    stubs = {
        "scontrol": '[ "$*" = "show hostnames n[7-8]" ] && printf "n7\\nn8\\n"',
        "srun": (
            'while [ "${1#--}" != "$1" ]; do shift; done\n'
            'SLURM_NODEID=0 SLURM_GPUS_ON_NODE=8 "$@" &&\n'
            'SLURM_NODEID=1 SLURM_GPUS_ON_NODE=4 "$@"'
        ),
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    known = environment(VIRTUAL_ENV=str(tmp_path), **slurm)
    for name in ("MASTER_ADDR", "GPUS_PER_NODE"):
        del known[name]
    spooled = shutil.copy(REPOSITORY / "launch_slurm.sbatch", tmp_path / "slurm_script")
    done = subprocess.run(
        ["bash", spooled, "train.epochs=1"],
        cwd=REPOSITORY,
        env=known,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    elsewhere = subprocess.run(
        ["bash", spooled], cwd=tmp_path, env=known, capture_output=True, text=True, check=False
    )
    assert elsewhere.returncode == 2
    assert re.fullmatch(
        rf"ERROR: there is no launch_node0.sh in {tmp_path} - submit from .+\n", elsewhere.stderr
    )
    assert "#SBATCH --ntasks-per-node=1" in Path(spooled).read_text(encoding="utf-8")
    launched = [
        line for line in done.stdout.splitlines() if "-m shardtune.cluster.torchrun" in line
    ]
    for line, node, gpus in zip(launched, (0, 1), (8, 4), strict=True):
        assert (
            f"--nnodes=2 --node_rank={node} --nproc_per_node={gpus} --master_addr=n7 --master_port=29600"
            in line
        )
        assert line.endswith("train_fsdp.py train.epochs=1")


def test_the_problem_of_a_node_is_the_last_line_of_its_log(folder: Path) -> None:
    """Node 1 goes on to look for node 0, to tell it."""
    done = subprocess.run(
        [str(REPOSITORY / "launch_node1.sh")],
        cwd=folder,
        env=environment(MASTER_PORT=a_free_port(), JOIN_TIMEOUT="1", NCCL_SOCKET_IFNAME="eth77"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and any(" looks for node 0: " in line for line in lines)
    assert lines[-1].startswith("ERROR: ") and "NCCL_SOCKET_IFNAME is 'eth77'" in lines[-1]
