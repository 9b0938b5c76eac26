"""Refuse a mesh or a setting for a model: every place that asks gets the same words.

`problems` needs no torch. With the facts of config.json alone it finds what the numbers there show,
with those of the model on meta all that shapes show; `trial` computes.
"""

import importlib.metadata
from collections.abc import Iterator
from math import gcd

from shardtune.distributed.layout import Layout, leaves_empty_slices
from shardtune.errors import divisors_text
from shardtune.model.facts.facts import Facts, ModelFacts
from shardtune.model.parts import has_new_transformers, not_trained


def problems(facts: Facts, layout: Layout) -> Iterator[str]:
    """Yield every reason why a model cannot be trained on a mesh with its settings."""
    length, positions = layout.max_length, facts.positions
    yield from filter(None, [not_trained(facts.kind), *facts.refusals])
    if 0 < positions < length:
        yield (
            f"data.max_length={length} is beyond the {positions} positions of {facts.path} - "
            f"use data.max_length={positions} or less"
        )
    if isinstance(facts, ModelFacts):
        yield from _inexact(facts, layout)
    yield from tensor_problems(facts, layout.tensor)
    yield from context_problems(facts, layout.context, length)
    yield from expert_problems(facts, layout.expert, layout.expert_shards)
    yield from _stage_problems(facts, layout)


def _too_old(key: str, degree: int, work: str) -> str:
    version = importlib.metadata.version("transformers")
    return (
        f"{key}={degree}: transformers {version} cannot {work} - "
        f"install transformers 5.23 or newer, or use {key}=1"
    )


def _inexact(facts: ModelFacts, layout: Layout) -> Iterator[str]:
    """Yield the features that would make a record's loss depend on others."""
    kind = facts.kind
    if layout.recomputes and not facts.recomputes:
        yield f"{kind} cannot compute layers again - use model.activation_checkpointing=none"
    is_shared = layout.row_ranks > 1
    if not (layout.packing or is_shared) and layout.micro_batch_size == 1:
        return  # each record is alone in its forward, and whole
    alone = "data.packing=false with train.micro_batch_size=1"
    alone += f" and {layout.row_key}=1" * is_shared
    short = facts.short_rope
    if short is not None and layout.max_length > short:
        yield (
            f"{kind} takes other rope factors for a whole forward once one of its records is "
            f"longer than {short} tokens - use data.max_length={short} or less, or {alone}"
        )
    tokens = layout.max_length * layout.micro_batch_size
    if facts.scaled_from is not None and tokens > facts.scaled_from:
        yield (
            f"{kind} scales queries by their place in the row from {facts.scaled_from:.0f} tokens "
            "on, so a record's loss would depend on those before it - lower data.max_length x "
            f"train.micro_batch_size to that, or use {alone}"
        )


def context_problems(facts: Facts, degree: int, max_length: int | None = None) -> Iterator[str]:
    """Yield why `degree` ranks cannot share rows. `max_length` None: of any length."""
    if degree == 1:
        return
    for heads in facts.numbers_of_heads:
        if heads % degree:
            yield (
                f"parallel.context={degree} does not divide the {heads} heads of {facts.kind} - "
                f"use one of {divisors_text(heads)} that divides world size / parallel.stages too"
            )
    if isinstance(facts, ModelFacts):
        yield from _row_problems(facts, f"parallel.context={degree}", max_length)


def _row_problems(facts: ModelFacts, key: str, max_length: int | None = None) -> Iterator[str]:
    """Yield what a rank with a slice of a row cannot compute. `key`: a key with its value."""
    kind, alone = facts.kind, f"{key.partition('=')[0]}=1"
    if facts.keeps_state:
        yield (
            f"{key}: layers of {kind} hand a state along the row, of which a rank has a slice - "
            f"use {alone}"
        )
    chosen = facts.chosen_keys
    if chosen and (max_length is None or max_length > chosen):
        shorter = f", or data.max_length={chosen}" * (max_length is not None)
        yield (
            f"{key}: indexers of {kind} choose {chosen} keys of the row, of which a rank has a "
            f"slice - use {alone}{shorter}"
        )


