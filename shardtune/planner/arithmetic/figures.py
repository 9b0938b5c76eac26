"""The figures of a plan: memory by cause, bytes by collective, and kernels."""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """Causes of a rank's memory."""

    PARAMETERS = "parameters"  # the slices of this rank
    GRADIENTS = "gradients"  # gradients of these slices
    OPTIMIZER = "optimizer"  # moments of these slices
    GATHERED = "gathered parameters"
    REDUCED = "unsharded gradients"
    ACTIVATIONS = "activations"  # made in the forward
    BACKWARD = "backward"  # made in the backward, gradients of activations above all
    UPDATE = "update"  # pieces of weights that the optimizer works on
    BOUNDED = "all else, at most"  # upper bound, if no step is simulated


class Collective(NamedTuple):
    """A kind of collective over a group of ranks. A message's group is its sender and receiver."""

    kind: str  # "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "send"
    ranks: tuple[int, ...]


class Peak(NamedTuple):
    """The most bytes at once in some part of a step, by cause."""

    n_bytes: int
    by_cause: Counter[Cause]


class Kind(StrEnum):
    """Kinds of kernels, which run at different rates."""

    PRODUCT = "matrix products"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention's backward"
    COPY = "FSDP's copies"  # into and out of the buffers of collectives
    OTHER = "all else"
    COLLECTIVE = "collectives"


class Kernel(NamedTuple):
    """A kernel. A collective's bytes are the larger of those that it sends and receives."""

    kind: Kind
    operator: str
    n_bytes: int
    flops: int = 0


# Tokens of the busiest rank of spread experts / the mean: assumed, since routing depends on data.
EXPERT_IMBALANCE = 1.5
