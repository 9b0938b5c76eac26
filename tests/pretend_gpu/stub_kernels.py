"""CUDA's kernels that the CPU build has no word of, by definition.

Each first makes the checks of the real one. Sources: torch 2.13, aten/src/ATen/native/
transformers/cuda/flash_attn/flash_api.cpp (mha_varlen_fwd), native/GroupedMMUtils.h and
native/cuda/GroupMMCommon.cuh.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

_OPS = torch.ops.pretend
_MULTIPROCESSORS = 132  # of an H100
_libraries: list[torch.library.Library] = []


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash, "CUDA")
    library.impl("_flash_attention_backward", _flash_backward, "CUDA")
    library.impl("_grouped_mm", _grouped_mm, "CUDA")
    library.impl("_conv_depthwise2d", _convolve_by_channel, "CUDA")
    library.impl("convolution_backward", _convolution_backward, "CUDA")
    library.impl("histc", _histc, "CUDA")
    library.impl("silu_backward", _silu_backward, "CUDA")
    library.impl("_fused_sdp_choice", lambda *_, **__: 0, "CUDA")  # the definition, by operators
    _libraries.append(library)
    # CUDA's are no Python, and another library in Python may take their place.
    torch.library._impls -= library._op_impls


def _require(condition: bool, message: str) -> None:
    torch._check(condition, lambda: message)


def _like(tensor: torch.Tensor, made: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of the CPU on the device of another, in its dtype or the named one."""
    return _OPS.on_device(made.to(dtype or tensor.dtype), tensor.device.index)


def _require_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: tuple[torch.Tensor | None, torch.Tensor | None],
    longest: int,
) -> None:
    for x in (query, key, value):
        _require(x.is_cuda and x.device == query.device, "query, key and value must be on one GPU")
        _require(
            x.dtype in (torch.bfloat16, torch.float16),
            "FlashAttention only support fp16 and bf16 data type",
        )
        _require(x.dtype == query.dtype, "query, key and value must have the same dtype")
        _require(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        _require(x.dim() == 3 and x.shape[-1] == query.shape[-1], "head dimensions must be equal")
    width = query.shape[-1]
    _require(width <= 256, "FlashAttention only supports head dimension at most 256")
    _require(width % 8 == 0, "head_size should be a multiple of 8")
    _require(query.shape[1] % key.shape[1] == 0, "key heads must divide query heads")
    for end in ends:
        _require(end is not None and end.is_cuda, "cu_seqlens must be on the GPU")
        assert end is not None
        _require(end.dtype == torch.int32, "cu_seqlens must have dtype int32")
        _require(end.is_contiguous(), "cu_seqlens must be contiguous")
        if not _OPS.hollow():
            bounds = _OPS.on_host(end)
            # The real kernel reads beyond its tensors, or leaves rows as they were.
            _require(int(bounds[0]) == 0 and int(bounds[-1]) == len(query), "cu_seqlens are wrong")
            _require(longest >= int(bounds.diff().max()), "max_seqlen is too small")


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, span: tuple[int, int]) -> torch.Tensor:
    """Return the scores of keys up to so many before and behind each query; -1 is all."""
    left, right = span
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    seen = seen.tril(right) if right >= 0 else seen
    seen = seen.triu(-left) if left >= 0 else seen
    return (q @ k.mT * scale).masked_fill(~seen, float("-inf"))


def _documents(ends: torch.Tensor) -> Iterator[slice]:
    for begin, end in pairwise(_OPS.on_host(ends).tolist()):
        yield slice(begin, end)


def _span(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in (left, right))
    return left, 0 if causal else right


