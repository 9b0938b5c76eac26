"""Attend within documents only, in flat rows (1, tokens), without a mask of tokens x tokens.

transformers' attention interface gives every layer's projections to `document_attention`, in all
models that use it. It calls PyTorch's fused attention once per document, or once for all documents
what the device has for that: varlen attention, or tiles on a CPU, in bfloat16 or where a layer has
a window or a sink.

A window is the number of tokens that a query sees, itself and those before it; 0 is all of its
document. A sink is one more score of each head, whose weight goes to no value: attention with it is
attention without, times sigmoid(log-sum-exp of the scores - sink).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shardtune.distributed.older_torch import varlen_attn
from shardtune.errors import first_line
from shardtune.model.context import HeadExchange
from shardtune.model.cpu_attention import causal_documents
from shardtune.model.flash_attention import is_third, keep_second

DOCUMENT_ATTENTION = "documents"  # its name in transformers' interface
# In the trial of FlashAttention 3: enough for many blocks of keys to add to one gradient.
_REPEATED_TOKENS, _REPEATS = 2048, 4


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
    slices: list[int] | None = None  # where ranks share the row, the tokens of each
    heads: HeadExchange | None = None  # between these ranks
    longest_of_run = 0  # tokens of the longest document of all data
    ways: set[str]  # how layers have attended since a trial began
    # Why `document_attention` is not the model's own attention; a list during the model's trial.
    objections: list[str] | None = None
    # The masks that a model made in its trial, with the window of each.
    masks: list[tuple[torch.Tensor, int]] | None = None

    def __init__(self) -> None:
        self.ways = set()

    def set(
        self, lengths: list[int], boundaries: torch.Tensor, slices: list[int] | None = None
    ) -> None:
        self.lengths, self.boundaries, self.slices = lengths, boundaries, slices

    @contextmanager
    def one(self, length: int) -> Iterator[None]:
        """Hide all documents but one, of so many tokens."""
        all_of_row = self.lengths, self.boundaries, self.slices
        boundaries = self.boundaries
        self.set([length], length * torch.arange(2, device=boundaries.device, dtype=torch.int32))
        try:
            yield
        finally:
            self.set(*all_of_row)

    def record_objection(self, feature: str) -> None:
        if self.objections is None:
            raise UnexpectedFeature(feature)
        self.objections.append(feature)

    def numbers(self) -> torch.Tensor:
        """Return the number of each token's document, int32 [tokens]."""
        lengths = self.boundaries.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=sum(self.lengths))

    def narrower(self, window: int | None) -> int:
        """Return a window that is narrower than some document of the data, else 0."""
        return window if window and window < self.longest_of_run else 0

    def check_window(self, window: int | None, mask: torch.Tensor | None) -> None:
        """Object to a mask that is not causal within the layer's window."""
        mask = mask if mask is not None and mask.numel() else None  # see DenseAttention
        if self.masks is None:
            if mask is not None:
                self.record_objection("a mask of its own")
            return
        of_mask = 0 if mask is None else next((w for m, w in self.masks if m is mask), None)
        if of_mask is None:
            self.record_objection("a mask of its own")
        elif self.narrower(of_mask) != self.narrower(window):
            self.record_objection(
                f"a window or chunks of {of_mask or window} tokens in its masks or its layers alone"
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
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,  # (heads,): sinks
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document of a flat row.

    The signature is that of transformers' attention interface. Returns (1, tokens, heads, value
    width), and no weights.
    """
    documents.check_window(sliding_window, attention_mask)
    _check_options(options)
    if key.shape[2] != query.shape[2]:  # DeepSeek V4 attends to compressed ones as well
        documents.record_objection("keys that are not those of its tokens")
        return torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2), None
    attend = functools.partial(_attend, dropout=dropout, scaling=scaling, window=sliding_window)
    heads = documents.heads
    if heads and query.shape[1] % heads.ranks:
        documents.record_objection(f"layers of {query.shape[1]} heads")
    if not heads or documents.slices is None:
        return attend(query, key, value, s_aux), None
    return heads.attend(attend, query, key, value, s_aux, documents.slices), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    s_aux: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the output for whole rows, (1, tokens, heads, value width)."""
    longest = max(documents.lengths)
    window = window if window and window < longest else 0
    width, value_width = query.shape[-1], value.shape[-1]
    # Varlen attention has no dropout, and one width for all: narrower values, such as those of
    # latent attention, are padded.
    if not dropout and value_width <= width:
        special = bool(window), s_aux is not None
        if _varlen_runs(*_kind(query), width, *special):
            documents.ways.add("varlen attention")
            padded = F.pad(value, (0, width - value_width)) if value_width < width else value
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, padded))
            output = _varlen(q, k, v, documents.boundaries, longest, scaling, window, s_aux)
            return output[..., :value_width].unsqueeze(0)
    # In float32 the tiles are no faster, and the fused kernel keeps the numbers of earlier runs.
    needs_tiles = query.dtype == torch.bfloat16 or window or s_aux is not None
    if not dropout and query.device.type == "cpu" and needs_tiles:
        documents.ways.add("tiles")
        q, k, v = (x.squeeze(0) for x in (query, key, value))
        scale = width**-0.5 if scaling is None else scaling
        output = causal_documents(q, k, v, documents.lengths, scale, window, s_aux)
        return output.unsqueeze(0)
    documents.ways.add("one call per document")
    if query.shape[1] != key.shape[1] and query.device.type == "cuda":
        # There only flash attention takes groups, and it has no float32 and no wide heads: the
        # others would be left with a matrix of tokens x tokens.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    # `split` and `cat`, since the backward of a slice fills a gradient of the whole row for each.
    documents_of = (x.split(documents.lengths, 2) for x in (query, key, value))
    outputs = [
        _one_document(q, k, v, window, s_aux, dropout_p=dropout, scale=scaling).transpose(1, 2)
        for q, k, v in zip(*documents_of, strict=True)
    ]
    return torch.cat(outputs, 1)


