"""Try a small copy of a model before its weights are read: does it keep documents apart?"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.documents.attention_choice import (
    decide_attention,
    leak_under_mask,
    mixing_refusal,
    require_shared,
)
from shardtune.model.documents.attention_trial import ROUNDING, LogitsTrial, logits_distance
from shardtune.model.source.small_copy import one_thread, small_copy

_COPY_ROW = 128  # the longest row of a small copy


@one_thread()
def require_documents_apart(layout: Layout, model_config: PreTrainedConfig) -> None:
    """Try a small copy of the model, for which its config.json is enough.

    Raises:
        UserError: a token sees later ones; a packed document sees the one before it; or ranks
            would share rows to which the model attends under a mask.
    """
    copy = small_copy(model_config, layout.attention)
    if copy is None:
        return
    if _sees_ahead(copy):
        raise UserError(
            f"{copy.config.model_type} is not a causal language model: its tokens see those behind "
            "them - name a model that predicts the next token"
        )
    if not layout.packing and layout.row_ranks == 1:
        return
    # The mask of a longer row takes seconds, so only the loaded weights are tried with the longest.
    length = min(layout.max_length, _COPY_ROW)
    layout = replace(layout, max_length=length, micro_batch_size=1)
    trial = LogitsTrial(copy, layout, torch.device("cpu"))
    try:
        # The data is not read yet, and may hold a document of a whole row.
        attention = decide_attention(trial, length)
        leak = leak_under_mask(attention, trial)
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        return
    require_shared(attention, layout)
    if leak:
        whose = "the logits of a small copy with random weights"
        raise UserError(mixing_refusal(copy, layout, leak, whose))


@torch.no_grad()
def _sees_ahead(copy: PreTrainedModel) -> bool:
    """Return whether the last token changes the logits of those before it."""
    ids = torch.arange(12).view(1, -1) + torch.tensor([[0], [1]]) * (torch.arange(12) == 11)
    try:
        one, other = (copy.eval()(input_ids=each.view(1, -1)).logits[0, :-1] for each in ids)
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        return False
    return logits_distance(one, other) > ROUNDING * one.std().item()
