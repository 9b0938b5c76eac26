"""Choose how a model attends, by trials on the model itself: are documents kept apart?

A document's logits must be the same alone and behind others, and the same behind other neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shardtune.data.batch import slice_lengths
from shardtune.distributed.exchange import HeadExchange, heads_between
from shardtune.distributed.layout import Layout
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.log import logger
from shardtune.model import documents
from shardtune.model.documents import Tried
from shardtune.model.documents.attention import (
    DOCUMENT_ATTENTION,
    agree_on_flash_attention,
    choose_flash_attention,
    flash_attention_name,
    keep_second,
    model_makes_masks,
)
from shardtune.model.documents.one_by_one import (
    OneByOne,
    dense_attention,
    describe_indexers,
    keeps_states_only,
    missing_kernels,
    restore,
    separate_documents,
    state_mixers,
    takes_boundaries,
)
from shardtune.model.fsdp_groups import forward_only

# Tokens of each document of the row for trials; the logits of the last document are compared.
TRIAL_LENGTHS = (11, 5, 16)
ROUNDING = 2e-5  # float32 logits of trials differ by less
_WHOLE = (0, 1)  # a rank's slice of a row: its number, and the number of slices
_NO_INTERFACE = "does not use transformers' attention interface"


class Attention(NamedTuple):
    """How a model attends."""

    is_flat: bool  # a row has its records in sequence, without padding
    by_document: bool  # without a mask
    text: str  # for the log
    reason: str = ""  # why it attends under a mask
    by_layer: bool = False  # each attention layer is called once per document
    ways: tuple[str, ...] = ()  # how layers attended in the trial


def choose_attention(model: PreTrainedModel, longest_document: int, world: World) -> bool:
    """Decide how the loaded model attends, log why, and return if rows are flat. Collective.

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
        # Once more: a kernel that fails in its trial has sent this rank back to the older version.
        agree_on_flash_attention(world)
    ways = " and ".join(attention.ways)
    if "varlen attention" in ways:
        ways = ways.replace("varlen attention", f"varlen attention by {flash_attention_name()}")
    elif is_gpu:
        keep_second("is for varlen attention alone")
    detail = f" ({ways})" * bool(ways) + "; rows have no padding" * attention.by_document
    logger.info(f"Attention: {attention.text}{detail}")
    if problem := not_shared(attention, layout):
        raise RunFailed(problem)
    if leak := leak_under_mask(attention, trial):
        raise RunFailed(mixing_refusal(model, layout, leak, "its logits"))
    if line := describe_indexers(model, longest_document):
        logger.info(line)
    if mixers := state_mixers(model):
        logger.info(_describe_states(mixers, attention.is_flat, trial))
    return attention.is_flat


def _describe_states(mixers: list[nn.Module], is_flat: bool, trial: LogitsTrial) -> str:
    """Return the log's line on layers that keep a state. Collective.

    On a GPU, layers that can take all documents of a row at once do so from now on.
    """
    is_gpu = trial.device.type == "cuda"
    missing = missing_kernels(mixers) if is_gpu else []
    at_once = is_gpu and is_flat and not missing and any(map(takes_boundaries, mixers))
    if at_once:
        separate_documents(mixers, at_once=True)
        if leak := trial.leak():
            separate_documents(mixers, at_once=False)
            at_once = False
            logger.info(
                f"Layers with a state mix documents in one call: {leak:.1%} of the logits' spread"
            )
    how = "all documents at once" if at_once else "one call per document"
    kernels = ""
    if missing:
        kernels = (
            f"; without {' and '.join(missing)} they run transformers' reference code, slower and "
            "with more memory"
        )
    return f"Layers with a state: {len(mixers)}, {how if is_flat else 'in padded rows'}{kernels}"


def not_shared(attention: Attention, layout: Layout) -> str:
    """Return why ranks cannot share rows to which the model attends like that, or an empty text."""
    if layout.row_ranks == 1 or attention.by_document:
        return ""
    return (
        f"{layout.row_key}={layout.row_ranks} needs attention without a mask, and this model "
        f"attends under one ({attention.reason}) - use {layout.row_key}=1"
    )


def leak_under_mask(attention: Attention, trial: LogitsTrial) -> float:
    return trial.leak() if attention.is_flat and not attention.by_document else 0.0


