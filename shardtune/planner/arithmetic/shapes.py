"""A step's traffic and memory by arithmetic on the shapes of a model's parameters.

A simulated step takes seconds; this takes less than a millisecond once the shapes are read.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from shardtune.distributed.layout import BYTES, Layout
from shardtune.model.documents.shared_rows import context_problems
from shardtune.model.moe.spread import spread_problems, spread_stacks
from shardtune.model.stages import layers_of_stages
from shardtune.model.traits import decoder_layers, heads, is_stack, most_of_layers, top_k
from shardtune.planner.arithmetic.figures import EXPERT_IMBALANCE, Collective
from shardtune.training.states.reshard import KeptBytes, ReshardPolicy, decide, room_beside


class Sizes(NamedTuple):
    """Elements of some modules: of weights that are cut into shards, and of experts that may be
    spread instead; what their products read and write for a token; and layers with experts."""

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0
    dense_products: int = 0
    expert_products: int = 0
    exchanges: int = 0

    @property
    def products(self) -> int:
        return self.dense_products + self.expert_products


class StageSizes(NamedTuple):
    """The layers of a stage, the largest of them, and what stands before and behind them."""

    per_layer: list[Sizes]
    layers: Sizes  # together
    largest: Sizes
    around: Sizes


class Keeps(NamedTuple):
    """What a rank keeps until the end of a step, and the bytes of parameters that stay gathered."""

    policy: ReshardPolicy
    gathered_bytes: float


class Shapes:
    """What the shapes of a whole model's parameters say of each of its stages."""

    def __init__(self, whole: PreTrainedModel) -> None:
        """`whole`: with its adapters, not sharded, as `whole_on_meta` returns it."""
        self.n_layers = len(decoder_layers(whole))
        self.hidden_size = most_of_layers(whole, "hidden_size")
        self.top_k = top_k(whole)
        self.heads = [heads(layer) for layer in whole.config.get_text_config().per_layer_config]
        stacks = spread_stacks(whole)
        names = {parameter: name for name, parameter in whole.named_parameters()}

        def sizes(module: nn.Module, left_out: Sequence[nn.Module] = ()) -> Sizes:
            others = {p for each in left_out for p in each.parameters()}
            parameters = [p for p in module.parameters() if p not in others]
            return _sizes(parameters, {p for p in parameters if names[p] in stacks}, self.top_k)

        layers = decoder_layers(whole)
        per_layer = [sizes(layer) for layer in layers]
        looked_up: Any = whole.get_input_embeddings()
        embedding, behind = sizes(looked_up), sizes(whole, [*layers, looked_up])
        is_tied = bool(whole.all_tied_weights_keys)
        # Elements of a trained weight that is both embedding and head.
        self.shared_numel = embedding.trained_dense if is_tied else 0

        @cache
        def of_stages(number: int) -> list[StageSizes]:
            parts = []
            for stage, own in enumerate(layers_of_stages(whole, number)):
                around = [behind] if stage == number - 1 else []
                is_first = stage == 0
                if is_first or (is_tied and stage == number - 1):
                    around.append(embedding)
                of_layers = per_layer[own.start : own.stop]
                largest = max(of_layers, key=lambda s: s.dense + s.experts, default=Sizes())
                parts.append(StageSizes(of_layers, _sum(of_layers), largest, _sum(around)))
            return parts

        @cache
        def may_spread(degree: int, copies: int) -> bool:
            return next(spread_problems(whole, degree, copies), None) is None

        @cache
        def may_share(ranks: int) -> bool:
            return next(context_problems(whole, ranks, max_length=sys.maxsize), None) is None

        # Each is asked about a few divisions by hundreds of meshes.
        self.of_stages, self.may_spread, self.may_share = of_stages, may_spread, may_share

    def head_exchange(self, ranks: int) -> int:
        """Return how many elements of a token a layer sends where so many ranks share its row."""
        sent = sum(
            (each.key_width + each.value_width)
            * (each.queries + ranks // gcd(ranks, each.keys) * each.keys)
            for each in self.heads
        )
        return round(sent / len(self.heads))

    def trained(self, stage: int, layout: Layout) -> float:
        """Return the elements that a rank of a stage updates."""
        sizes = self.of_stages(layout.stages)[stage]
        whole = _sum([sizes.layers, sizes.around])
        return (whole.trained_dense + whole.trained_experts) / layout.stage_ranks


def _sum(sizes: Sequence[Sizes]) -> Sizes:
    return Sizes(*map(sum, zip(Sizes(), *sizes, strict=True)))


def _sizes(parameters: Sequence[nn.Parameter], spread: set[nn.Parameter], met: int) -> Sizes:
    counted: Counter[str] = Counter()
    for parameter in parameters:
        kind = "experts" if parameter in spread else "dense"
        counted[kind] += parameter.numel()
        counted[f"trained_{kind}"] += parameter.numel() * parameter.requires_grad
        width, height = parameter.shape[-1], parameter.shape[-2] if parameter.dim() > 1 else 0
        products = "expert_products" if is_stack(parameter) else "dense_products"
        counted[products] += (width + height) * (met if is_stack(parameter) else 1)
    return Sizes(**counted, exchanges=int(bool(spread)))


def least_traffic(shapes: Shapes, stage: int, keeps: Keeps, layout: Layout) -> Counter[Collective]:
    """Return what the first rank of a stage gathers, reduces, exchanges and receives in a step.

    The bytes are of the unsharded side, as a `Tracker` counts them.
    """
    stages, micro_batches = layout.stages, layout.micro_batches
    stage_ranks, shards, expert = layout.stage_ranks, layout.shards, layout.expert
    first = stage * stage_ranks
    shard_group = tuple(range(first, first + shards))
    copies = tuple(range(first, first + shards, expert))
    replicas = tuple(range(first, first + stage_ranks, shards))
    sizes = shapes.of_stages(stages)[stage]
    layers, around = sizes.layers, sizes.around
    compute_bytes, reduce_bytes = BYTES[layout.compute_dtype], BYTES[layout.reduce_dtype]
    own, trained = (n // expert for n in (layers.experts, layers.trained_experts))
    kept = keeps.gathered_bytes / compute_bytes
    gathered = list(_gathered(kept, around.dense, layers.dense, own, micro_batches))
    reduced = reduce_bytes * (1 if keeps.policy.keep_gradients else micro_batches)
    traffic: Counter[Collective] = Counter()
    trained_dense = layers.trained_dense + around.trained_dense
    traffic[Collective("all-gather", shard_group)] += compute_bytes * sum(gathered[:2])
    traffic[Collective("reduce-scatter", shard_group)] += reduced * trained_dense
    traffic[Collective("all-gather", copies)] += compute_bytes * gathered[2]
    traffic[Collective("reduce-scatter", copies)] += reduced * trained
    if layout.replicate > 1:
        slices = (trained_dense + layers.trained_experts) // shards
        reduced = reduce_bytes if keeps.policy.keep_sums else reduced
        traffic[Collective("reduce-scatter", replicas)] += reduced * slices
        traffic[Collective("all-gather", replicas)] += BYTES[layout.updated_dtype] * slices
    tokens = micro_batches * layout.tokens_per_rank
    hidden = compute_bytes * tokens * shapes.hidden_size
    experts, heads = _exchanged(shapes, sizes, layout, tokens)
    traffic[Collective("all-to-all", shard_group[:expert])] += experts
    traffic[Collective("all-to-all", tuple(range(first, first + layout.context)))] += heads
    neighbours = [first - stage_ranks] * (stage > 0) + [first + stage_ranks] * (stage < stages - 1)
    for neighbour in neighbours:
        traffic[Collective("send", (neighbour, first))] += hidden
    if neighbours and stage in (0, stages - 1):
        shared = BYTES[layout.gradient_dtype] * shapes.shared_numel // stage_ranks
        traffic[Collective("send", (layout.ranks - stage_ranks - first, first))] += shared
    return Counter({each: n for each, n in traffic.items() if n and len(each.ranks) > 1})


def _exchanged(shapes: Shapes, sizes: StageSizes, layout: Layout, tokens: int) -> tuple[int, int]:
    """Return the bytes that the experts and the heads of a stage exchange for a rank's tokens."""
    again, compute_bytes = layout.recomputes, BYTES[layout.compute_dtype]
    hidden = compute_bytes * tokens * shapes.hidden_size
    # To the experts and back, in the forward and the backward; once more to them in a
    # recomputation. Weights, in float32, go to the experts, and their gradients come back.
    pair = (4 + again) * hidden + (2 + again) * 4 * tokens
    # All heads in the forward, their gradients in the backward, and once more in a recomputation.
    width = shapes.head_exchange(layout.context) * len(sizes.per_layer)
    heads = (2 + again) * compute_bytes * tokens * width
    return shapes.top_k * pair * sizes.layers.exchanges, heads


def _gathered(
    kept: float, around: int, layers: int, experts: int, micro_batches: int
) -> Iterator[int]:
    """Yield how many elements a step gathers around the layers, of these, and of spread experts.

    The first `kept` elements are gathered once. FSDP2 keeps what stands around the layers from the
    forward to the backward in any case.
    """
    for numel, times in ((around, 1), (layers, 2), (experts, 2)):
        once = min(kept, numel)
        kept -= once
        yield round(once + times * micro_batches * (numel - once))


def _copied_numel(sizes: Sizes, expert: int, frozen: bool, trained: bool) -> float:
    """Return how many elements FSDP2 copies for a rank, of frozen weights and of trained ones."""
    n_trained = sizes.trained_dense + sizes.trained_experts / expert
    n_frozen = sizes.dense + sizes.experts / expert - n_trained
    return n_frozen * frozen + n_trained * trained


def rough_memory(shapes: Shapes, stage: int, layout: Layout, free: float) -> tuple[float, Keeps]:
    """Return about the bytes that a rank of a stage holds at its peak, and what it keeps.

    Where not all parameters have room, those that stay gathered are left out of the peak. `free`:
    what a rank may hold. The plans in docs/planner.md are within a tenth of it; a simulated step
    knows better.
    """
    expert, stage_ranks, shards = layout.expert, layout.stage_ranks, layout.shards
    sizes = shapes.of_stages(layout.stages)[stage]
    whole, largest = _sum([sizes.layers, sizes.around]), sizes.largest
    compute_bytes, reduce_bytes = BYTES[layout.compute_dtype], BYTES[layout.reduce_dtype]
    stored_bytes, gradient_bytes = BYTES[layout.master_dtype], BYTES[layout.gradient_dtype]
    trained = whole.trained_dense + whole.trained_experts
    frozen = whole.dense + whole.experts - trained
    states = (BYTES[layout.updated_dtype] * trained + compute_bytes * frozen) / shards
    if layout.offloads:  # of a layer, and of the one before
        states += 2 * gradient_bytes * (largest.dense + largest.experts) / stage_ranks
    else:
        states += (gradient_bytes + layout.optimizer_bytes) * trained / stage_ranks

    is_alike = stored_bytes == compute_bytes == reduce_bytes
    trained_too = stage_ranks > 1 or layout.offloads or not is_alike
    copied = partial(_copied_numel, expert=expert, frozen=shards > 1, trained=trained_too)
    gathered = compute_bytes * copied(whole)
    reduced = reduce_bytes * (whole.trained_dense + whole.trained_experts / expert)
    if stage_ranks == 1 and not layout.offloads:  # they replace those that are kept
        reduced = 0.0
    micro_batches = layout.micro_batches
    sums = gradient_bytes * trained / shards * (1 - 1 / layout.replicate)
    kept_bytes = KeptBytes([round(gathered)], round(reduced), round(sums))
    policy, _, room = decide(kept_bytes, free - states, micro_batches)
    if not policy.kept_groups:  # that of one layer, of the one before, and a copy
        gathered = compute_bytes * (copied(sizes.around) + 3 * copied(largest))
    if not policy.keep_gradients or micro_batches == 1:
        layer = largest.trained_dense + largest.trained_experts / expert
        reduced = min(reduced, reduce_bytes * 2 * layer)
    kept = {
        "offload": 2 * shapes.hidden_size,
        "full": shapes.hidden_size * len(sizes.per_layer),
        "selective": 0.6 * whole.products,
        "none": 1.2 * whole.products,
    }[layout.checkpointing]
    kept *= layout.in_flight(stage)
    imbalance = EXPERT_IMBALANCE if expert > 1 else 1
    of_layer = largest.dense_products + imbalance * largest.expert_products
    activations = compute_bytes * layout.tokens_per_rank * (kept + 3 * of_layer)
    if policy.keep_gradients or not policy.keep_sums or micro_batches == 1:
        sums = 0.0
    total = states + gathered + reduced + sums + activations
    more = max(0.0, min(room, room_beside(total, free)))
    return total, Keeps(policy, math.inf if policy.kept_groups else more)


def host_inputs_bytes(shapes: Shapes, stage: int, layout: Layout) -> int:
    """Return the host memory that the inputs of a stage's layers take of a rank, of full rows."""
    if layout.checkpointing != "offload":
        return 0
    row = layout.tokens_per_rank * shapes.hidden_size * BYTES[layout.compute_dtype]
    layers = len(shapes.of_stages(layout.stages)[stage].per_layer)
    return layers * row * layout.in_flight(stage)
