"""Stages: consecutive parts of a model's layers, each on ranks of its own (`parallel.stages`).

A stage runs the architecture's own forward. Layers of other stages keep their names there and do
nothing, so that names of weights, masks and positions are those of the whole model. The hidden
states that the stage before has sent take the place of the embedding's output.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


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


def divided(costs: tuple[float, Sequence[float], float], stages: int) -> list[range]:
    """Divide layers into stages by the costs of the embedding, of the layers and of the head."""
    first, layers, last = costs
    if not layers:  # an architecture that does not name its layers has one stage
        return [range(0)]
    # The first stage has the embedding, too, and the last one the head.
    of_layers = [*layers]
    of_layers[0] += first
    of_layers[-1] += last
    return divide_layers(of_layers, stages)


def keep_stage(
    model: PreTrainedModel,
    layer_list: str,
    kept: range,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
) -> None:
    """Replace all layers of a model but `kept`.

    `layer_list`: the name of the list of its layers. `dtype`: that of hidden states.
    """
    # A weight that embedding and head share stays in the first stage and in the last one, which sum
    # its gradients (`Stage.finish`).
    is_tied = bool(model.all_tied_weights_keys)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    layers: Any = model.get_submodule(layer_list)
    caller: Any = model.get_submodule(layer_list.rpartition(".")[0])
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


def layers_in(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the layers with these names that a model or its stage has, in order."""
    modules = dict(model.named_modules())
    named = [modules[name] for name in names if name in modules]  # a plan may build the first alone
    return [layer for layer in named if not isinstance(layer, PassThrough)]
