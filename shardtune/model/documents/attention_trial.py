"""Trials of a model: does it keep the documents of a packed row apart?

A document's logits must be the same alone and behind others, and the same behind other neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from shardtune.data.batch import slice_lengths
from shardtune.distributed.exchange import HeadExchange
from shardtune.distributed.layout import Layout
from shardtune.model import documents
from shardtune.model.documents import Tried
from shardtune.model.fsdp_groups import forward_only

# Tokens of each document of the row for trials; the logits of the last document are compared.
TRIAL_LENGTHS = (11, 5, 16)
ROUNDING = 2e-5  # float32 logits of trials differ by less
_WHOLE = (0, 1)  # a rank's slice of a row: its number, and the number of slices


@dataclass
class LogitsTrial:
    """Compares the logits of a document in packed rows with those that it has alone."""

    model: PreTrainedModel
    layout: Layout
    device: torch.device
    # Ranks must decide alike, or their later collectives differ.
    all_gather: Callable[[Any], list[Any]] = lambda value: [value]
    heads: HeadExchange | None = None  # between ranks that share rows
    compares: bool = True  # fake tensors have no logits to compare
    tried: Tried = field(default_factory=Tried)
    alone: torch.Tensor | None = None  # (tokens, vocabulary)

    def attend_alone(self) -> None:
        """Make the logits of the document alone, as the model attends now."""
        if self.compares:
            self.alone = self.logits(TRIAL_LENGTHS[-1:])

    def leak(self) -> float:
        """Return how far a packed row moves the document's logits, as the model attends now.

        The unit is the logits' spread; 0 if it may be rounding. Collective: the largest one counts.
        """
        # The document stands behind two others. If that shows nothing, it stands at the end of the
        # longest row of a micro-batch: some models go by the place in the row, and others lack
        # positions for a long row. Ranks that share rows compare the tokens of their slices. Others
        # try a gradient, too: it shows leaks that rounding in bfloat16 hides.
        if not self.compares:
            return 0.0
        assert self.alone is not None
        share = self.heads.share if self.heads else _WHOLE
        max_length = self.layout.max_length
        text_config = self.model.config.get_text_config()
        longest = min(max_length, getattr(text_config, "max_position_embeddings", 0) or max_length)
        last, rows = TRIAL_LENGTHS[-1], self.layout.micro_batch_size
        short = TRIAL_LENGTHS if share[1] == 1 else _cut_lengths(share[1])
        trials = [short, (*[longest] * (rows - 1), longest - last, last)]
        for lengths in trials[: 2 if longest > sum(short) else 1]:
            packed, disturbed = (self.logits(lengths, neighbour, share) for neighbour in (0, 1))
            before = max(0, _own_tokens(sum(lengths), share).start - sum(lengths[:-1]))
            alone = self.alone[before : before + len(packed)]
            is_reached = lengths is short and share[1] == 1 and self._gradient_reaches()
            leak = _beyond_rounding(alone, packed, disturbed, is_reached)
            if leak := max(self.all_gather(leak)):
                return float(leak)
        return 0.0

    def _gradient_reaches(self) -> bool:
        """Return whether the last document's logits have a gradient in the documents before it."""
        # Documents that are apart have none, in any dtype: their attention to one another is 0.
        embedded: list[torch.Tensor] = []

        def begin_graph(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1].clone()  # some models scale it in place

        hook = self.model.get_input_embeddings().register_forward_hook(begin_graph)
        try:
            with forward_only(self.model), torch.enable_grad():
                logits = self._forward(TRIAL_LENGTHS).float()
                total = logits.square().sum()
                gradients = torch.autograd.grad(
                    total, embedded, allow_unused=True, materialize_grads=True
                )
        finally:
            hook.remove()
        last, tokens = TRIAL_LENGTHS[-1], sum(TRIAL_LENGTHS)
        # Some models look tokens up again in each layer, and a table may be called per document.
        is_whole = all(each.shape[1] == tokens for each in gradients)
        whole = torch.cat([each[0] for each in gradients], -1 if is_whole else 0).float()
        before, within = whole[:-last].norm().item(), whole[-last:].norm().item()
        return before > ROUNDING * within

    def logits(self, *row: Any) -> torch.Tensor:
        """Return `_forward` of a row, without gradients."""
        with forward_only(self.model):
            return self._forward(*row)

    def _forward(
        self, lengths: Sequence[int], neighbour: int = 0, share: tuple[int, int] = _WHOLE
    ) -> torch.Tensor:
        """Return the logits (tokens, vocabulary) of the last document of a row, in a rank's slice.

        The last document is always the same; `neighbour` chooses the tokens before it.
        """
        model, device = self.model, self.device
        vocabulary = model.config.get_text_config().vocab_size
        earlier = torch.arange(sum(lengths[:-1]), device=device).flip(0)
        earlier += neighbour * (vocabulary // 2)
        last = torch.arange(lengths[-1], device=device) + sum(TRIAL_LENGTHS[:-1])
        inputs = {"input_ids": torch.cat([earlier, last]) % vocabulary}
        if len(lengths) > 1:  # a document that is alone gets the model's own positions
            positions = [torch.arange(length, device=device) for length in lengths]
            inputs["position_ids"] = torch.cat(positions)
        slices = slice_lengths(sum(lengths), share[1]) if share[1] > 1 else None
        tokens = _own_tokens(sum(lengths), share)
        inputs = {name: value[tokens].view(1, -1) for name, value in inputs.items()}
        kept = max(0, tokens.stop - max(tokens.start, sum(lengths[:-1])))
        # Without this option a long row gets logits for every token.
        has_option = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = {"logits_to_keep": max(1, kept)} if has_option else {}
        row = documents.row_of(list(lengths), device, slices)
        with documents.of(row, self.heads, self.tried):
            output = model(**inputs, **options)
        return output.logits[0, output.logits.shape[1] - kept :]


def _beyond_rounding(
    alone: torch.Tensor, packed: torch.Tensor, disturbed: torch.Tensor, is_reached: bool
) -> float:
    """Return the larger change, by packing or by another neighbour, or 0 if it may be rounding.

    The unit is the logits' spread. `is_reached`: a gradient reaches the documents before, so that
    it is no rounding.
    """
    if not len(alone):
        return 0.0
    spread = max(alone.float().std().item(), 1e-30)
    by_neighbour, by_packing = (
        logits_distance(packed, other) / spread for other in (disturbed, alone)
    )
    # Kernels round differently for other shapes: through 30 layers of bfloat16 a token's logits
    # move by 5%.
    is_float32 = alone.dtype == torch.float32
    rounding, rounding_of_shapes = (ROUNDING, ROUNDING) if is_float32 else (2e-2, 0.25)
    is_rounding = by_neighbour <= rounding and by_packing <= rounding_of_shapes and not is_reached
    if is_rounding or not alone.isfinite().all():  # the first step will refuse infinite logits
        return 0.0
    return max(by_neighbour, by_packing, ROUNDING)


def _cut_lengths(ranks: int) -> tuple[int, ...]:
    """Return lengths with which a slice ends within the last document and no slice is empty."""
    first, *others = TRIAL_LENGTHS
    return max(first - 2, ranks), *others


def _own_tokens(tokens: int, share: tuple[int, int]) -> slice:
    number, ranks = share
    ends = [0, *accumulate(slice_lengths(tokens, ranks))]
    return slice(ends[number], ends[number + 1])


def logits_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the root mean square difference of a token's logits, the median over tokens."""
    # Not the largest: rounding may send single tokens to another expert; a leak reaches nearly all.
    return (a.float() - b.float()).square().mean(-1).sqrt().median().item()
