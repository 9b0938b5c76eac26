"""A step's traffic and memory by arithmetic on the shapes of a model's parameters.

A simulated step takes seconds; this takes less than a millisecond once the shapes are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.tensors import DTYPES
from shardtune.model.experts import spread_stacks
from shardtune.model.stages import layers_of_stages
from shardtune.model.support import decoder_layers
from shardtune.planner.tracker import Collective
from shardtune.training.reshard import ReshardPolicy


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


class StageSizes(NamedTuple):
    """The layers of a stage, the largest of them, and what stands before and behind them."""

    layers: Sizes
    largest: Sizes
    around: Sizes
    n_layers: int


class Shapes:
    """What the shapes of a whole model's parameters say of each of its stages."""

    def __init__(self, whole: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        """`whole`: with its adapters, not sharded, as `whole_on_meta` returns it.

        `compute_dtype`: of forward and backward.
        """
        self.compute_bytes = compute_dtype.itemsize
        settings: Any = whole.config.get_text_config()
        self.hidden_size: int = getattr(settings, "hidden_size", None) or 0
        self.top_k: int = getattr(settings, "num_experts_per_tok", None) or 1
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

        @cache
        def of_stages(number: int) -> list[StageSizes]:
            parts = []
            for stage, own in enumerate(layers_of_stages(whole, number)):
                around = [behind] if stage == number - 1 else []
                is_first = stage == 0
                if is_first or (is_tied and stage == number - 1):
                    around.append(embedding)
                of_layers = per_layer[own.start : own.stop]
                largest = max(of_layers, key=lambda each: each.dense + each.experts)
                parts.append(StageSizes(_sum(of_layers), largest, _sum(around), len(of_layers)))
            return parts

        self.of_stages = of_stages


def _sum(sizes: Sequence[Sizes]) -> Sizes:
    return Sizes(*map(sum, zip(Sizes(), *sizes, strict=True)))


def _sizes(parameters: Sequence[nn.Parameter], spread: set[nn.Parameter], top_k: int) -> Sizes:
    counted: Counter[str] = Counter()
    for parameter in parameters:
        kind = "experts" if parameter in spread else "dense"
        counted[kind] += parameter.numel()
        counted[f"trained_{kind}"] += parameter.numel() * parameter.requires_grad
        width, height = parameter.shape[-1], parameter.shape[-2] if parameter.dim() > 1 else 0
        is_stack = parameter.dim() > 2
        products = "expert_products" if is_stack else "dense_products"
        counted[products] += (width + height) * (top_k if is_stack else 1)
    return Sizes(**counted, exchanges=int(bool(spread)))


def least_traffic(
    shapes: Shapes, stage: int, policy: ReshardPolicy, config: Config, ranks: int
) -> Counter[Collective]:
    """Return what the first rank of a stage gathers, reduces, exchanges and receives in a step.

    `ranks`: of all stages. The bytes are of the unsharded side, as a `Tracker` counts them.
    """
    parallel, train = config.parallel, config.train
    stages, micro_batches = parallel.stages, train.gradient_accumulation_steps
    stage_ranks = ranks // stages
    first, shards = stage * stage_ranks, stage_ranks // parallel.replicate
    shard_group = tuple(range(first, first + shards))
    copies = tuple(range(first, first + shards, parallel.expert))
    replicas = tuple(range(first, first + stage_ranks, shards))
    sizes = shapes.of_stages(stages)[stage]
    layers, around = sizes.layers, sizes.around
    compute_bytes = shapes.compute_bytes
    reduce_bytes = DTYPES[config.model.reduce_dtype].itemsize
    # FSDP2 keeps what stands around the layers from the forward to the backward.
    once = 1 if policy.keep_parameters else micro_batches
    twice = 1 if policy.keep_parameters else 2 * micro_batches
    reduced = reduce_bytes * (1 if policy.keep_gradients else micro_batches)
    traffic: Counter[Collective] = Counter()
    trained_dense = layers.trained_dense + around.trained_dense
    gathered = twice * layers.dense + once * around.dense
    traffic[Collective("all-gather", shard_group)] += compute_bytes * gathered
    traffic[Collective("reduce-scatter", shard_group)] += reduced * trained_dense
    own, trained = (n // parallel.expert for n in (layers.experts, layers.trained_experts))
    traffic[Collective("all-gather", copies)] += compute_bytes * twice * own
    traffic[Collective("reduce-scatter", copies)] += reduced * trained
    if parallel.replicate > 1:
        slices = (trained_dense + layers.trained_experts) // shards
        reduced = reduce_bytes if policy.keep_sums else reduced
        traffic[Collective("reduce-scatter", replicas)] += reduced * slices
        # Factors of adapters are float32.
        updated = DTYPES["float32" if config.lora.rank else config.model.master_dtype].itemsize
        traffic[Collective("all-gather", replicas)] += updated * slices
    rows = micro_batches * train.micro_batch_size
    hidden = compute_bytes * rows * config.data.max_length * shapes.hidden_size
    if parallel.expert > 1:
        # To the experts and back, in the forward, its recomputation and the backward.
        times = 4 if config.model.activation_checkpointing == "none" else 6
        pairs = times * shapes.top_k * hidden * layers.exchanges
        traffic[Collective("all-to-all", shard_group[: parallel.expert])] += pairs
    neighbours = [first - stage_ranks] * (stage > 0) + [first + stage_ranks] * (stage < stages - 1)
    for neighbour in neighbours:
        traffic[Collective("send", (neighbour, first))] += hidden
    return Counter({each: n for each, n in traffic.items() if n and len(each.ranks) > 1})
