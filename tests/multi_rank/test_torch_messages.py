"""Make each message of torch happen that docs/troubleshooting.md quotes."""

import datetime
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.commands import REPOSITORY, a_free_port, completed
from helpers.documented import QUOTES, is_in
from helpers.ranks import on_ranks

SECONDS = datetime.timedelta(seconds=1)


def torchrun_alone(node: int) -> str:
    """Return the output of one of two nodes, to which the other one does not come."""
    where = f"--node_rank={node} --master_addr=127.0.0.1 --master_port={a_free_port()}"
    options = f"--nnodes=2 {where} --rdzv_conf=timeout=2 distTest/demo_reduce.py"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    done = completed(command, cwd=REPOSITORY, timeout_s=240)
    assert done.returncode == 1
    return done.stderr


def port_taken(folder: Path) -> str:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(dist.DistNetworkError) as error:
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=2 * SECONDS)
    return f"torch.distributed.DistNetworkError: {error.value}"


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


def different_collectives(impatient: int = 0) -> None:
    """Let the impatient rank give up first."""
    dist.init_process_group(
        "gloo", timeout=SECONDS * (1 if int(os.environ["RANK"]) == impatient else 30)
    )
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def different_collectives_in_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    different_collectives()


# A part of each quote, and the mistake that makes torch say it.
TORCH: dict[str, Callable[[Path], str]] = {
    "clients joined": lambda folder: torchrun_alone(0),
    "client socket has timed out": lambda folder: torchrun_alone(1),
    "Timed out initializing process group": on_two_ranks(one_in_the_barrier),
    "EADDRINUSE": port_taken,
    "Unable to find address": on_two_ranks(no_such_interface),
    "by peer": on_two_ranks(one_has_ended),
    "for recv operation": on_two_ranks(functools.partial(different_collectives, 1)),
    "for send operation": on_two_ranks(different_collectives),
    "Detected mismatch": on_two_ranks(different_collectives_in_detail),
}


_SLOW = ("clients joined", "client socket has timed out", "Timed out initializing process group")


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.full] if part in _SLOW else []) for part in TORCH],
)
def test_torch_prints_the_quoted_message(part, tmp_path):
    (quote,) = [quote for quote in QUOTES["torch"] if part in quote]
    said = TORCH[part](tmp_path)
    assert is_in(quote, said), said


def test_every_quoted_message_of_torch_has_a_mistake():
    assert len(QUOTES["torch"]) == len(TORCH)
