"""What a model is, as plain data that a process can send to another. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardtune.model.traits import Heads

if TYPE_CHECKING:
    from shardtune.data.schedule import Cost
    from shardtune.model.flops import ModelFlops


class Parameter(NamedTuple):
    """A parameter of the whole model."""

    name: str  # within its layer, or within the model
    shape: tuple[int, ...]
    is_trained: bool
    kind: str  # "cut" by parallel.tensor, "experts" that parallel.expert may spread, else "dense"

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Layer(NamedTuple):
    """A decoder layer. Layers that are equal are built alike."""

    layer_type: str | None
    parameters: tuple[Parameter, ...]


class Cut(NamedTuple):
    """A linear module whose matrix `parallel.tensor` cuts."""

    module: str  # its name
    shape: tuple[int, int]  # of its weight
    dimension: int  # 0: by rows, 1: by columns


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What config.json says of a model: it decides which meshes and settings it may have."""

    kind: str  # its `model_type`
    path: str  # model.path
    positions: int  # the most tokens of a row; 0: any number
    n_layers: int  # 0: not known
    numbers_of_heads: tuple[int, ...]  # of query heads, each once
    numbers_of_experts: tuple[int, ...]  # in a layer, each once
    refusals: tuple[str, ...] = ()  # of quantised weights, and of lora.targets


@dataclass(frozen=True, kw_only=True)
class ModelFacts(Facts):
    """What the whole model on meta says beyond its config.json."""

    layer_names: tuple[str, ...]  # full ones
    layer_list: str  # the name of the list that has all layers, with a head behind; empty: none has
    recomputes: bool  # layers can be computed again
    keeps_state: bool  # layers hand a state along the row
    chosen_keys: int  # the fewest keys that an indexer chooses; 0: there is none
    short_rope: int | None  # the longest forward with longrope's short factors, in tokens
    scaled_from: float | None  # the place in the row from which queries are scaled
    takes_attention: bool  # transformers' attention interface
    has_placements: bool  # FSDP2 shards parts of matrices, as from PyTorch 2.13 on
    uncut: str  # why its plan does not cut all attention; empty: it does
    cut: tuple[Cut, ...]
    heads: tuple[Heads, ...]  # of each layer
    has_experts: bool
    has_expert_plan: bool
    stacks: tuple[tuple[int, int], ...]  # experts and last dimension of stacks, each pair once
    top_k: int  # experts that a token meets at most; 1 without experts
    hidden_size: int
    layers: tuple[Layer, ...]
    embedding: tuple[Parameter, ...]
    behind: tuple[Parameter, ...]  # neither in a layer nor in the embedding
    is_tied: bool  # embedding and head are one weight
    costs: tuple[float, tuple[float, ...], float]  # of embedding, layers and head: `stage_costs`
    flops: ModelFlops | None  # None: not known
    uncounted: str  # why they are not known
    row_cost: Cost  # of a forward

    def numel(self, trained: bool = False) -> int:
        """Return the number of parameters, or of trained ones alone."""
        parts = (self.embedding, self.behind, *(layer.parameters for layer in self.layers))
        return sum(p.numel for part in parts for p in part if p.is_trained or not trained)
