"""Choose the attention at start, by trials on the model itself: are documents kept apart?

A document's logits must be the same alone and behind others, and the same behind other neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.data.batch import slice_lengths
from shardtune.distributed.layout import Layout
from shardtune.distributed.world import World
from shardtune.errors import RunFailed, UserError
from shardtune.log import logger
from shardtune.model import documents
from shardtune.model.build import forward_only
from shardtune.model.documents import Tried
from shardtune.model.documents.attention import DOCUMENT_ATTENTION, model_makes_masks
from shardtune.model.documents.attention_layers import OneByOne, keeps_states_only
from shardtune.model.documents.flash_attention import (
    agree_on_flash_attention,
    choose_flash_attention,
    flash_attention_name,
    keep_second,
)
from shardtune.model.documents.head_exchange import HeadExchange, describe_rows, heads_between
from shardtune.model.documents.indexers import dense_attention, describe_indexers
from shardtune.model.documents.one_by_one import restore
from shardtune.model.documents.state_layers import (
    missing_kernels,
    separate_documents,
    state_mixers,
    takes_boundaries,
)
from shardtune.model.source.small_copy import one_thread, small_copy
from shardtune.model.source.text_model import set_attention

# Tokens of each document of the row for trials; the logits of the last document are compared.
TRIAL_LENGTHS = (11, 5, 16)
_NO_INTERFACE = "does not use transformers' attention interface"
_ROUNDING = 2e-5  # of float32, in trials
_COPY_ROW = 128  # the longest row of a small copy
_WHOLE = (0, 1)  # of a row, the slice of a rank: its number, of how many


@dataclass
class LogitsTrial:
    """Compares the logits of a document in packed rows with those that it has alone."""

    model: PreTrainedModel
    layout: Layout
    device: torch.device
    all_gather: Callable[[Any], list[Any]] = lambda value: [value]  # the ranks must agree
    heads: HeadExchange | None = None  # between ranks that share rows
    compares: bool = True  # fake tensors have no logits to compare
    tried: Tried = field(default_factory=Tried)
    alone: torch.Tensor | None = None  # (tokens, vocabulary)

    def attend_alone(self) -> None:
        """Make the logits of the document alone, as the model attends now."""
        if self.compares:
            self.alone = self.logits(TRIAL_LENGTHS[-1:])

    def leak(self) -> float:
        """Return how far they are from those in a packed row, as the model attends now, or 0 within
        rounding.

        The unit is the logits' spread; the rank with the largest distance counts. The document
        stands behind two others, and, where that shows nothing, at the end of the longest row of a
        micro-batch: some models go by the place in the row, and others lack positions for a long
        one. Ranks that share rows compare the tokens of their slices. Where none do, a gradient
        shows a small leak, too, that rounding in bfloat16 would hide.
        """
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
        """Return whether the last document's logits have a gradient in the documents before it.

        Documents that are apart have none, in any dtype: their attention to one another is 0.
        """
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
        # Some look tokens up again in each layer, and a table may be called once per document.
        is_whole = all(each.shape[1] == tokens for each in gradients)
        whole = torch.cat([each[0] for each in gradients], -1 if is_whole else 0).float()
        before, own = whole[:-last].norm().item(), whole[-last:].norm().item()
        return before > _ROUNDING * own

    def logits(self, *row: Any) -> torch.Tensor:
        """Return the same as `_forward` of this row, without gradients."""
        with forward_only(self.model):
            return self._forward(*row)

    def _forward(
        self, lengths: Sequence[int], neighbour: int = 0, share: tuple[int, int] = _WHOLE
    ) -> torch.Tensor:
        """Return the logits (tokens, vocabulary) of the last document of a row of so many tokens
        each.

        The last document is always the same; `neighbour` chooses the tokens before it. `share`: the
        slice of the row that this rank has, and has logits for, of how many.
        """
        model, device = self.model, self.device
        vocabulary = model.config.get_text_config().vocab_size
        earlier = torch.arange(sum(lengths[:-1]), device=device).flip(0)
        earlier += neighbour * (vocabulary // 2)
        last = torch.arange(lengths[-1], device=device) + sum(TRIAL_LENGTHS[:-1])
        row = {"input_ids": torch.cat([earlier, last]) % vocabulary}
        if len(lengths) > 1:  # alone it has the positions that the model gives it
            positions = [torch.arange(length, device=device) for length in lengths]
            row["position_ids"] = torch.cat(positions)
        slices = slice_lengths(sum(lengths), share[1]) if share[1] > 1 else None
        own = _own_tokens(sum(lengths), share)
        row = {name: value[own] for name, value in row.items()}
        kept = max(0, own.stop - max(own.start, sum(lengths[:-1])))
        # Without this a long row gets logits for every token.
        has_option = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = {"logits_to_keep": max(1, kept)} if has_option else {}
        given = documents.row_of(list(lengths), device, slices)
        with documents.of(given, self.heads, self.tried):
            output = model(**{name: value.view(1, -1) for name, value in row.items()}, **options)
        return output.logits[0, output.logits.shape[1] - kept :]


class Attention(NamedTuple):
    """How a model attends."""

    is_flat: bool  # rows are records one behind the other, without padding
    by_document: bool
    text: str
    reason: str = ""  # why not by document
    by_layer: bool = False  # each attention layer is called once per document
    ways: tuple[str, ...] = ()  # how layers attended in the trial


def choose_attention(model: PreTrainedModel, longest_document: int, world: World) -> bool:
    """Decide how the loaded model attends, and log it with the reason. Collective.

    Returns whether rows are flat.

    Raises:
        RunFailed: data.packing is on, and a document sees the one before it.
    """
    layout, is_gpu = world.layout, world.device.type == "cuda"
    is_chosen = is_gpu and layout.attention == "auto"
    if is_chosen:
        choose_flash_attention(model.config, world)
    heads = heads_between(world)
    trial = LogitsTrial(model, layout, world.device, world.all_gather_json, heads)
    attention = decide_attention(trial, longest_document)
    if is_chosen:
        agree_on_flash_attention(world)
    ways = " and ".join(attention.ways)
    if "varlen attention" in ways:
        ways = ways.replace("varlen attention", f"varlen attention by {flash_attention_name()}")
    elif is_gpu:
        keep_second("is for varlen attention alone")
    detail = f" ({ways})" * bool(ways) + "; rows have no padding" * attention.by_document
    logger.info(f"Attention: {attention.text}{detail}")
    try:
        require_shared(attention, layout)
    except UserError as late:  # no small copy has shown it
        raise RunFailed(*late.problems) from late
    if heads:
        logger.info(describe_rows(model, layout.row_ranks))
    if leak := _leak_under_mask(attention, trial):
        raise RunFailed(_mixing(model, layout, leak, "its logits"))
    if line := describe_indexers(model, longest_document):
        logger.info(line)
    if mixers := state_mixers(model):
        logger.info(_describe_states(mixers, attention.is_flat, trial))
    return attention.is_flat


def _describe_states(mixers: list[nn.Module], is_flat: bool, trial: LogitsTrial) -> str:
    """Return the log's line on layers that keep a state. Collective.

    On a GPU those that can are let to take all documents of a row at once.
    """
    is_gpu = trial.device.type == "cuda"
    missing = missing_kernels(mixers) if is_gpu else []
    at_once = is_gpu and is_flat and not missing and any(map(takes_boundaries, mixers))
    if at_once:
        separate_documents(mixers, at_once=True)
        if leak := trial.leak():
            separate_documents(mixers, at_once=False)
            at_once = False
            logger.info(f"Layers with a state let documents mix at once ({leak:.1%} of the spread)")
    how = "all documents at once" if at_once else "one call per document"
    kernels = ""
    if missing:
        kernels = (
            f"; without {' and '.join(missing)} they run transformers' reference code, slower and "
            "with more memory"
        )
    return f"Layers with a state: {len(mixers)}, {how if is_flat else 'in padded rows'}{kernels}"


@one_thread()
def require_documents_apart(layout: Layout, model_config: PreTrainedConfig) -> None:
    """Try a small copy of the model, for which its config.json is enough.

    Raises:
        UserError: a token sees those behind it; data.packing is on, and a document sees the one
            before it; or ranks would share rows to which the model attends under a mask.
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
        leak = _leak_under_mask(attention, trial)
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        return
    require_shared(attention, layout)
    if leak:
        whose = "the logits of a small copy with random weights"
        raise UserError(_mixing(copy, layout, leak, whose))


