"""The loss: a sum over trained tokens, divided once by their number in the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .errors import Refused
from .model import forward_only
from .packing import Batch


def summed_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """The sum of the negative log-likelihoods (nats, float32, a scalar) of the batch's trained tokens.

    A sum, because a mean over a micro-batch or a rank weights tokens by where they happen to lie, and is NaN where
    nothing is trained. Here such a batch gives zero, with a graph, so that its backward joins the collectives.
    """
    inputs = {name: value for name in ("position_ids", "attention_mask") if (value := getattr(batch, name)) is not None}
    logits = model(input_ids=batch.input_ids, **inputs).logits
    predicting = logits.flatten(0, 1).index_select(0, batch.predicting)
    return F.cross_entropy(predicting.float(), batch.targets, reduction="sum")


def require_separate_documents(model: PreTrainedModel, device: torch.device) -> None:
    """Check on the model itself that a packed document is not changed by the one before it in its row.

    Raises:
        Refused: it is; the architecture cannot be packed.
    """
    vocabulary = model.config.get_text_config().vocab_size
    length = 16
    first = torch.arange(2 * length, device=device).view(1, -1) % vocabulary
    other = first.clone()
    other[0, :length] = other[0, :length].flip(0) + vocabulary // 2
    positions = torch.arange(length, device=device).repeat(2).view(1, -1)
    runs = ((first, positions), (other, positions), (first[:, length:], positions[:, length:]))
    with forward_only(model):
        packed, disturbed, alone = (
            model(input_ids=ids % vocabulary, position_ids=at).logits[0, -length:] for ids, at in runs
        )
    spread = alone.float().std().item()
    by_neighbour, by_packing = _distance(packed, disturbed) / spread, _distance(packed, alone) / spread
    # Kernels round differently for other shapes: through 30 layers of bfloat16 a token's logits move by 5%.
    rounding, rounding_of_shapes = (2e-5, 2e-5) if alone.dtype == torch.float32 else (2e-2, 0.25)
    # A model that is not finite by itself is for the first step to name.
    if alone.isfinite().all() and not (by_neighbour <= rounding and by_packing <= rounding_of_shapes):
        raise Refused(
            f"{model.config.model_type} lets a packed document see the one before it (its logits change by "
            f"{max(by_neighbour, by_packing):.1%} of their spread) - use data.packing=false"
        )


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The root mean square difference of a token's logits, (tokens, vocabulary) both; the median over tokens.

    Not the largest: rounding may send a single token to another expert, where a leak reaches nearly all of them.
    """
    return (a.float() - b.float()).square().mean(-1).sqrt().median().item()
