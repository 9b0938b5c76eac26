"""When FSDP2 gathers parameters: a layer ahead of their use, in the forward and the backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def gather_ahead(model: Any, layers: Sequence[nn.Module]) -> None:
    """Let each layer begin to gather the next one with its spread experts, both ways.

    FSDP2 itself gathers spread experts behind the host's wait for the sizes of their exchange, when
    the network has been idle. In the backward it follows the forwards since the last backward: with
    those of several micro-batches in flight it would gather the last layer of another one for
    nothing. A layer that is computed again gathers nothing.
    """
    groups = [[module for module in layer.modules() if _is_group(module)] for layer in layers]
    for group in (group for of_layer in groups for group in of_layer):
        group.set_modules_to_backward_prefetch([group])  # nothing: it has been gathered
    for before, behind in pairwise([[model], *groups]):
        before[0].set_modules_to_forward_prefetch(behind)
    for before, behind in pairwise([*groups, [model]]):
        behind[0].set_modules_to_backward_prefetch(before)


def _is_group(module: nn.Module) -> Any:
    return isinstance(module, FSDPModule)
