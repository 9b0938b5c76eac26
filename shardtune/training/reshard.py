"""Where gradient accumulation meets resharding: what stays unsharded between micro-batches.

                      freed after each forward and backward     kept for the whole step
    parameters        gathered twice in every micro-batch       gathered once a step
    gradients         reduced in every micro-batch              reduced once a step

The sums are the same, in another order. Kept tensors need memory, so the free memory decides.

A rank that has the whole model, one shard, gathers nothing, but FSDP2 casts its weights to the
compute dtype and copies its gradients all the same, as often as others gather and reduce. There the
kept gradients take the place of the sharded ones, and their sum has the same order.

FSDP2 itself gathers the next layer while this one computes: in the forward because the host runs
ahead of a GPU, in the backward because it prefetches in the reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardtune.config import Config
from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.build import compute_dtype
from shardtune.model.experts import gathered_numel
from shardtune.training.states import StateBytes

_SHARE = 0.5  # of the free memory; the rest is for activations


@dataclass(frozen=True)
class ReshardPolicy:
    """Whether unsharded parameters and gradients are kept until the last micro-batch of a step."""

    keep_parameters: bool
    keep_gradients: bool

    def before_backward(self, model: Any, is_last_micro_batch: bool) -> None:
        """Tell FSDP what the coming backward keeps and reduces."""
        model.set_requires_gradient_sync(is_last_micro_batch or not self.keep_gradients)
        # The line above decides within a replica, and this one between replicas.
        model.set_requires_all_reduce(is_last_micro_batch)
        model.set_reshard_after_backward(is_last_micro_batch or not self.keep_parameters)


def unsharded_bytes(model: Any, config: Config, world: World) -> tuple[int, int]:
    """Return the bytes of all parameters that a rank gathers, and those of their gradients.

    The gradients of one shard take none, since they replace the sharded ones.
    """
    numel = sum(gathered_numel(p) for p in model.parameters())
    trained = sum(gathered_numel(p) for p in model.parameters() if p.requires_grad)
    compute = compute_dtype(config.model.compute_dtype, world.device)
    gradients = 0 if _is_whole(world) else trained * DTYPES[config.model.reduce_dtype].itemsize
    return numel * compute.itemsize, gradients


def choose_reshard_policy(
    model: Any, config: Config, state: StateBytes, saved: ReshardPolicy | None, world: World
) -> ReshardPolicy:
    """Decide by the free memory of the fullest rank, for all ranks, and log why. Collective.

    `saved` is the decision of the resumed run. It holds for gradients, because a resume must not
    change the order of a sum.
    """
    # Stages differ, and one decision holds for all.
    sizes = world.all_gather_json(unsharded_bytes(model, config, world))
    parameters, gradients = map(max, zip(*sizes, strict=True))
    micro_batches = config.train.gradient_accumulation_steps
    # The sharded gradients and the optimizer's state are not allocated yet.
    free = _free_bytes(world) - state.gradients - state.optimizer
    keep_gradients = saved.keep_gradients if saved else None
    if _is_whole(world):
        keep_gradients = keeps_gradients_whole(config, world)
    policy, room, room_for_parameters = decide(
        parameters, gradients, min(world.all_gather_json(free)), micro_batches, keep_gradients
    )
    if policy.keep_parameters:
        model.set_reshard_after_forward(False)
    made = "whole on each rank, copied" if _is_whole(world) else "gathered"
    when = "once a step" if policy.keep_parameters else "in each forward and each backward"
    logger.info(
        f"Parameters: {made} {when} "
        f"({_gb(parameters)} unsharded, room for {_gb(room_for_parameters)})"
    )
    if micro_batches > 1 and not _is_whole(world):
        reduced = "once a step" if policy.keep_gradients else "in each micro-batch"
        reason = "as before the resume" if saved else f"room for {_gb(room)}"
        logger.info(f"Gradients: reduced {reduced} ({_gb(gradients)} unsharded, {reason})")
    return policy


def keeps_gradients_whole(config: Config, world: World) -> bool | None:
    """Return whether gradients are kept where each rank has the whole model, whatever the memory.

    None where ranks have shards, so that the free memory decides.
    """
    if not _is_whole(world):
        return None
    # One rank sums gradients that it does not keep in the dtype of the sharded ones.
    return world.size > 1 or config.model.reduce_dtype == "float32"


def _is_whole(world: World) -> bool:
    """Return whether each rank has the whole model."""
    return world.mesh["shard"].size() == 1


def decide(
    parameters: float,
    gradients: float,
    free: float,
    micro_batches: int,
    keep_gradients: bool | None = None,
) -> tuple[ReshardPolicy, float, float]:
    """Decide by the bytes of all parameters, of all gradients, and of the free memory.

    Returns the decision, the room for both, and that for the parameters, in bytes.
    """
    room = max(0.0, _SHARE * free)
    if keep_gradients is None:
        keep_gradients = gradients <= room
    kept = gradients if keep_gradients and micro_batches > 1 else 0
    room_for_parameters = max(0.0, room - kept)
    policy = ReshardPolicy(parameters <= room_for_parameters, keep_gradients)
    return policy, room, room_for_parameters


def _free_bytes(world: World) -> float:
    """Return the memory that this rank may still take: of its GPU, or its share of the host's."""
    if world.device.type == "cpu":
        return available_memory() / world.local_size
    free, _ = torch.cuda.mem_get_info(world.device)
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free + cached


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
