"""Keep documents apart in layers that mix tokens in code of their own: one call for each document.

Layers with capped scores, with a bias, with compressed keys or with a mask that knows no documents
attend in code of their own. Delta rules, state spaces, lightning attention and short convolutions
hand a state along the row instead, and begin with an empty one. The innermost module of such a
layer that mixes tokens takes the documents of a flat row one by one, as if each were alone. The
rest of the model, experts among it, takes the whole row. A gated delta rule on a GPU takes all
documents at once where the kernels for that are installed.
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
from shardtune.model.parts import decoder_layers, layer_types


def call_one_by_one(module: nn.Module) -> None:
    """Let a module take each document of a row in a call of its own, from now on."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    one_by_one = partial(_one_by_one, module.forward, names)
    module.forward = torch.compiler.disable(one_by_one)


def restore(module: nn.Module) -> None:
    """Let a module take a row as one document again."""
    vars(module).pop("forward", None)


def _one_by_one(
    forward: Callable[..., Any], names: list[str], *arguments: Any, **options: Any
) -> Any:
    """Call `forward`, whose arguments have `names`, for each document, and join the outputs."""
    row = documents.current()
    lengths = row.lengths
    if len(lengths) == 1:
        return forward(*arguments, **options)
    tensors = (each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor))
    if _token_dim(first := next(tensors), sum(lengths)) is None:
        raise RuntimeError(
            f"a layer got a tensor of {tuple(first.shape)} for documents of {sum(lengths)} tokens"
        )
    ordered = [_parts(value, name, lengths) for name, value in zip(names, arguments, strict=False)]
    named = {name: _parts(value, name, lengths) for name, value in options.items()}
    outputs, ends = [], torch.arange(2, device=row.boundaries.device, dtype=torch.int32)
    for i, length in enumerate(lengths):
        alone = documents.Documents([length], length * ends)
        with documents.of(alone, tried=row.tried):  # for modules within
            options = {name: part[i] for name, part in named.items()}
            outputs.append(forward(*(part[i] for part in ordered), **options))
    return _joined(outputs, lengths)


def _parts(value: Any, name: str, lengths: list[int]) -> list[Any]:
    """Return each document's part of a value that a module gets as its argument `name`."""
    if isinstance(value, torch.Tensor):
        if "mask" in name or name == "alibi":
            return [_beginning(value, sum(lengths), length) for length in lengths]
        dim = _token_dim(value, sum(lengths))
        return [value] * len(lengths) if dim is None else list(value.split(lengths, dim))
    if isinstance(value, tuple):
        parts = [_parts(each, name, lengths) for each in value]
        return [tuple(part[i] for part in parts) for i in range(len(lengths))]
    if isinstance(value, dict):
        named = {key: _parts(each, name, lengths) for key, each in value.items()}
        return [{key: part[i] for key, part in named.items()} for i in range(len(lengths))]
    return [value] * len(lengths)


