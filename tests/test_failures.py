"""What ends a run that is under way: on every node all processes are gone within a minute, the last line says which
rank failed where and why, and the same commands resume. The launch scripts run as two nodes on this machine's loopback,
or as network namespaces where a cable is cut."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, a_free_port, needs_namespaces, read_metrics
from helpers.documented import require_documented
from helpers.launches import (
    ARGUMENTS,
    DATA,
    FORWARD,
    GONE_WITHIN_S,
    break_rank,
    end,
    resumes,
    start,
    two_nodes,
    while_it_imports,
    write_run,
)

from distTest.rehearse import namespaces
from shardtune.cluster.children import is_running
from shardtune.errors import AGAIN

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


@pytest.mark.parametrize(
    ("rank", "effect", "how"),
    [
        (3, "threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()", "by SIGKILL"),
        pytest.param(
            0, "os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL", marks=pytest.mark.full
        ),
        pytest.param(2, "os._exit(7)", "with code 7", marks=pytest.mark.full),
        pytest.param(2, "os._exit(0)", "with code 0", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_while_it_imports(rank: int, effect: str, how: str, folder: Path) -> None:
    """Nobody has met it yet: the nodes are still connected by their preflight."""
    with two_nodes(folder, **while_it_imports(folder, str(rank), effect)) as nodes:
        nodes.wait_for_words("nodes agree")
        for code, last in nodes.end():
            who = "local rank 0 of node 1" if how == "with code 0" else f"rank {rank}"
            said = rf"{who} on {HOST}: ended {how}, before it had met the others - .*"
            assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)
        assert "Training Configuration" not in nodes.texts()[0]


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", ["torchrun", "launch script"])
def test_a_launch_that_is_killed_before_its_ranks_have_met(
    what: str, node: int, folder: Path
) -> None:
    fault = while_it_imports(folder, "train_fsdp.py", "time.sleep(10)")
    (folder / "temporary").mkdir()
    with two_nodes(folder, TMPDIR=str(folder / "temporary"), **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        while nodes.count_ranks() < 4:
            assert all(script.poll() is None for script in nodes.scripts), nodes.texts()
            time.sleep(0.1)
        nodes.remember()
        os.kill(
            nodes.torchrun(node) if what == "torchrun" else nodes.scripts[node].pid, signal.SIGKILL
        )
        ended = nodes.end()
    if what == "torchrun":
        said = rf"torchrun of node {node} on {HOST} was ended by SIGKILL - .*"
        assert re.fullmatch(f"ERROR: {said}", ended[node][1]) and ended[node][0] == 1, nodes.texts()
    else:
        said = rf"node {node} \({HOST}\): its launch script was killed before its ranks had met the others, or .*"
    assert re.fullmatch(f"ERROR: {said}", ended[1 - node][1]) and ended[1 - node][0] == 1, (
        nodes.texts()
    )
    require_documented("running", ended[1 - node][1])
    assert not list((folder / "temporary").iterdir())


@pytest.mark.full
def test_a_torchrun_that_ends_while_it_imports(folder: Path) -> None:
    with two_nodes(
        folder, **while_it_imports(folder, "shardtune.cluster.torchrun", "os._exit(3)")
    ) as nodes:
        nodes.wait_for_words("nodes agree")
        for node, (code, last) in enumerate(nodes.end()):
            said = rf"ended without a word: a process of node {node} on {HOST} - .*"
            assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)


@pytest.mark.full
def test_a_port_that_is_taken_after_the_preflight(folder: Path) -> None:
    listen = "listener = socket.create_server(('', int(os.environ['MASTER_PORT'])))"
    fault = while_it_imports(
        folder, "shardtune.cluster.torchrun", f"if os.environ['NODE_RANK'] == '0': {listen}"
    )
    with two_nodes(folder, **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        for code, last in nodes.end():
            said = rf"node 0 on {HOST} started no process: DistNetworkError: .*EADDRINUSE.* - see the logs of the .*"
            assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)


@pytest.mark.full
def test_a_rank_that_hangs_while_it_imports(folder: Path) -> None:
    """Slow or stuck, nobody can know before the time in which the nodes have to meet is over. It is alone on its node,
    whose torchrun sees nothing wrong."""
    fault = while_it_imports(folder, "1", "time.sleep(3600)")
    with two_nodes(folder, GPUS_PER_NODE="1", JOIN_TIMEOUT="25", **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        time.sleep(25)
        for code, last in nodes.end():
            said = r"(node 0 \(.*\): )?rank 1 of 2 did not come within 25.0 s - start every node within that time, .*"
            assert code == 2 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)


KILLED = r"rank {rank} on {host}: ended without a word, last seen in step \d \(.+\) - most often killed for memory, .*"
CRASHED = r"rank {rank} on {host}: ended by SIGSEGV, last seen in step \d \(.+\) - see what it said above .*"
ENDED = r"rank {{rank}} on {{host}}: ended with code {}, last seen in step \d \(.+\) - see what it said above .*"
STOPPED = r"rank {rank} on {host}: no sign of life for \d+ s, last seen in step \d \(.+\) - its process is stopped or .*"


@pytest.mark.parametrize(
    ("where", "effect", "said"),
    [
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGKILL)", KILLED, marks=pytest.mark.full),
        pytest.param(
            FORWARD,
            "raise ValueError('no such token')",
            r"rank 3 on {host}: ValueError: no such token, in step 5 \(forward and backward\) - see the traceback .*",
            marks=pytest.mark.full,
        ),
        pytest.param(
            FORWARD,
            "sys.exit(0)",
            r"rank 3 on {host}: SystemExit: 0, in step 5 \(forward and backward\) - see the traceback .*",
            marks=pytest.mark.full,
        ),
        pytest.param(DATA, "os._exit(0)", ENDED.format(0), marks=pytest.mark.full),
        pytest.param(DATA, "os._exit(7)", ENDED.format(7), marks=pytest.mark.full),
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGSEGV)", CRASHED, marks=pytest.mark.full),
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGSTOP)", STOPPED, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_or_stops(
    where: tuple[str, str], effect: str, said: str, folder: Path
) -> None:
    with two_nodes(folder, **break_rank(folder, 3, where, effect)) as nodes:
        nodes.wait_for_step(4)
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(f"ERROR: {said.format(rank=3, host=HOST)}", last), (
                nodes.texts()
            )
            require_documented("running", last)
    resumes(folder)


@pytest.mark.parametrize(
    ("rank", "effect", "said"),
    [
        (0, "os._exit(0)", ENDED.format(0)),
        pytest.param(1, "os._exit(0)", ENDED.format(0), marks=pytest.mark.full),
        pytest.param(0, "os.kill(os.getpid(), signal.SIGKILL)", KILLED, marks=pytest.mark.full),
        pytest.param(1, "os.kill(os.getpid(), signal.SIGSEGV)", CRASHED, marks=pytest.mark.full),
    ],
)
def test_a_rank_alone_on_its_node(rank: int, effect: str, said: str, folder: Path) -> None:
    """The torchrun of its node says how it ended; it sees nothing wrong in one that ends with 0."""
    with two_nodes(folder, GPUS_PER_NODE="1", **break_rank(folder, rank, DATA, effect)) as nodes:
        nodes.wait_for_step(4)
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(
                f"ERROR: {said.format(rank=rank, host=HOST)}", last
            ), nodes.texts()
            require_documented("running", last)


@pytest.mark.full
def test_a_rank_that_is_stopped_alone_on_its_node(folder: Path) -> None:
    fault = break_rank(folder, 1, DATA, "os.kill(os.getpid(), signal.SIGSTOP)")
    with two_nodes(folder, GPUS_PER_NODE="1", **fault) as nodes:
        nodes.wait_for_step(4)
        (code0, last0), (code1, last1) = nodes.end()
    assert (code0, code1) == (1, 1), nodes.texts()
    assert re.fullmatch(f"ERROR: {STOPPED.format(rank=1, host=HOST)}", last0), last0
    said = rf"rank 1 on {HOST}, last seen in step \d+ .*: no sign of life for \d+ s, its process was stopped .*"
    assert re.fullmatch(f"ERROR: {said}", last1), last1
    require_documented("running", last1)


@pytest.mark.full
def test_the_rank_that_ended_first(folder: Path) -> None:
    """Both are killed, before one can say what it saw of the other."""
    others = "os.system('(sleep 0.2; kill -9 $(cat $SHARDTUNE_LAUNCH_DIR/processes)) &')"
    fault = break_rank(folder, 1, DATA, f"{others}; os.kill(os.getpid(), signal.SIGKILL)")
    one_node = {"NNODES": "1", "GPUS_PER_NODE": "2", "MASTER_PORT": a_free_port()}
    code, _, errors = end(start("launch_node0.sh", *ARGUMENTS, cwd=folder, **one_node, **fault))
    said = KILLED.format(rank=1, host=HOST)
    assert code == 1 and re.fullmatch(f"ERROR: {said}", errors.splitlines()[-1]), errors


@pytest.mark.full
def test_a_rank_that_is_stopped_before_the_first_step(folder: Path) -> None:
    loading = ("shardtune.training.optim", "build_optimizer")
    fault = break_rank(
        folder, 3, loading, "time.sleep(3); os.kill(os.getpid(), signal.SIGSTOP)", nth=1
    )
    with two_nodes(folder, **fault) as nodes:
        nodes.wait_for_words("Trained tokens")
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(
                rf"ERROR: rank 3 on {HOST}: no sign of life .* loading the model .*", last
            )


@pytest.mark.parametrize(
    ("rank", "ranks_per_node", "where", "phase", "at"),
    [
        (1, 1, DATA, "data", "build_batch"),
        pytest.param(1, 2, DATA, "data", "build_batch", marks=pytest.mark.full),
        pytest.param(2, 2, FORWARD, "forward and backward", "summed_loss", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_does_not_arrive(
    rank: int, ranks_per_node: int, where: tuple[str, str], phase: str, at: str, folder: Path
) -> None:
    fault = break_rank(folder, rank, where, "time.sleep(3600)") | {
        "GPUS_PER_NODE": str(ranks_per_node)
    }
    with two_nodes(folder, "distributed.step_timeout_s=12", **fault) as nodes:
        nodes.wait_for_step(4)
        for code, last in nodes.end():
            said = rf"rank {rank} on {HOST}: did not arrive within 12 s \(at {at}, sitecustomize.py:\d+\), in step 5"
            assert code == 1 and re.match(
                rf"ERROR: {said} \({phase}\) - see its traceback", last
            ), nodes.texts()
            require_documented("running", last)
        its_own = nodes.texts()[rank // ranks_per_node]
        assert (
            f"rank {rank} on {HOST} is here:" in its_own
            and "time.sleep(3600)" in its_own.partition("is here:")[2]
        )


@pytest.mark.parametrize(
    ("node", "ranks_per_node"),
    [(0, 1), *(pytest.param(node, 2, marks=pytest.mark.full) for node in (0, 1))],
)
def test_a_torchrun_that_is_killed(node: int, ranks_per_node: int, folder: Path) -> None:
    size = {"GPUS_PER_NODE": str(ranks_per_node)}
    with two_nodes(folder, **size) as nodes:
        nodes.wait_for_step(4)
        time.sleep(2)  # a rank leaves its place every second
        os.kill(nodes.torchrun(node), signal.SIGKILL)
        ended = nodes.end()
        code, last = ended[node]
        place = rf"rank {ranks_per_node * node} on {HOST}, last seen in step \d+ \(.+\)"
        killed = rf"ERROR: torchrun of node {node} on {HOST} was ended by SIGKILL and its processes with it: {place} - "
        assert code == 1 and re.fullmatch(killed + AGAIN, last), nodes.texts()
        require_documented("running", last)
        code, last = ended[1 - node]
        if node == 0:
            out_of_reach = rf"node 0 \({HOST}\) is out of reach, its torchrun ended or .*"
            said = rf"ERROR: rank [1-3] on {HOST}: {out_of_reach}, in step \d+ .*"
        else:
            said = rf"ERROR: rank 2 on {HOST} \(and rank 3 on {HOST}\): no sign of life .*, last seen in step \d+ .*"
        assert code == 1 and re.fullmatch(said, last), nodes.texts()
        require_documented("running", last)
    resumes(folder, **size)


@pytest.mark.full
def test_a_torchrun_that_is_stopped(folder: Path) -> None:
    """Node 0's, which holds the store."""
    with two_nodes(folder, GPUS_PER_NODE="1") as nodes:
        nodes.wait_for_step(4)
        os.kill(nodes.torchrun(0), signal.SIGSTOP)
        for code, last in nodes.end():
            said = (
                rf"ERROR: rank [01] on {HOST}: node 0 \({HOST}\) is out of reach, .* in step \d+ .*"
            )
            assert code == 1 and re.fullmatch(said, last), nodes.texts()
            require_documented("running", last)


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_a_launch_script_that_is_killed(node: int, folder: Path) -> None:
    """Its torchrun ends as by a signal, so the run is saved."""
    with two_nodes(folder) as nodes:
        nodes.wait_for_step(4)
        nodes.scripts[node].kill()
        ended = nodes.end()
        code, last = ended[1 - node]
        why = f"ERROR: stopped by the end of its launch script on {HOST} after saving step"
        assert code == 75 and why in last and why in nodes.texts()[node], nodes.texts()
    resumes(folder)


