"""How the processes of a run find one another and become a world."""

import datetime
import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardtune.config import Config
from shardtune.distributed.gpus import unseen_gpus, use_gpu
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import build_meshes
from shardtune.distributed.progress import Progress
from shardtune.distributed.rank_record import FIRST_STEP_TIMEOUT_S
from shardtune.distributed.world import World, set_collective_timeout, wait_for
from shardtune.errors import UserError, first_few, first_line

_LAUNCHER_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def join_world(config: Config) -> World:
    """Meet the other processes that the launcher started; without a launcher, a world of one.

    Raises UserError.
    """
    settings = config.distributed
    is_launched = any(name in os.environ for name in _LAUNCHER_NUMBERS)
    rank, size, local_rank, local_size, node_rank = 0, 1, 0, 1, 0
    if is_launched:
        rank, size, local_rank = _launcher_numbers()
        local_size = _variable("LOCAL_WORLD_SIZE", size)
        node_rank = _variable("GROUP_RANK", rank // local_size)
    device, backend = _device_and_backend(settings.backend, local_rank)
    layout = Layout.of(config, size, device.type == "cuda", native_dtype(device))
    if problems := layout.problems():
        raise UserError(*problems)
    timeout = datetime.timedelta(seconds=settings.join_timeout_s)
    progress = Progress(device)
    store: dist.Store = dist.HashStore()
    try:
        if is_launched:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            store = _meet(store, rank, size, settings.join_timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistBackendError, torch.AcceleratorError) as error:
        raise UserError(
            f"rank {rank} of {size} on {socket.gethostname()}: {device} or NCCL did not start "
            f"({first_line(error)}) - look at `nvidia-smi` there, and at the log with "
            "NCCL_DEBUG=INFO set on every node"
        ) from error
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {size} did not meet the others at {address} within "
            f"{settings.join_timeout_s} s ({first_line(error)}) - start every node within that "
            "time, with one MASTER_ADDR and MASTER_PORT that all of them reach"
        ) from error
    meshes = build_meshes(device, layout)
    set_collective_timeout(max(FIRST_STEP_TIMEOUT_S, settings.step_timeout_s), meshes.groups)
    store = dist.PrefixStore("shardtune", store)
    world = World(rank, layout, local_rank, local_size, node_rank, device, meshes, store, progress)
    if problem := layout.split_by_nodes(world.all_gather_json(node_rank)):
        raise UserError(problem)
    progress.record.stage = world.stage
    return world


def native_dtype(device: torch.device) -> str:
    """Return bfloat16 where the device multiplies it itself, else float32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        native = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return "bfloat16" if native else "float32"


def _launcher_numbers() -> Iterator[int]:
    names = [*_LAUNCHER_NUMBERS, "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        present = ", ".join(name for name in names if name not in missing)
        raise UserError(
            f"the environment has {present} and lacks {', '.join(missing)} - start with torchrun "
            "or a launch script, which set all of them, or unset them"
        )
    return map(_variable, _LAUNCHER_NUMBERS)


def _variable(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(value)
    except ValueError as error:
        raise UserError(
            f"{name} is {value!r}, not a number - start with torchrun or a launch script, or unset "
            "the variables of a launcher"
        ) from error


def _meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Wait for every rank, and return a part of the store that no earlier processes have used.

    A launcher that starts the ranks again keeps its store, with all that the last ones left there.
    Raises UserError.
    """
    attempt = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    store = dist.PrefixStore("/".join([*attempt, str(size)]), store)
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        wait_for(store, keys, timeout_s)
    except TimeoutError as error:
        late = [other for other, key in enumerate(keys) if not store.check([key])]
        raise UserError(
            f"rank {first_few(late, 8)} of {size} did not come within {timeout_s} s - start every "
            "node within that time, and look at the logs of those that did not come"
        ) from error
    return store


def _device_and_backend(backend: str, local_rank: int) -> tuple[torch.device, str]:
    """Return this rank's device and backends: gloo for CPU tensors, nccl for those of GPUs."""
    has_gpu = torch.cuda.is_available()
    if backend != "gloo" and (problem := unseen_gpus()):
        raise UserError(problem)
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
    return use_gpu(local_rank), "cpu:gloo,cuda:nccl"


def describe(world: World) -> str:
    is_launched = "RANK" in os.environ  # without a launcher MASTER_ADDR may be set, but unused
    master, nodes = "none, a single process", 1
    if is_launched:
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-world.size // world.local_size)))
    return f"""
Training Configuration:
  Hostname: {socket.gethostname()}
  World Size: {world.size}
  Number of Nodes: {nodes}
  GPUs per Node: {world.local_size}
  Master: {master}
"""
