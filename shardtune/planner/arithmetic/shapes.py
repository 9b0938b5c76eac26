"""A step's traffic and memory by arithmetic on the shapes of a model's parameters.

A simulated step takes seconds, the arithmetic less than a millisecond once shapes are read.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import gcd, prod
from typing import NamedTuple

from shardtune.distributed.layout import BYTES, Layout
from shardtune.model.facts.facts import ModelFacts, Parameter
from shardtune.model.facts.problems import context_problems, expert_problems, tensor_problems
from shardtune.model.stages import divided
from shardtune.optimizers.rounding import SCALE_BLOCK
from shardtune.planner.arithmetic.figures import EXPERT_IMBALANCE, Collective
from shardtune.training.states.reshard import KeptBytes, ReshardPolicy, decide, room_beside


class Sizes(NamedTuple):
    """Elements of some modules."""

    dense: int = 0  # elements of weights that all ranks shard
    cut: int = 0  # elements of matrices that `parallel.tensor` cuts
    experts: int = 0  # elements of experts, which may be spread over ranks instead
    trained_dense: int = 0
    trained_cut: int = 0
    trained_experts: int = 0
    dense_products: int = 0  # that matrix products read and write for a token
    expert_products: int = 0
    exchanges: int = 0  # number of layers with experts
    blocks: int = 0  # number of modules with matrices that `parallel.tensor` cuts

    @property
    def numel(self) -> int:
        return self.dense + self.cut + self.experts

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_cut + self.trained_experts

    def held(self, layout: Layout) -> float:
        """Return the elements that a rank has once all are gathered."""
        return self.dense + self.cut / layout.tensor + self.experts / layout.expert

    def trained_held(self, layout: Layout) -> float:
        """Return the trained elements that a rank has once all are gathered."""
        cut, experts = self.trained_cut / layout.tensor, self.trained_experts / layout.expert
        return self.trained_dense + cut + experts

    @property
    def products(self) -> int:
        return self.dense_products + self.expert_products


class StageSizes(NamedTuple):
    """Sizes of a stage: of its layers, and of embedding, norm and head around them."""

    per_layer: list[Sizes]
    layers: Sizes  # together
    largest: Sizes
    around: Sizes


class Keeps(NamedTuple):
    """A rank's policy, and the bytes of parameters that stay gathered until a step ends."""

    policy: ReshardPolicy
    gathered_bytes: float