def _beginning(value: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Return the part of a mask or ALiBi for the first `length` tokens of a row."""
    # Masks and ALiBi go by the place in the row: a document that is alone gets the same part.
    for dim in range(max(0, value.dim() - 2), value.dim()):
        if value.shape[dim] == tokens:
            value = value.narrow(dim, 0, length)
    return value


def _token_dim(value: torch.Tensor, tokens: int) -> int | None:
    """Return the dimension of a row's tokens, or None."""
    # Tokens follow the dimension of rows, whose size is 1, or are the first dimension. Another
    # dimension may have the same size, but is a width.
    dims = [dim for dim, size in enumerate(value.shape) if size == tokens]
    behind_row = [dim for dim in dims if dim and value.shape[dim - 1] == 1]
    return next(iter(behind_row or dims[: dims[:1] == [0]]), None)


def _joined(outputs: list[Any], lengths: list[int]) -> Any:
    """Join documents' outputs (1, tokens, ...). A state at their end is the last document's."""
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(_joined(list(each), lengths) for each in zip(*outputs, strict=True))
    if all(
        isinstance(output, torch.Tensor) and output.shape[:2] == (1, length)
        for output, length in zip(outputs, lengths, strict=True)
    ):
        return torch.cat(outputs, 1)
    return outputs[-1]


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


class OneByOne:
    """Lets a model's attention take documents one by one, until it is removed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tables = position_tables(model)
        self._modules = [*attention_layers(model), *self._tables]
        for module in self._modules:
            call_one_by_one(module)
        self._hook = model.register_forward_pre_hook(self._hide_documents, with_kwargs=True)

    @property
    def is_used(self) -> bool:
        return bool(self._modules)

    def remove(self) -> None:
        self._hook.remove()
        for module in self._modules:
            restore(module)

    def _hide_documents(self, _: nn.Module, ordered: Any, named: dict[str, Any]) -> Any:
        """Let the model make the masks of a row without documents."""
        # If transformers gets a mask of tokens, it does not look for documents in the positions.
        # Learned tables of positions count tokens themselves. Some do not begin at 0.
        named = named | {"attention_mask": torch.ones_like(named["input_ids"])}
        if self._tables:
            named.pop("position_ids", None)
        return ordered, named


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that attend under a mask and keep no state."""
    named_so = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    masked = [m for m in named_so if any("mask" in name for name in _takes(m))]
    inner = {m for module in masked for m in [*module.modules()][1:]}
    left_out = {*inner, *state_mixers(model)}
    return [module for module in masked if module not in left_out]


def position_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that count positions themselves and look them up."""
    counts = {"input_ids", "past_key_values_length"}
    modules = (m for m in model.modules() if not isinstance(m, PreTrainedModel))
    return [module for module in modules if counts <= _takes(module)]


def keeps_states_only(model: PreTrainedModel) -> bool:
    """Return whether every layer hands a state along the row instead of attending."""
    if types := layer_types(model.config.get_text_config()):
        return set(types) == {"linear_attention"}
    decoder: Any = model.get_decoder()
    return "position_ids" not in _takes(decoder) and not attention_layers(model)


def _takes(module: nn.Module) -> set[str]:
    return {*inspect.signature(type(module).forward).parameters}


_INDEXED = "indexed_attention"  # among the types of layers


def indexers(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "index_topk") and hasattr(m, "wq_b")]


def dense_attention(model: PreTrainedModel, longest: int) -> DenseAttention | None:
    """Let a model attend densely if its indexers choose all keys of the longest document."""
    numbers = [indexer.index_topk for indexer in indexers(model)]
    chooses_all = numbers and longest <= min(numbers)
    return DenseAttention(model) if chooses_all else None


class DenseAttention:
    """Lets a model attend to all keys, until it is removed.

    An indexer of DeepSeek's sparse attention (arXiv 2512.02556) scores every key for every query
    and leaves the best `index_topk` to attention. It has no gradient. If no document has more
    tokens, all keys are left, so that a flat row needs neither scores nor a mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._indexers = indexers(model)
        # An empty tensor stands for choices and masks that attention does not read.
        nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool)
        types = {*layer_types(model.config.get_text_config()), _INDEXED}
        masks = {kind: nothing if kind == _INDEXED else None for kind in types}
        for indexer in self._indexers:
            indexer.forward = partial(_choose_all, nothing)
        self._hook = model.register_forward_pre_hook(partial(_give_masks, masks), with_kwargs=True)

    def remove(self) -> None:
        self._hook.remove()
        for indexer in self._indexers:
            vars(indexer).pop("forward", None)


def _choose_all(nothing: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return nothing


def _give_masks(masks: Any, _: nn.Module, ordered: Any, named: dict[str, Any]) -> Any:
    return ordered, named | {"attention_mask": masks}


def describe_indexers(model: PreTrainedModel, longest: int) -> str | None:
    """Return the log's line on a model's indexers, or None without any."""
    numbers = [indexer.index_topk for indexer in indexers(model)]
    if not numbers:
        return None
    number = numbers[0]
    how = (
        f"attention is dense, since no document of the data has more than {number} tokens"
        if longest <= number
        else f"each token sees the {number} keys that they choose"
    )
    return f"Indexers: {len(numbers)}, which get no gradient; {how}"
