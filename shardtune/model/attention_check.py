"""Choose the attention at start, by trials on the model itself: are documents kept apart?

A document's logits must be the same alone and behind others, and the same behind other neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.model.attention import DOCUMENT_ATTENTION, attention_trial, documents
from shardtune.model.build import forward_only
from shardtune.model.support import can_be_packed

# Tokens of each document of the row for trials; the logits of the last document are compared.
_TRIAL_LENGTHS = (11, 5, 16)


def choose_attention(
    model: PreTrainedModel, config: Config, longest_document: int, world: World
) -> bool:
    """Let the model attend document by document if that is exact, and log the choice and its
    reason.

    Returns whether rows are flat: records one behind the other, without padding. A sliding window
    counts only if it is narrower than the longest document, in tokens.

    Raises:
        UserError: data.packing is on, and a document sees the one before it.
    """
    kind, usual = model.config.model_type, model.config._attn_implementation
    packing, reason = config.data.packing, f"model.attention={config.model.attention}"
    if not can_be_packed(type(model)):
        logger.info(
            f"Attention: {kind}'s own, in padded rows (it keeps a state or takes no positions)"
        )
        return False
    if config.model.attention != "auto" and not packing:
        logger.info(f"Attention: {usual} under a mask of row x row ({reason})")
        return False
    alone = _last_document_logits(model, _TRIAL_LENGTHS[-1:], world.device)
    if config.model.attention == "auto":
        documents.longest_of_run = longest_document
        reasons = world.all_gather_json(_try_document_attention(model, alone, config, world))
        reason = next(filter(None, reasons), "")
        if not reason:
            logger.info(
                f"Attention: within each document, without a mask ({documents.way}); rows have no "
                "padding"
            )
            return True
        model.set_attn_implementation(usual)
    # The rows of a packed micro-batch are one row for the model.
    side = config.data.max_length * (config.train.micro_batch_size if packing else 1)
    logger.info(
        f"Attention: {usual} under a mask of row x row, up to {side} tokens a side ({reason})"
    )
    if packing and (leak := _leak(model, alone, config, world)):
        raise UserError(
            f"{kind} lets a packed document see the one before it (its logits change by "
            f"{leak:.1%} of their spread) - use data.packing=false"
        )
    return packing


def _try_document_attention(
    model: PreTrainedModel, alone: torch.Tensor, config: Config, world: World
) -> str:
    """Switch the model to `document_attention`, and return the reason to switch back, or ""."""
    model_type = model.config.model_type
    no_interface = f"{model_type} does not use transformers' attention interface"
    if not model._can_set_attn_implementation():
        return no_interface
    model.set_attn_implementation(DOCUMENT_ATTENTION)
    with attention_trial() as objections:
        try:
            _last_document_logits(model, _TRIAL_LENGTHS, world.device)
        except (TypeError, AttributeError):  # they get None
            objections.append("layers that read the mask")
    if objections:
        return f"{model_type} has {objections[0]}"
    if not documents.way:
        return no_interface
    if leak := _leak(model, alone, config, world):
        return f"{model_type}'s logits change without the mask, by {leak:.1%} of their spread"
    return ""


def _leak(model: PreTrainedModel, alone: torch.Tensor, config: Config, world: World) -> float:
    """Return how far a packed document's logits are from its logits alone, or 0 within rounding.

    The unit is the logits' spread; the rank with the largest distance counts. The document stands
    behind two others, and, where that shows nothing, at the end of the longest row of a
    micro-batch: some models go by the place in the row, and others lack positions for a long one.
    """
    max_length = config.data.max_length
    text_config = model.config.get_text_config()
    longest = min(max_length, getattr(text_config, "max_position_embeddings", None) or max_length)
    last = _TRIAL_LENGTHS[-1]
    rows = [
        _TRIAL_LENGTHS,
        (*[longest] * (config.train.micro_batch_size - 1), longest - last, last),
    ]
    for lengths in rows[: 2 if longest > sum(_TRIAL_LENGTHS) else 1]:
        packed, disturbed = (
            _last_document_logits(model, lengths, world.device, neighbour) for neighbour in (0, 1)
        )
        leak = max(world.all_gather_json(_beyond_rounding(alone, packed, disturbed)))
        if leak:
            return float(leak)
    return 0.0


def _beyond_rounding(alone: torch.Tensor, packed: torch.Tensor, disturbed: torch.Tensor) -> float:
    """Return the larger change, by packing or by another neighbour, or 0 if it may be rounding.

    The unit is the logits' spread. Logits that are not finite alone are left to the first step.
    """
    spread = max(alone.float().std().item(), 1e-30)
    by_neighbour, by_packing = (_distance(packed, other) / spread for other in (disturbed, alone))
    # Kernels round differently for other shapes: through 30 layers of bfloat16 a token's logits
    # move by 5%.
    rounding, rounding_of_shapes = (2e-5, 2e-5) if alone.dtype == torch.float32 else (2e-2, 0.25)
    is_rounding = by_neighbour <= rounding and by_packing <= rounding_of_shapes
    return 0.0 if is_rounding or not alone.isfinite().all() else max(by_neighbour, by_packing)


def _last_document_logits(
    model: PreTrainedModel, lengths: Sequence[int], device: torch.device, neighbour: int = 0
) -> torch.Tensor:
    """Return the logits (tokens, vocabulary) of the last document of a row of so many tokens each.

    The last document is always the same; `neighbour` chooses the tokens before it.
    """
    vocabulary = model.config.get_text_config().vocab_size
    earlier = torch.arange(sum(lengths[:-1]), device=device).flip(0) + neighbour * (vocabulary // 2)
    last = torch.arange(lengths[-1], device=device) + sum(_TRIAL_LENGTHS[:-1])
    row = {
        "input_ids": torch.cat([earlier, last]) % vocabulary,
        "position_ids": torch.cat([torch.arange(length, device=device) for length in lengths]),
    }
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    documents.set(list(lengths), boundaries)
    # Without this a long row gets logits for every token.
    has_option = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": lengths[-1]} if has_option else {}
    with forward_only(model):
        output = model(**{name: value.view(1, -1) for name, value in row.items()}, **options)
    return output.logits[0, -lengths[-1] :]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the root mean square difference of a token's logits, the median over tokens.

    Both are (tokens, vocabulary). Not the largest: rounding may send a single token to another
    expert, where a leak reaches nearly all of them.
    """
    return (a.float() - b.float()).square().mean(-1).sqrt().median().item()
