"""Attend within documents only, in flat rows (1, tokens), without a mask of tokens x tokens.

transformers' attention interface gives every layer's projections to `document_attention`, in all
models that use it. One call serves all documents where the device can: varlen attention on GPUs;
tiles on a CPU, in bfloat16 or where a layer has a window or a sink. Else PyTorch's fused attention
is called once per document.

A window is the number of tokens that a query sees, itself and those before it; 0 is all of its
document. A sink is one more score of each head, whose weight goes to no value: attention with it is
attention without, times sigmoid(log-sum-exp of the scores - sink).

Varlen attention calls FlashAttention 3 where it is installed, else PyTorch's version 2: PyTorch has
both behind the same operators. Version 3 is for GPUs of compute capability 9 and has no dropout. It
adds up in one order only for heads that are narrow enough, and builds of early 2025 never do.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shardtune.distributed.older_torch import varlen_attn
from shardtune.distributed.world import World
from shardtune.errors import first_line
from shardtune.model import documents
from shardtune.model.documents import Documents, Tried
from shardtune.model.documents.cpu_attention import causal_documents

DOCUMENT_ATTENTION = "documents"  # its name in transformers' interface
# In the trial of FlashAttention 3: enough for many blocks of keys to add to one gradient.
_REPEATED_TOKENS, _REPEATS = 2048, 4
_why_second = ""  # why FlashAttention 2 is called, or "" if version 3 is


class UnexpectedFeature(RuntimeError):
    """Attention asks for something that it did not ask for in its trial."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"attention asks for {feature}, which it did not in its trial")
        self.feature = feature


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
    """Return causal attention within each document of a row, (1, tokens, heads, value width)."""
    # transformers' attention interface has this signature, and takes attention weights, too: none.
    row = documents.current()
    _check_window(row.tried, sliding_window, attention_mask)
    _check_options(row.tried, options)
    if key.shape[2] != query.shape[2]:  # DeepSeek V4 attends to compressed keys as well
        _object(row.tried, "keys that are not those of its tokens")
        return torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2), None
    attend = functools.partial(
        _attend, row=row, dropout=dropout, scaling=scaling, window=sliding_window
    )
    if row.heads and query.shape[1] % row.heads.ranks:
        _object(row.tried, f"layers of {query.shape[1]} heads")
    if not row.heads or row.slices is None:
        return attend(query, key, value, s_aux), None
    return row.heads.attend(attend, query, key, value, s_aux, row.slices), None


def _object(tried: Tried | None, feature: str) -> None:
    if tried is None or tried.objections is None:
        raise UnexpectedFeature(feature)
    tried.objections.append(feature)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    s_aux: torch.Tensor | None,
    row: Documents,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the output for whole rows, (1, tokens, heads, value width)."""
    longest, ways = max(row.lengths), row.tried.ways if row.tried else set()
    window = window if window and window < longest else 0
    width, value_width = query.shape[-1], value.shape[-1]
    # Varlen attention has no dropout, and one width for queries, keys and values: narrower values,
    # such as those of latent attention, are padded.
    if not dropout and value_width <= width:
        special = bool(window), s_aux is not None
        if _varlen_runs(*_kind(query), width, *special):
            ways.add("varlen attention")
            padded = F.pad(value, (0, width - value_width)) if value_width < width else value
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, padded))
            output = _varlen(q, k, v, row.boundaries, longest, scaling, window, s_aux)
            return output[..., :value_width].unsqueeze(0)
    # In float32 the tiles are no faster, and the fused kernel keeps the numbers of earlier runs.
    needs_tiles = query.dtype == torch.bfloat16 or window or s_aux is not None
    if not dropout and query.device.type == "cpu" and needs_tiles:
        ways.add("tiles")
        q, k, v = (x.squeeze(0) for x in (query, key, value))
        scale = width**-0.5 if scaling is None else scaling
        output = causal_documents(q, k, v, row.lengths, scale, window, s_aux)
        return output.unsqueeze(0)
    ways.add("one call per document")
    if query.shape[1] != key.shape[1] and query.device.type == "cuda":
        # On GPUs flash attention alone takes groups of heads, and it has neither float32 nor wide
        # heads. Other kernels that take groups of heads make a matrix of tokens x tokens.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    # `split` and `cat`: the backward of each slice would fill a gradient of the whole row.
    by_document = (x.split(row.lengths, 2) for x in (query, key, value))
    outputs = [
        _one_document(q, k, v, window, s_aux, dropout_p=dropout, scale=scaling).transpose(1, 2)
        for q, k, v in zip(*by_document, strict=True)
    ]
    return torch.cat(outputs, 1)


def _check_window(tried: Tried | None, window: int | None, mask: torch.Tensor | None) -> None:
    """Object to a mask that is not causal within the layer's window."""
    mask = mask if mask is not None and mask.numel() else None  # DenseAttention gives empty masks
    if tried is None or tried.masks is None:
        if mask is not None:
            _object(tried, "a mask of its own")
        return
    masked = 0 if mask is None else next((w for m, w in tried.masks if m is mask), None)
    if masked is None:
        _object(tried, "a mask of its own")
    elif tried.narrower(masked) != tried.narrower(window):
        span = f"a window or chunks of {masked or window} tokens"
        _object(tried, f"{span} in its masks or its layers alone")


