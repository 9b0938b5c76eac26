"""What a model is, as plain data that a process can send to another. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Stack(NamedTuple):
    """The shape of stacked experts."""

    experts: int
    width: int  # of the dimension that FSDP2 shards where it cannot share out whole experts


class Cut(NamedTuple):
    """A matrix that `parallel.tensor` cuts."""

    name: str
    shape: tuple[int, int]
    width: int  # the elements of the dimension that is cut


@dataclass(frozen=True)
class Built:
    """What the model on meta says beyond its config.json."""

    has_layer_list: bool  # all layers are in one list, and a head follows
    recomputes: bool  # layers can be computed again
    keeps_state: bool  # layers hand a state along the row
    chosen_keys: int  # the fewest keys that an indexer chooses; 0: there is none
    short_rope: int | None  # the longest forward with longrope's short factors, in tokens
    scaled_from: float | None  # the place in the row from which queries are scaled
    takes_attention: bool  # transformers' attention interface
    has_placements: bool  # FSDP2 shards parts of matrices, as from PyTorch 2.13 on
    uncut: str  # why its plan does not cut all attention; empty: it does
    cut: tuple[Cut, ...]
    heads: tuple[tuple[int, int], ...]  # query heads and key heads of each layer
    has_experts: bool
    has_expert_plan: bool
    stacks: tuple[Stack, ...]  # each shape once


@dataclass(frozen=True)
class Facts:
    """What decides which meshes and settings a model may have."""

    kind: str  # its `model_type`
    path: str  # model.path
    positions: int  # the most tokens of a row; 0: any number
    layers: int  # 0: not known
    heads: tuple[int, ...]  # numbers of query heads, each once
    experts: tuple[int, ...]  # numbers of experts in a layer, each once
    unread: str = ""  # why its quantised weights are not read
    built: Built | None = None  # None: config.json alone was read
