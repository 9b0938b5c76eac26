"""Count the FLOPs that a step's documents need, and their share of the devices' peak (MFU).

The forward costs 2 FLOPs for every parameter that a token is multiplied by, and in each layer 2
FLOPs for every (query, key) pair, head and dimension, once for the scores and once for the values.
The backward costs twice the forward, and for a frozen parameter as much as the forward. This is the
MFU of PaLM (arXiv 2204.02311, appendix B), with three corrections: a document of L tokens has the
L (L + 1) / 2 pairs of causal attention, or those of its window, not L x L; only positions whose
next token is trained reach the head; a token is multiplied only by the experts that it is routed
to. Layers that keep a state instead of attending cost the products of that state for each token,
see `recurrence_flops`. Embedding lookups, norms, activations, softmax, the optimizer, padding and
recomputation count nothing.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.cards import card_of
from shardtune.data.schedule import Cost
from shardtune.distributed.tensors import dtype_name
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.documents.one_by_one import keeps_states_only, recurrence_flops, state_mixers
from shardtune.model.parts import is_in_list, is_stack, layer_types, met_numel, stacked_experts
from shardtune.model.traits import EXPERTS, TOP_K, heads, number, top_k

# The setting with the span of each layer type. Other types have no pairs, or the data decides.
_SPANS = {
    "full_attention": "",
    "hybrid": "",  # attention beside a layer that keeps a state
    "hybrid_sliding": "sliding_window",
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",  # counts as a window of this width, wherever its keys are
}
_WITHOUT_PAIRS = ("linear_attention", "conv", "moe", "mlp")

_GEMM_SIZE = 1024


class NotCounted(Exception):
    """The architecture has no known number of FLOPs; the message says why."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model's forward."""

    per_token: float
    per_trained_token: float  # the head
    # Of these, the FLOPs of frozen parameters, whose gradients no backward computes.
    frozen_per_token: float
    frozen_per_trained_token: float
    # The number of layers of each kind: FLOPs of a pair, span in tokens, whether it is chunked.
    layers: Counter[tuple[float, int, bool]]

    def per_step(self, lengths: np.ndarray, trained_tokens: int) -> float:
        """Return the FLOPs of forward and backward over documents of these lengths, in tokens."""
        tokens = int(lengths.sum(dtype=np.int64))
        frozen = self.frozen_per_token * tokens + self.frozen_per_trained_token * trained_tokens
        return 3 * self.forward(lengths, trained_tokens) - frozen

    def forward(self, lengths: np.ndarray, trained_tokens: int) -> float:
        """Return the FLOPs of a forward over documents of these lengths, in tokens."""
        tokens = int(lengths.sum(dtype=np.int64))
        forward = self.per_token * tokens + self.per_trained_token * trained_tokens
        for (per_pair, span, is_chunked), count in self.layers.items():
            forward += count * per_pair * attended_pairs(lengths, span, is_chunked)
        return forward


