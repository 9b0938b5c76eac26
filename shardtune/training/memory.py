"""Whether a step fits the memory, and what to change where it does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import psutil
import torch

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.errors import OutOfMemory

# The file of a control group's limit, that of its use, and the line of memory.stat with the files that it keeps cached.
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file")


_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@contextlib.contextmanager
def memory_suffices(config: Config, saved: Callable[[], object]) -> Iterator[None]:
    """Raises OutOfMemory, with the keys that take less, where there is no memory for a step or an evaluation.

    `saved`: whether there is a checkpoint; what goes on from it may not change most of these keys.
    """
    rows, length = config.train.micro_batch_size, config.data.max_length
    noun, verb = ("row", "does") if rows == 1 else ("rows", "do")
    what = (
        f"{rows} (train.micro_batch_size) {noun} of up to {length} (data.max_length) tokens {verb}"
    )
    with _said_if_it_does_not_fit(what, lambda: _what_takes_less(config, bool(saved()))):
        yield


def _what_takes_less(config: Config, is_saved: bool) -> str:
    rows, is_full = config.train.micro_batch_size, config.model.activation_checkpointing == "full"
    if not is_saved:
        lower = "lower one of the two" if rows > 1 else "lower data.max_length"
        return lower if is_full else f"{lower}, or set model.activation_checkpointing=full"
    at_resume = "use more GPUs or nodes"
    if config.parallel.replicate > 1:
        at_resume = "lower parallel.replicate"
    if rows > 1:
        at_resume = (
            "lower train.micro_batch_size and raise train.gradient_accumulation_steps as much"
        )
    anew = (
        "a lower data.max_length"
        if is_full
        else "a lower data.max_length or model.activation_checkpointing=full"
    )
    return f"{at_resume}, or start anew with another run.dir and {anew}"


@contextlib.contextmanager
def weights_fit() -> Iterator[None]:
    """Raises OutOfMemory where there is no memory for the weights and what the optimizer keeps of them."""
    remedy = "share it among more GPUs or nodes, use some with more memory, or a smaller model"
    with _said_if_it_does_not_fit(
        "the model with its gradients and its optimizer's state does", lambda: remedy
    ):
        yield


@contextlib.contextmanager
def _said_if_it_does_not_fit(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except OutOfMemory:
        raise
    except (
        Exception
    ) as error:  # of any class, where a CPU's allocator or the mapping of a file fails
        is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_known and "t allocate memory" not in str(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutOfMemory(f"{what} not fit the memory ({reason}) - {remedy()}") from error


def _free_bytes(world: World) -> float:
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return (
            free
            + torch.cuda.memory_reserved(world.device)
            - torch.cuda.memory_allocated(world.device)
        )
    return free_host_bytes() / world.local_size


def free_host_bytes(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """What this process and the others here may still take: of the machine, or of their container or job, if less.

    A limit holds for a control group (version 2 or 1) and all below it. Files that may leave its cache count as free.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in own.read_text(encoding="utf-8").splitlines():
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
    with contextlib.suppress(
        OSError, ValueError, KeyError
    ):  # no such group here, or "max": no limit
        statistics = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        bound, taken = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, used))
        return bound - taken + int(statistics[cached])
    return math.inf
