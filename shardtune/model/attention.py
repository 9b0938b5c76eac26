"""Attend within documents only, in flat rows (1, tokens), without a mask of tokens x tokens.

transformers' attention interface gives every layer's projections to `document_attention`, in all
models that use it. It calls PyTorch's fused attention once per document, or varlen attention once
for all documents where the device has it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shardtune.distributed.tensors import dtype_name

DOCUMENT_ATTENTION = "documents"  # its name in transformers' interface
_UNSUPPORTED_OPTIONS = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biased scores",
}


@dataclass
class Trial:
    """Records what a model asks of `document_attention` while it is tried."""

    calls: int = 0
    objections: list[str] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)


class _Documents:
    """The documents of the current batch, from its forward to the end of its backward.

    A global, since models do not hand unknown arguments down to their attention.
    """

    lengths: list[int]  # in tokens
    boundaries: torch.Tensor  # int32 [documents + 1]: where each document begins, and the end
    longest_of_run = 0  # tokens of the longest document of all data
    trial: Trial | None = None
    varlen_lacks = ""  # why a layer could not use varlen attention

    def set(self, lengths: list[int], boundaries: torch.Tensor) -> None:
        self.lengths, self.boundaries = lengths, boundaries

    def record_objection(self, reason: str) -> None:
        """Note why `document_attention` computes something else than the model's own attention."""
        if self.trial is None:
            raise RuntimeError(f"attention asks for {reason}, which it did not in its trial")
        self.trial.objections.append(reason)


documents = _Documents()


class _WatchedMask(torch.Tensor):
    """A model's usual mask, which objects when anything but `document_attention` reads it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.__name__ not in ("__get__", "is_floating_point"):  # its shape, its dtype
            documents.record_objection("layers that read the mask")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))


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
    _check_request(attention_mask, options)
    if documents.trial:
        documents.trial.calls += 1
    width, value_width = query.shape[-1], value.shape[-1]
    lacking = varlen_lacks(query.device.type, query.dtype, width, value_width, dropout)
    if not lacking and not _varlen_runs(query.device, query.dtype, width):
        lacking = f"does not run on this GPU with heads of {width}"
    documents.varlen_lacks = documents.varlen_lacks or lacking
    lengths = documents.lengths
    if not lacking:
        longest = max(lengths)
        # Varlen attention has one width for all. Narrower values, such as those of latent
        # attention, are padded.
        padded = value if value_width == width else F.pad(value, (0, width - value_width))
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, padded))
        output = varlen_attn(
            q,
            k,
            v,
            documents.boundaries,
            documents.boundaries,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        assert isinstance(output, torch.Tensor)
        return output[..., :value_width].unsqueeze(0), None
    # `split` and `cat`, since the backward of a slice fills a gradient of the whole row for each.
    outputs = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        ).transpose(1, 2)
        for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, 1), None


def _check_request(attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Object to whatever is more than causal attention within documents."""
    window, longest = options.get("sliding_window"), documents.longest_of_run
    known_masks = documents.trial.masks if documents.trial else []
    if attention_mask is not None and not any(attention_mask is mask for mask in known_masks):
        documents.record_objection("a mask of its own")
    if window is not None and window < longest:
        documents.record_objection(
            f"a sliding window of {window} tokens, and the data a document of {longest}"
        )
    if options.get("is_causal") is False:
        documents.record_objection("attention that is not causal")
    for name, feature in _UNSUPPORTED_OPTIONS.items():
        if options.get(name) is not None:
            documents.record_objection(feature)


def varlen_lacks(
    device_type: str, dtype: torch.dtype, width: int, value_width: int, dropout: float
) -> str:
    """Return what keeps `varlen_attn` from this attention, or "".

    The words follow "varlen attention". `width` is that of a head's queries and keys.
    """
    if dropout:
        return "has no dropout"
    if device_type != "cuda":
        return "needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"is not for {dtype_name(dtype)}"
    return "is not for values wider than their keys" if value_width > width else ""


@functools.cache
def _varlen_runs(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether this GPU runs it for heads of this width, forward and backward."""
    x = torch.zeros(4, 1, width, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    try:
        with torch.enable_grad():
            output = varlen_attn(x, x, x, ends, ends, 3, 3, window_size=(-1, 0), enable_gqa=True)
            assert isinstance(output, torch.Tensor)
            output.sum().backward()
    except RuntimeError:
        return False
    return True


def _mask(*, local_size: int | None = None, **arguments: Any) -> torch.Tensor | None:
    """Return no mask, or in a trial the model's usual one, watched."""
    longest = documents.longest_of_run
    if local_size and local_size < longest:
        documents.record_objection(
            f"a sliding window or chunks of {local_size} tokens, and the data a document of "
            f"{longest}"
        )
    # A window of 0 is made for layers of a type that the model does not have.
    if documents.trial is None or local_size == 0:
        return None
    ends = documents.boundaries[1:].long()
    document = torch.bucketize(
        torch.arange(sum(documents.lengths), device=ends.device), ends, right=True
    )
    expected = (document[:, None] == document).tril()
    mask = sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    if mask is None or not torch.equal(mask.expand(1, 1, *expected.shape)[0, 0], expected):
        documents.record_objection("another mask than the causal one within each document")
    watched = None if mask is None else mask.as_subclass(_WatchedMask)
    documents.trial.masks.append(watched)
    return watched


AttentionInterface.register(DOCUMENT_ATTENTION, torch.compiler.disable(document_attention))
AttentionMaskInterface.register(DOCUMENT_ATTENTION, _mask)
