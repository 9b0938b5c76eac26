"""docs/troubleshooting.md: every message that it quotes is made to happen, here or by the tests that name its kind."""

from __future__ import annotations

import ast
import datetime
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, a_free_port, needs_namespaces
from helpers.documented import DOCUMENT, MET, QUOTES, is_in
from helpers.launches import environment
from helpers.ranks import on_ranks

SECONDS = datetime.timedelta(seconds=1)


def torchrun_alone(node: int) -> str:
    """What a node says when the other one does not come, or when something else listens at its port."""
    port = a_free_port()
    options = [
        f"--node_rank={node}",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
        "--rdzv_conf=timeout=2",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        *options,
        "distTest/demo_reduce.py",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    return done.stderr


def port_taken(folder: Path) -> str:
    with socket.create_server(("", 0)) as listener:
        try:
            dist.TCPStore(
                "127.0.0.1", listener.getsockname()[1], 2, is_master=True, timeout=2 * SECONDS
            )
        except dist.DistNetworkError as error:
            return f"torch.distributed.DistNetworkError: {error}"
    raise AssertionError("the port was free")


def on_two_ranks(work: Callable[[], None]) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        done = on_ranks(2, work, cwd=folder, grace_s=8)
        assert done.returncode != 0
        return done.stderr

    return run


def one_in_the_barrier() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DIST_INIT_BARRIER": "1"}
    dist.init_process_group("gloo", timeout=SECONDS)


def no_such_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    dist.init_process_group("gloo")


def one_has_ended() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        time.sleep(1)
        dist.all_reduce(torch.ones(1))
    os._exit(0)


def others_than_each_other(impatient: int = 0) -> None:
    """The impatient one gives up first."""
    dist.init_process_group(
        "gloo", timeout=SECONDS * (1 if int(os.environ["RANK"]) == impatient else 30)
    )
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def others_in_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    others_than_each_other()


# A part of each quote, and what makes torch say it.
TORCH: dict[str, Callable[[Path], str]] = {
    "clients joined": lambda folder: torchrun_alone(0),
    "client socket has timed out": lambda folder: torchrun_alone(1),
    "Timed out initializing process group": on_two_ranks(one_in_the_barrier),
    "EADDRINUSE": port_taken,
    "Unable to find address": on_two_ranks(no_such_interface),
    "by peer": on_two_ranks(one_has_ended),
    "for recv operation": on_two_ranks(functools.partial(others_than_each_other, 1)),
    "for send operation": on_two_ranks(others_than_each_other),
    "Detected mismatch": on_two_ranks(others_in_detail),
}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.full] if "Timed out init" in part else [])
        for part in TORCH
    ],
)
def test_what_torch_says(part: str, tmp_path: Path) -> None:
    (quote,) = [quote for quote in QUOTES["torch"] if part in quote]
    said = TORCH[part](tmp_path)
    assert is_in(quote, said), said


def test_every_message_of_torch_has_a_test() -> None:
    assert len(QUOTES["torch"]) == len(TORCH)


def said_by_python(file: Path) -> Iterator[str]:
    """Of each literal `<what> - <what to do>` of a module `<what>`, and what it calls `what`; NUL for what varies."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    named = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "what"
    ]
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif isinstance(node, ast.Constant) and node not in parts + docstrings:
            text = str(node.value)
        what, dash, _ = text.partition(" - ")
        if what.strip() and (dash or node in named):
            yield what.splitlines()[-1]


def said_by_bash(file: Path) -> Iterator[str]:
    script = file.read_text(encoding="utf-8").replace("\\\n", "")
    for text in re.findall(r"""(?:ERROR: |line=["'])([^"]*) - """, script):
        yield re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+", "\0", text)


def test_every_message_of_ours_is_quoted() -> None:
    """What a launch can end with, as its source has it: the parts of it that do not vary stand in a quote, in order."""
    rehearsal = ("rehearse", "terminals", "namespaces", "tiny", "demo_reduce")
    modules = [
        file for file in (REPOSITORY / "distTest").glob("*.py") if file.stem not in rehearsal
    ]
    modules += [
        REPOSITORY / "shardtune" / name for name in ("watchdog.py", "world.py", "signals.py")
    ]
    said = [text for file in modules for text in said_by_python(file)]
    said += said_by_bash(REPOSITORY / "distTest/launch.sh")
    assert len(said) > 60
    quotes = [quote for kind in ("preflight", "running") for quote in QUOTES[kind]]
    for text in said:
        fixed = ".*".join(map(re.escape, re.sub("^(ERROR: |\0: )", "", text).split("\0")))
        assert any(re.search(fixed, quote) for quote in quotes), text.replace("\0", "<...>")


@pytest.mark.met
@needs_namespaces
@pytest.mark.parametrize("kind", ["preflight", "running"])
def test_every_message_of_ours_is_met(kind: str) -> None:
    """By the tests that ran before."""
    assert set(QUOTES[kind]) <= {*MET.read_text(encoding="utf-8").splitlines()}


def test_the_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", DOCUMENT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT)) <= anchors


@pytest.mark.full
def test_the_ladder(tmp_path: Path, models: dict[str, Path]) -> None:
    """Its commands on one machine, over CPU and loopback; rehearsal and demo_reduce.py have tests of their own."""
    for name in ("train_fsdp.py", "launch_node0.sh", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    model = tmp_path / "models/SmolLM2-135M-Instruct"
    shutil.copytree(models["llama"], model)
    longer = (
        (model / "config.json")
        .read_text(encoding="utf-8")
        .replace('"max_position_embeddings": 512', '"max_position_embeddings": 1024')
    )
    (model / "config.json").write_text(longer, encoding="utf-8")
    commands = re.findall(r"^\| one .+? \| `(.+?)` \|", DOCUMENT, re.MULTILINE)
    assert len(commands) == 2
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = environment(PATH=path, MASTER_PORT=a_free_port(), GPUS_PER_NODE="2")
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=here,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0 and "Step 2/2 | Loss" in done.stdout, done.stdout + done.stderr
