"""Decide what stays unsharded between micro-batches, where accumulation meets resharding.

                      freed after each forward and backward     kept for the whole step
    parameters        gathered twice in every micro-batch       gathered once a step
    gradients         reduced in every micro-batch              reduced once a step

Kept tensors need memory, so the plan of the first start decides, and the run obeys. Parameters are
kept by group, as many groups as have room; gradients all or none. If gradients are reduced in every
micro-batch and a replica has room for their sums, replicas exchange the sums once a step, else
gradients in every micro-batch. Each choice sums the same gradients, in another order: checkpoints
keep it, and a resume on the same mesh repeats it.

On a rank with the whole model, one shard, FSDP2 gathers nothing, but still casts weights to the
compute dtype and copies gradients, as often as it would gather and reduce. There kept gradients
take the place of sharded ones, and are summed in the same order. A weight in the compute dtype is
not copied at all (`sharding.shard`). Freed groups are gathered again a layer ahead of their use
(`fsdp_groups.gather_ahead`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import gathered_numel, to_local
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.units import gb

_SHARE = 0.5  # the share of free memory for parameters; activations take the rest


@dataclass(frozen=True)
class ReshardPolicy:
    """The tensors that are kept until the last micro-batch of a step."""

    kept_groups: int  # the first of `gathered_groups`, whose parameters stay unsharded
    keep_gradients: bool  # unsharded
    keep_sums: bool = True  # a replica's reduced gradients; always with one replica

    def keep_gathered(self, model: Any) -> None:
        """Tell FSDP which groups every forward leaves unsharded."""
        for group in list(gathered_groups(model))[: self.kept_groups]:
            group.set_reshard_after_forward(False, recurse=False)

    def before_backward(self, model: Any, is_last_micro_batch: bool) -> None:
        """Tell FSDP which tensors the next backward keeps. The last backward reduces all."""
        # The first call decides within a replica, the second one between replicas.
        model.set_requires_gradient_sync(is_last_micro_batch or not self.keep_gradients)
        model.set_requires_all_reduce(is_last_micro_batch or not self.keep_sums)
        for number, group in enumerate(gathered_groups(model)):
            is_freed = is_last_micro_batch or number >= self.kept_groups
            group.set_reshard_after_backward(is_freed, recurse=False)


class KeptBytes(NamedTuple):
    """The bytes of a rank that each choice of a `ReshardPolicy` needs, beside its state."""

    parameters: Sequence[int]  # bytes per group
    gradients: int
    sums: int


def kept_bytes(model: Any, layout: Layout) -> KeptBytes:
    """Return the bytes of a rank if it keeps all parameters, all gradients or all sums."""
    groups = gathered_groups(model).values()
    trained = [p for p in model.parameters() if p.requires_grad]
    # A rank that is alone in its stage needs none: kept gradients replace the sharded ones.
    gradient_bytes = BYTES[layout.reduce_dtype] * (layout.stage_ranks > 1)
    gradients = sum(map(gathered_numel, trained)) * gradient_bytes
    # The rank needs its own part of the sums in any case. Kept sums also have the other parts.
    sums = sum(to_local(p).numel() for p in trained) * BYTES[layout.gradient_dtype]
    others = sums * (layout.replicate - 1) // layout.replicate
    compute_bytes = BYTES[layout.compute_dtype]
    parameters = [sum(map(gathered_numel, group)) * compute_bytes for group in groups]
    return KeptBytes(parameters, gradients, others)


def choose_reshard_policy(
    model: Any, saved: ReshardPolicy | None, planned: ReshardPolicy, world: World
) -> ReshardPolicy:
    """Do as planned, but sum gradients in the order of the resumed run, and log both.

    `saved`: the policy of the resumed run. `planned`: one decision about gradients for all stages,
    which reduce together.
    """
    layout, policy = world.layout, planned
    if saved and layout.stage_ranks > 1:
        policy = replace(saved, kept_groups=planned.kept_groups)
    policy.keep_gathered(model)
    kept = kept_bytes(model, layout)
    if any(kept.parameters):
        made = "whole on each rank, copied" if layout.shards == 1 else "gathered"
        unsharded = f"{gb(sum(kept.parameters), 2)} GB unsharded"
        logger.info(f"Parameters: {made} {_when(policy, kept, layout)} ({unsharded})")
    else:
        logger.info("Parameters: whole on each rank, not copied")
    if layout.micro_batches > 1 and layout.stage_ranks > 1:
        reduced = "once a step" if policy.keep_gradients else "in each micro-batch"
        if layout.replicate > 1 and not policy.keep_gradients:
            when = "once a step" if policy.keep_sums else "as often"
            reduced += f", between replicas {when}"
        reason = "as before the resume" if saved else "as planned"
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
    """Return the policy of a rank that is alone in its stage, else None: free memory decides."""
    if layout.stage_ranks > 1:
        return None
    # Gradients that are not kept are summed in the dtype of sharded gradients.
    is_alike = layout.reduce_dtype == "float32"
    # Offloaded gradients take no room on the device. Without offload kept gradients replace the
    # sharded ones.
    keep_gradients = not layout.offloads if is_alike else layout.ranks > 1
    return ReshardPolicy(kept_groups=0, keep_gradients=keep_gradients)


def decide(
    kept: KeptBytes,
    free: float,
    micro_batches: int,
    fixed: ReshardPolicy | None = None,
    most_groups: int | None = None,
) -> tuple[ReshardPolicy, float]:
    """Return the policy, and the room for parameters in bytes.

    `fixed`: what is decided already about gradients. `most_groups`: those that fit beside a
    simulated step. None: all groups or none.
    """
    # Gradients come first: they save a reduction in every micro-batch. Parameters get the room that
    # is left.
    room = max(0.0, _SHARE * free)
    policy = fixed or ReshardPolicy(
        kept_groups=0, keep_gradients=kept.gradients <= room, keep_sums=kept.sums <= room
    )
    gradients = kept.gradients if policy.keep_gradients else kept.sums * policy.keep_sums
    room = max(0.0, room - gradients * (micro_batches > 1))
    groups = groups_in(kept, room)
    if most_groups is not None:
        groups = min(groups, most_groups)
    elif groups < len(kept.parameters):
        groups = 0
    return replace(policy, kept_groups=groups), room


def room_beside(peak: float, memory: float) -> float:
    """Return the bytes of groups that may stay gathered beside the peak of a step without them."""
    return _SHARE * (memory - peak)


def groups_in(kept: KeptBytes, room: float) -> int:
    """Return the number of groups, from the first on, that have room together."""
    return sum(total <= room for total in accumulate(kept.parameters))
