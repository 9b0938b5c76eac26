"""Try a small copy of a model before its weights are read, for which config.json is enough.

The copy computes whole, and cut as the run cuts the model: into documents, stages and halves of
matrices. Where no copy can be built, the trial on the weights decides alone.
"""

import contextlib
import copy
import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any, cast

import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.documents.attention_choice import (
    ROUNDING,
    LogitsTrial,
    decide_attention,
    leak_under_mask,
    logits_distance,
    mixing_refusal,
    not_shared,
)
from shardtune.model.facts.facts import Cut
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.facts.problems import tensor_problems
from shardtune.model.source.small_copy import one_thread, small_copy
from shardtune.model.stages import keep_stage
from shardtune.model.tensor_parallel import CUTS, Sum, summed
from shardtune.run_files import cache_folder

_COPY_ROW = 128  # the longest row of a small copy
_ASKED = ("stages", "context", "tensor", "attention", "packing")
_IDS = torch.arange(1, 9).view(1, -1)


def require_exact_copy(layout: Layout, model_config: PreTrainedConfig) -> None:
    """Compare a small copy of the model with its parts, once in all starts if they are equal.

    Raises:
        UserError: a token sees later ones; a packed document sees the one before it; ranks would
            share rows to which the model attends under a mask; or stages or halves of matrices
            give other logits than the whole.
    """
    # The trial sees these fields alone, so that nothing else decides its result.
    asked = {name: getattr(layout, name) for name in _ASKED}
    # The mask of a longer row takes seconds, so only the loaded weights are tried with the longest.
    asked["max_length"] = min(layout.max_length, _COPY_ROW)
    no_cache = contextlib.suppress(OSError, RuntimeError)  # no home, or none to look into or write
    passed: Path | None = None
    with no_cache:
        passed = cache_folder("trials") / _key(asked, model_config)
        if passed.exists():
            return
    problems, is_compared = _tried(Layout(1, **asked), model_config)
    if problems:
        raise UserError(*problems)
    # A machine without memory may be why nothing was compared: the next start tries again.
    with no_cache:
        if passed and is_compared:
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def _key(asked: dict[str, Any], model_config: PreTrainedConfig) -> str:
    """Return a digest of everything that decides a trial's result."""
    code = sorted(Path(__file__).parents[2].rglob("*.py"))
    parts = [
        [asked, model_config.to_json_string(use_diff=False)],
        [file.read_text("utf-8", errors="replace") for file in code],
        [importlib.metadata.version(name) for name in ("torch", "transformers")],
        torch.backends.cpu.get_cpu_capability(),  # rounds in its own way
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


@one_thread()
def _tried(layout: Layout, model_config: PreTrainedConfig) -> tuple[list[str], bool]:
    """Return how a small copy and its parts are not what is trained, and if all was compared."""
    whole = small_copy(model_config, layout.attention)
    sees_ahead = _sees_ahead(whole) if whole else None
    if whole and sees_ahead:
        refusal = (
            f"{whole.config.model_type} is not a causal language model: its tokens see those "
            "behind them - name a model that predicts the next token"
        )
        return [refusal], True
    problems: list[str] = []
    is_compared = sees_ahead is not None
    if layout.stages > 1:
        problems += _in_stages(copy.deepcopy(whole), layout, model_config.model_type)
    if whole and layout.tensor > 1:
        problems += _in_halves(copy.deepcopy(whole), layout)
    if whole and (layout.packing or layout.row_ranks > 1):
        found = _documents(whole, layout)
        problems += found or []
        is_compared = is_compared and found is not None
    return problems, is_compared


@torch.no_grad()
def _sees_ahead(whole: PreTrainedModel) -> bool | None:
    """Return whether the last token changes the logits of those before it; None: not known."""
    ids = torch.arange(12).view(1, -1) + torch.tensor([[0], [1]]) * (torch.arange(12) == 11)
    try:
        one, other = (whole.eval()(input_ids=each.view(1, -1)).logits[0, :-1] for each in ids)
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        return None
    return logits_distance(one, other) > ROUNDING * one.std().item()


def _documents(whole: PreTrainedModel, layout: Layout) -> list[str] | None:
    """Return why documents cannot be kept apart, or ranks not share a row; None: not known."""
    trial = LogitsTrial(whole, layout, torch.device("cpu"))
    try:
        # The data is not read yet, and may hold a document of a whole row.
        attention = decide_attention(trial, layout.max_length)
        leak = leak_under_mask(attention, trial)
    except Exception:  # as in `_sees_ahead`
        return None
    if problem := not_shared(attention, layout):
        return [problem]
    whose = "the logits of a small copy with random weights"
    return [mixing_refusal(whole, layout, leak, whose)] if leak else []


@torch.no_grad()
def _in_stages(whole: PreTrainedModel | None, layout: Layout, kind: str) -> Iterator[str]:
    """Yield why two stages give other logits than the whole: no other trial would show it."""
    key = f"parallel.stages={layout.stages}"
    try:
        expected = whole.eval()(input_ids=_IDS).logits if whole else None
    except Exception:  # as in `_sees_ahead`
        expected = None
    if whole is None or expected is None:
        yield f"{key}: no small copy of {kind} can be built to try in stages - use 1"
        return
    facts = facts_of_model(whole)
    cut = facts.n_layers // 2
    try:
        first, hidden = copy.deepcopy(whole), torch.float32
        keep_stage(first, facts.layer_list, range(cut), is_first=True, is_last=False, dtype=hidden)
        first(input_ids=_IDS)
        last: Any = whole
        behind = range(cut, facts.n_layers)
        keep_stage(last, facts.layer_list, behind, is_first=False, is_last=True, dtype=hidden)
        last.get_input_embeddings().hidden = cast(Any, first.get_output_embeddings()).take()
        same = torch.allclose(last(input_ids=_IDS).logits, expected, rtol=1e-4, atol=1e-5)
    except Exception:
        same = False  # a layer takes or returns more than hidden states
    if not same:
        yield (
            f"{key}: {kind} hands more from layer to layer than hidden states, or changes these "
            "outside of its layers - use parallel.stages=1 and parallel.replicate or expert"
        )


@torch.no_grad()
def _in_halves(whole: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yield why two halves of all cut matrices give other logits than the whole.

    Such as an activation that looks at all hidden units.
    """
    facts = facts_of_model(whole)
    if any(tensor_problems(facts, 2)):  # the model is refused by its shapes
        return
    barrier, parts = Barrier(2, timeout=60), dict[int, torch.Tensor]()

    def sum_of_halves(part: torch.Tensor) -> torch.Tensor:
        parts[get_ident()] = part
        barrier.wait()
        total = torch.stack([*parts.values()]).sum(0)
        barrier.wait()  # before the next part replaces this one
        return total

    def logits(half: Any) -> torch.Tensor:
        try:
            return cast(torch.Tensor, half(input_ids=_IDS).logits)
        except Exception:
            barrier.abort()
            raise

    # Threads, since later layers may read the keys of earlier ones, and each half has its own.
    with ThreadPoolExecutor(2) as pool:
        try:
            halves = [_half(whole.eval(), facts.cut, n, sum_of_halves) for n in range(2)]
            close = partial(torch.allclose, logits(whole), rtol=1e-4, atol=1e-5)
            is_same = all(map(close, pool.map(logits, halves)))
        except Exception:  # such as a view for all heads
            is_same = False
    if not is_same:
        key, context = (f"parallel.{name}={layout.tensor}" for name in ("tensor", "context"))
        yield (
            f"{key}: parts of the matrices of {whole.config.model_type} do not add up to the whole "
            f"- use {context}, or parallel.tensor=1"
        )


def _half(model: PreTrainedModel, cut: Iterable[Cut], number: int, total: Sum) -> PreTrainedModel:
    """Return a copy with one half of each matrix that is cut. `total` adds up both halves'."""
    half = copy.deepcopy(model)
    for name, _, side in cut:
        module: Any = half.get_submodule(name)
        for key, dimension in CUTS[side].items():
            if (whole := module._parameters.get(key)) is not None:
                module._parameters[key] = nn.Parameter(whole.chunk(2, dimension)[number])
        if side == 1:
            module.forward = partial(summed, module, module.forward, total)
    return half