def require_shared(attention: Attention, layout: Layout) -> None:
    """Raises UserError if ranks would share rows to which a model attends under a mask."""
    if layout.row_ranks > 1 and not attention.by_document:
        raise UserError(
            f"parallel.context={layout.context} needs attention without a mask, and this "
            f"model attends under one ({attention.reason}) - use parallel.context=1"
        )


@torch.no_grad()
def _sees_ahead(copy: PreTrainedModel) -> bool:
    """Return whether the last token changes the logits of those before it."""
    ids = torch.arange(12).view(1, -1) + torch.tensor([[0], [1]]) * (torch.arange(12) == 11)
    try:
        one, other = (copy.eval()(input_ids=each.view(1, -1)).logits[0, :-1] for each in ids)
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        return False
    return _distance(one, other) > _ROUNDING * one.std().item()


def _leak_under_mask(attention: Attention, trial: LogitsTrial) -> float:
    return trial.leak() if attention.is_flat and not attention.by_document else 0.0


def _mixing(model: PreTrainedModel, layout: Layout, leak: float, whose: str) -> str:
    is_chosen = layout.attention != "auto"
    return (
        f"{model.config.model_type} lets a packed document see the one before it ({whose} change "
        f"by {leak:.1%} of their spread) - use {'model.attention=auto or ' * is_chosen}"
        "data.packing=false"
    )