class Shapes:
    """Sizes of each stage of a model, from the shapes of its parameters."""

    def __init__(self, facts: ModelFacts) -> None:
        """Compute the sizes of the layers, and of what stands around them."""
        self.n_layers, self.hidden_size = facts.n_layers, facts.hidden_size
        self.top_k, self.heads = facts.top_k, facts.heads
        per_layer = [_sizes(layer.parameters, self.top_k) for layer in facts.layers]
        embedding, behind = (
            _sizes(parameters, self.top_k) for parameters in (facts.embedding, facts.behind)
        )
        # Elements of a trained weight that is both embedding and head.
        self.shared_numel = embedding.trained if facts.is_tied else 0

        @cache
        def by_stage(number: int) -> list[StageSizes]:
            parts = []
            for stage, layers_of_stage in enumerate(divided(facts.costs, number)):
                around = [behind] if stage == number - 1 else []
                is_first = stage == 0
                if is_first or (facts.is_tied and stage == number - 1):
                    around.append(embedding)
                chosen = per_layer[layers_of_stage.start : layers_of_stage.stop]
                largest = max(chosen, key=lambda s: s.numel, default=Sizes())
                parts.append(StageSizes(chosen, _sum(chosen), largest, _sum(around)))
            return parts

        @cache
        def may_spread(degree: int, copies: int) -> bool:
            return next(expert_problems(facts, degree, copies), None) is None

        @cache
        def may_share(ranks: int) -> bool:
            return next(context_problems(facts, ranks), None) is None

        @cache
        def may_cut(ranks: int, has_blocks: bool) -> bool:
            """`has_blocks`: parts of columns are whole blocks of one scale."""
            columns = [cut.shape[1] for cut in facts.cut if cut.dimension]
            is_whole = not has_blocks or not any(n // ranks % SCALE_BLOCK for n in columns)
            return is_whole and next(tensor_problems(facts, ranks), None) is None

        # Hundreds of meshes ask about the same few divisions, so answers are cached.
        self.by_stage, self.may_spread = by_stage, may_spread
        self.may_share, self.may_cut = may_share, may_cut

    def head_exchange(self, ranks: int) -> int:
        """Return the elements of a token that a layer sends where `ranks` share its row."""
        sent = sum(
            (layer.key_width + layer.value_width)
            * (layer.queries + ranks // gcd(ranks, layer.keys) * layer.keys)
            for layer in self.heads
        )
        return round(sent / len(self.heads))

    def trained(self, stage: int, layout: Layout) -> float:
        """Return the elements that a rank of a stage updates."""
        sizes = self.by_stage(layout.stages)[stage]
        whole = _sum([sizes.layers, sizes.around])
        return whole.trained / layout.stage_ranks


def _sum(sizes: Sequence[Sizes]) -> Sizes:
    return Sizes(*map(sum, zip(Sizes(), *sizes, strict=True)))


def _sizes(parameters: Sequence[Parameter], top_k: int) -> Sizes:
    counted: Counter[str] = Counter()
    for _, shape, is_trained, kind in parameters:
        numel = prod(shape)
        counted[kind] += numel
        counted[f"trained_{kind}"] += numel * is_trained
        sides, is_stack = sum(shape[-2:]), len(shape) == 3
        products = "expert_products" if is_stack else "dense_products"
        counted[products] += sides * (top_k if is_stack else 1)
    blocks = {p.name.rsplit(".", 2)[0] for p in parameters if p.kind == "cut"}
    return Sizes(**counted, exchanges=int(counted["experts"] > 0), blocks=len(blocks))


def least_traffic(shapes: Shapes, stage: int, keeps: Keeps, layout: Layout) -> Counter[Collective]:
    """Return the traffic of a stage's first rank in a step.

    The bytes are of each collective's unsharded side, as a `Tracker` counts them.
    """
    stages, micro_batches = layout.stages, layout.micro_batches
    stage_ranks, shards, expert = layout.stage_ranks, layout.shards, layout.expert
    first = stage * stage_ranks
    shard_group = tuple(range(first, first + shards))
    copies = tuple(range(first, first + shards, expert))
    parts = tuple(range(first, first + shards, layout.tensor))  # of ranks with equal parts
    replicas = tuple(range(first, first + stage_ranks, shards))
    sizes = shapes.by_stage(stages)[stage]
    layers, around = sizes.layers, sizes.around
    compute_bytes, reduce_bytes = BYTES[layout.compute_dtype], BYTES[layout.reduce_dtype]
    experts, trained = (n // expert for n in (layers.experts, layers.trained_experts))
    kept = keeps.gathered_bytes / compute_bytes
    cut, trained_cut = (n // layout.tensor for n in (layers.cut, layers.trained_cut))
    in_layers = layers.dense + cut
    gathered = list(_gathered(kept, around.dense, in_layers, experts, micro_batches))
    gathered_cut = gathered[1] * cut // max(1, in_layers)
    reduced = reduce_bytes * (1 if keeps.policy.keep_gradients else micro_batches)
    traffic: Counter[Collective] = Counter()
    trained_dense = layers.trained_dense + around.trained_dense
    whole = sum(gathered[:2]) - gathered_cut
    traffic[Collective("all-gather", shard_group)] += compute_bytes * whole
    traffic[Collective("reduce-scatter", shard_group)] += reduced * trained_dense
    traffic[Collective("all-gather", parts)] += compute_bytes * gathered_cut
    traffic[Collective("reduce-scatter", parts)] += reduced * trained_cut
    traffic[Collective("all-gather", copies)] += compute_bytes * gathered[2]
    traffic[Collective("reduce-scatter", copies)] += reduced * trained
    if layout.replicate > 1:  # replicas reduce gradients of their slices, then gather new weights
        slices = (trained_dense + layers.trained_cut + layers.trained_experts) // shards
        reduced = reduce_bytes if keeps.policy.keep_sums else reduced
        traffic[Collective("reduce-scatter", replicas)] += reduced * slices
        traffic[Collective("all-gather", replicas)] += BYTES[layout.updated_dtype] * slices
    tokens = micro_batches * layout.tokens_per_rank
    hidden = compute_bytes * tokens * shapes.hidden_size
    tokens_bytes, heads_bytes = _exchanged(shapes, sizes, layout, tokens)
    traffic[Collective("all-to-all", shard_group[:expert])] += tokens_bytes
    traffic[Collective("all-to-all", tuple(range(first, first + layout.context)))] += heads_bytes
    group = tuple(range(first, first + layout.tensor))
    gathered_bytes, scattered_bytes = rows_bytes(shapes, stage, layout)
    traffic[Collective("all-gather", group)] += gathered_bytes
    traffic[Collective("reduce-scatter", group)] += scattered_bytes
    neighbours = [first - stage_ranks] * (stage > 0) + [first + stage_ranks] * (stage < stages - 1)
    for neighbour in neighbours:
        traffic[Collective("send", (neighbour, first))] += hidden
    # A weight that is both embedding and head exchanges its gradient between the outer stages.
    if neighbours and stage in (0, stages - 1):
        shared = BYTES[layout.gradient_dtype] * shapes.shared_numel // stage_ranks
        traffic[Collective("send", (layout.ranks - stage_ranks - first, first))] += shared
    return Counter({key: n for key, n in traffic.items() if n and len(key.ranks) > 1})


def rows_bytes(shapes: Shapes, stage: int, layout: Layout) -> tuple[int, int]:
    """Return the bytes of rows that ranks of `tensor` gather in a step, and those they scatter."""
    if layout.tensor == 1:
        return 0, 0
    # Each block gathers its row and scatters its sums, and the backward does the reverse. A layer
    # that is computed again stops before its last sums.
    sizes, again = shapes.by_stage(layout.stages)[stage], layout.recomputes
    times = (2 + again) * sizes.layers.blocks
    tokens = layout.micro_batches * layout.tokens_per_rank * layout.tensor
    row = tokens * shapes.hidden_size * BYTES[layout.compute_dtype]
    return times * row, (times - again * len(sizes.per_layer)) * row


def _exchanged(shapes: Shapes, sizes: StageSizes, layout: Layout, tokens: int) -> tuple[int, int]:
    """Return the bytes that the experts and the heads of a stage exchange for a rank's tokens."""
    again, compute_bytes = layout.recomputes, BYTES[layout.compute_dtype]
    hidden = compute_bytes * tokens * shapes.hidden_size
    # Hidden states go to the experts and back, in the forward and in the backward, and once more
    # to them in a recomputation. Router weights go along in float32, and their gradients back.
    pair = (4 + again) * hidden + (2 + again) * 4 * tokens
    # Heads travel in the forward and in a recomputation, their gradients in the backward.
    width = shapes.head_exchange(layout.context) * len(sizes.per_layer)
    heads = (2 + again) * compute_bytes * tokens * width
    return shapes.top_k * pair * sizes.layers.exchanges, heads


def _gathered(
    kept: float, around: int, layers: int, experts: int, micro_batches: int
) -> Iterator[int]:
    """Yield the elements that a step gathers: around layers, of layers, and of spread experts.

    The first `kept` elements are gathered once, those around the layers once a micro-batch: FSDP2
    keeps them from the forward to the backward. All others are gathered in both.
    """
    for numel, times in ((around, 1), (layers, 2), (experts, 2)):
        once = min(kept, numel)
        kept -= once
        yield round(once + times * micro_batches * (numel - once))


def _copied_numel(sizes: Sizes, layout: Layout, frozen: bool, trained: bool) -> float:
    """Return the elements that FSDP2 copies for a rank when it gathers these modules."""
    n_trained = sizes.trained_held(layout)
    return (sizes.held(layout) - n_trained) * frozen + n_trained * trained


def rough_memory(shapes: Shapes, stage: int, layout: Layout, free: float) -> tuple[float, Keeps]:
    """Estimate the peak bytes of a rank of a stage, and the parameters that it keeps gathered.

    Groups kept only because memory is left do not count. `free`: bytes that a rank may hold. For
    the plans in docs/planner.md the estimate is within a tenth of a simulated step.
    """
    stage_ranks, shards = layout.stage_ranks, layout.shards
    sizes = shapes.by_stage(layout.stages)[stage]
    whole, largest = _sum([sizes.layers, sizes.around]), sizes.largest
    compute_bytes, reduce_bytes = BYTES[layout.compute_dtype], BYTES[layout.reduce_dtype]
    stored_bytes, gradient_bytes = BYTES[layout.master_dtype], BYTES[layout.gradient_dtype]
    trained, frozen = whole.trained, whole.numel - whole.trained
    states = (BYTES[layout.updated_dtype] * trained + compute_bytes * frozen) / shards
    if layout.offloads:  # gradients of a layer, and of the one before, which still travel
        states += 2 * gradient_bytes * largest.numel / stage_ranks
    else:
        states += (gradient_bytes + layout.optimizer_bytes) * trained / stage_ranks

    is_alike = stored_bytes == compute_bytes == reduce_bytes
    trained_too = stage_ranks > 1 or layout.offloads or not is_alike
    copied = partial(_copied_numel, layout=layout, frozen=shards > 1, trained=trained_too)
    gathered = compute_bytes * copied(whole)
    # One rank keeps its gradients as they are, without a copy.
    is_copied = stage_ranks > 1 or layout.offloads
    reduced = reduce_bytes * whole.trained_held(layout) * is_copied
    micro_batches = layout.micro_batches
    sums = gradient_bytes * trained / shards * (1 - 1 / layout.replicate)
    kept_bytes = KeptBytes([round(gathered)], round(reduced), round(sums))
    policy, room = decide(kept_bytes, free - states, micro_batches)
    # A layer, the one before, and a copy.
    freed = compute_bytes * (copied(sizes.around) + 3 * copied(largest))
    if not policy.keep_gradients or micro_batches == 1:
        reduced = min(reduced, reduce_bytes * 2 * largest.trained_held(layout))
    # Blocks of cut matrices read whole rows, which the backward keeps unless it gathers them again.
    more_rows = (layout.tensor - 1) * shapes.hidden_size
    kept = {
        "offload": 2 * shapes.hidden_size,
        "full": shapes.hidden_size * len(sizes.per_layer),
        "selective": 0.6 * whole.products,
        "none": 1.2 * whole.products + sizes.layers.blocks * more_rows,
    }[layout.checkpointing]
    kept *= layout.in_flight(stage)
    imbalance = EXPERT_IMBALANCE if layout.expert > 1 else 1
    products = largest.dense_products + imbalance * largest.expert_products
    activations = compute_bytes * layout.tokens_per_rank * (kept + 3 * (products + more_rows))
    if policy.keep_gradients or not policy.keep_sums or micro_batches == 1:
        sums = 0.0
    total = states + reduced + sums + activations
    if policy.kept_groups and total + gathered > free:
        policy = replace(policy, kept_groups=0)
    total += gathered if policy.kept_groups else freed
    more = max(0.0, min(room, room_beside(total, free)))
    return total, Keeps(policy, math.inf if policy.kept_groups else more)


def host_inputs_bytes(shapes: Shapes, stage: int, layout: Layout) -> int:
    """Return a rank's host memory for the inputs of its stage's layers, with full rows."""
    if layout.checkpointing != "offload":
        return 0
    row = layout.tokens_per_rank * shapes.hidden_size * BYTES[layout.compute_dtype]
    layers = len(shapes.by_stage(layout.stages)[stage].per_layer)
    return layers * row * layout.in_flight(stage)
