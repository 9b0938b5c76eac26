"""The host memory of a node: how much processes may still take, and how they pin it."""

import mmap
from pathlib import Path

import psutil
import torch
from torch.cuda import _pin_memory_utils

from shardtune.errors import RunFailed, first_line
from shardtune.units import gb

_FLAGS = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
)  # pinning takes them
# By the name of a cgroup's controller, "" for v2: the file of its limit, the file of its use, and
# the names of cached files in its statistics.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file", "active_file"),
    "memory": (
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("total_inactive_file", "total_active_file"),
    ),
}


def available_memory(
    own: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process's node can give without swapping.

    Slurm, Kubernetes and Docker limit processes by a cgroup (v1 or v2), and kill a process that
    goes beyond. Each folder above it may have a limit, too.
    """
    available = [psutil.virtual_memory().available]
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controller, path = line.split(":", 2)
        if controller in _FILES:
            root = cgroups / controller
            group = root / path.removeprefix("/")
            folders = [each for each in (group, *group.parents) if each.is_relative_to(root)]
            limit = _FILES[controller][0]
            available += [
                _available_in(each, controller) for each in folders if (each / limit).exists()
            ]
    return max(0, min(available))


def _available_in(cgroup: Path, controller: str) -> int:
    """Return the limit less the memory in use. Cached files can go and count as free."""
    limit, used, *of_files = _FILES[controller]
    most = (cgroup / limit).read_text(encoding="ascii").strip()
    if most == "max":
        return psutil.virtual_memory().total
    stat = dict(map(str.split, (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()))
    cached = sum(int(stat[name]) for name in of_files)
    return int(most) - int((cgroup / used).read_text(encoding="ascii")) + cached


def pinned_zeros(n_bytes: int, use: str, remedy: str) -> torch.Tensor:
    """Return `n_bytes` pinned zero bytes, uint8, which GPUs copy beside their other work.

    They are pinned in place: PyTorch's own pinned memory comes in powers of two. `unpin` must come
    before they are freed. `use` and `remedy` are of the message. Raises RunFailed.
    """
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # New pages are zero already, and writing zeros would take as long as pinning.
    memory = torch.frombuffer(mmap.mmap(-1, n_bytes, flags=_FLAGS), dtype=torch.uint8)
    try:
        _pin_memory_utils.pin_memory(memory.data_ptr(), n_bytes)
    except RuntimeError as error:
        raise RunFailed(
            f"{gb(n_bytes)} GB of host memory for {use} cannot be pinned "
            f"({first_line(error)}) - {remedy}"
        ) from error
    return memory


def unpin(memory: torch.Tensor) -> None:
    _pin_memory_utils.unpin_memory(memory.data_ptr())
