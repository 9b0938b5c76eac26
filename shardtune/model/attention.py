"""Attend within documents only, in flat rows (1, tokens), without a mask of tokens x tokens.

transformers' attention interface gives every layer's projections to `document_attention`, in all
models that use it. It calls PyTorch's fused attention once per document, or once for all documents
what the device has for that: varlen attention, or tiles in bfloat16 on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shardtune.errors import first_line
from shardtune.model.cpu_attention import causal_documents
from shardtune.model.flash_attention import is_third, keep_second

DOCUMENT_ATTENTION = "documents"  # its name in transformers' interface
# In the trial of FlashAttention 3: enough for many blocks of keys to add to one gradient.
_REPEATED_TOKENS, _REPEATS = 2048, 4
_UNSUPPORTED_OPTIONS = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biased scores",
}


class UnexpectedFeature(RuntimeError):
    """Attention asks for something that it did not ask for in its trial."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"attention asks for {feature}, which it did not in its trial")
        self.feature = feature


class _Documents:
    """The documents of the current batch, from its forward to the end of its backward.

    A global, since models do not hand unknown arguments down to their attention.
    """

    lengths: list[int]  # in tokens
    boundaries: torch.Tensor  # int32 [documents + 1]: where each document begins, and the end
    longest_of_run = 0  # tokens of the longest document of all data
    way = ""  # how the last layer attended
    # Why `document_attention` is not the model's own attention; a list during the model's trial.
    objections: list[str] | None = None

    def set(self, lengths: list[int], boundaries: torch.Tensor) -> None:
        self.lengths, self.boundaries = lengths, boundaries

    def record_objection(self, feature: str) -> None:
        if self.objections is None:
            raise UnexpectedFeature(feature)
        self.objections.append(feature)

    def check_span(self, tokens: int | None) -> None:
        """Object to attention to the last `tokens` alone, if a document is longer than that."""
        if tokens and tokens < self.longest_of_run:
            self.record_objection(
                f"a sliding window or chunks of {tokens} tokens, and the data a document of "
                f"{self.longest_of_run}"
            )


documents = _Documents()


def document_attention(
    module: nn.Module,
    query: torch.Tensor,  # (1, heads, tokens, width)
    key: torch.Tensor,  # (1, key heads, tokens, width)
    value: torch.Tensor,  # (1, key heads, tokens, value width)
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document of a flat row.

    The signature is that of transformers' attention interface. Returns (1, tokens, heads, value
    width), and no weights.
    """
    if attention_mask is not None:
        documents.record_objection("a mask of its own")
    if options.get("is_causal") is False:
        documents.record_objection("attention that is not causal")
    for name, feature in _UNSUPPORTED_OPTIONS.items():
        if options.get(name) is not None:
            documents.record_objection(feature)
    documents.check_span(options.get("sliding_window"))
    width, value_width = query.shape[-1], value.shape[-1]
    # Varlen attention has no dropout, and one width for all: narrower values, such as those of
    # latent attention, are padded.
    if not dropout and value_width <= width and _varlen_runs(*_kind(query), width):
        documents.way = "varlen attention"
        padded = F.pad(value, (0, width - value_width)) if value_width < width else value
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, padded))
        output = _varlen(q, k, v, documents.boundaries, max(documents.lengths), scaling)
        return output[..., :value_width].unsqueeze(0), None
    # In float32 the tiles are no faster, and the fused kernel keeps the numbers of earlier runs.
    if not dropout and query.device.type == "cpu" and query.dtype == torch.bfloat16:
        documents.way = "tiles in bfloat16"
        q, k, v = (x.squeeze(0) for x in (query, key, value))
        scale = width**-0.5 if scaling is None else scaling
        return causal_documents(q, k, v, documents.lengths, scale).unsqueeze(0), None
    documents.way = "one call per document"
    options = {"dropout_p": dropout, "is_causal": True, "scale": scaling}
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    if options["enable_gqa"] and query.device.type == "cuda":
        # There only flash attention takes groups, and it has no float32 and no wide heads: the
        # others would be left with a matrix of tokens x tokens.
        groups, options["enable_gqa"] = query.shape[1] // key.shape[1], False
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    # `split` and `cat`, since the backward of a slice fills a gradient of the whole row for each.
    documents_of = (x.split(documents.lengths, 2) for x in (query, key, value))
    outputs = [
        F.scaled_dot_product_attention(*qkv, **options).transpose(1, 2)
        for qkv in zip(*documents_of, strict=True)
    ]
    return torch.cat(outputs, 1), None


def _varlen(
    query: torch.Tensor,  # (tokens, heads, width)
    key: torch.Tensor,  # (tokens, key heads, width)
    value: torch.Tensor,  # (tokens, key heads, width)
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    sizes, causal = (boundaries, boundaries, longest, longest), (-1, 0)
    output = varlen_attn(
        query, key, value, *sizes, scale=scale, window_size=causal, enable_gqa=True
    )
    assert isinstance(output, torch.Tensor)
    _make_backward_deterministic(output)
    return output


def _make_backward_deterministic(output: torch.Tensor) -> None:
    """Let flash attention's backward add up in one order, so that a run repeats to the bit.

    It reads a flag of the whole process when it is launched. Other operators would refuse to run,
    or take slower ways, under that flag, so that it is set for this node of the graph alone.
    """
    if output.grad_fn is None:
        return
    before: list[bool] = []

    def set_flag(_: Any) -> None:
        before.append(torch.are_deterministic_algorithms_enabled())
        torch._C._set_deterministic_algorithms(True)

    def reset_flag(*_: Any) -> None:
        torch._C._set_deterministic_algorithms(before.pop())

    output.grad_fn.register_prehook(set_flag)
    output.grad_fn.register_hook(reset_flag)


def _kind(tensor: torch.Tensor) -> tuple[type, torch.device, torch.dtype]:
    """Return what decides which kernels run; a plan's fake tensors run all of them."""
    return type(tensor), tensor.device, tensor.dtype


