"""Where gradient accumulation meets resharding: what stays unsharded between micro-batches.

                      freed after each forward and backward     kept for the whole step
    parameters        gathered twice in every micro-batch       gathered once a step
    gradients         reduced in every micro-batch              reduced once a step

Gradients that are reduced in every micro-batch meet those of other replicas once a step, if the
sums of each replica can be kept until then, else in every micro-batch, too.

The sums are the same, in another order. Kept tensors need memory, so the free memory decides.

A rank that has the whole model, one shard, gathers nothing, but FSDP2 casts its weights to the
compute dtype and copies its gradients all the same, as often as others gather and reduce. There the
kept gradients take the place of the sharded ones, and their sum has the same order.

What is freed is gathered again a layer ahead of its use (`model/overlap.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardtune.config import Config
from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.build import compute_dtype, gradient_dtype
from shardtune.model.experts import gathered_numel
from shardtune.training.states import StateBytes

_SHARE = 0.5  # of the free memory; the rest is for activations


@dataclass(frozen=True)
class ReshardPolicy:
    """What is kept until the last micro-batch of a step."""

    keep_parameters: bool  # unsharded
    keep_gradients: bool  # unsharded
    keep_sums: bool = True  # of a replica's gradients, sharded; with one replica always

    def before_backward(self, model: Any, is_last_micro_batch: bool) -> None:
        """Tell FSDP what the coming backward keeps and reduces."""
        model.set_requires_gradient_sync(is_last_micro_batch or not self.keep_gradients)
        # The line above decides within a replica, and this one between replicas.
        model.set_requires_all_reduce(is_last_micro_batch or not self.keep_sums)
        model.set_reshard_after_backward(is_last_micro_batch or not self.keep_parameters)


class KeptBytes(NamedTuple):
    """The bytes that each choice of a `ReshardPolicy` takes of a rank, beside its state."""

    parameters: int
    gradients: int
    sums: int


def kept_bytes(model: Any, config: Config, world: World) -> KeptBytes:
    """Return what a rank keeps of all parameters that it gathers and of their gradients.

    The gradients of a rank that reduces with no other take none, since they replace the sharded
    ones. Of a replica's sums a rank keeps those whose owners are other replicas' ranks.
    """
    numel = sum(gathered_numel(p) for p in model.parameters())
    trained = sum(gathered_numel(p) for p in model.parameters() if p.requires_grad)
    compute = compute_dtype(config.model.compute_dtype, world.device)
    reduce_dtype = DTYPES[config.model.reduce_dtype]
    gradients = 0 if world.stage_ranks == 1 else trained * reduce_dtype.itemsize
    sums = sum(
        to_local(p).numel() * gradient_dtype(p, reduce_dtype).itemsize
        for p in model.parameters()
        if p.requires_grad
    )
    others = sums * (world.replicas - 1) // world.replicas
    return KeptBytes(numel * compute.itemsize, gradients, others)


def choose_reshard_policy(
    model: Any, config: Config, state: StateBytes, saved: ReshardPolicy | None, world: World
) -> ReshardPolicy:
    """Decide by the free memory of the fullest rank, for all ranks, and log why. Collective.

    `saved` is the decision of the resumed run. It holds for gradients, because a resume must not
    change the order of a sum.
    """
    # Stages differ, and one decision holds for all.
    sizes = world.all_gather_json(kept_bytes(model, config, world))
    kept = KeptBytes(*map(max, zip(*sizes, strict=True)))
    micro_batches = config.train.gradient_accumulation_steps
    # The sharded gradients and the optimizer's state are not allocated yet.
    free = _free_bytes(world) - state.gradients - state.optimizer
    policy, room, room_for_parameters = decide(
        kept, min(world.all_gather_json(free)), micro_batches, fixed_policy(config, world) or saved
    )
    if policy.keep_parameters:
        model.set_reshard_after_forward(False)
    is_whole = world.mesh["shard"].size() == 1
    made = "whole on each rank, copied" if is_whole else "gathered"
    when = "once a step" if policy.keep_parameters else "in each forward and each backward"
    logger.info(
        f"Parameters: {made} {when} "
        f"({_gb(kept.parameters)} unsharded, room for {_gb(room_for_parameters)})"
    )
    if micro_batches > 1 and world.stage_ranks > 1:
        reduced = "once a step" if policy.keep_gradients else "in each micro-batch"
        if world.replicas > 1 and not policy.keep_gradients:
            when = "once a step" if policy.keep_sums else "as often"
            reduced += f", between replicas {when}"
        reason = "as before the resume" if saved else f"room for {_gb(room)}"
        logger.info(f"Gradients: reduced {reduced} ({_gb(kept.gradients)} unsharded, {reason})")
    return policy


def fixed_policy(config: Config, world: World) -> ReshardPolicy | None:
    """Return what a rank keeps of its gradients that reduces with no other, whatever the memory.

    None where ranks share a stage, so that the free memory decides.
    """
    if world.stage_ranks > 1:
        return None
    # One rank sums gradients that it does not keep in the dtype of the sharded ones.
    keep_gradients = world.size > 1 or config.model.reduce_dtype == "float32"
    return ReshardPolicy(keep_parameters=True, keep_gradients=keep_gradients)


def decide(
    kept: KeptBytes, free: float, micro_batches: int, saved: ReshardPolicy | None = None
) -> tuple[ReshardPolicy, float, float]:
    """Decide by the bytes of what is kept and of the free memory, as `saved` has it for gradients.

    Returns the decision, the room for all of it, and that for the parameters, in bytes.
    """
    room = max(0.0, _SHARE * free)
    keep_gradients = saved.keep_gradients if saved else kept.gradients <= room
    keep_sums = saved.keep_sums if saved else kept.sums <= room
    of_gradients = kept.gradients if keep_gradients else kept.sums * keep_sums
    room_for_parameters = max(0.0, room - of_gradients * (micro_batches > 1))
    policy = ReshardPolicy(kept.parameters <= room_for_parameters, keep_gradients, keep_sums)
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
