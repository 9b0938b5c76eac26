"""Stages: consecutive parts of a model's layers, each on ranks of its own (`parallel.stages`).

A stage runs the architecture's own forward. Layers of other stages keep their names there and do
nothing, so that names of weights, masks and positions are those of the whole model. The hidden
states that the stage before has sent take the place of the embedding's output.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.flops import stage_costs
from shardtune.model.source.config_json import too_few_layers
from shardtune.model.source.small_copy import one_thread, small_copy
from shardtune.model.traits import decoder_layers


class PassThrough(nn.Module):
    """Stands for a module of another stage: returns the hidden states that it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The module's own settings stay: Nemotron-H chooses the mask of a layer by them.
        settings = {name: v for name, v in vars(module).items() if not name.startswith("_")}
        vars(self).update(settings | {"training": self.training})

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class StageInput(nn.Module):
    """Stands for the embedding in every stage but the first: returns the received hidden states."""

    # [rows, tokens, width]; None in a trial, whose input then depends on the token.
    hidden: torch.Tensor | None
    width: int
    dtype: torch.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            frequencies = torch.linspace(-1, 1, self.width, dtype=self.dtype, device=ids.device)
            return torch.sin((ids + 1).unsqueeze(-1) * frequencies)
        return self.hidden


class StageOutput(nn.Module):
    """Stands for the head in every stage but the last: keeps the hidden states to hand on."""

    hidden: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        # The model may scale or cap its logits: in training it gets an empty tensor, for speed.
        return hidden.new_empty(0) if self.training else hidden

    def take(self) -> torch.Tensor:
        """Return the hidden states of the last forward, and forget them."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden


class TiedStageInput(StageInput, nn.Embedding):
    """Holds the weight of the embedding in the last stage, whose head has it too."""


class TiedStageOutput(StageOutput, nn.Linear):
    """Holds the weight of the head in the first stage, whose embedding has it too."""


def divide_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Divide layers into consecutive nonempty parts with the lowest possible highest cost."""
    # Dynamic programming over exact sums. Of several best divisions `min` takes the one whose
    # earlier parts are shorter, on every rank the same one, since ranks do not exchange it.
    number, sums = len(costs), [0.0, *accumulate(costs)]
    # best[end]: the highest cost of the best division of the first `end` layers, and its cuts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for part in range(1, stages + 1):
        best = {
            end: min(
                (max(highest, sums[end] - sums[begin]), (*cuts, end))
                for begin, (highest, cuts) in best.items()
                if begin < end
            )
            for end in range(part, number - stages + part + 1)
        }
    cuts = best[number][1]
    return [range(begin, end) for begin, end in pairwise(cuts)]


def layers_of_stages(model: PreTrainedModel, stages: int) -> list[range]:
    """Return the numbers of the layers of each stage, divided by FLOPs and memory alike."""
    first, costs, last = stage_costs(model)
    if not costs:  # an architecture that does not name its layers has one stage
        return [range(0)]
    # The first stage has the embedding, too, and the last one the head.
    costs[0] += first
    costs[-1] += last
    return divide_layers(costs, stages)


def keep_stage(
    model: PreTrainedModel, kept: range, is_first: bool, is_last: bool, dtype: torch.dtype
) -> None:
    """Replace all layers of a model but `kept`. `dtype`: that of hidden states."""
    # A weight that embedding and head share stays in the first stage and in the last one, which sum
    # its gradients (`Stage.finish`).
    is_tied = bool(model.all_tied_weights_keys)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    layers, caller = cast(Any, _list_of_layers(model))  # not None: `stage_problems` has looked
    for number in set(range(len(layers))) - set(kept):
        layers[number] = PassThrough(layers[number])
    if not is_last:
        for name, module in list(caller.named_children()):  # the norm behind the layers
            is_norm = "Norm" in type(module).__name__  # OLMo's has no parameters
            if module not in (layers, embedding) and (
                is_norm or any(True for _ in module.parameters())
            ):
                setattr(caller, name, PassThrough(module))
        if is_tied and is_first:
            head.__class__ = TiedStageOutput
        else:
            output = StageOutput()
            vars(output)["weight"] = torch.empty(0, dtype=dtype)  # Mamba 2 looks at its dtype
            model.set_output_embeddings(output)
    if not is_first:
        if hasattr(caller, "embedding_multiplier"):  # Granite would scale received hidden states
            caller.embedding_multiplier = 1.0
        stage_input: Any = StageInput()
        if is_tied and is_last:
            stage_input, embedding.__class__ = embedding, TiedStageInput
        stage_input.hidden, stage_input.width = None, embedding.embedding_dim
        stage_input.dtype = dtype
        model.set_input_embeddings(stage_input)
    if not is_first and not is_last:
        model.config.tie_word_embeddings, model.all_tied_weights_keys = False, {}


def stage_problems(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yield why a model cannot be trained in `parallel.stages`; its shapes are enough."""
    stages, kind = layout.stages, model.config.model_type
    if stages == 1:
        return
    key, number = f"parallel.stages={stages}", len(decoder_layers(model))
    if problem := too_few_layers(stages, number, layout.ranks, kind):
        yield problem
    elif _list_of_layers(model) is None or model.get_output_embeddings() is None:
        yield f"{key}: {kind} has no single list of its layers, or no head - use parallel.stages=1"
    if layout.micro_batches < stages:
        yield (
            f"{key}: train.gradient_accumulation_steps={layout.micro_batches} gives a step fewer "
            f"micro-batches than stages, which then never all work - use {stages} or more"
        )


@one_thread()
@torch.no_grad()
def require_composable(layout: Layout, model_config: PreTrainedConfig) -> None:
    """Compare two stages of a small copy with the whole of it; its config.json is enough.

    Raises:
        UserError: both give other logits, or no small copy can be built.
    """
    if layout.stages == 1:
        return
    kind, key = model_config.model_type, f"parallel.stages={layout.stages}"
    whole = small_copy(model_config, layout.attention)
    ids = torch.arange(1, 9).view(1, -1)
    try:
        expected = whole.eval()(input_ids=ids).logits if whole else None
    except Exception:  # a width that `small_copy` does not know shows in the forward alone
        expected = None
    if whole is None or expected is None:
        raise UserError(f"{key}: no small copy of {kind} can be built to try in stages - use 1")
    cut = len(decoder_layers(whole)) // 2
    try:
        first, hidden = copy.deepcopy(whole), torch.float32
        keep_stage(first, range(cut), is_first=True, is_last=False, dtype=hidden)
        first(input_ids=ids)
        last: Any = whole
        keep_stage(last, range(cut, 2 * cut + 1), is_first=False, is_last=True, dtype=hidden)
        last.get_input_embeddings().hidden = cast(Any, first.get_output_embeddings()).take()
        same = torch.allclose(last(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    except Exception:
        same = False  # a layer takes or returns more than hidden states
    if not same:
        raise UserError(
            f"{key}: {kind} hands more from layer to layer than hidden states, or changes these "
            "outside of its layers - use parallel.stages=1 and parallel.replicate or expert"
        )


def _list_of_layers(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module] | None:
    """Return the list of all decoder layers and the module that calls them, or None."""
    layers = decoder_layers(model)
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and list(child) == layers:
                return child, module
    return None