def _check_options(tried: Tried | None, options: dict[str, Any]) -> None:
    """Object to options of a layer beyond causal attention with windows and sinks."""
    if options.get("is_causal") is False:
        _object(tried, "attention that is not causal")
    if options.get("softcap") is not None:
        _object(tried, "capped scores")
    indices = options.get("indices")
    if indices is not None and indices.numel():
        _object(tried, "attention to keys that an indexer chooses")


def _one_document(
    query: torch.Tensor,  # (1, heads, tokens, width)
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    sink: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Attend within one document. A mask of tokens x tokens gives it a window or a sink."""
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

    The kernel computes the weights again from the log-sum-exp, and the gradients of scores as
    weight x (gradient of the weight - gradient of the output . output). Both are exact with the
    output and the log-sum-exp of attention with the sink. A sink has no value, so that the gradient
    of its score is - its weight x (gradient of the output . output).
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
        row_gradients = torch.ops.torch_attn._varlen_attn_backward(
            *(gradient, query, key, value, output, log_sums, boundaries, boundaries),
            *(ctx.longest, ctx.longest, ctx.span == (-1, 0), no_dropout),
            *(ctx.scale, list(ctx.span)),
        )
        weights = (sink.float().unsqueeze(1) - log_sums).exp().t()  # (tokens, heads)
        sink_gradient = -(weights * (gradient.float() * output.float()).sum(-1)).sum(0)
        return *row_gradients, sink_gradient.to(sink.dtype), None, None, None


def _make_backward_deterministic(output: torch.Tensor) -> None:
    """Let flash attention's backward add up in one order, so that a run repeats to the bit."""
    # The kernel reads a flag of the whole process at its launch. Under that flag other operators
    # refuse to run or are slower, so that it is set for this node of the graph alone.
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
    """Return the facts that decide which kernels run; a plan's fake tensors run all of them."""
    return type(tensor), tensor.device, tensor.dtype


@functools.cache
def _varlen_runs(
    _: type, device: torch.device, dtype: torch.dtype, width: int, window: bool, sink: bool
) -> bool:
    """Return whether varlen attention runs on a device, forward and backward."""
    problem = _varlen_problem(device, dtype, width, window, sink)
    if problem and _is_third():
        keep_second(f"fails for heads of {width} in its trial ({problem})")
        problem = _varlen_problem(device, dtype, width, window, sink)
    return not problem


def _varlen_problem(
    device: torch.device, dtype: torch.dtype, width: int, window: bool, sink: bool
) -> str:
    """Return why varlen attention does not serve, or ""."""
    length = _REPEATED_TOKENS if _is_third() else 4
    numbers = torch.arange(length * 2 * width, dtype=torch.float32, device=device).sin()
    x = numbers.view(length, 2, width).to(dtype).requires_grad_()
    boundaries = torch.tensor([0, 1, length], dtype=torch.int32, device=device)
    special = (2 if window else 0, x.new_zeros(2) if sink else None)
    gradients: list[torch.Tensor] = []
    try:
        for _ in range(_REPEATS if _is_third() else 1):
            with torch.enable_grad():
                output = _varlen(x, x, x, boundaries, length - 1, None, *special)
                gradients += torch.autograd.grad(output.sum(), x)
    except RuntimeError as error:
        return first_line(error)
    repeats = all(torch.equal(gradients[0], other) for other in gradients[1:])
    return "" if repeats else "its gradients do not repeat to the bit"


@contextmanager
def model_makes_masks(tried: Tried) -> Iterator[None]:
    """Let a model in its trial make the masks that it has without `document_attention`."""
    # In training no function for masks is registered: with one, transformers asks in every forward
    # whether the positions hold several documents, and the host waits for the GPU.
    tried.masks = []
    AttentionMaskInterface.register(DOCUMENT_ATTENTION, _checked_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[DOCUMENT_ATTENTION]
        tried.masks = None


def _checked_mask(*, local_size: int | None = None, **arguments: Any) -> torch.Tensor:
    """Make a model's mask, and object unless it is causal within each document."""
    # GPT-OSS gives its masks no positions, so that they span all documents. Only their parts within
    # a document are compared.
    row, tried = documents.current(), documents.current().tried
    assert tried is not None and tried.masks is not None
    window, number = tried.narrower(local_size), row.numbers()
    within = number[:, None] == number
    expected = within.tril()
    expected = expected.triu(1 - window) if window else expected
    options = {"local_size": local_size, "allow_is_causal_skip": False}
    mask = sdpa_mask(**arguments | options)
    assert mask is not None
    is_expected = torch.equal(mask.expand(1, 1, *within.shape)[0, 0] & within, expected)
    # A window of 0 is made for layers of a type that the model does not have.
    if not is_expected and local_size != 0:
        _object(tried, "another mask than the causal one within each document")
    tried.masks.append((mask, window))
    return mask


def choose_flash_attention(model_config: PreTrainedConfig, world: World) -> None:
    """Let varlen attention call version 3 from now on, if every rank has it. Collective."""
    global _why_second
    _why_second = _activate_third(model_config, world.device)
    agree_on_flash_attention(world)


def agree_on_flash_attention(world: World) -> None:
    """Call version 2 on every rank if one of them must. Collective."""
    # Ranks with different versions would round differently, and rank 0 would log its own alone.
    reasons = world.all_gather_json(_why_second)
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if rank is not None:
        keep_second(f"{reasons[rank]} on rank {rank}" if rank else reasons[rank])


def _is_third() -> bool:
    return current_flash_attention_impl() == "FA3"


def keep_second(reason: str) -> None:
    """Call version 2 from now on."""
    global _why_second
    if _is_third():
        restore_flash_attention_impl()
    _why_second = reason


def flash_attention_name() -> str:
    """Return the version that varlen attention calls on a GPU, and why version 3 is not called."""
    return "FlashAttention 3" if _is_third() else f"FlashAttention 2, as 3 {_why_second}"


def _activate_third(model_config: PreTrainedConfig, device: torch.device) -> str:
    """Activate version 3, or return why that is impossible: words to follow its name."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a GPU of compute capability 9, and this one has {major}.{minor}"
    settings = vars(model_config.get_text_config())
    drops = [name for name in settings if "att" in name and "drop" in name and settings[name]]
    if drops:
        return f"has no dropout, and the model {drops[0]}={settings[drops[0]]}"
    try:
        activate_flash_attention_impl("FA3")
    except Exception as error:  # the import of a package may raise anything
        return f"is not there ({first_line(error)})"
    return ""


AttentionInterface.register(DOCUMENT_ATTENTION, torch.compiler.disable(document_attention))