def decide_attention(
    trial: LogitsTrial, longest_document: int, is_by_document: bool = False
) -> Attention:
    """Let the model attend document by document if that is exact, else under a mask.

    Windows and chunks count only if they are narrower than the longest document, in tokens.
    `is_by_document`: an earlier call has found it exact, so that nothing is tried.
    """
    model, layout, trial.tried = trial.model, trial.layout, Tried(longest_document)
    usual, packing = model.config._attn_implementation, layout.packing
    mixers = state_mixers(model)
    is_auto, reason = layout.attention == "auto", f"model.attention={layout.attention}"
    if is_auto or packing:
        trial.attend_alone()
    separate_documents(mixers, at_once=False)
    if is_auto:
        dense = dense_attention(model, longest_document)
        if is_by_document and not keeps_states_only(model):
            set_attention(model, DOCUMENT_ATTENTION)
        reason = "" if is_by_document else _try_document_attention(trial)
        if not reason:
            text = "within each document, without a mask"
            if keeps_states_only(model):
                text = "none, as all layers keep a state"
            return Attention(True, True, text, ways=(*sorted(trial.tried.ways),))
        set_attention(model, usual)
        if dense:
            dense.remove()
        # Ranks that share rows exchange heads in `document_attention` alone.
        if layout.row_ranks == 1 and _attends_one_by_one(trial):
            text = "within each document, by one call of each attention layer per document"
            return Attention(True, True, f"{text} ({reason})", by_layer=True)
    if not packing:
        for mixer in mixers:
            restore(mixer)
    # The rows of a packed micro-batch are one row for the model.
    side = layout.max_length * (layout.micro_batch_size if packing else 1)
    mask = f"{usual} under a mask of row x row, up to {side} tokens a side ({reason})"
    return Attention(packing, False, mask, reason)


