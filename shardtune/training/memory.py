"""Whether a step fits the memory, and which keys to change where it does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import psutil
import torch

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.errors import OutOfMemory, first_line

# A control group's limit, its use, and the line of memory.stat that counts its cached files.
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@contextlib.contextmanager
def memory_suffices(config: Config, has_saved: Callable[[], object]) -> Iterator[None]:
    """Name the keys that need less memory if a step or an evaluation runs out of it.

    `has_saved`: whether there is a checkpoint; resuming from it forbids to change most of the keys.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    rows, length = config.train.micro_batch_size, config.data.max_length
    noun, verb = ("row", "does") if rows == 1 else ("rows", "do")
    subject = (
        f"{rows} (train.micro_batch_size) {noun} of up to {length} (data.max_length) tokens {verb}"
    )
    with _explain_out_of_memory(subject, lambda: _keys_to_lower(config, bool(has_saved()))):
        yield


def _keys_to_lower(config: Config, has_saved: bool) -> str:
    rows, is_full = config.train.micro_batch_size, config.model.activation_checkpointing == "full"
    if not has_saved:
        lower = "lower one of the two" if rows > 1 else "lower data.max_length"
        return lower if is_full else f"{lower}, or set model.activation_checkpointing=full"
    if not is_full:
        at_resume = "set model.activation_checkpointing=full"
    elif rows > 1:
        at_resume = (
            "lower train.micro_batch_size and raise train.gradient_accumulation_steps as much"
        )
    elif config.parallel.replicate > 1:
        at_resume = "lower parallel.replicate"
    else:
        at_resume = "use more GPUs or nodes"
    return f"{at_resume}, or start anew with another run.dir and a lower data.max_length"


@contextlib.contextmanager
def weights_fit() -> Iterator[None]:
    """Name what helps if the weights, or the optimizer's state of them, run out of memory.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    remedy = "share it among more GPUs or nodes, use some with more memory, or a smaller model"
    with _explain_out_of_memory(
        "the model with its gradients and its optimizer's state does", lambda: remedy
    ):
        yield


@contextlib.contextmanager
def _explain_out_of_memory(subject: str, remedy: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:  # a CPU's allocator and the mapping of files raise various classes
        is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_known and "t allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{subject} not fit the memory ({first_line(error)}) - {remedy()}"
        ) from error


def free_bytes(world: World) -> float:
    """Return the memory that this rank may still take: of its GPU, or its share of the host's."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return (
            free
            + torch.cuda.memory_reserved(world.device)
            - torch.cuda.memory_allocated(world.device)
        )
    return free_host_bytes() / world.local_size


def free_host_bytes(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the memory that all processes here may still take: of the machine or their container.

    A limit holds for a control group (version 2 or 1) and all below it. Cached files count as free
    where the kernel may drop them.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (
                (groups / "memory", _GROUP_FILES_V1) if controllers else (groups, _GROUP_FILES)
            )
            for path in (PurePosixPath(group), *PurePosixPath(group).parents):
                free = min(free, _free_in_group(root / path.relative_to("/"), *names))
    return max(0, int(free))


def _free_in_group(folder: Path, limit: str, used: str, cached: str) -> float:
    # No such group here, or "max": no limit.
    with contextlib.suppress(OSError, ValueError, KeyError):
        statistics = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        bound, taken = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, used))
        return bound - taken + int(statistics[cached])
    return math.inf
