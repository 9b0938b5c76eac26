"""The memory that a node's processes may still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_memory(
    own: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process's node can give without swapping.

    Slurm, Kubernetes and Docker limit processes by a cgroup (v2), and kill a process that goes
    beyond. Each folder above it may have a limit, too.
    """
    available = [psutil.virtual_memory().available]
    for line in own.read_text(encoding="utf-8").splitlines():
        if line.startswith("0::/"):
            group = cgroups / line.removeprefix("0::/")
            folders = [each for each in (group, *group.parents) if each.is_relative_to(cgroups)]
            available += [_available_in(each) for each in folders if (each / "memory.max").exists()]
    return max(0, min(available))


def _available_in(cgroup: Path) -> int:
    """Return the limit less the memory in use; cached files count as free, for they can go."""
    limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
    if limit == "max":
        return psutil.virtual_memory().total
    stat = dict(map(str.split, (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()))
    cached = int(stat["inactive_file"]) + int(stat["active_file"])
    return int(limit) - int((cgroup / "memory.current").read_text(encoding="ascii")) + cached