def _check_options(options: dict[str, Any]) -> None:
    """Object to what a layer asks for beyond causal attention with windows and sinks."""
    if options.get("is_causal") is False:
        documents.record_objection("attention that is not causal")
    if options.get("softcap") is not None:
        documents.record_objection("capped scores")
    indices = options.get("indices")
    if indices is not None and indices.numel():
        documents.record_objection("attention to keys that an indexer chooses")


def _one_document(
    query: torch.Tensor,  # (1, heads, tokens, width)
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    sink: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Attend within a document: a window and a sink by a mask of document x document."""
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    tokens = query.shape[2]
    if sink is None and not 0 < window < tokens:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    mask = mask.triu(1 - window) if window else mask
    if sink is not None:  # the score of one more key, whose value is 0
        scores = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
        columns = (scores.expand(len(sink), -1, -1), sink.view(-1, 1, 1).expand(-1, tokens, 1))
        mask = torch.cat(columns, -1).to(query.dtype).unsqueeze(0)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _varlen(
    query: torch.Tensor,  # (tokens, heads, width)
    key: torch.Tensor,  # (tokens, key heads, width)
    value: torch.Tensor,  # (tokens, key heads, width)
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int = 0,
    sink: torch.Tensor | None = None,  # (heads,)
) -> torch.Tensor:
    sizes, span = (boundaries, boundaries, longest, longest), (window - 1, 0)
    if sink is None:
        output: Any = varlen_attn(
            query, key, value, *sizes, scale=scale, window_size=span, enable_gqa=True
        )
    else:
        output = _VarlenWithSink.apply(query, key, value, sink, sizes, scale, span)
    assert isinstance(output, torch.Tensor)
    _make_backward_deterministic(output)
    return output


class _VarlenWithSink(torch.autograd.Function):
    """Varlen attention with sinks, and the kernel's own backward.

    The kernel makes the weights again from the log-sum-exp that it is given, and the gradients of
    scores as weight x (gradient of the weight - gradient of the output . output). Given those of
    attention with the sink, they are exact. A sink's own score has no value, so that its gradient
    is - its weight x (gradient of the output . output).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor,
        sizes: tuple[Any, ...],
        scale: float | None,
        span: tuple[int, int],
    ) -> torch.Tensor:
        plain, log_sums = varlen_attn(
            *(query, key, value, *sizes),
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=span,
            enable_gqa=True,
        )
        # (heads, tokens), float32
        with_sink = torch.logaddexp(log_sums, sink.float().unsqueeze(1))
        share = (log_sums - with_sink).exp().t().unsqueeze(-1)
        output = torch.mul(plain, share, out=torch.empty_like(plain))
        ctx.save_for_backward(query, key, value, sink, output, with_sink, sizes[0])
        ctx.longest, ctx.scale, ctx.span = sizes[-1], scale, span
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sink, output, log_sums, boundaries = ctx.saved_tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        of_row = torch.ops.torch_attn._varlen_attn_backward(
            *(gradient, query, key, value, output, log_sums, boundaries, boundaries),
            *(ctx.longest, ctx.longest, ctx.span == (-1, 0), no_dropout),
            *(ctx.scale, list(ctx.span)),
        )
        weights = (sink.float().unsqueeze(1) - log_sums).exp().t()  # (tokens, heads)
        of_sink = -(weights * (gradient.float() * output.float()).sum(-1)).sum(0)
        return *of_row, of_sink.to(sink.dtype), None, None, None


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
def _varlen_runs(
    _: type, device: torch.device, dtype: torch.dtype, width: int, window: bool, sink: bool
) -> bool:
    """Return whether this device runs it for heads of this width, forward and backward."""
    problem = _varlen_problem(device, dtype, width, window, sink)
    if problem and is_third():
        keep_second(f"fails for heads of {width} in its trial ({problem})")
        problem = _varlen_problem(device, dtype, width, window, sink)
    return not problem


