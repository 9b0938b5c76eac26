"""Compares the facts and figures of all nodes: refuses, warns of and shows differences."""

import statistics
from collections.abc import Sequence

from shardtune.cluster.control import Message
from shardtune.cluster.node_info import digest_of
from shardtune.config import ParallelConfig
from shardtune.distributed.layout import Layout
from shardtune.errors import first_few
from shardtune.units import gb

_MOST_LINES = 10
_SKEW_REFUSED_S = 30.0
_SLOW = 0.8  # relative to the median
# Facts that all nodes must share, each with its remedy. A cause stands behind its consequences,
# because people read the last line first.
_ADVICE = {
    "devices": "use nodes of one kind; where a GPU is missing, run nvidia-smi",
    "environment": "set it on every node, or on none",
    "data": "copy the same files to every node",
    "model": "copy the same files to every node",
    "config": "start every node with the same configuration",
    "versions": "install the same requirements.txt on every node",
    "code": "bring every node to the same commit, without changes of its own",
}


def problems_of(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Describe everything in which a node differs from node 0, as `<what> - <what to do>`.

    `names[k]` is how lines call node k.
    """
    problems = []
    shared = [name for fact, name in zip(facts, names, strict=True) if fact["shares_run_dir"]]
    others = [name for name in names if name not in shared]
    if len(shared) > 1 and others:  # nodes may share it or have disks of their own
        problems.append(
            f"run.dir {facts[0]['run_dir']} is one directory on {first_few(shared, _MOST_LINES)} "
            f"and another on {first_few(others, _MOST_LINES)} - mount it on every node, or give "
            "each node a disk of its own"
        )
    counts = [fact["processes"] for fact in facts]
    config = facts[0]["config"]
    degrees = {key: int(config[f"parallel.{key}"]) for key in ParallelConfig.model_fields}
    nodes_of_ranks = [node for node, count in enumerate(counts) for _ in range(count)]
    problems += Layout.divided(len(nodes_of_ranks), degrees).problems(nodes_of_ranks)
    for fact, name in zip(facts, names, strict=True):
        if abs(fact["clock_ahead_s"]) > _SKEW_REFUSED_S:
            side = "ahead of" if fact["clock_ahead_s"] > 0 else "behind"
            problems.append(
                f"the clock of {name} is {abs(fact['clock_ahead_s']):.1f} s {side} that of "
                f"{names[0]} - set the clocks (chronyd, ntpd or timedatectl)"
            )
    for kind, advice in _ADVICE.items():
        problems += _differences(kind, facts, names, advice)
    return problems


def _differences(
    kind: str, facts: Sequence[Message], names: Sequence[str], advice: str
) -> list[str]:
    """Give a line for each key whose value differs from node 0's, up to a number of lines."""
    first = facts[0][kind]
    lines = []
    for fact, name in zip(facts, names, strict=True):
        for key in first | fact[kind]:
            here, there = (values.get(key, "missing") for values in (first, fact[kind]))
            if here != there:
                lines.append(f"{key} is {here} on {names[0]} and {there} on {name} - {advice}")
    if (more := len(lines) - _MOST_LINES) > 0:
        return [f"{more} more differences in {kind} - {advice}", *lines[:_MOST_LINES]]
    return lines


def agreement(facts: Sequence[Message]) -> list[str]:
    first = facts[0]
    installed = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    digests = ", ".join(
        f"{kind} {digest_of(first[kind])}"
        for kind in ("code", "config", "data", "model")
        if first[kind]
    )
    where = ""
    if len(facts) > 1:
        is_shared = all(fact["shares_run_dir"] for fact in facts)
        where = " is shared by all nodes"
        if not is_shared:
            is_mirrored = first["config"]["checkpoint.mirror"] != "false"
            end = ", mirrored" if is_mirrored else ", and checkpoints are lost with any of them"
            where = f" is on each node's own disk{end}"
    free = " and ".join(gb(fact["free_disk_bytes"], 0) for fact in facts[:8])
    run_dir = f"run.dir {first['run_dir']}{where}, {free} GB free"
    compared = [f"digests: {digests}"] * (len(facts) > 1)
    return [installed, *compared, run_dir, *first["remarks"]]


def table(facts: Sequence[Message], figures: Sequence[Message], hosts: Sequence[str]) -> list[str]:
    """Tabulate one line a node: bus bandwidth of the all-reduces as nccl-tests defines it.

    A node alone is one line without a head.
    """
    if len(facts) == 1:
        (fact,), (figure,) = facts, figures
        device = f"{fact['processes']} x {fact['devices']['the device']}"
        return [f"{device}, all-reduce {_rate(figure['inside'])}, {_gemm(figure)} each"]
    transports = ", ".join(sorted({figure["transport"] for figure in figures} - {""}))
    of_all = f"of all nodes ({transports})" if transports else "of all nodes"
    rows = [["node", "host", "devices", "all-reduce inside", of_all, "latency", "GEMM per device"]]
    for node, (fact, figure, host) in enumerate(zip(facts, figures, hosts, strict=True)):
        rows.append(
            [
                str(node),
                host,
                f"{fact['processes']} x {fact['devices']['the device']}",
                _rate(figure["inside"]),
                _rate(figure["between"]),
                f"{1e6 * figure['latency_s']:.0f} us",
                _gemm(figure),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _gemm(figure: Message) -> str:
    tflops = [value / 1e12 for value in figure["flops"]]
    return f"{min(tflops):.3g}..{max(tflops):.3g} TFLOP/s"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else "-"  # one rank has no all-reduce


def warnings_of(
    facts: Sequence[Message], figures: Sequence[Message], names: Sequence[str]
) -> list[str]:
    """Describe differences that may be intended, limits of single nodes, and slow parts."""
    warnings = _differences("tuning", facts, names, "most of these must be alike")
    median = statistics.median(value for figure in figures for value in figure["flops"])
    for name, fact, figure in zip(names, facts, figures, strict=True):
        warnings += [f"{name}: {text}" for text in fact["warnings"]]
        warnings += [
            f"{name}: device {number} is slow, its GEMM runs at {value / 1e12:.3g} TFLOP/s, the "
            f"median of all at {median / 1e12:.3g}: every step will wait for it (temperature, "
            "power limit, another process)"
            for number, value in enumerate(figure["flops"])
            if value < _SLOW * median
        ]
        if figure["transport"] == "sockets" and fact["rdma_ports"]:
            warnings.append(
                f"{name}: NCCL uses sockets although RDMA ports are active ({fact['rdma_ports']}): "
                "steps may be many times slower (NCCL_IB_DISABLE, NCCL_IB_HCA, the RDMA libraries, "
                "`ibv_devinfo`)"
            )
    return warnings
