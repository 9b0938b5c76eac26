"""Attention within documents only: rows are flat, (1, tokens), and no mask of tokens x tokens exists.

transformers' attention interface hands every layer's projections to `document_attention`, for any model that uses it. It goes
through the documents one by one with PyTorch's fused attention, or through all at once with its kernel for sequences
of many lengths, where the device has it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shardtune.config import Config
from shardtune.distributed.tensors import dtype_name
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.model.build import forward_only
from shardtune.model.support import can_be_packed

_NAME = "documents"
_NOT_SERVED = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biased scores",
}
_PROBE = (
    11,
    5,
    16,
)  # tokens in each document of the row that a model is tried with, the last of which is looked at


class _Documents:
    """The documents of the batch that is under way, its backward included; and, while a model is tried, its objections.

    A global, since models do not hand unknown arguments down to their attention.
    """

    lengths: list[int]
    boundaries: torch.Tensor
    longest_ever = 0  # of the run's data
    is_trial = False

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """What other models asked for."""
        self.objections: list[str] = []
        self.masks: list[torch.Tensor | None] = []
        self.calls = 0
        self.unserved = (
            ""  # what the kernel for sequences of many lengths was asked for and does not have
        )

    def set(self, lengths: list[int], boundaries: torch.Tensor) -> None:
        """`boundaries`: int32 [documents + 1], where each document begins, and the end."""
        self.lengths, self.boundaries = lengths, boundaries

    def object(self, reason: str) -> None:
        if not self.is_trial:
            raise RuntimeError(
                f"attention asks for {reason}, which it did not when the model was tried"
            )
        self.objections.append(reason)


documents = _Documents()


class _WatchedMask(torch.Tensor):
    """The mask that a model has usually, which objects when anything but `document_attention` looks into it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.__name__ not in ("__get__", "is_floating_point"):  # its shape, its dtype
            documents.object("layers that read the mask")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document of a flat row; in and out as transformers' attention interface has it.

    query: (1, heads, tokens, width); key, value: (1, key heads, tokens, width). Returns (1, tokens, heads, width).
    """
    _look_at(attention_mask, options)
    documents.calls += 1
    width, value_width = query.shape[-1], value.shape[-1]
    unserved = kernel_lacks(query.device.type, query.dtype, width, value_width, dropout)
    if not unserved and not _kernel_runs(query.device, query.dtype, width):
        unserved = f"this GPU with heads of {width}"
    documents.unserved = documents.unserved or unserved
    lengths = documents.lengths
    if not unserved:
        longest = max(lengths)
        # It has one width for all, and narrower values, as those of latent attention, are filled up.
        filled = value if value_width == width else F.pad(value, (0, width - value_width))
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, filled))
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
    # `split` and `cat`: the backward of a slice would fill a gradient of the whole row for each document.
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


def _look_at(attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    if attention_mask is not None and not any(attention_mask is mask for mask in documents.masks):
        documents.object("a mask of its own")
    if window is not None and window < documents.longest_ever:
        documents.object(
            f"a sliding window of {window} tokens, and the data a document of {documents.longest_ever}"
        )
    if options.get("is_causal") is False:
        documents.object("attention that is not causal")
    for name, what in _NOT_SERVED.items():
        if options.get(name) is not None:
            documents.object(what)


def kernel_lacks(
    device_type: str, dtype: torch.dtype, width: int, value_width: int, dropout: float
) -> str:
    """What the kernel for sequences of many lengths, `varlen_attn`, is not for; empty if it is for all of this.

    `width` is that of a head's queries and keys.
    """
    if dropout:
        return "dropout"
    if device_type != "cuda":
        return f"a {device_type.upper()}"
    if dtype not in (torch.bfloat16, torch.float16):
        return dtype_name(dtype)
    return "values wider than their keys" if value_width > width else ""


@functools.cache
def _kernel_runs(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether this GPU has it for heads of this width, forward and backward."""
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
    """No mask; while a model is tried, the one that it would have had, watched."""
    if local_size and local_size < documents.longest_ever:
        longest = documents.longest_ever
        documents.object(
            f"a sliding window or chunks of {local_size} tokens, and the data a document of {longest}"
        )
    if (
        not documents.is_trial or local_size == 0
    ):  # a window of nothing, made for layers that there are none of
        return None
    ends = documents.boundaries[1:].long()
    document = torch.bucketize(
        torch.arange(sum(documents.lengths), device=ends.device), ends, right=True
    )
    expected = (document[:, None] == document).tril()
    mask = sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    if mask is None or not torch.equal(mask.expand(1, 1, *expected.shape)[0, 0], expected):
        documents.object("another mask than the causal one within each document")
    documents.masks.append(mask if mask is None else mask.as_subclass(_WatchedMask))
    return documents.masks[-1]


AttentionInterface.register(_NAME, torch.compiler.disable(document_attention))
AttentionMaskInterface.register(_NAME, _mask)


