"""Short measurements with as many processes as the run: collectives, and a GEMM in each."""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardtune.cluster.child import Child, Message, Pipe, results
from shardtune.errors import first_line

_PART_TIMEOUT_S = 30.0
_ALL_TIMEOUT_S = 120.0
_AFTER_FAILURE_S = 2.0
_REDUCED_BYTES = {"CPU": 1 << 20, "GPU": 64 << 20}
_REDUCTIONS = {"CPU": 2, "GPU": 10}
_SMALL_REDUCTIONS = 10
_GEMM_SIZE = {"CPU": 256, "GPU": 8192}
_GEMMS = {"CPU": 40, "GPU": 20}
_SLOW = 0.8  # of the median


def measure(job: Message) -> Message:
    """Fork this node's ranks, measure, and return the figures or `problems`.

    `job`: logs (an empty folder), node, name, sizes (processes of each node), device, address,
    port. torch has been imported, and CUDA has not been used.
    """
    first = sum(job["sizes"][: job["node"]])
    local = job["sizes"][job["node"]]
    logs = [Path(job["logs"]) / f"rank{number}" for number in range(local)]
    names = [f"{job['name']}, rank {first + number}" for number in range(local)]
    for log in logs:
        log.with_suffix(".part").write_text("its start", encoding="utf-8")
    children = [
        Child(name, _be_rank, job, first + number, number, str(log))
        for number, (name, log) in enumerate(zip(names, logs, strict=True))
    ]

    def late(number: int) -> str:
        part = (logs[number].with_suffix(".part")).read_text(encoding="utf-8")
        return (
            f"{names[number]} did not finish within {_ALL_TIMEOUT_S:.0f} s, it was in {part} - "
            "see the log above"
        )

    reports = results(children, _ALL_TIMEOUT_S, late, _AFTER_FAILURE_S)
    problems = [problem for report in reports for problem in report.get("problems") or ()]
    if problems:
        shown = next(number for number, report in enumerate(reports) if report.get("problems"))
        print(_tail(logs[shown]), end="", file=sys.stderr, flush=True)
        return {"problems": problems[:1]}
    return {
        "problems": [],
        "inside": min(report["inside"] for report in reports),
        "between": min(report["between"] for report in reports),
        "latency_s": max(report["latency_s"] for report in reports),
        "flops": [report["flops"] for report in reports],
        "transport": transport(logs[0].read_text(errors="replace")) if logs[0].exists() else "",
    }