def attended_pairs(lengths: np.ndarray, span: int, is_chunked: bool) -> int:
    """Count the (query, key) pairs of one layer over documents of these lengths, in tokens.

    A token attends to itself and the tokens before it: to `span` tokens in all (0: to all of them),
    or to those of its own chunk of `span` tokens.
    """
    lengths = np.asarray(lengths, np.int64)
    if is_chunked:
        rest = lengths % span
        return int((lengths // span * (span * (span + 1) // 2) + rest * (rest + 1) // 2).sum())
    within = np.minimum(lengths, span) if span else lengths
    return int((within * (within + 1) // 2 + (lengths - within) * span).sum())


def count_flops(model: PreTrainedModel) -> ModelFlops:
    """Count the FLOPs of a model, sharded or not, from its parameters and its attention's config.

    Raises:
        NotCounted: some of its layers attend to keys that depend on the data; or its experts, heads
            or head are not where other architectures have them.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if getattr(head, "weight", None) is None:
        raise NotCounted(f"{config.model_type} has no head")
    # Of a model that sees or hears too, only the decoder runs on text.
    decoder = model if config is model.config else model.get_decoder()
    skipped = _embeddings_and_head(model)
    routed = {id(p) for _, experts, _ in stacked_experts(model) for p in experts.parameters()}
    per_token = [
        (p, 2.0 * p.numel() * _used_share(name, p, config, id(p) in routed))
        for name, p in decoder.named_parameters()
        if id(p) not in skipped
    ]
    attend = [] if keeps_states_only(model) else config.per_layer_config
    layers = Counter(
        attention for i, layer in enumerate(attend) if (attention := _attention(layer, i))
    )
    recurrences = sum(map(recurrence_flops, state_mixers(model)))
    per_trained_token = 2.0 * head.weight.numel()
    return ModelFlops(
        sum(flops for _, flops in per_token) + recurrences,
        per_trained_token,
        sum(flops for parameter, flops in per_token if not parameter.requires_grad),
        0.0 if head.weight.requires_grad else per_trained_token,
        layers,
    )


def cost_of(model: PreTrainedModel) -> Cost:
    """Estimate the forward's FLOPs, to balance rows between ranks."""
    # Unlike `count_flops` this serves every architecture: all attention is causal over the whole
    # document, and attention counts nothing where the config does not name the number of heads.
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    skipped, met = _embeddings_and_head(model), top_k(model)
    body_size = sum(met_numel(p, met) for p in model.parameters() if id(p) not in skipped)
    head_size = sum(p.numel() for p in head.parameters()) if head else 0
    queries, _, key_width, value_width = heads(config)
    per_pair = 2 * queries * (key_width + value_width)
    return Cost(2 * body_size, 2 * head_size, number(config, "num_hidden_layers") * per_pair)


def stage_costs(
    model: PreTrainedModel, decoder_layers: list[nn.Module]
) -> tuple[float, tuple[float, ...], float]:
    """Return the costs of the embedding, of each decoder layer and of the head of a whole model."""
    # The cost of a part is its share of the model's FLOPs plus its share of the weights: a stage
    # needs time for FLOPs, and memory for weights.
    met = top_k(model)

    def flops_and_weights(module: Any, is_looked_up: bool = False) -> np.ndarray:
        parameters = list(module.parameters()) if module else []
        used = 0 if is_looked_up else sum(met_numel(p, met) for p in parameters)
        return np.array([used, sum(p.numel() for p in parameters)])

    costs = np.array(
        [
            flops_and_weights(model.get_input_embeddings(), is_looked_up=True),
            *map(flops_and_weights, decoder_layers),
            flops_and_weights(model.get_output_embeddings()),
        ],
        float,
    )
    first, *layers, last = (costs / costs.sum(0)).sum(1).tolist()
    return first, tuple(layers), last


def _embeddings_and_head(model: PreTrainedModel) -> set[int]:
    """Return the ids of the parameters of embeddings and head, which only some tokens meet."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head: Any = model.get_output_embeddings()
    return {id(p) for module in [*modules, *filter(None, [head])] for p in module.parameters()}


def _used_share(name: str, parameter: nn.Parameter, config: Any, is_routed: bool) -> float:
    """Return the share of a parameter by which a token is multiplied."""
    # A state decays by A_log and passes D, element by element. Decoders made for an encoder keep
    # the attention to it, and skip it without one. An indexer has no backward.
    is_elementwise = parameter.dim() < 2 or name.endswith(("bias", "A_log", ".D"))
    if is_elementwise or ".encoder_attn." in name or ".indexer." in name:
        return 0.0
    is_listed = is_in_list(name)
    if (parameter.dim() == 2 and not is_listed) or ".conv" in name:  # convolutions go by channel
        return 1.0
    met, stack, configured = number(config, *TOP_K), parameter.shape[0], number(config, *EXPERTS)
    # What takes a router's choices has experts, whatever they and their settings are called.
    if is_stack(parameter) and stack > 1 and not (configured or is_routed or "expert" in name):
        return 1.0  # each head or block of a token's features has a part
    experts = configured if is_listed else stack
    is_named_so = "expert" in name or configured == stack
    if not (met and experts and is_named_so and (is_listed or is_stack(parameter))):
        raise NotCounted(f"{config.model_type} does not say how often a token meets its {name}")
    return min(1.0, met / experts)


def _attention(config: Any, layer: int) -> tuple[float, int, bool] | None:
    """Return a layer's FLOPs per pair (a query by a key, a weight by a value), its span, and
    whether it is chunked; or None if it does not attend."""
    types = layer_types(config)
    layer_type = types[layer] if types else "sliding_attention"
    if layer_type in _WITHOUT_PAIRS:
        return None
    queries, _, key_width, value_width = heads(config)
    if not queries or not key_width:
        raise NotCounted(f"{config.model_type} does not say how many heads its layers have")
    if layer_type not in _SPANS:
        raise NotCounted(f"{config.model_type} has layers of type {layer_type}")
    span = number(config, _SPANS[layer_type])
    is_chunked = span > 0 and layer_type == "chunked_attention"
    return 2.0 * queries * (key_width + value_width), span, is_chunked


@dataclass(frozen=True)
class DevicePeak:
    """The FLOP/s that the devices of a run could reach at most."""

    flops_per_s: float | None  # the mean over ranks; None if it is not known
    source: str

    def __str__(self) -> str:
        if self.flops_per_s is None:
            return f"no peak is {self.source}"
        return f"{self.flops_per_s / 1e12:.3g} TFLOP/s ({self.source})"


def device_peak(dtype: torch.dtype, world: World) -> DevicePeak:
    """Return the GPUs' published peak, or the peak that CPU processes measure now. Collective."""
    if world.device.type == "cpu":
        measure_matmul_rate(dtype, seconds=0)
        # All ranks at once: cores and memory that they share must not count twice.
        world.all_reduce_max(0)
        peak: float | None = measure_matmul_rate(dtype)
        source = f"measured on this CPU in {dtype_name(dtype)}"
    else:
        device = torch.cuda.get_device_name(world.device)
        peak = published_peak(device, dtype)
        source = f"published for {device} in {dtype_name(dtype)}"
    peaks = world.all_gather_json(peak)
    return DevicePeak(None if None in peaks else sum(peaks) / world.size, source)


class MfuMeter:
    """The MFU of a run's steps: model FLOPs per second over the peak of all its devices."""

    def __init__(
        self, flops: ModelFlops | None, uncounted: str, device_peak: DevicePeak, ranks: int
    ) -> None:
        """Log the peak that the MFU is relative to, or why there is none."""
        self._flops, self._peak = flops, (device_peak.flops_per_s or 0.0) * ranks
        if not flops:
            logger.info(f"MFU is left out: {uncounted}")
        elif self._peak:
            logger.info(f"MFU counts model FLOPs against {device_peak} x {ranks} (ranks)")
        else:
            logger.info(f"MFU is left out: {device_peak}")

    def per_step(self, lengths: np.ndarray, trained_tokens: int, seconds: float) -> float | None:
        """Return the MFU, from 0 to 1, of a step over documents of these lengths, or None."""
        if not self._flops or not self._peak:
            return None
        return self._flops.per_step(lengths, trained_tokens) / seconds / self._peak


def published_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU in bfloat16 or float16, dense, or None."""
    card = card_of(device_name) if dtype in (torch.bfloat16, torch.float16) else None
    return card.flops_per_s if card else None


def measure_matmul_rate(dtype: torch.dtype, seconds: float = 0.1) -> float:
    """Return this process's FLOP/s in products of 1024-wide matrices, for `seconds` at least."""
    # Matrices of ones: to draw random numbers here would change the run's later draws.
    a, b, product = torch.ones(3, _GEMM_SIZE, _GEMM_SIZE, dtype=dtype)
    started, count = time.perf_counter(), 0
    while True:
        torch.mm(a, b.T, out=product)
        count += 1
        if (elapsed := time.perf_counter() - started) >= seconds:
            return count * 2 * _GEMM_SIZE**3 / elapsed
