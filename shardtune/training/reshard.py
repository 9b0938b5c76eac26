"""What FSDP keeps unsharded from one micro-batch of a step to the next, where memory allows it.

Sharded again each time, parameters are gathered twice and gradients reduced once in every micro-batch. Kept, both
happen once a step, which is the same sum in another order.

When a layer is gathered is left to FSDP2: on a GPU the next layer's parameters travel while this one computes. Forward,
because the host runs ahead of the device (except in layers that wait for it, as some architectures' experts do);
backward, because FSDP2 asks for them in the reverse of the forward's order. To prefetch further ahead would hold more
whole layers, for a gain that nobody has measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardtune.config import Config
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.build import compute_dtype, local_bytes
from shardtune.training.memory import _free_bytes

_SHARE = 0.5  # of the free memory that may be taken; the rest is for activations


@dataclass(frozen=True)
class ReshardPolicy:
    """Whether whole parameters and whole gradients stay until the last micro-batch of a step."""

    parameters: bool
    gradients: bool

    def before_forward(self, model: Any, is_last: bool) -> None:
        """Call it before each forward of a step."""
        model.set_requires_gradient_sync(is_last or not self.gradients)
        model.set_requires_all_reduce(
            is_last
        )  # between replicas, of what is reduced within each of them
        model.set_reshard_after_backward(is_last or not self.parameters)


def choose_reshard_policy(
    model: Any, config: Config, saved: list[bool] | None, world: World
) -> ReshardPolicy:
    """Decide by the memory that is free on the fullest rank, and say so; `saved` is what the resumed run decided.

    The order of a sum is part of what a resumed run must not change, the place of parameters is not.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    of_gradients = numel * DTYPES[config.model.reduce_dtype].itemsize
    of_parameters = numel * compute_dtype(config.model.compute_dtype, world.device).itemsize
    parameters_take, gradients_take = (
        f"whole they take {n / 1e9:.2f} GB" for n in (of_parameters, of_gradients)
    )
    after_last = "reduced once a step, after its last micro-batch"
    if world.mesh["shard"].size() == 1:
        if world.size > 1:
            logger.info(
                f"Parameters: whole on each rank ({parameters_take}) | Gradients: {after_last} ({gradients_take})"
            )
        return ReshardPolicy(parameters=False, gradients=world.size > 1)
    micro_batches = config.train.gradient_accumulation_steps
    # Two moments and the sharded gradients are still to come.
    room = _SHARE * min(world.all_gather_json(_free_bytes(world) - 3 * local_bytes(model)))
    gradients = saved[1] if saved else micro_batches > 1 and of_gradients <= room
    room_of_parameters = room - gradients * of_gradients
    parameters = of_parameters <= room_of_parameters
    if parameters:
        model.set_reshard_after_forward(False)
    half = "half of what is free"
    when = "once a step" if parameters else "in each forward and each backward"
    logger.info(
        f"Parameters: gathered {when} ({parameters_take}; room for {max(0.0, room_of_parameters) / 1e9:.2f} GB, "
        f"{half}{' less the whole gradients' * gradients}), "
        + (
            "each layer's while the one before it computes"
            if world.device.type == "cuda"
            else "while the CPU waits"
        )
    )
    if micro_batches > 1:
        why = (
            "as before the resume, whatever is free"
            if saved
            else f"room for {max(0.0, room) / 1e9:.2f} GB, {half}"
        )
        logger.info(
            f"Gradients: {after_last if gradients else 'reduced in each micro-batch'} ({gradients_take}; {why})"
        )
    return ReshardPolicy(parameters, gradients)
