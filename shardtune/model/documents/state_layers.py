"""Keep documents apart in layers that hand a state along the row instead of attending.

Delta rules, state spaces, lightning attention and short convolutions begin with an empty state. So
their innermost module that mixes tokens is called once per document of a flat row; the rest of a
layer works by token. A gated delta rule on a GPU takes all documents at once where the kernels for
that are installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.model import documents
from shardtune.model.documents.one_by_one import call_one_by_one, restore
from shardtune.model.traits import decoder_layers

# The packages with the kernels that transformers calls where they are installed, and their names
# in a registry.
_KERNELS = {
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
}


def state_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that hand a state from token to token, of all decoder layers."""
    inside = dict.fromkeys(m for layer in decoder_layers(model) for m in layer.modules())
    stateful = {m for m in inside if _keeps_state(m)}
    return [m for m in inside if m in stateful and not stateful & {*list(m.modules())[1:]}]


def _keeps_state(module: nn.Module) -> bool:
    """Return whether a module has a state of its own, besides keys and values."""
    takes = inspect.signature(type(module).forward).parameters
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    is_linear = getattr(module, "layer_type", "") == "linear_attention"
    return "cache_params" in takes or has_convolution or (is_linear and "past_key_values" in takes)


def separate_documents(mixers: list[nn.Module], at_once: bool) -> None:
    """Let the documents of a flat row begin with an empty state each, from now on.

    `at_once`: gated delta rules take all documents of a row in one call.
    """
    for mixer in mixers:
        restore(mixer)
        if at_once and takes_boundaries(mixer):
            mixer.forward = torch.compiler.disable(partial(_at_once, mixer.forward))
        else:
            call_one_by_one(mixer)


def takes_boundaries(mixer: nn.Module) -> bool:
    """Return whether a mixer's own forward reads where documents begin."""
    constants = inspect.unwrap(type(mixer).forward).__code__.co_consts
    return "cu_seq_lens_q" in constants


def missing_kernels(mixers: list[nn.Module]) -> list[str]:
    """Return the names of the packages whose kernels these mixers would call."""
    wanted = {package for mixer in mixers for package in _kernels_of(mixer)}
    return [name for each, name in _KERNELS.items() if each in wanted and not find_spec(each)]


def _kernels_of(mixer: nn.Module) -> list[str]:
    if hasattr(mixer, "ssm_state_size"):
        return ["mamba_ssm", "causal_conv1d"]
    convolutions = [m for m in mixer.children() if isinstance(m, nn.Conv1d)]
    recurrences = ["fla"] if delta_state_size(mixer) else []
    return recurrences + ["causal_conv1d"] * bool(convolutions)


def _at_once(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    row = documents.current()
    numbers = row.numbers().unsqueeze(0)
    return forward(*arguments, **options, cu_seq_lens_q=row.boundaries, seq_idx=numbers)


def delta_state_size(mixer: nn.Module) -> int:
    """Return the elements of the state of a delta rule, of all heads, or 0."""
    m: Any = mixer
    if decays_by_head(m):
        return int(m.num_v_heads * m.head_k_dim * m.head_v_dim)
    if hasattr(m, "ssm_state_size") or not hasattr(m, "conv1d") or not hasattr(m, "head_dim"):
        return 0
    return int(m.num_heads * m.head_dim * m.head_dim)


def decays_by_head(mixer: nn.Module) -> bool:
    """Return whether a mixer is a gated delta rule with one decay for each head and token."""
    # Kimi Linear (arXiv 2510.26692) has one decay for each channel.
    return hasattr(mixer, "head_k_dim")


def recurrence_flops(mixer: nn.Module) -> float:
    """Return the FLOPs of a token in a mixer's recurrence: 2 for each element of its state and
    each product with it. Projections are left out; weights of convolutions count as parameters."""
    m: Any = mixer
    # A state space has two products, the change of the state and its answer to a query (arXiv
    # 2312.00752, equation 2; 2405.21060, equation 1).
    if hasattr(m, "ssm_state_size"):
        return 4.0 * m.intermediate_size * m.ssm_state_size
    # A delta rule has a third one, the state's answer to a key (arXiv 2412.06464, equation 10; by
    # channel 2510.26692, equation 1).
    if state := delta_state_size(mixer):
        return 6.0 * state
    # Lightning attention has two (arXiv 2401.04658, equation 4).
    if getattr(m, "layer_type", "") == "linear_attention" and hasattr(m, "num_attention_heads"):
        return 4.0 * m.num_attention_heads * m.head_dim * m.head_dim
    return 0.0