def _try_document_attention(trial: LogitsTrial) -> str:
    """Switch the model to `document_attention`, and return the reason to switch back, or ""."""
    model = trial.model
    reason = next(filter(None, trial.all_gather(_objection(trial))), "")
    # A stage may have layers that keep a state alone.
    is_used = trial.tried.ways or (not trial.compares and state_mixers(model))
    if not reason and not keeps_states_only(model) and not any(trial.all_gather(bool(is_used))):
        reason = _NO_INTERFACE
    if not reason and (leak := trial.leak()):
        reason = f"has logits that change without the mask, by {leak:.1%} of their spread"
    return f"{model.config.model_type} {reason}" if reason else ""


def _attends_one_by_one(trial: LogitsTrial) -> bool:
    """Let attention layers take documents one by one, if that is exact, and return whether it is.

    Arguments that cannot be cut show in an error of the layer's own.
    """
    one_by_one = OneByOne(trial.model)
    try:
        trial.logits(TRIAL_LENGTHS)
        runs = one_by_one.is_used
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
        runs = False
    if all(trial.all_gather(runs)) and not trial.leak():
        return True
    one_by_one.remove()
    return False


def _objection(trial: LogitsTrial) -> str:
    """Switch the model to `document_attention`, and return why that is not its own, or ""."""
    model, tried = trial.model, trial.tried
    if keeps_states_only(model):
        return ""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(_architecture_of(part)._can_set_attn_implementation() for part in parts):
        return _NO_INTERFACE
    set_attention(model, DOCUMENT_ATTENTION)
    objections = tried.objections = list[str]()
    try:
        trial.logits(TRIAL_LENGTHS)
        with model_makes_masks(tried):
            trial.logits(TRIAL_LENGTHS)
    except (TypeError, AttributeError):  # they get None
        objections.append("layers that read the mask")
    finally:
        tried.objections = None
    return f"has {objections[0]}" if objections else ""


def _architecture_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return a model's class in transformers, which looks at its source. FSDP2 makes another."""
    classes: Any = type(model).__mro__
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _beyond_rounding(
    alone: torch.Tensor, packed: torch.Tensor, disturbed: torch.Tensor, is_reached: bool
) -> float:
    """Return the larger change, by packing or by another neighbour, or 0 if it may be rounding.

    The unit is the logits' spread. It is not rounding where a gradient reaches the documents before
    (`is_reached`). Logits that are not finite alone are left to the first step.
    """
    if not len(alone):
        return 0.0
    spread = max(alone.float().std().item(), 1e-30)
    by_neighbour, by_packing = (_distance(packed, other) / spread for other in (disturbed, alone))
    # Kernels round differently for other shapes: through 30 layers of bfloat16 a token's logits
    # move by 5%.
    is_float32 = alone.dtype == torch.float32
    rounding, rounding_of_shapes = (_ROUNDING, _ROUNDING) if is_float32 else (2e-2, 0.25)
    is_rounding = by_neighbour <= rounding and by_packing <= rounding_of_shapes and not is_reached
    if is_rounding or not alone.isfinite().all():
        return 0.0
    return max(by_neighbour, by_packing, _ROUNDING)


def _cut_lengths(ranks: int) -> tuple[int, ...]:
    """Return lengths like those for trials: a slice ends within the last, and none is empty."""
    first, *others = TRIAL_LENGTHS
    return max(first - 2, ranks), *others


def _own_tokens(tokens: int, share: tuple[int, int]) -> slice:
    number, ranks = share
    ends = [0, *accumulate(slice_lengths(tokens, ranks))]
    return slice(ends[number], ends[number + 1])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the root mean square difference of a token's logits, the median over tokens.

    Both are (tokens, vocabulary). Not the largest: rounding may send a single token to another
    expert, where a leak reaches nearly all of them.
    """
    return (a.float() - b.float()).square().mean(-1).sqrt().median().item()