@pytest.mark.full
def test_a_launch_script_that_is_killed_while_it_waits(folder: Path) -> None:
    with two_nodes(folder) as nodes:
        nodes.scripts[1].kill()
        time.sleep(6)
        nodes.remember()
        nodes.scripts[0].kill()
        deadline = time.monotonic() + GONE_WITHIN_S
        while any(is_running(pid) for pid in nodes._seen):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_node_that_is_lost(lost: int, how: str, folder: Path) -> None:
    """Nothing comes from it any more, not even the end of its connections."""
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = (places[0].prefix, places[1].prefix)
        place = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}
        with two_nodes(folder, prefixes=prefixes, **place) as nodes:
            nodes.wait_for_step(4)
            time.sleep(2)  # a rank posts its place every second
            places[lost].ip("link", "set", places[lost].interface, "down")
            if how == "power":
                places[lost].kill_all()
            ended = nodes.end()
        silent = r"rank 2 on node1 \(and rank 3 on node1\): no sign of life for \d+ s, last seen in step \d+ .*"
        no_store = r"rank [23] on node1: node 0 \(node0\) is out of reach, .* 10.11.7.50:\d+ has not answered for 40 s"
        no_store += r", in step .*"
        for node, said in enumerate((silent, no_store)):
            code, last = ended[node]
            if how == "cable" or node != lost:
                assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
                require_documented("running", last)
    resumes(folder)


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("cause", ["an error", "a second signal"])
def test_a_rank_that_ends_while_node_0_cannot_be_reached(cause: str, folder: Path) -> None:
    """It is alone on its node, and what it asks of the store is never answered."""
    effect, said = {
        "an error": (
            "time.sleep(11); raise OSError(116, 'Stale file handle')",
            r"rank 1 on node1: OSError: .*, in step 5 .*",
        ),
        "a second signal": (
            "time.sleep(9999)",
            r"ended by a second signal, SIGTERM, without a save - .*",
        ),
    }[cause]
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = (places[0].prefix, places[1].prefix)
        place = {
            "MASTER_ADDR": "10.11.7.50",
            "NCCL_SOCKET_IFNAME": "enp26s0np0",
            "GPUS_PER_NODE": "1",
        }
        fault = break_rank(folder, 1, DATA, effect)
        with two_nodes(folder, prefixes=prefixes, **place, **fault) as nodes:
            nodes.wait_for_step(4)
            time.sleep(2)  # its save asks the store, before the fifth step begins
            places[0].ip("link", "set", places[0].interface, "down")
            for pause_s in (3, 4) * (cause == "a second signal"):
                time.sleep(pause_s)
                nodes.scripts[1].terminate()
            (code0, last0), (code1, last1) = nodes.end()
    assert code0 == 1 and re.match("ERROR: rank 1 on node1: no sign of life for ", last0), (
        nodes.texts()
    )
    assert code1 == 1 and re.fullmatch(f"ERROR: {said}", last1), nodes.texts()
    require_documented("running", last1)


