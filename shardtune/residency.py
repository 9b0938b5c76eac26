"""What FSDP keeps unsharded from one micro-batch of a step to the next, where memory allows it.

Sharded again each time, parameters are gathered twice and gradients reduced once in every micro-batch. Kept, both
happen once a step, which is the same sum in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from .config import Config
from .errors import OutOfMemory
from .model import DTYPES, compute_dtype, local_bytes
from .world import World

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
    if world.mesh["shard"].size() == 1:
        return Residency(parameters=False, gradients=world.size > 1)
    micro_batches = config.train.gradient_accumulation_steps
    numel = sum(parameter.numel() for parameter in model.parameters())
    # Two moments and the sharded gradients are still to come.
    room = _SHARE * min(world.gather(_free_bytes(world) - 3 * local_bytes(model)))
    of_gradients = numel * DTYPES[config.model.reduce_dtype].itemsize
    of_parameters = numel * compute_dtype(config.model.compute_dtype, world.device).itemsize
    gradients = saved[1] if saved else micro_batches > 1 and of_gradients <= room
    parameters = of_parameters <= room - gradients * of_gradients
    if parameters:
        model.set_reshard_after_forward(False)
    room_text = f"{room / 1e9:.2f} GB, half of what is free"
    world.say(
        f"Parameters: gathered {'once a step' if parameters else 'in each forward and each backward'} (whole they take "
        f"{of_parameters / 1e9:.2f} GB; room for {room_text})"
    )
    if micro_batches > 1:
        when = "once a step, after its last micro-batch" if gradients else "in each micro-batch"
        world.say(f"Gradients: reduced {when} (whole they take {of_gradients / 1e9:.2f} GB; room for {room_text})")
    return Residency(parameters, gradients)


@contextlib.contextmanager
def memory_suffices(config: Config) -> Iterator[None]:
    """Raises OutOfMemory, with the keys that take less, where PyTorch finds no memory for a step or an evaluation."""
    try:
        yield
    except RuntimeError as error:  # as which a CPU's allocator fails
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        also = "" if config.model.activation_checkpointing == "full" else ", or set model.activation_checkpointing=full"
        reason = str(error).splitlines()[0]
        raise OutOfMemory(
            f"{config.train.micro_batch_size} (train.micro_batch_size) rows of up to {config.data.max_length} "
            f"(data.max_length) tokens do not fit the memory ({reason}) - lower one of the two{also}"
        ) from error


def _free_bytes(world: World) -> float:
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return free + torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return psutil.virtual_memory().available / world.local_size