@functools.cache
def _varlen_runs(_: type, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether this device runs it for heads of this width, forward and backward."""
    problem = _varlen_problem(device, dtype, width)
    if problem and is_third():
        keep_second(f"fails for heads of {width} in its trial ({problem})")
        problem = _varlen_problem(device, dtype, width)
    return not problem


def _varlen_problem(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return why varlen attention does not serve, or ""."""
    length = _REPEATED_TOKENS if is_third() else 4
    numbers = torch.arange(length * 2 * width, dtype=torch.float32, device=device).sin()
    x = numbers.view(length, 2, width).to(dtype).requires_grad_()
    boundaries = torch.tensor([0, 1, length], dtype=torch.int32, device=device)
    gradients: list[torch.Tensor] = []
    try:
        for _ in range(_REPEATS if is_third() else 1):
            with torch.enable_grad():
                output = _varlen(x, x, x, boundaries, length - 1, None)
                gradients += torch.autograd.grad(output.sum(), x)
    except RuntimeError as error:
        return first_line(error)
    repeats = all(torch.equal(gradients[0], other) for other in gradients[1:])
    return "" if repeats else "its gradients do not repeat to the bit"


@contextmanager
def attention_trial() -> Iterator[list[str]]:
    """Collect why `document_attention` is not the attention of the model that runs here.

    Masks are looked at here alone. Where an implementation has a function for them, transformers
    asks in every forward whether the positions hold several documents, and the host would wait for
    the GPU.
    """
    documents.objections, documents.way = [], ""
    AttentionMaskInterface.register(DOCUMENT_ATTENTION, _check_mask)
    try:
        yield documents.objections
    finally:
        del AttentionMaskInterface._global_mapping[DOCUMENT_ATTENTION]
        documents.objections = None


def _check_mask(*, local_size: int | None = None, **arguments: Any) -> None:
    """Stand in for the mask that a model makes, and look at what it would have been."""
    documents.check_span(local_size)
    # A window of 0 is made for layers of a type that the model does not have.
    if local_size == 0:
        return
    lengths = documents.boundaries.diff()
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=sum(documents.lengths)
    )
    expected = (document[:, None] == document).tril()
    mask = sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    if mask is None or not torch.equal(mask.expand(1, 1, *expected.shape)[0, 0], expected):
        documents.record_objection("another mask than the causal one within each document")


AttentionInterface.register(DOCUMENT_ATTENTION, torch.compiler.disable(document_attention))