def _varlen_problem(
    device: torch.device, dtype: torch.dtype, width: int, window: bool, sink: bool
) -> str:
    """Return why varlen attention does not serve, or ""."""
    length = _REPEATED_TOKENS if is_third() else 4
    numbers = torch.arange(length * 2 * width, dtype=torch.float32, device=device).sin()
    x = numbers.view(length, 2, width).to(dtype).requires_grad_()
    boundaries = torch.tensor([0, 1, length], dtype=torch.int32, device=device)
    special = (2 if window else 0, x.new_zeros(2) if sink else None)
    gradients: list[torch.Tensor] = []
    try:
        for _ in range(_REPEATS if is_third() else 1):
            with torch.enable_grad():
                output = _varlen(x, x, x, boundaries, length - 1, None, *special)
                gradients += torch.autograd.grad(output.sum(), x)
    except RuntimeError as error:
        return first_line(error)
    repeats = all(torch.equal(gradients[0], other) for other in gradients[1:])
    return "" if repeats else "its gradients do not repeat to the bit"


@contextmanager
def attention_trial() -> Iterator[list[str]]:
    """Collect why `document_attention` is not the attention of the model that runs here."""
    documents.objections = []
    documents.ways.clear()
    try:
        yield documents.objections
    finally:
        documents.objections = None


@contextmanager
def model_makes_masks() -> Iterator[None]:
    """Let a model in its trial make the masks that it has without `document_attention`.

    Masks are looked at here alone. Where an implementation has a function for them, transformers
    asks in every forward whether the positions hold several documents, and the host would wait for
    the GPU.
    """
    documents.masks = []
    AttentionMaskInterface.register(DOCUMENT_ATTENTION, _checked_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[DOCUMENT_ATTENTION]
        documents.masks = None


def _checked_mask(*, local_size: int | None = None, **arguments: Any) -> torch.Tensor:
    """Make a model's mask, and look at what it lets a token of a document see of its own document.

    GPT-OSS gives no positions for its masks, which then hold all documents together.
    """
    window = documents.narrower(local_size)
    number = documents.numbers()
    within = number[:, None] == number
    expected = within.tril()
    expected = expected.triu(1 - window) if window else expected
    options = {"local_size": local_size, "allow_is_causal_skip": False}
    mask = sdpa_mask(**arguments | options)
    assert mask is not None
    is_expected = torch.equal(mask.expand(1, 1, *within.shape)[0, 0] & within, expected)
    # A window of 0 is made for layers of a type that the model does not have.
    if not is_expected and local_size != 0:
        documents.record_objection("another mask than the causal one within each document")
    assert documents.masks is not None
    documents.masks.append((mask, window))
    return mask


AttentionInterface.register(DOCUMENT_ATTENTION, torch.compiler.disable(document_attention))