def _flash(
    query: torch.Tensor,  # (tokens, heads, width)
    key: torch.Tensor,  # (tokens, key heads, width)
    value: torch.Tensor,
    ends_q: torch.Tensor | None,
    ends_k: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    _require_varlen(query, key, value, (ends_q, ends_k), longest_q)
    _require(dropout == 0, "dropout is not pretended")
    span = _span(causal, window_size_left, window_size_right)
    tokens, heads, width = query.shape
    unused = [query.new_empty(n, dtype=torch.uint8) for n in (16, 0, 0)]
    if _OPS.hollow():
        log_sums = query.new_empty(heads, tokens, dtype=torch.float32)
        return torch.empty_like(query), log_sums, *unused
    q, k, v = (_OPS.on_host(x).float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // len(k), 0) for x in (k, v))
    out, log_sums = torch.empty_like(q), torch.empty(heads, tokens)
    for document in _documents(ends_q):
        parts = (x[:, document] for x in (q, k))
        scores = _scores(*parts, width**-0.5 if scale is None else scale, span)
        out[:, document] = scores.softmax(-1) @ v[:, document]
        log_sums[:, document] = scores.logsumexp(-1)
    return _like(query, out.transpose(0, 1)), _like(query, log_sums, torch.float32), *unused


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    _require_varlen(query, key, value, (ends_q, ends_k), longest_q)
    span = _span(causal, window_size_left, window_size_right)
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _workspace = _backward_workspace(query, key, len(ends_q) - 1)
    if _OPS.hollow():
        return gradients
    tensors = (query, key, value, out, gradient)
    q, k, v, o, do = (_OPS.on_host(x).float().transpose(0, 1) for x in tensors)
    group, factor = len(q) // len(k), query.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    sums = _OPS.on_host(log_sums)
    for document in _documents(ends_q):
        of_q, of_k, of_v, of_o, of_do = (x[:, document] for x in (q, k, v, o, do))
        # Flash attention's own formula: probabilities from the saved sums.
        p = (_scores(of_q, of_k, factor, span) - sums[:, document, None]).exp()
        row = (of_do * of_o).sum(-1, keepdim=True)
        ds = p * (of_do @ of_v.mT - row) * factor
        dq[:, document], dk[:, document] = ds @ of_k, ds.mT @ of_q
        dv[:, document] = p.mT @ of_do
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (dk, dv))
    for made, x in zip(gradients, (dq, dk, dv), strict=True):
        made.copy_(_like(query, x.transpose(0, 1)))
    return gradients


def _backward_workspace(query: torch.Tensor, key: torch.Tensor, documents: int) -> Any:
    """Allocate what the kernel works in: of mha_varlen_bwd."""
    tokens, heads, width = query.shape
    padded = tokens + 128 * documents
    splits = 1
    if torch.are_deterministic_algorithms_enabled():
        splits = -(-_MULTIPROCESSORS // (heads * documents))
    step = 32 if width <= 128 else 64
    sums = query.new_empty(splits, padded, heads, -(-width // step) * step, dtype=torch.float32)
    of_rows = query.new_empty(heads, padded, dtype=torch.float32)
    repeated = [query.new_empty(query.shape) for _ in range(2 * (key.shape[1] != heads))]
    return sums, of_rows, repeated


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    for x in (a, b):
        _require(x.is_cuda and x.device == a.device, "both matrices must be on one GPU")
        _require(
            x.dtype == a.dtype and x.dtype in (torch.bfloat16, torch.float32, torch.float16),
            "Expected inputs of BF16, FP16 or FP32 type",
        )
        _require_strides(x)
    if a.dim() == 2 or b.dim() == 2:
        _require(offs is not None, "Have to provide offsets if there is a 2d matrix")
        assert offs is not None
        _require(offs.is_cuda and offs.dtype == torch.int32, "Offsets have to be int32")
        if a.dtype != torch.bfloat16:
            offs.cpu()  # a loop of plain products, for which the host reads where groups end
        elif not _OPS.hollow():
            _require_groups(a, b, _OPS.on_host(offs))
    _require(bias is None, "Bias not supported yet")
    if _OPS.hollow():
        groups = [len(offs)] if offs is not None and a.dim() == b.dim() == 2 else []
        batch = [len(a)] if a.dim() == b.dim() == 3 else groups
        return a.new_empty(*batch, a.shape[-2], b.shape[-1], dtype=out_dtype)
    host = [None if x is None else _OPS.on_host(x) for x in (a, b, offs)]
    if a.dtype == torch.bfloat16:
        return _like(a, torch._grouped_mm(*host), out_dtype)
    return _like(a, torch._grouped_mm(*host, None, out_dtype))


def _require_strides(x: torch.Tensor) -> None:
    """As check_valid_strides_and_return_transposed."""
    (of_row, of_column), (rows, columns) = x.stride()[-2:], x.shape[-2:]
    is_transposed = of_row == 1 and of_column >= max(1, rows)
    is_plain = of_column == 1 and of_row >= max(1, columns)
    _require(x.data_ptr() % 16 == 0, "expected data_ptr to be aligned to 16 bytes")
    _require(
        is_transposed or is_plain,
        f"Invalid strides/sizes, got {x.stride()} for strides and {x.shape} for sizes",
    )
    leading = of_column if is_transposed else of_row
    _require(leading * x.itemsize % 16 == 0, "strides should be multiple of 16 bytes")


def _require_groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> None:
    """As prepare_grouped_gemm_data, which asserts on the device: a later call raises it there.

    Groups that follow one another along rows may have any size. Along contiguous elements each has
    to begin at 16 bytes.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1))
    _require(len(sizes) < 1024, "Can't process more than 1024 groups")
    if b.dim() == 3:
        along_rows = a.stride(-1) == 1
    elif a.dim() == 2:  # a sum over each group, as of the gradients of weights
        along_rows = a.stride(-1) != 1 and b.stride(-1) == 1
        least = 0 if along_rows else 1
        _require(int(sizes.min()) >= least, "expected offsets to be greater than 0")
    else:
        along_rows = False  # those of the output's columns
    _require(
        along_rows or not (sizes[:-1] * a.itemsize % 16).any(),
        "expected input tensor dynamic dimension byte size to be non-negative multiple of 16",
    )


def _convolve_by_channel(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Any,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> torch.Tensor:
    if _OPS.hollow():
        return torch.empty_like(x[..., : x.shape[-1] + 2 * padding[-1] - kernel_size[-1] + 1])
    host = [None if each is None else _OPS.on_host(each) for each in (x, weight, bias)]
    made = torch.nn.functional.conv2d(*host, stride, padding, dilation, len(weight))
    return _like(x, made)


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor | None, ...]:
    wanted = options[-1]
    if _OPS.hollow():
        made: Any = (x, weight, weight.new_empty(len(weight)))
        return tuple(
            torch.empty_like(each) if want else None
            for each, want in zip(made, wanted, strict=True)
        )
    host = (_OPS.on_host(each) for each in (gradient, x, weight))
    gradients = torch.ops.aten.convolution_backward(*host, *options)
    return tuple(None if each is None else _like(x, each) for each in gradients)


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Unlike the CPU's it counts integers; without bounds it looks for them on the host."""
    return _like(x, torch.histc(_OPS.on_host(x).float(), bins, min, max))


def _silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One kernel, where a device that has none gets the formula, operator by operator."""
    if _OPS.hollow():
        return torch.empty_like(x)
    host = (_OPS.on_host(tensor) for tensor in (gradient, x))
    return _like(x, torch.ops.aten.silu_backward(*host))