def table(figures: Sequence[Message], devices: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Tabulate one line a node: bus bandwidth of the all-reduces as nccl-tests defines it."""
    rows = [
        (
            "node",
            "host",
            "devices",
            "all-reduce inside",
            "of all nodes",
            "latency",
            "GEMM per device",
        )
    ]
    if transports := {figure["transport"] for figure in figures if figure["transport"]}:
        rows[0] = (*rows[0][:4], f"of all nodes ({', '.join(sorted(transports))})", *rows[0][5:])
    for node, (figure, device, host) in enumerate(zip(figures, devices, hosts, strict=True)):
        flops = [value / 1e12 for value in figure["flops"]]
        rows.append(
            (
                str(node),
                host,
                device,
                _rate(figure["inside"]),
                _rate(figure["between"]) if len(figures) > 1 else "-",
                f"{1e6 * figure['latency_s']:.0f} us" if figure["latency_s"] else "-",
                f"{min(flops):.3g}..{max(flops):.3g} TFLOP/s",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def warnings_of(
    figures: Sequence[Message], facts: Sequence[Message], names: Sequence[str]
) -> list[str]:
    """Warn of devices that multiply much more slowly than the median, and of unused RDMA ports."""
    median = statistics.median(value for figure in figures for value in figure["flops"])
    warnings = [
        f"{name}: device {number} is slow, its GEMM runs at {value / 1e12:.3g} TFLOP/s, the median "
        f"of all at {median / 1e12:.3g}: every step will wait for it (temperature, power limit, "
        "another process)"
        for name, figure in zip(names, figures, strict=True)
        for number, value in enumerate(figure["flops"])
        if value < _SLOW * median
    ]
    warnings += [
        f"{name}: NCCL uses sockets although RDMA ports are active ({fact['rdma_ports']}): steps "
        "may be many times slower (NCCL_IB_DISABLE, NCCL_IB_HCA, the RDMA libraries, `ibv_devinfo`)"
        for name, figure, fact in zip(names, figures, facts, strict=True)
        if figure["transport"] == "sockets" and fact["rdma_ports"]
    ]
    return warnings


def transport(log: str) -> str:
    """Read the network that NCCL took from its log: `InfiniBand`, `RoCE`, `sockets`, or empty."""
    if "NET/IB : Using" in log:
        return "RoCE" if "/RoCE" in log else "InfiniBand"
    return "sockets" if "NET/Socket : Using" in log else ""


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else "-"


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "".join(f"  {line}\n" for line in text.splitlines()[-lines:])


def _be_rank(pipe: Pipe, job: Message, rank: int, local_rank: int, log: str) -> None:
    """Measure as one rank. Each part is noted in a file before it begins."""
    import torch
    import torch.distributed as dist

    _write_output_to(log, job["device"])
    part = Path(log).with_suffix(".part")

    def begin(what: str) -> None:
        part.write_text(what, encoding="utf-8")

    kind, sizes = job["device"], job["sizes"]
    device = torch.device("cuda", local_rank) if kind == "GPU" else torch.device("cpu")
    if kind == "GPU":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_PART_TIMEOUT_S)
    try:
        begin("the GEMM")
        flops = _gemm_flops(torch, device, kind)
        begin("the rendezvous of the ranks")
        store = dist.TCPStore(
            job["address"], job["port"], sum(sizes), rank == 0, timeout, wait_for_workers=False
        )
        dist.init_process_group(
            "nccl" if kind == "GPU" else "gloo",
            store=store,
            rank=rank,
            world_size=sum(sizes),
            timeout=timeout,
            device_id=device if kind == "GPU" else None,
        )
        begin("the all-reduce inside the node")
        groups = [
            dist.new_group(range(sum(sizes[:node]), sum(sizes[: node + 1])))
            for node in range(len(sizes))
        ]
        inside = _reduce_rate(torch, device, kind, groups[job["node"]], sizes[job["node"]])
        begin("the all-reduce of all nodes")
        between = _reduce_rate(torch, device, kind, None, sum(sizes))
        begin("the small all-reduces of all nodes")
        latency_s = _latency_s(torch, device, sum(sizes))
        begin("the end")
        _leave_together(store, rank, sum(sizes), timeout)
        pipe.send({"inside": inside, "between": between, "latency_s": latency_s, "flops": flops})
    except Exception as error:
        print(f"rank {rank}, {part.read_text(encoding='utf-8')}: {error}", flush=True)
        why = first_line(error).partition(" This is typically caused by")[0][:300]  # gloo guesses
        problem = (
            f"{job['name']}, rank {rank}: {part.read_text(encoding='utf-8')} failed ({why}) - the "
            "same with NCCL_DEBUG=INFO, or TORCH_DISTRIBUTED_DEBUG=DETAIL on every node, says more"
        )
        pipe.send({"problems": [problem]})
    os._exit(0)  # closing the groups would wait for the others


def _write_output_to(log: str, kind: str) -> None:
    """Send this process's output to a file, unless the user asks for more of it by a variable."""
    asked = os.environ.keys() & {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"}
    if asked or os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR") != "ERROR":  # the agent's default
        return
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if kind == "GPU":  # NCCL names the network that it takes
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def _leave_together(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Wait for all ranks: another may still need this one's connections, and rank 0's store."""
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(size)], timeout)
    if rank > 0:
        store.set(f"left/{rank}", "")
    else:
        store.wait([f"left/{other}" for other in range(1, size)], timeout)


def _gemm_flops(torch: Any, device: Any, kind: str) -> float:
    """Measure the best of a few multiplications, in operations a second.

    On a CPU that is a second of this thread's, since several may share a core.
    """
    size = _GEMM_SIZE[kind]
    dtype = torch.bfloat16 if kind == "GPU" else torch.float32
    factors = [torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)]
    torch.matmul(*factors)
    times = []
    clock = time.perf_counter if kind == "GPU" else time.thread_time
    for _ in range(_GEMMS[kind]):
        _wait_for(torch, device)
        started = clock()
        torch.matmul(*factors)
        _wait_for(torch, device)
        times.append(clock() - started)
    return 2 * size**3 / min(times)


def _reduce_rate(torch: Any, device: Any, kind: str, group: Any, ranks: int) -> float:
    """Measure the bus bandwidth of an all-reduce in bytes a second; 0 for one rank.

    It is 2 (n - 1) / n x size / time, as in nccl-tests (PERFORMANCE.md).
    """
    import torch.distributed as dist

    values = torch.ones(_REDUCED_BYTES[kind] // 4, device=device)
    if ranks == 1:
        return 0.0
    dist.all_reduce(values, group=group)
    _wait_for(torch, device)
    started = time.perf_counter()
    for _ in range(_REDUCTIONS[kind]):
        dist.all_reduce(values, group=group)
    _wait_for(torch, device)
    seconds = (time.perf_counter() - started) / _REDUCTIONS[kind]
    return 2 * (ranks - 1) / ranks * _REDUCED_BYTES[kind] / seconds


def _latency_s(torch: Any, device: Any, ranks: int) -> float:
    import torch.distributed as dist

    if ranks == 1:
        return 0.0
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    _wait_for(torch, device)
    started = time.perf_counter()
    for _ in range(_SMALL_REDUCTIONS):
        dist.all_reduce(value)
    _wait_for(torch, device)
    return (time.perf_counter() - started) / _SMALL_REDUCTIONS


def _wait_for(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
