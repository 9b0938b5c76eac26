"""The launch scripts: two nodes on this machine's loopback, their banners, their choices and their
exit codes."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, a_free_port, piped, read_metrics, wait_until
from helpers.documented import require_error_line
from helpers.launches import descendants, end, environment, start

from shardtune.cluster.environment import DEFAULTS
from shardtune.distributed.measured import CPU, read_measured

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
CONFIG = "--config=config.yaml"
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


@pytest.mark.full
def test_one_node_trains(folder):
    """Through a symbolic link, from another directory; nothing stays in the folder of temporary
    files."""
    (folder / "elsewhere").mkdir()
    (folder / "temporary").mkdir()
    script = folder / "elsewhere/train"
    script.symlink_to(REPOSITORY / "launch_node0.sh")
    port = a_free_port()
    given = ("--config=../config.yaml", "data.train=../train.jsonl", "data.eval=../train.jsonl")
    settings = {"NNODES": "1", "GPUS_PER_NODE": "2", "TMPDIR": str(folder / "temporary")}
    there = folder / "elsewhere"
    code, output, errors = end(start(script, *given, cwd=there, MASTER_PORT=port, **settings))
    assert code == 0, errors
    assert not list((folder / "temporary").iterdir())
    assert output.startswith(BANNER.format(role="MASTER", node=0, port=port, nodes=1, gpus=2))
    assert BLOCK.format(host=socket.gethostname(), world=2, nodes=1, gpus=2, port=port) in output
    assert [step["step"] for step in read_metrics(there / "runs/config", "step")] == [1, 2]


@pytest.mark.full
def test_two_nodes_of_different_size_train(folder):
    """The worker comes first; only node 0 tells the run, and one process a node where it runs."""
    port = a_free_port()
    worker = start("launch_node1.sh", CONFIG, cwd=folder, MASTER_PORT=port)
    time.sleep(1)
    master = start("launch_node0.sh", CONFIG, cwd=folder, MASTER_PORT=port, GPUS_PER_NODE="2")
    (code0, output0, errors0), (code1, output1, errors1) = end(master), end(worker)
    assert (code0, code1) == (0, 0), errors0 + errors1
    host = socket.gethostname()
    assert read_measured(folder / "runs/config", 1, 3, lambda _: True).ranks == []
    measured = json.loads((folder / "runs/config/preflight.json").read_text())
    assert (measured["ranks"], measured["device"]) == ([2, 1], CPU)
    for output, role, node, gpus in ((output0, "MASTER", 0, 2), (output1, "WORKER", 1, 1)):
        assert output.startswith(BANNER.format(role=role, node=node, port=port, nodes=2, gpus=gpus))
        assert output.count(BLOCK.format(host=host, world=3, nodes=2, gpus=gpus, port=port)) == 1
    assert "x 3 (ranks) = 3" in output0 and "Saved the final model" in output0
    told = {"Effective", "Steps per epoch", "Baseline", "Step ", "Eval", "Saved"}
    assert {match[1] for match in LINES.finditer(output0)} == told
    assert not LINES.search(output1 + errors0 + errors1)


@pytest.mark.full
def test_a_refusal_ends_both_nodes_with_its_code(folder):
    """The master comes first; the data is broken, which is known when both have met."""
    (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
    port = a_free_port()
    master = start("launch_node0.sh", CONFIG, cwd=folder, MASTER_PORT=port)
    time.sleep(1)
    worker = start("launch_node1.sh", CONFIG, cwd=folder, MASTER_PORT=port)
    for code, output, errors in (end(master), end(worker)):
        assert code == 2, errors
        assert "Training Configuration:" in output
        assert re.search(r"^ERROR: .*train.jsonl:1: has no field", errors, re.MULTILINE)
        last = "ERROR: data.eval: 1 of 1 records broken - "
        assert errors.splitlines()[-1].startswith(last)
        assert errors.count(last) == 1


def test_a_node_that_waits_in_vain_says_so_in_its_last_line(folder):
    """It says so in its last line, and has looked for node 0."""
    port = a_free_port()
    settings = {"MASTER_PORT": port, "JOIN_TIMEOUT": "2"}
    code, output, errors = end(start("launch_node1.sh", CONFIG, cwd=folder, **settings))
    (line,) = errors.splitlines()
    words = f"no node 0 came to 127.0.0.1:{port} within 2 s, 127.0.0.1 refuses connections to node"
    assert code == 2 and line.startswith(f"ERROR: {words} 1 (") and " looks for node 0: " in output


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "GPUs per Node: 1"),  # in its first moments
        (signal.SIGHUP, "GPUs per Node: 1"),
        (signal.SIGINT, "waiting for node 1 of 2"),
        (signal.SIGKILL, "waiting for node 1 of 2"),
    ],
)
def test_a_launch_that_is_ended_before_the_nodes_have_met_leaves_nothing(number, words, folder):
    here = {"MASTER_PORT": a_free_port(), "TMPDIR": str(folder)}
    node = start("launch_node0.sh", CONFIG, cwd=folder, **here)
    assert node.stdout is not None
    while words not in node.stdout.readline():
        assert node.poll() is None
    _, *helpers = descendants(node.pid)
    node.send_signal(number)
    code, _, errors = end(node)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        line = f"ERROR: ended by {number.name} during the preflight - run the same command again\n"
        assert (code, errors) == (1, line)
        require_error_line(line.strip())
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in helpers), 40)
    assert not list(folder.glob("shardtune.*"))


def test_bad_settings_are_refused_together(folder):
    """A carriage return, as from a file of another system, is shown and not obeyed."""
    bad = {"MASTER_ADDR": "127.0.0.1\r", "MASTER_PORT": "29600\r", "NNODES": "two"}
    bad |= {"GPUS_PER_NODE": "0", "JOIN_TIMEOUT": "soon"}
    code, output, errors = end(start("launch_node0.sh", CONFIG, cwd=folder, **bad))
    assert code == 2 and "Training" not in output and "\r" not in output + errors
    assert "\nMaster: '127.0.0.1\\r':'29600\\r'\n" in output
    starts = ["MASTER_PORT is '29600?'", "NNODES is ", "GPUS_PER_NODE is "]
    starts += ["distributed.join_timeout_s =", "MASTER_ADDR is '127.0.0.1?'"]
    for line, words in zip(errors.splitlines(), starts, strict=True):
        assert re.match(rf"ERROR: node \S+ \(.+?\): {re.escape(words)}", line)
        require_error_line(line)


def test_the_help_of_the_scripts_names_every_variable(folder):
    code, output, errors = end(start("launch_node1.sh", "--help", cwd=folder))
    assert (code, errors) == (0, "") and "usage: " in output and "Launching" not in output
    contract = {**DEFAULTS, "JOIN_TIMEOUT": "300", "MAX_RESTARTS": "0"}
    said = dict(re.findall(r"^  ([A-Z_]+)(?:=(\S+))?  ", output, re.MULTILINE))
    assert said == contract | {"NODE_RANK": "", "JOIN_SECRET": ""}


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("is_old", [False, True])
def test_an_environment_that_is_gone_or_too_old_is_refused(name, is_old, folder):
    words = rf"ERROR: {folder}/other/bin/python does not exist - .+\n"
    if is_old:
        a_python(folder / "other/bin", "python").write_text("#!/bin/sh\nexit 1\n")
        words = rf"ERROR: {folder}/other/bin/python is older than Python 3\.11, .+ - activate .+\n"
    other = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""} | {name: str(folder / "other")}
    code, output, errors = end(start("launch_node1.sh", cwd=folder, **other))
    assert (code, output) == (2, "") and re.fullmatch(words, errors)
    require_error_line(errors.strip())


def a_python(path: Path, name: str) -> Path:
    """A Python that prints its name, this node's settings and its arguments, and ends with 0."""
    path.mkdir(parents=True)
    file = path / name
    shown = "$0 $NODE_RANK of $NNODES at $MASTER_ADDR, $GPUS_PER_NODE: $*"
    file.write_text(f'#!/bin/sh\necho "{shown}"\n', encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_the_scripts_take_the_python_of_the_active_environment_first(tmp_path):
    """The active environment's, else .venv beside the script, else python3."""
    copy = tmp_path / "copy"
    active = a_python(tmp_path / "active/bin", "python")
    conda = a_python(tmp_path / "conda/bin", "python")
    beside = a_python(copy / ".venv/bin", "python")
    on_path = a_python(tmp_path / "path", "python3")
    for name in ("launch_node0.sh", "launch_node1.sh"):
        shutil.copy(REPOSITORY / name, copy / name)

    def output(script: str = "launch_node0.sh", **settings: str) -> str:
        known = {name: value for name, value in environment(**settings).items() if value}
        known["PATH"] = f"{on_path.parent}:{known['PATH']}"
        command = ["sh", copy / script, "--config", "my own.yaml", "train.epochs=1"]
        return subprocess.run(
            command, env=known, capture_output=True, text=True, check=True, timeout=240
        ).stdout

    both = {"VIRTUAL_ENV": str(active.parent.parent), "CONDA_PREFIX": str(conda.parent.parent)}
    assert output(**both).startswith(f"{active} ")
    assert output(**both | {"VIRTUAL_ENV": ""}).startswith(f"{conda} ")
    arguments = "-P -m shardtune.cluster --config my own.yaml train.epochs=1\n"
    for script, node in (("launch_node0.sh", "0"), ("launch_node1.sh", "1")):
        shown = output(script, VIRTUAL_ENV="")
        assert shown.startswith(f"{beside} {node} of ") and shown.endswith(arguments), shown
    assert output(VIRTUAL_ENV="", NODE_RANK="5").startswith(f"{beside} 5 of ")
    beside.unlink()
    assert output(VIRTUAL_ENV="").startswith(f"{on_path} ")


def slurm_job(tmp_path: Path, srun: str, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the batch script as Slurm does, with stand-ins for `srun` and `scontrol`."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    stubs = {
        "scontrol": (
            'if [ "$*" = "show hostnames n[7-8]" ]; then printf "n7\\nn8\\n"; fi\n'
            'if [ "$1" = requeue ]; then test ! -e never_requeue && echo "$2" >> requeued; fi'
        ),
        "srun": (
            f'echo "$*" > {tmp_path}/srun_options\n'
            f'while [ "${{1#--}}" != "$1" ]; do shift; done\n{srun}'
        ),
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncd {cwd}\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    known = environment(VIRTUAL_ENV=str(tmp_path), **slurm)
    for name in ("MASTER_ADDR", "GPUS_PER_NODE"):
        del known[name]
    spooled = shutil.copy(REPOSITORY / "launch_slurm.sbatch", tmp_path / "slurm_script")
    return piped(["bash", str(spooled), *arguments], cwd, known)


def test_a_slurm_job_starts_every_node(tmp_path):
    """On two nodes of different size."""
    a_python(tmp_path / "bin", "python")
    srun = 'SLURM_NODEID=0 SLURM_GPUS_ON_NODE=8 "$@" &&\nSLURM_NODEID=1 SLURM_GPUS_ON_NODE=4 "$@"'
    srun += f'\nprintf %s "$JOIN_SECRET" > {tmp_path}/secret'
    launched, _ = slurm_job(tmp_path, srun, REPOSITORY, "train.epochs=1").communicate(timeout=240)
    for line, node, gpus in zip(launched.splitlines(), (0, 1), (8, 4), strict=True):
        assert f"{node} of 2 at n7, {gpus}: " in line and line.endswith(" train.epochs=1")
    secret, given = [(tmp_path / name).read_text("utf-8") for name in ("secret", "srun_options")]
    assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in given + launched
    elsewhere = slurm_job(tmp_path, srun, tmp_path)
    refusal = rf"ERROR: there is no launch_node0.sh in {tmp_path} - submit from .+\n"
    assert re.fullmatch(refusal, elsewhere.communicate(timeout=240)[1])
    assert elsewhere.returncode == 2
    script = (REPOSITORY / "launch_slurm.sbatch").read_text(encoding="utf-8")
    options = re.findall("^#SBATCH (.+)$", script.partition("set -eu")[0], re.MULTILINE)
    assert "--kill-on-bad-exit=0 " in given, "the other nodes say why the run ended"
    expected = {"--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=B:USR1@300"}
    assert expected <= {*options}


@pytest.mark.parametrize(
    ("number", "code", "is_requeued"),
    [
        (signal.SIGUSR1, 75, True),  # the time is nearly up
        (signal.SIGUSR1, 75, False),  # Slurm may be set up to requeue no job
        (signal.SIGUSR1, 1, False),
        (signal.SIGTERM, 75, False),  # scancel
        (None, 0, False),
    ],
)
def test_a_slurm_job_that_has_saved_when_its_time_is_up_is_requeued(
    number, code, is_requeued, tmp_path
):
    """The signal reaches the batch shell alone, which passes it to `srun`, and that to the run."""
    cwd = tmp_path / "checkout"
    cwd.mkdir()
    script = cwd / "launch_node0.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"trap 'echo saved; exit {code}' USR1 TERM\n"
        "echo training\n"
        f"for _ in $(seq {600 if number else 1}); do sleep 0.05; done\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    srun = 'SLURM_NODEID=0 SLURM_GPUS_ON_NODE=8 exec "$@"'
    is_refused = (number, code, is_requeued) == (signal.SIGUSR1, 75, False)
    if is_refused:
        (cwd / "never_requeue").touch()
    job = slurm_job(tmp_path, srun, cwd)
    assert job.stdout and job.stdout.readline() == "training\n"
    if number:
        time.sleep(0.2)  # the batch script waits
        job.send_signal(number)
    said, errors = job.communicate(timeout=240)
    assert job.returncode == code
    refusal = r"ERROR: .* does not requeue job 123 - submit the same command again\n"
    assert re.fullmatch(refusal if is_refused else "", errors)
    assert said.startswith("saved\n" if number else "")
    assert ("Requeued: " in said) == is_requeued
    requeued = cwd / "requeued"
    assert (requeued.read_text("utf-8") == "123\n") if is_requeued else not requeued.exists()


@pytest.mark.parametrize(("node", "is_stopped"), [(0, False), (1, False), (1, True)])
def test_a_pod_waits_for_node_0_and_starts_with_its_rank(node, is_stopped, tmp_path):
    """The command of examples/kubernetes.yaml, before and after node 0 listens.

    As the first process of a container it is not ended by a signal that it does not handle.
    """
    text = (REPOSITORY / "examples/kubernetes.yaml").read_text(encoding="utf-8")
    _, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    a_python(tmp_path / "bin", "python")
    known = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    port = a_free_port()
    known |= {"NODE_RANK": f"{node}", "POD_IP": "10.1.2.3", "MASTER_PORT": port}
    known |= {"MASTER_ADDR": "localhost", "VIRTUAL_ENV": str(tmp_path), "PATH": os.environ["PATH"]}
    pod = piped([*container["command"], *container["args"]], REPOSITORY, known)
    if node:
        with pytest.raises(subprocess.TimeoutExpired):
            pod.wait(timeout=0.3)
    if is_stopped:  # its node is drained, or the job is deleted
        pod.terminate()
        assert (*pod.communicate(timeout=240), pod.returncode) == ("", "", 75)
        return
    if node:
        with socket.create_server(("localhost", int(port))):
            said, errors = pod.communicate(timeout=240)
    else:
        said, errors = pod.communicate(timeout=240)
    master = "localhost" if node else "10.1.2.3"
    assert (pod.returncode, errors) == (0, "")
    assert f"{node} of 2 at {master}, 8: " in said
    assert said.endswith(" --config /work/config.yaml run.dir=/work/runs/mine\n")