def tensor_problems(facts: Facts, degree: int) -> Iterator[str]:
    """Yield why `degree` ranks cannot share the matrices of a model's layers."""
    kind, key = facts.kind, f"parallel.tensor={degree}"
    if degree == 1:
        return
    if not has_new_transformers():
        yield _too_old("parallel.tensor", degree, "cut matrices")
        return
    if not isinstance(facts, ModelFacts):
        return
    if not facts.has_placements:
        yield f"{key} needs PyTorch 2.13 or newer - install it, or use parallel.tensor=1"
        return
    if found := list(_row_problems(facts, key)):
        yield from found
        return
    # A model without transformers' attention interface attends under a mask.
    is_shared = facts.takes_attention and not any(context_problems(facts, degree, 1))
    instead = f"use parallel.context={degree}, or parallel.tensor" * is_shared
    instead = instead or "use parallel.tensor"
    if facts.uncut:
        yield f"{key}: transformers' plan of {kind} {facts.uncut} - {instead}=1"
        return
    for heads in facts.heads:
        if heads.keys % degree:
            context = f", or parallel.context={degree}" * (heads.queries % degree == 0)
            yield (
                f"{key} does not divide the {heads.keys} key heads of {kind} - use "
                f"parallel.tensor={gcd(degree, heads.keys)}{context}"
            )
            return
    if undivided := [cut for cut in facts.cut if cut.shape[cut.dimension] % degree]:
        nearest = gcd(degree, *(cut.shape[cut.dimension] for cut in undivided))
        named = f"{undivided[0].module}.weight of {kind}, {[*undivided[0].shape]}"
        yield f"{key} does not divide {named} - {instead}={nearest}"


def expert_problems(facts: Facts, degree: int, copies: int) -> Iterator[str]:
    """Yield why experts cannot be spread over `degree` ranks, and each part over `copies` ranks."""
    kind, key = facts.kind, f"parallel.expert={degree}"
    if degree == 1:
        return
    if not has_new_transformers():
        yield _too_old("parallel.expert", degree, "spread experts")
        return
    stacks = facts.stacks if isinstance(facts, ModelFacts) else ()
    if isinstance(facts, ModelFacts) and not (facts.has_expert_plan and stacks):
        lack = "no plan to spread its experts over ranks" if facts.has_experts else "no experts"
        yield f"{key}: {kind} has {lack} - use parallel.expert=1"
        return
    for number in facts.numbers_of_experts:
        if number % degree:
            yield (
                f"{key} does not divide the {number} experts of {kind} - use one of "
                f"{divisors_text(number)} that divides world size / parallel.replicate too"
            )
    # transformers cannot read the empty slices of files that hold stacks.
    for number, width in stacks:
        experts = number // degree
        leaves_empty = number % degree == 0 and leaves_empty_slices(experts, copies)
        if leaves_empty and width % copies:
            yield (
                f"{key}: {copies} ranks share {experts} experts of {kind}, and neither these nor "
                f"their width, {width}, can be cut into {copies} - use a larger parallel.replicate"
            )


def _stage_problems(facts: Facts, layout: Layout) -> Iterator[str]:
    stages, layers, kind = layout.stages, facts.n_layers, facts.kind
    if stages == 1:
        return
    key = f"parallel.stages={stages}"
    if 0 < layers < stages:
        fewer = [n for n in range(1, layers + 1) if layout.ranks % n == 0]
        yield f"{key}: {kind} has {layers} layers - use parallel.stages={fewer[-1]}"
    elif isinstance(facts, ModelFacts) and not facts.layer_list:
        yield f"{key}: {kind} has no single list of its layers, or no head - use parallel.stages=1"
    if isinstance(facts, ModelFacts) and layout.micro_batches < stages:
        yield (
            f"{key}: train.gradient_accumulation_steps={layout.micro_batches} gives a step fewer "
            f"micro-batches than stages, which then never all work - use {stages} or more"
        )