def choose_attention(
    model: PreTrainedModel, config: Config, longest_document: int, world: World
) -> bool:
    """Let the model attend document by document if it can, saying so, or why not; whether its rows are flat.

    A window as wide as the longest document, in tokens, is none. Both ways are tried on the model itself: a document
    must be what it is alone, whatever stands before it.

    Raises:
        UserError: data.packing is on, and a document sees the one before it.
    """
    usual, why_not = model.config._attn_implementation, f"model.attention={config.model.attention}"
    if not can_be_packed(type(model)):
        logger.info(
            f"Attention: as {model.config.model_type} has it, in padded rows (it keeps a state or takes no positions, "
            "so records one behind the other would not be apart)"
        )
        return False
    if config.model.attention != "auto" and not config.data.packing:
        logger.info(f"Attention: {usual} under a mask of row x row ({why_not})")
        return False
    alone = _last_document(model, _PROBE[-1:], world.device)
    if config.model.attention == "auto":
        documents.longest_ever = longest_document
        why_not = next(
            filter(None, world.all_gather_json(_try_documents(model, alone, config, world))), ""
        )
        if why_not:
            model.set_attn_implementation(usual)
    if not why_not:
        documents.unserved = ""
        _last_document(model, _PROBE, world.device, is_training=True)
        kernel = "the kernel for sequences of many lengths"
        if documents.unserved:
            kernel = f"one call for each, since {kernel} is not for {documents.unserved}"
        logger.info(
            f"Attention: within each document, without a mask ({kernel}); rows have no padding"
        )
        return True
    # The rows of a packed micro-batch are one row for the model.
    side = config.data.max_length * (config.train.micro_batch_size if config.data.packing else 1)
    logger.info(
        f"Attention: {usual} under a mask of row x row, up to {side} tokens a side ({why_not})"
    )
    if config.data.packing and (leak := _leak(model, alone, config, world)):
        raise UserError(
            f"{model.config.model_type} lets a packed document see the one before it (its logits change by "
            f"{leak:.1%} of their spread) - use data.packing=false"
        )
    return config.data.packing


def _try_documents(
    model: PreTrainedModel, alone: torch.Tensor, config: Config, world: World
) -> str:
    """Switch the model to `document_attention`; the reason why it must not stay so, if there is one."""
    kind = model.config.model_type
    if not model._can_set_attn_implementation():
        return f"{kind} does not use transformers' attention interface"
    model.set_attn_implementation(_NAME)
    documents.forget()
    documents.is_trial = True
    _last_document(model, _PROBE, world.device)
    documents.is_trial = False
    if not documents.calls:
        return f"{kind} does not use transformers' attention interface"
    if documents.objections:
        return f"{kind} has {documents.objections[0]}"
    leak = _leak(model, alone, config, world)
    return (
        f"{kind} computes something else without it, by {leak:.1%} of its logits' spread"
        if leak
        else ""
    )


def _leak(model: PreTrainedModel, alone: torch.Tensor, config: Config, world: World) -> float:
    """By how much the logits of a packed document differ from those that it has alone, beyond rounding; 0 if not.

    In units of their spread, and on the rank with the most. It is looked at behind two others, and, where that shows
    nothing, at the end of the longest row of a micro-batch: some models go by the place in the row, and such a model
    may have no positions for a long one.
    """
    packed, disturbed = (_last_document(model, _PROBE, world.device, before) for before in (0, 1))
    leak = max(world.all_gather_json(_beyond_rounding(alone, packed, disturbed)))
    positions = getattr(
        model.config.get_text_config(), "max_position_embeddings", config.data.max_length
    )
    longest = min(config.data.max_length, positions)
    if leak or longest <= sum(_PROBE):
        return leak
    row = [longest] * config.train.micro_batch_size
    row[-1:] = longest - _PROBE[-1], _PROBE[-1]
    packed = _last_document(model, row, world.device)
    return max(world.all_gather_json(_beyond_rounding(alone, packed, packed)))


def _beyond_rounding(alone: torch.Tensor, packed: torch.Tensor, disturbed: torch.Tensor) -> float:
    """The larger of what packing and what another neighbour change, in units of the logits' spread; 0 if rounding may.

    A model that is not finite by itself is for the first step to name.
    """
    spread = max(alone.float().std().item(), 1e-30)
    by_neighbour, by_packing = (
        _distance(packed, disturbed) / spread,
        _distance(packed, alone) / spread,
    )
    # Kernels round differently for other shapes: through 30 layers of bfloat16 a token's logits move by 5%.
    rounding, rounding_of_shapes = (2e-5, 2e-5) if alone.dtype == torch.float32 else (2e-2, 0.25)
    if not alone.isfinite().all() or (
        by_neighbour <= rounding and by_packing <= rounding_of_shapes
    ):
        return 0.0
    return max(by_neighbour, by_packing)


def _last_document(
    model: PreTrainedModel,
    lengths: Sequence[int],
    device: torch.device,
    before: int = 0,
    is_training: bool = False,
) -> torch.Tensor:
    """The logits (tokens, vocabulary) of the last document of a row, which is always the same one; `before` changes
    those before it. With dropout if `is_training`, and then the run's random numbers stay as they are."""
    vocabulary = model.config.get_text_config().vocab_size
    earlier = torch.arange(sum(lengths[:-1]), device=device).flip(0) + before * (vocabulary // 2)
    ids = torch.cat([earlier, torch.arange(lengths[-1], device=device) + sum(_PROBE[:-1])])
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    documents.set(list(lengths), ends)
    with forward_only(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train(is_training)
        row = {"input_ids": ids % vocabulary, "position_ids": positions}
        # Without it a long row would have logits for every token.
        few = (
            {"logits_to_keep": lengths[-1]}
            if "logits_to_keep" in inspect.signature(model.forward).parameters
            else {}
        )
        return model(**{name: value.view(1, -1) for name, value in row.items()}, **few).logits[
            0, -lengths[-1] :
        ]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The root mean square difference of a token's logits, (tokens, vocabulary) both; the median over tokens.

    Not the largest: rounding may send a single token to another expert, where a leak reaches nearly all of them.
    """
    return (a.float() - b.float()).square().mean(-1).sqrt().median().item()
