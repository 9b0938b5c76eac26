"""What FSDP keeps unsharded from one micro-batch of a step to the next, where memory allows it.

Sharded again each time, parameters are gathered twice and gradients reduced once in every micro-batch. Kept, both
happen once a step, which is the same sum in another order.

When a layer is gathered is left to FSDP2: on a GPU the next layer's parameters travel while this one computes. Forward,
because the host runs ahead of the device (except in layers that wait for it, as some architectures' experts do);
backward, because FSDP2 asks for them in the reverse of the forward's order. To prefetch further ahead would hold more
whole layers, for a gain that nobody has measured here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

from .config import Config
from .errors import OutOfMemory
from .model import DTYPES, compute_dtype, local_bytes
from .world import World

# The file of a control group's limit, that of its use, and the line of memory.stat with the files that it keeps cached.
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SHARE = 0.5  # of the free memory that may be taken; the rest is for activations


@dataclass(frozen=True)
class Residency:
    """Whether whole parameters and whole gradients stay until the last micro-batch of a step."""

    parameters: bool
    gradients: bool

    def begin_micro_batch(self, model: Any, is_last: bool) -> None:
        """Call it before each forward of a step."""
        model.set_requires_gradient_sync(is_last or not self.gradients)
        model.set_requires_all_reduce(is_last)  # between replicas, of what is reduced within each of them
        model.set_reshard_after_backward(is_last or not self.parameters)


def choose_residency(model: Any, config: Config, saved: list[bool] | None, world: World) -> Residency:
    """Decide by the memory that is free on the fullest rank, and say so; `saved` is what the resumed run decided.

    The order of a sum is part of what a resumed run must not change, the place of parameters is not.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    of_gradients = numel * DTYPES[config.model.reduce_dtype].itemsize
    of_parameters = numel * compute_dtype(config.model.compute_dtype, world.device).itemsize
    parameters_take, gradients_take = (f"whole they take {n / 1e9:.2f} GB" for n in (of_parameters, of_gradients))
    after_last = "reduced once a step, after its last micro-batch"
    if world.mesh["shard"].size() == 1:
        if world.size > 1:
            world.say(
                f"Parameters: whole on each rank ({parameters_take}) | Gradients: {after_last} ({gradients_take})"
            )
        return Residency(parameters=False, gradients=world.size > 1)
    micro_batches = config.train.gradient_accumulation_steps
    # Two moments and the sharded gradients are still to come.
    room = _SHARE * min(world.gather(_free_bytes(world) - 3 * local_bytes(model)))
    gradients = saved[1] if saved else micro_batches > 1 and of_gradients <= room
    room_of_parameters = room - gradients * of_gradients
    parameters = of_parameters <= room_of_parameters
    if parameters:
        model.set_reshard_after_forward(False)
    half = "half of what is free"
    when = "once a step" if parameters else "in each forward and each backward"
    world.say(
        f"Parameters: gathered {when} ({parameters_take}; room for {max(0.0, room_of_parameters) / 1e9:.2f} GB, "
        f"{half}{' less the whole gradients' * gradients}), "
        + ("each layer's while the one before it computes" if world.device.type == "cuda" else "while the CPU waits")
    )
    if micro_batches > 1:
        why = "as before the resume, whatever is free" if saved else f"room for {max(0.0, room) / 1e9:.2f} GB, {half}"
        world.say(f"Gradients: {after_last if gradients else 'reduced in each micro-batch'} ({gradients_take}; {why})")
    return Residency(parameters, gradients)


@contextlib.contextmanager
def memory_suffices(config: Config, saved: Callable[[], object]) -> Iterator[None]:
    """Raises OutOfMemory, with the keys that take less, where there is no memory for a step or an evaluation.

    `saved`: whether there is a checkpoint; what goes on from it may not change most of these keys.
    """
    rows, length = config.train.micro_batch_size, config.data.max_length
    noun, verb = ("row", "does") if rows == 1 else ("rows", "do")
    what = f"{rows} (train.micro_batch_size) {noun} of up to {length} (data.max_length) tokens {verb}"
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
        at_resume = "lower train.micro_batch_size and raise train.gradient_accumulation_steps as much"
    anew = "a lower data.max_length" if is_full else "a lower data.max_length or model.activation_checkpointing=full"
    return f"{at_resume}, or start anew with another run.dir and {anew}"


@contextlib.contextmanager
def weights_fit() -> Iterator[None]:
    """Raises OutOfMemory where there is no memory for the weights and what the optimizer keeps of them."""
    remedy = "share it among more GPUs or nodes, use some with more memory, or a smaller model"
    with _said_if_it_does_not_fit("the model with its gradients and its optimizer's state does", lambda: remedy):
        yield


@contextlib.contextmanager
def _said_if_it_does_not_fit(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:  # of any class, where a CPU's allocator or the mapping of a file fails
        is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_known and "t allocate memory" not in str(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutOfMemory(f"{what} not fit the memory ({reason}) - {remedy()}") from error


def _free_bytes(world: World) -> float:
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return free + torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free_host_bytes() / world.local_size


def free_host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What this process and the others here may still take: of the machine, or of their container or job, if less.

    A limit holds for a control group (version 2 or 1) and all below it. Files that may leave its cache count as free.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (groups / "memory", _GROUP_FILES_V1) if controllers else (groups, _GROUP_FILES)
            for path in (PurePosixPath(group), *PurePosixPath(group).parents):
                free = min(free, _free_in_group(root / path.relative_to("/"), *names))
    return max(0, int(free))


def _free_in_group(folder: Path, limit: str, used: str, cached: str) -> float:
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such group here, or "max": no limit
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        bound, taken = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, used))
        return bound - taken + int(statistics[cached])
    return math.inf
