"""How the processes of a run find one another and become a world."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from shardtune.config import DistributedConfig
from shardtune.distributed.progress import Progress
from shardtune.distributed.world import World, set_collective_timeout
from shardtune.errors import UserError, first_few, first_line

FIRST_STEP_TIMEOUT_S = 1800  # it also compiles, warms up disks and evaluates
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def join_world(config: DistributedConfig, replicate: int = 1) -> World:
    """Meet the other processes that the launcher started; without a launcher, a world of one.

    The ranks make up `replicate` groups of consecutive ranks. Each group shards a whole copy of the
    model.

    Raises:
        UserError: the launcher's environment is incomplete, there are too few GPUs, `replicate`
            does not divide the ranks, or not everyone came in time.
    """
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        raise UserError(
            f"the environment sets only some of a launcher's variables, {', '.join(missing)} not - "
            "start with torchrun, or unset RANK and WORLD_SIZE for one process"
        )
    alone = bool(missing)
    rank, size, local_rank = (
        (0, 1, 0) if alone else map(_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    )
    local_size = 1 if alone else _variable("LOCAL_WORLD_SIZE", size)
    node_rank = 0 if alone else _variable("GROUP_RANK", rank // local_size)
    device, backend = _device_and_backend(config.backend, local_rank)
    if size % replicate:
        raise UserError(
            f"parallel.replicate={replicate} does not divide the world size, {size} - "
            "use a number that does"
        )
    timeout = datetime.timedelta(seconds=config.join_timeout_s)
    progress = Progress(device)
    store: dist.Store
    try:
        if alone:
            store = dist.HashStore()
        else:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            store = _meet(store, rank, size, config.join_timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {size} did not meet the others at {address} within "
            f"{config.join_timeout_s} s ({first_line(error)}) - start every node within that time, "
            "with one MASTER_ADDR and MASTER_PORT that all of them reach"
        ) from error
    shape = {"replicate": replicate, "shard": size // replicate}
    if replicate == 1:
        del shape["replicate"]
    mesh = dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    set_collective_timeout(max(FIRST_STEP_TIMEOUT_S, config.step_timeout_s), mesh)
    store = dist.PrefixStore("shardtune", store)
    return World(rank, size, local_rank, local_size, node_rank, device, mesh, store, progress)


def _meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return a part of the store for these processes alone, when every rank has come.

    A launcher keeps its store when it starts the ranks again, with all that the last ones left
    there, and nodes may count the restarts differently. So rank 0 names the attempt and the ranks
    that it has seen, until each rank has found itself there.

    Raises:
        UserError: some ranks did not come in time.
    """
    me = secrets.token_hex(8)
    hello_keys, here_keys = ([f"{name}/{r}" for r in range(size)] for name in ("hello", "here"))
    store.set(hello_keys[rank], me)
    attempt: dict[str, Any] = {"seen": []}
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while True:
        if rank == 0:
            seen = [store.get(key).decode() if store.check([key]) else "" for key in hello_keys]
            if seen != attempt["seen"]:
                store.set("attempt", json.dumps({"id": secrets.token_hex(8), "seen": seen}))
        if store.check(["attempt"]):
            attempt = json.loads(store.get("attempt"))
            if attempt["seen"][rank : rank + 1] == [me]:
                own = dist.PrefixStore(attempt["id"], store)
                own.set(here_keys[rank], "")
                if own.check(here_keys):
                    return own
        if time.monotonic() > deadline:
            late = [str(r) for r, key in enumerate(hello_keys) if not store.check([key])]
            raise UserError(
                f"rank {first_few(late, 8) or 'that was started again'} of {size} did not come "
                f"within {timeout_s} s - start every node within that time, and look at the logs "
                "of those that did not come"
            )
        time.sleep(pause_s)
        pause_s = min(0.2, 1.5 * pause_s)


def _variable(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(str(value))
    except ValueError as error:
        raise UserError(
            f"the environment has {name}={value}, which is not a number - start with torchrun"
        ) from error


def _device_and_backend(backend: str, local_rank: int) -> tuple[torch.device, str]:
    """gloo always serves CPU tensors; nccl serves the GPUs' when there are any."""
    has_gpu = torch.cuda.is_available()
    if backend == "nccl" and not has_gpu:
        raise UserError(
            "distributed.backend is nccl and this node has no GPU - use distributed.backend=auto"
        )
    if backend == "gloo" or not has_gpu:
        return torch.device("cpu"), "gloo"
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU, this node has {torch.cuda.device_count()} - "
            "start at most one process per GPU (--nproc_per_node, GPUS_PER_NODE)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def describe(world: World) -> str:
    """The `Training Configuration:` block of this node."""
    # Without a launcher an address may be set all the same, and is not used.
    launched = "RANK" in os.environ
    master = "none, a single process"
    if launched:
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    nodes = os.environ.get("GROUP_WORLD_SIZE") if launched else None
    return "\n".join(
        (
            "",
            "Training Configuration:",
            f"  Hostname: {socket.gethostname()}",
            f"  World Size: {world.size}",
            f"  Number of Nodes: {nodes or -(-world.size // world.local_size)}",
            f"  GPUs per Node: {world.local_size}",
            f"  Master: {master}",
            "",
        )
    )
