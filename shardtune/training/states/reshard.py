"""Where gradient accumulation meets resharding: what stays unsharded between micro-batches.

                      freed after each forward and backward     kept for the whole step
    parameters        gathered twice in every micro-batch       gathered once a step
    gradients         reduced in every micro-batch              reduced once a step

Parameters are kept by group, as many as have room; gradients all or none.

Gradients that are reduced in every micro-batch meet those of other replicas once a step, if the
sums of each replica can be kept until then, else in every micro-batch, too.

The sums are the same, in another order. Kept tensors need memory, so the free memory decides.

A rank that has the whole model, one shard, gathers nothing, but FSDP2 casts its weights to the
compute dtype and copies its gradients all the same, as often as others gather and reduce. There the
kept gradients take the place of the sharded ones, and their sum has the same order. A weight that
has that dtype already is not FSDP2's, so that nothing of it is copied (`build.shard`).

What is freed is gathered again a layer ahead of its use (`model/fsdp_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.model.moe.placement import gathered_numel
from shardtune.training.states.state_bytes import StateBytes
from shardtune.units import gb

_SHARE = 0.5  # of the free memory; the rest is for activations


@dataclass(frozen=True)
class ReshardPolicy:
    """What is kept until the last micro-batch of a step."""

    kept_groups: int  # whose parameters stay unsharded, of `gathered_groups`
    keep_gradients: bool  # unsharded
    keep_sums: bool = True  # of a replica's gradients, sharded; with one replica always

    def keep_gathered(self, model: Any) -> None:
        """Tell FSDP what every forward leaves unsharded."""
        for group in list(gathered_groups(model))[: self.kept_groups]:
            group.set_reshard_after_forward(False, recurse=False)

    def before_backward(self, model: Any, is_last_micro_batch: bool) -> None:
        """Tell FSDP what the coming backward keeps and reduces."""
        model.set_requires_gradient_sync(is_last_micro_batch or not self.keep_gradients)
        # The line above decides within a replica, and this one between replicas.
        model.set_requires_all_reduce(is_last_micro_batch or not self.keep_sums)
        for number, group in enumerate(gathered_groups(model)):
            is_freed = is_last_micro_batch or number >= self.kept_groups
            group.set_reshard_after_backward(is_freed, recurse=False)


class KeptBytes(NamedTuple):
    """The bytes that each choice of a `ReshardPolicy` takes of a rank, beside its state."""

    parameters: Sequence[int]  # of each group
    gradients: int
    sums: int


def kept_bytes(model: Any, layout: Layout) -> KeptBytes:
    """Return what a rank keeps of all parameters that it gathers and of their gradients.

    The gradients of a rank that reduces with no other take none, since they replace the sharded
    ones. Of a replica's sums a rank keeps those whose owners are other replicas' ranks.
    """
    groups = gathered_groups(model).values()
    trained = sum(gathered_numel(p) for p in model.parameters() if p.requires_grad)
    gradients = 0 if layout.stage_ranks == 1 else trained * BYTES[layout.reduce_dtype]
    own = sum(to_local(p).numel() for p in model.parameters() if p.requires_grad)
    sums = own * BYTES[layout.gradient_dtype]
    others = sums * (layout.replicate - 1) // layout.replicate
    compute_bytes = BYTES[layout.compute_dtype]
    parameters = [sum(map(gathered_numel, group)) * compute_bytes for group in groups]
    return KeptBytes(parameters, gradients, others)


def choose_reshard_policy(
    model: Any,
    state: StateBytes,
    saved: ReshardPolicy | None,
    world: World,
    planned_groups: int,
) -> ReshardPolicy:
    """Decide by the free memory of the fullest rank, for all ranks, and log why. Collective.

    `saved` is the decision of the resumed run. It holds for gradients, because a resume must not
    change the order of a sum. `planned_groups`: how many this stage may keep gathered where not all
    have room, by the plan, which knows the activations.
    """
    # Stages differ, and one decision about gradients holds for all.
    layout = world.layout
    own = kept_bytes(model, layout)
    gradients, sums = map(max, zip(*world.all_gather_json(own[1:]), strict=True))
    kept = KeptBytes(own.parameters, gradients, sums)
    # The sharded gradients and the optimizer's state are not allocated yet.
    free = min(world.all_gather_json(_free_bytes(world) - state.gradients - state.optimizer))
    policy, room, room_for_parameters = decide(
        kept, free, layout.micro_batches, fixed_policy(layout) or saved, planned_groups
    )
    policy.keep_gathered(model)
    if any(kept.parameters):
        made = "whole on each rank, copied" if layout.shards == 1 else "gathered"
        logger.info(
            f"Parameters: {made} {_when(policy, kept, layout)} "
            f"({gb(sum(kept.parameters), 2)} GB unsharded, "
            f"room for {gb(room_for_parameters, 2)} GB)"
        )
    else:
        logger.info("Parameters: whole on each rank, not copied")
    if layout.micro_batches > 1 and layout.stage_ranks > 1:
        reduced = "once a step" if policy.keep_gradients else "in each micro-batch"
        if layout.replicate > 1 and not policy.keep_gradients:
            when = "once a step" if policy.keep_sums else "as often"
            reduced += f", between replicas {when}"
        reason = "as before the resume" if saved else f"room for {gb(room, 2)} GB"
        unsharded = f"{gb(kept.gradients, 2)} GB unsharded"
        logger.info(f"Gradients: reduced {reduced} ({unsharded}, {reason})")
    return policy


def _when(policy: ReshardPolicy, kept: KeptBytes, layout: Layout) -> str:
    once, always = "once a step", "in each forward and each backward"
    number, groups = policy.kept_groups, len(kept.parameters)
    if number in (0, groups):
        return once if number else always
    stage = " of the first stage" if layout.stages > 1 else ""
    size = f"{gb(sum(kept.parameters[:number]), 2)} GB"
    return f"{once} in {number} of {groups} groups{stage} ({size}), {always} in the others"


def fixed_policy(layout: Layout) -> ReshardPolicy | None:
    """Return what a rank keeps of its gradients that reduces with no other, whatever the memory.

    None where ranks share a stage, so that the free memory decides.
    """
    if layout.stage_ranks > 1:
        return None
    # One rank sums gradients that it does not keep in the dtype of the sharded ones.
    is_alike = layout.reduce_dtype == "float32"
    # In host memory they take no room. Else those that are kept take the place of sharded ones.
    keep_gradients = not layout.offloads if is_alike else layout.ranks > 1
    return ReshardPolicy(kept_groups=0, keep_gradients=keep_gradients)


def decide(
    kept: KeptBytes,
    free: float,
    micro_batches: int,
    saved: ReshardPolicy | None = None,
    planned_groups: int = 0,
) -> tuple[ReshardPolicy, float, float]:
    """Decide by the bytes of what is kept and of the free memory, as `saved` has it for gradients.

    Where not all groups have room, at most `planned_groups` are kept. Returns the decision, the
    room for all of it, and that for the parameters, in bytes.
    """
    room = max(0.0, _SHARE * free)
    keep_gradients = saved.keep_gradients if saved else kept.gradients <= room
    keep_sums = saved.keep_sums if saved else kept.sums <= room
    of_gradients = kept.gradients if keep_gradients else kept.sums * keep_sums
    room_for_parameters = max(0.0, room - of_gradients * (micro_batches > 1))
    groups = groups_in(kept, room_for_parameters)
    if groups < len(kept.parameters):
        groups = min(groups, planned_groups)
    return ReshardPolicy(groups, keep_gradients, keep_sums), room, room_for_parameters


def room_beside(peak: float, memory: float) -> float:
    """Return how many bytes of groups may stay gathered beside the peak of a step without them."""
    return _SHARE * (memory - peak)


def groups_in(kept: KeptBytes, room: float) -> int:
    """Return how many groups have room, from the first on."""
    return sum(total <= room for total in accumulate(kept.parameters))


def _free_bytes(world: World) -> float:
    """Return the memory that this rank may still take: of its GPU, or its share of the host's."""
    if world.device.type == "cpu":
        return available_memory() / world.local_size
    free, _ = torch.cuda.mem_get_info(world.device)
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free + cached
