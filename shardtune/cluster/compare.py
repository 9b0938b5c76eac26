"""Compares the facts of all nodes: differences that are refused, or warned of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardtune.cluster.child import Message
from shardtune.cluster.node_info import digest_of
from shardtune.errors import first_few

_MOST_LINES = 10
_SKEW_REFUSED_S = 30.0
_SKEW_WARNED_S = 1.0
_FREE_DISK_BYTES = 10e9
# Bytes of a checkpoint per byte of bfloat16 weights: float32 weights and two moments.
_CHECKPOINT_PER_WEIGHT = 6
_SHM_BYTES = 1 << 29
_FILES = 1024
_SAME_VERSIONS = "install the same requirements.txt on every node"
_SAME_CODE = "bring every node to the same commit, without changes of its own"
_SAME_CONFIG = "start every node with the same configuration"
_SAME_FILES = "copy the same files to every node"
_SAME_VARIABLE = "set it on every node, or on none"


def problems_of_files(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Describe everything in which a node differs from node 0, as `<what> - <what to do>`.

    `names[k]` is how lines call node k. Consequences stand before their cause, because the last
    line is read first.
    """
    problems = [
        f"{_clock(fact, name, names[0])} - set the clocks (chronyd, ntpd or timedatectl)"
        for fact, name in zip(facts, names, strict=True)
        if abs(fact["clock_ahead_s"]) > _SKEW_REFUSED_S
    ]
    problems += _mount_problems(facts, names)
    problems += _differences("environment", facts, names, _SAME_VARIABLE)
    comparable = [_files_at_the_same_paths(fact, facts[0]) for fact in facts]
    problems += _differences("data", comparable, names, _SAME_FILES)
    problems += _differences("model", comparable, names, _SAME_FILES, lambda file: file["shown"])
    problems += _world_problems(facts, names)
    problems += _differences("config", facts, names, _SAME_CONFIG)
    problems += _differences("versions", facts, names, _SAME_VERSIONS)
    problems += _differences("code", facts, names, _SAME_CODE)
    return problems


def _files_at_the_same_paths(fact: Message, first: Message) -> Message:
    """Replace a node's files by node 0's where their paths differ: that alone is reported."""
    other = {key for key, value in first["config"].items() if fact["config"].get(key) != value}
    data = {
        file: shown
        for source, is_taken in ((fact, False), (first, True))
        for file, shown in source["data"].items()
        if (file.partition(": ")[0] in other) == is_taken
    }
    return {"data": data, "model": first["model"] if "model.path" in other else fact["model"]}


