"""Short measurements with as many processes as the run: collectives, and a GEMM in each."""

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import synchronize

from shardtune.cluster.child import Child, Message, Pipe, results
from shardtune.errors import first_line

_PART_TIMEOUT_S = 30.0
_ALL_TIMEOUT_S = 120.0


def measure(job: Message) -> Message:
    """Fork this node's ranks, measure, and return the figures or `problems`.

    `job`: logs (an empty folder), node, name, sizes (processes of each node), stages, backend,
    address, port. CUDA has not been used in this process.
    """
    first = sum(job["sizes"][: job["node"]])
    local_ranks = range(job["sizes"][job["node"]])
    names = [f"{job['name']}, rank {first + local_rank}" for local_rank in local_ranks]
    logs = [Path(job["logs"]) / f"rank{local_rank}" for local_rank in local_ranks]
    for log in logs:
        log.touch()
    children = [
        Child(names[local_rank], _be_rank, job, first + local_rank, local_rank, logs[local_rank])
        for local_rank in local_ranks
    ]

    def late(number: int) -> str:
        text = logs[number].read_text(encoding="utf-8", errors="replace")
        begun = re.findall(rf"^rank {first + number} begins (.+)$", text, re.MULTILINE)
        where = f" (last seen in {begun[-1]})" if begun else ""
        within = f"within {_ALL_TIMEOUT_S:.0f} s"
        return f"{names[number]} did not finish {within}{where} - see the log above"

    reports = results(children, _ALL_TIMEOUT_S, late)
    for report, log in zip(reports, logs, strict=True):
        if report.get("problems"):
            text = log.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines()[-15:]:
                print(f"  {line}", file=sys.stderr, flush=True)
            return {"problems": report["problems"][:1]}
    return {
        "inside": min(report["inside"] for report in reports),
        "between": min(report["between"] for report in reports),
        "latency_s": max(report["latency_s"] for report in reports),
        "flops": [report["flops"] for report in reports],
        "transport": transport(logs[0].read_text(encoding="utf-8", errors="replace")),
    }


def transport(log: str) -> str:
    """Read the network that NCCL took from its log: `InfiniBand`, `RoCE`, `sockets`, or empty."""
    if "NET/IB : Using" in log:
        return "RoCE" if "/RoCE" in log else "InfiniBand"
    return "sockets" if "NET/Socket : Using" in log else ""


def _be_rank(pipe: Pipe, job: Message, rank: int, local_rank: int, log: Path) -> None:
    if not os.environ.keys() & {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"}:  # else to the terminal
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # NCCL names the network that it takes.
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    torch.set_num_threads(1)
    part = ""

    def begin(name: str) -> None:
        """Log the measurement that begins: a rank may never return from it."""
        nonlocal part
        part = name
        with log.open("a", encoding="utf-8") as file:
            file.write(f"rank {rank} begins {part}\n")

    try:
        pipe.send(_measure(job, rank, local_rank, begin))
    except Exception as error:
        print(f"rank {rank}, {part}: {error}", flush=True)
        why = first_line(error).partition(" This is typically caused by")[0][:300]  # gloo guesses
        problem = (
            f"{job['name']}, rank {rank}: {part} failed ({why}) - the same with NCCL_DEBUG=INFO, "
            "or TORCH_DISTRIBUTED_DEBUG=DETAIL on every node, says more"
        )
        pipe.send({"problems": [problem]})
    os._exit(0)  # closing the groups would wait for the others


def _measure(
    job: Message, rank: int, local_rank: int, begin: Callable[[str], None]
) -> dict[str, float]:
    """Return this rank's figures: bytes a second, seconds, and operations a second."""
    is_gpu, sizes = job["backend"] == "nccl", job["sizes"]
    world_size = sum(sizes)
    device = torch.device("cuda", local_rank) if is_gpu else torch.device("cpu")
    timeout = timedelta(seconds=_PART_TIMEOUT_S)
    begin("the GEMM")
    if is_gpu:
        torch.cuda.set_device(device)
    flops = _gemm_flops(device)
    begin("the rendezvous of the ranks")
    store = dist.TCPStore(
        job["address"], job["port"], world_size, rank == 0, timeout, wait_for_workers=False
    )
    dist.init_process_group(
        job["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if is_gpu else None,
    )
    begin("the all-reduce inside the node")
    ends = list(accumulate(sizes))
    ranks = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    own_node, _ = dist.new_subgroups_by_enumeration(ranks)
    inside = _bus_bytes_per_s(device, own_node)
    begin("the all-reduce of all nodes")
    between = _bus_bytes_per_s(device, dist.group.WORLD)
    if job["stages"] > 1:
        begin("the messages between the stages")
        _exchange(device, world_size // job["stages"])
    begin("the small all-reduces of all nodes")
    value = torch.ones(1, device=device)
    latency_s = _seconds(lambda: dist.all_reduce(value), 10, device)
    begin("the end")
    # Another rank may still need this one's connections, and rank 0's store.
    synchronize(store, b"", rank, world_size, "done/", _PART_TIMEOUT_S)
    return {"inside": inside, "between": between, "latency_s": latency_s, "flops": flops}


def _exchange(device: torch.device, stage_ranks: int) -> None:
    """Send a message to the rank of the next stage; the last stage sends to the first.

    An all-reduce need not use these paths.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.ones(2, 1 << 18, device=device)
    messages = [
        dist.P2POp(dist.isend, sent, (rank + stage_ranks) % size),
        dist.P2POp(dist.irecv, received, (rank - stage_ranks) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    torch.get_device_module(device).synchronize()


def _gemm_flops(device: torch.device) -> float:
    """Measure the fastest of many multiplications, in operations a second: ranks may share a
    core."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(_seconds(lambda: a @ b, 1, device) for _ in range(40))


def _bus_bytes_per_s(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Measure the bus bandwidth of an all-reduce in bytes a second; 0 for one rank.

    It is 2 (n - 1) / n x size / time, as in nccl-tests (PERFORMANCE.md).
    """
    n_bytes, times = (64 << 20, 10) if device.type == "cuda" else (1 << 20, 2)
    values, ranks = torch.ones(n_bytes // 4, device=device), dist.get_world_size(group)
    seconds = _seconds(lambda: dist.all_reduce(values, group=group), times, device)
    return 2 * (ranks - 1) / ranks * n_bytes / seconds


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize
    work()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times