def torchrun(*options: str, folder: Path, **settings: str) -> subprocess.Popen[str]:
    script = [str(REPOSITORY / "train_fsdp.py"), *ARGUMENTS, "train.max_steps=12"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *script],
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
def test_torchrun_starts_the_ranks_again(folder: Path) -> None:
    fault = break_rank(
        folder,
        1,
        DATA,
        "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), 9)",
    )
    run = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1", folder=folder, **fault)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert (
        f"ERROR: rank 1 on {HOST}: ended without a word" in said
        and "Resumed from checkpoint_000000" in said
    )
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))


@pytest.mark.full
def test_torchrun_goes_on_with_the_nodes_that_are_left(folder: Path) -> None:
    """The two ranks of node 1 die with their torchrun; node 0 starts again, without them."""
    port = a_free_port()
    options = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=7",
        "--nnodes=1:2",
    ]
    options += ["--nproc_per_node=2", "--max-restarts=2"]
    fault = break_rank(folder, 3, DATA, "os.kill(os.getppid(), 9)")
    first = torchrun(*options, "--rdzv-conf=is_host=1", folder=folder)
    second = torchrun(*options, "--rdzv-conf=is_host=0", folder=folder, **fault)
    said, _ = first.communicate(timeout=200)
    second.communicate(timeout=10)
    assert first.returncode == 0, said
    assert "Resumed from checkpoint_000000" in said and "world size was 4, is 2" in said
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))