def problems_of_machines(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Describe the differences of libraries, drivers and devices."""
    problems = list(_differences("libraries", facts, names, _SAME_VERSIONS))
    drivers = [fact["driver"] for fact in facts]
    kinds = [_gpu_kinds(fact) for fact in facts]
    for what, values, advice in (
        ("the GPU driver", drivers, "install the same one on every node"),
        ("the GPU", kinds, "use nodes of one kind"),
    ):
        problems += [
            f"{what} is {values[0]} on {names[0]} and {value} on {name} - {advice}"
            for value, name in zip(values, names, strict=True)
            if value != values[0] and values[0] and value
        ]
    if len({fact["device"] for fact in facts}) > 1:
        devices = " and ".join(
            f"{fact['device']}s on {name}" for fact, name in zip(facts, names, strict=True)
        )
        problems.append(
            f"some nodes would train on CPUs, others on GPUs ({devices}) - run nvidia-smi there"
        )
    return problems


def warnings_of(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Describe differences that may be meant, and limits that may be reached later."""
    warnings = list(_differences("tuning", facts, names, "most of these must be alike"))
    for fact, name in zip(facts, names, strict=True):
        warnings += [f"{name}: {text}" for text in _machine_warnings(fact)]
        skew_s = abs(fact["clock_ahead_s"]) - fact["clock_error_s"]
        if skew_s > _SKEW_WARNED_S and abs(fact["clock_ahead_s"]) <= _SKEW_REFUSED_S:
            clock = _clock(fact, name, names[0])
            warnings.append(f"{clock}: lines of different logs will not match")
    return warnings


def agreement(facts: Sequence[Message]) -> list[str]:
    """Describe what all nodes have in common, in a few lines."""
    first = facts[0]
    versions = first["versions"] | first["libraries"]
    installed = ", ".join(
        f"{name} {version}" for name, version in versions.items() if version != "none"
    )
    digests = ", ".join(
        f"{key} {digest_of(first[key])}"
        for key in ("code", "config", "data", "model")
        if first[key]
    )
    where = (
        "shared by all nodes"
        if all(fact["shares_run_dir"] for fact in facts)
        else "on each node's own disk"
    )
    free = " and ".join(f"{fact['free_disk_bytes'] / 1e9:.0f}" for fact in facts[:8])
    place = f" is {where}" if len(facts) > 1 else ""
    run_dir = f"run.dir {first['run_dir']}{place}, {free} GB free"
    return [installed, f"digests: {digests}", run_dir, *first["remarks"]]


def _differences(
    kind: str,
    facts: Sequence[Message],
    names: Sequence[str],
    advice: str,
    shown: Callable[[Any], Any] = lambda v: v,
) -> Iterator[str]:
    """Yield a line for each key whose value differs from node 0's, up to a number of lines."""
    first: Mapping[str, Any] = facts[0][kind]
    lines = []
    for fact, name in zip(facts[1:], names[1:], strict=True):
        for key in dict.fromkeys([*first, *fact[kind]]):
            here, there = (
                _text(shown(values[key])) if key in values else "missing"
                for values in (first, fact[kind])
            )
            if here != there:
                lines.append(f"{key} is {here} on {names[0]} and {there} on {name} - {advice}")
    if len(lines) > _MOST_LINES:  # first, because the last line is read first
        yield f"{len(lines) - _MOST_LINES} more differences in {kind} - {advice}"
    yield from lines[:_MOST_LINES]


def _text(value: Any) -> str:
    """Write a value as YAML does."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _world_problems(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    counts = [fact["processes"] for fact in facts]
    world = sum(counts)
    config = facts[0]["config"]
    replicate, expert = config["parallel.replicate"], config["parallel.expert"]
    size = f"{world} ({' + '.join(map(str, counts))} processes on {', '.join(names)})"
    if world % replicate:
        return [
            f"the world size is {size}, which parallel.replicate={replicate} does not divide - "
            "change GPUS_PER_NODE or that"
        ]
    if (world // replicate) % expert:
        return [
            f"the world size is {size}, and parallel.expert={expert} does not divide {world} / "
            f"{replicate} (parallel.replicate) - change GPUS_PER_NODE or one of them"
        ]
    return []


def _mount_problems(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Refuse a run.dir that some nodes share and others do not: all may, or each has its own."""
    shared, others = (
        [name for fact, name in zip(facts, names, strict=True) if fact["shares_run_dir"] == shares]
        for shares in (True, False)
    )
    if len(shared) < 2 or not others:
        return []
    return [
        f"run.dir {facts[0]['run_dir']} is one directory on {first_few(shared, _MOST_LINES)} and "
        f"another on {first_few(others, _MOST_LINES)} - mount it on every node, or give each node "
        "a disk of its own"
    ]


def _machine_warnings(fact: Message) -> Iterator[str]:
    for number, gpu in enumerate(fact["gpus"]):
        if gpu["free_bytes"] < 0.9 * gpu["total_bytes"]:
            by = f" (processes on its GPUs: {fact['gpu_users']})" if fact["gpu_users"] else ""
            free = f"{gpu['free_bytes'] / 1e9:.1f} of {gpu['total_bytes'] / 1e9:.1f} GB"
            yield f"GPU {number} has only {free} free, another process holds the rest{by}"
    free, needed = fact["free_disk_bytes"], _CHECKPOINT_PER_WEIGHT * fact["weights_bytes"]
    needed = max(_FREE_DISK_BYTES, needed)
    if free < needed:
        yield (
            f"run.dir {fact['run_dir']} has {free / 1e9:.1f} GB free, a checkpoint may need up to "
            f"{needed / 1e9:.0f} GB"
        )
    if fact["shm_bytes"] < _SHM_BYTES and (fact["processes"] or 0) > 1:
        yield (
            f"/dev/shm has {fact['shm_bytes'] / 1e6:.0f} MB, NCCL wants {_SHM_BYTES / 1e6:.0f} "
            "(docker: --shm-size)"
        )
    if 0 <= fact["nofile"] < _FILES:
        yield f"only {fact['nofile']} open files are allowed (ulimit -n), {_FILES} are safe"
    if fact["rdma_ports"] and 0 <= fact["memlock"] < math.inf and fact["device"] == "GPU":
        yield (
            f"only {fact['memlock']} bytes may be locked in memory (ulimit -l), RDMA wants no limit"
        )


def devices(fact: Message) -> str:
    """Describe a node's devices: `8 x NVIDIA H100 80GB HBM3`."""
    return f"{fact['processes']} x {_gpu_kinds(fact) or 'CPU process'}"


def _gpu_kinds(fact: Message) -> str:
    return " and ".join(dict.fromkeys(gpu["name"] for gpu in fact["gpus"]))


def _clock(fact: Message, name: str, first: str) -> str:
    side = "ahead of" if fact["clock_ahead_s"] > 0 else "behind"
    return f"the clock of {name} is {abs(fact['clock_ahead_s']):.1f} s {side} that of {first}"