def mixing_refusal(model: PreTrainedModel, layout: Layout, leak: float, whose: str) -> str:
    is_chosen = layout.attention != "auto"
    return (
        f"{model.config.model_type} lets a packed document see the one before it ({whose} change "
        f"by {leak:.1%} of their spread) - use {'model.attention=auto or ' * is_chosen}"
        "data.packing=false"
    )


def decide_attention(trial: LogitsTrial, longest_document: int) -> Attention:
    """Let the model attend document by document if that is exact, else under a mask.

    Windows and chunks count only if they are narrower than `longest_document`, in tokens.
    """
    # Three ways are tried, the fastest first: `document_attention` in every layer; each attention
    # layer called once per document; a mask over the whole row.
    model, layout, trial.tried = trial.model, trial.layout, Tried(longest_document)
    usual, packing = model.config._attn_implementation, layout.packing
    mixers = state_mixers(model)
    is_auto, reason = layout.attention == "auto", f"model.attention={layout.attention}"
    if is_auto or packing:
        trial.attend_alone()  # the measure of all ways: before the model is changed
    separate_documents(mixers, at_once=False)
    if is_auto:
        dense = dense_attention(model, longest_document)
        reason = _try_document_attention(trial)
        if not reason:
            text = "within each document, without a mask"
            if keeps_states_only(model):
                text = "none, as all layers keep a state"
            return Attention(True, True, text, ways=(*sorted(trial.tried.ways),))
        _set_attention(model, usual)
        if dense:
            dense.remove()
        # Ranks that share rows exchange heads in `document_attention` alone.
        if layout.row_ranks == 1 and _attends_one_by_one(trial):
            text = "within each document, by one call of each attention layer per document"
            return Attention(True, True, f"{text} ({reason})", by_layer=True)
    if not packing:
        for mixer in mixers:
            restore(mixer)
    # A packed micro-batch is one row: the batch joins its rows.
    side = layout.max_length * (layout.micro_batch_size if packing else 1)
    mask = f"{usual} under a mask of row x row, up to {side} tokens a side ({reason})"
    return Attention(packing, False, mask, reason)


def _try_document_attention(trial: LogitsTrial) -> str:
    """Switch the model to `document_attention`, and return the reason to switch back, or ""."""
    model = trial.model
    reason = next(filter(None, trial.all_gather(_objection(trial))), "")
    # A plan tries each stage alone, and one may have only layers that keep a state.
    is_used = trial.tried.ways or (not trial.compares and state_mixers(model))
    if not reason and not keeps_states_only(model) and not any(trial.all_gather(bool(is_used))):
        reason = _NO_INTERFACE
    if not reason and (leak := trial.leak()):
        reason = f"has logits that change without the mask, by {leak:.1%} of their spread"
    return f"{model.config.model_type} {reason}" if reason else ""


def _attends_one_by_one(trial: LogitsTrial) -> bool:
    """Let attention layers take documents one by one if that is exact; return whether it is."""
    one_by_one = OneByOne(trial.model)
    try:
        trial.logits(TRIAL_LENGTHS)
        runs = one_by_one.is_used
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
        runs = False  # a layer has an argument that cannot be cut
    if all(trial.all_gather(runs)) and not trial.leak():
        return True
    one_by_one.remove()
    return False


def _objection(trial: LogitsTrial) -> str:
    """Switch the model to `document_attention`, and return why it needs another one, or ""."""
    model, tried = trial.model, trial.tried
    if keeps_states_only(model):
        return ""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(_architecture_of(part)._can_set_attn_implementation() for part in parts):
        return _NO_INTERFACE
    _set_attention(model, DOCUMENT_ATTENTION)
    objections = tried.objections = list[str]()
    try:
        trial.logits(TRIAL_LENGTHS)
        with model_makes_masks(tried):
            trial.logits(TRIAL_LENGTHS)
    except (TypeError, AttributeError):  # such layers get None for the mask
        objections.append("layers that read the mask")
    finally:
        tried.objections = None
    return f"has {objections[0]}" if objections else ""


def _architecture_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return a model's own class, not FSDP2's subclass: transformers reads its source."""
    classes: Any = type(model).__mro__
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set how a model attends."""
    # transformers warns of sections of the configuration whose towers are not built: left out.
    config, parts = model.config, [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    built = {id(part.config) for part in parts}
    sections = [name for name in config.sub_configs if id(getattr(config, name, None)) in built]
    whole = [""] * model._can_set_attn_implementation()  # not if a tower has attention of its own
    model.set_attn_implementation(dict.fromkeys([*whole, *sections], implementation))


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
    it is more than rounding.
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
