"""What of the nodes' facts keeps them from training together, and what is only worth a warning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardtune.cluster.child import Message
from shardtune.cluster.node_info import digest_of

_MOST_LINES = 10
_SKEW_REFUSED_S = 30.0
_SKEW_WARNED_S = 1.0
_FREE_DISK_BYTES = 10e9
_CHECKPOINT_PER_WEIGHT = (
    6  # float32 weights and two moments, for weights that are stored in 2 bytes
)
_SHM_BYTES = 1 << 29
_FILES = 1024
_SAME_VERSIONS = "install the same requirements.txt on every node"
_SAME_CODE = "bring every node to the same commit, without changes of its own"
_SAME_CONFIG = "start every node with the same configuration"
_SAME_FILES = "copy the same files to every node"
_SAME_VARIABLE = "set it on every node, or on none"


def problems_of_files(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """`<what> - <what to do>` for everything in which a node differs from node 0; `names` is how lines call them.

    What may only follow from something else stands before it: the last line is read first.
    """
    problems = [
        f"{_clock(each, name, names[0])} - set the clocks (chronyd, ntpd or timedatectl)"
        for each, name in zip(facts, names, strict=True)
        if abs(each["clock_ahead_s"]) > _SKEW_REFUSED_S
    ]
    problems += _mount_problems(facts, names)
    problems += _differences("environment", facts, names, _SAME_VARIABLE)
    same = [_at_the_same_paths(each, facts[0]) for each in facts]
    problems += _differences("data", same, names, _SAME_FILES)
    problems += _differences("model", same, names, _SAME_FILES, lambda entry: entry["shown"])
    problems += _world_problems(facts, names)
    problems += _differences("config", facts, names, _SAME_CONFIG)
    problems += _differences("versions", facts, names, _SAME_VERSIONS)
    problems += _differences("code", facts, names, _SAME_CODE)
    return problems


def _at_the_same_paths(each: Message, first: Message) -> Message:
    """Its files, with node 0's own in place of those that lie elsewhere: the path is what differs then."""
    other = {key for key, value in first["config"].items() if each["config"].get(key) != value}
    data = {
        file: told for file, told in each["data"].items() if file.partition(": ")[0] not in other
    }
    data |= {file: told for file, told in first["data"].items() if file.partition(": ")[0] in other}
    return {"data": data, "model": first["model"] if "model.path" in other else each["model"]}


def problems_of_machines(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """The same for what is known of the devices."""
    problems = list(_differences("libraries", facts, names, _SAME_VERSIONS))
    drivers = [each["driver"] for each in facts]
    kinds = [_gpu_kinds(each) for each in facts]
    for what, values, advice in (
        ("the GPU driver", drivers, "install the same one on every node"),
        ("the GPU", kinds, "use nodes of one kind"),
    ):
        problems += [
            f"{what} is {values[0]} on {names[0]} and {value} on {name} - {advice}"
            for value, name in zip(values, names, strict=True)
            if value != values[0] and values[0] and value
        ]
    if len({each["device"] for each in facts}) > 1:
        has = " and ".join(
            f"{each['device']}s on {name}" for each, name in zip(facts, names, strict=True)
        )
        problems.append(
            f"some nodes would train on CPUs, others on GPUs ({has}) - see what nvidia-smi says there"
        )
    return problems


def warnings_of(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """What may be meant, or may go wrong later."""
    found = list(_differences("tuning", facts, names, "most of these must be alike"))
    for each, name in zip(facts, names, strict=True):
        found += [f"{name}: {text}" for text in _machine_warnings(each)]
        skew_s = abs(each["clock_ahead_s"]) - each["clock_error_s"]
        if skew_s > _SKEW_WARNED_S and abs(each["clock_ahead_s"]) <= _SKEW_REFUSED_S:
            found.append(f"{_clock(each, name, names[0])}: lines of different logs will not match")
    return found


def agreement(facts: Sequence[Message]) -> list[str]:
    """What is the same, in a few lines."""
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
        if all(each["shares_run_dir"] for each in facts)
        else "on each node's own disk"
    )
    free = " and ".join(f"{each['free_disk_bytes'] / 1e9:.0f}" for each in facts[:8])
    lines = [installed, f"digests: {digests}"]
    lines.append(
        f"run.dir {first['run_dir']}"
        + (f" is {where}" if len(facts) > 1 else "")
        + f", {free} GB free"
    )
    return [*lines, *first["remarks"]]


def _differences(
    kind: str,
    facts: Sequence[Message],
    names: Sequence[str],
    advice: str,
    shown: Callable[[Any], Any] = lambda v: v,
) -> Iterator[str]:
    """A line for each key that a node has otherwise than node 0, up to a number of lines."""
    first: Mapping[str, Any] = facts[0][kind]
    lines = []
    for each, name in zip(facts[1:], names[1:], strict=True):
        for key in dict.fromkeys([*first, *each[kind]]):
            values = [shown(own[key]) if key in own else "missing" for own in (first, each[kind])]
            if values[0] != values[1]:
                lines.append(
                    f"{key} is {_text(values[0])} on {names[0]} and {_text(values[1])} on {name} - {advice}"
                )
    # The first differences are said last, where they are read first.
    more = (
        [f"{len(lines) - _MOST_LINES} more differences in {kind} - {advice}"]
        if len(lines) > _MOST_LINES
        else []
    )
    yield from more + lines[:_MOST_LINES]


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _world_problems(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    counts = [each["processes"] for each in facts]
    world = sum(counts)
    config = facts[0]["config"]
    replicate, expert = config["parallel.replicate"], config["parallel.expert"]
    told = f"the world size is {world} ({' + '.join(map(str, counts))} processes on {', '.join(names)})"
    if world % replicate:
        return [
            f"{told}, which parallel.replicate={replicate} does not divide - change GPUS_PER_NODE or that"
        ]
    if (world // replicate) % expert:
        return [
            f"{told}, and parallel.expert={expert} does not divide {world} / {replicate} (parallel.replicate) - change "
            "GPUS_PER_NODE or one of them"
        ]
    return []


def _mount_problems(facts: Sequence[Message], names: Sequence[str]) -> list[str]:
    """Of a directory that some nodes share and others do not: all may, or each may have its own."""
    shared, others = (
        [
            name
            for each, name in zip(facts, names, strict=True)
            if each["shares_run_dir"] == is_shared
        ]
        for is_shared in (True, False)
    )
    if len(shared) < 2 or not others:
        return []
    return [
        f"run.dir {facts[0]['run_dir']} is one directory on {_listed(shared)} and another on {_listed(others)} - mount "
        "it on every node, or give each node a disk of its own"
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LINES} more" if len(names) > _MOST_LINES else ""
    return ", ".join(names[:_MOST_LINES]) + more


def _machine_warnings(each: Message) -> Iterator[str]:
    for number, gpu in enumerate(each["gpus"]):
        if gpu["free_bytes"] < 0.9 * gpu["total_bytes"]:
            by = f" (processes on its GPUs: {each['gpu_users']})" if each["gpu_users"] else ""
            free = f"{gpu['free_bytes'] / 1e9:.1f} of {gpu['total_bytes'] / 1e9:.1f} GB"
            yield f"GPU {number} has only {free} free, another process holds the rest{by}"
    need = max(_FREE_DISK_BYTES, _CHECKPOINT_PER_WEIGHT * each["weights_bytes"])
    if each["free_disk_bytes"] < need:
        yield (
            f"run.dir {each['run_dir']} has {each['free_disk_bytes'] / 1e9:.1f} GB free, a checkpoint may need up to "
            f"{need / 1e9:.0f} GB"
        )
    if each["shm_bytes"] < _SHM_BYTES and (each["processes"] or 0) > 1:
        yield f"/dev/shm has {each['shm_bytes'] / 1e6:.0f} MB, NCCL wants {_SHM_BYTES / 1e6:.0f} (docker: --shm-size)"
    if 0 <= each["nofile"] < _FILES:
        yield f"only {each['nofile']} open files are allowed (ulimit -n), {_FILES} are safe"
    if each["rdma_ports"] and 0 <= each["memlock"] < math.inf and each["device"] == "GPU":
        yield f"only {each['memlock']} bytes may be locked in memory (ulimit -l), RDMA wants no limit"


def devices(each: Message) -> str:
    """`8 x NVIDIA H100 80GB HBM3`."""
    return f"{each['processes']} x {_gpu_kinds(each) or 'CPU process'}"


def _gpu_kinds(each: Message) -> str:
    return " and ".join(dict.fromkeys(gpu["name"] for gpu in each["gpus"]))


def _clock(each: Message, name: str, first: str) -> str:
    side = "ahead of" if each["clock_ahead_s"] > 0 else "behind"
    return f"the clock of {name} is {abs(each['clock_ahead_s']):.1f} s {side} that of {first}"
