"""Give transformers 5.17 to 5.22, when imported, the checkpointing of layers that 5.23 has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

_Layer: Any = GradientCheckpointingLayer


def _checkpoint_forward(layer: Any) -> None:
    """Let a class of layers checkpoint its forward, so that hooks of modules stay outside."""
    # Before 5.23 the whole call is checkpointed: FSDP2's hooks would run again in the backward, and
    # out of order.
    forward = layer.forward

    @wraps(forward)
    def forward_with_checkpointing(self: Any, *arguments: Any, **options: Any) -> Any:
        # FSDP2 makes a subclass of a layer's class. Both have this forward, and one checkpoints.
        is_outermost = type(self).forward is forward_with_checkpointing
        if self.gradient_checkpointing and self.training and is_outermost:
            return self._gradient_checkpointing_func(partial(forward, self, **options), *arguments)
        return forward(self, *arguments, **options)

    layer.forward = forward_with_checkpointing


def _subclasses(layer: Any) -> Iterator[Any]:
    for each in layer.__subclasses__():
        yield each
        yield from _subclasses(each)


if "__call__" in vars(_Layer):
    del _Layer.__call__
    for _each in list(_subclasses(_Layer)):
        _checkpoint_forward(_each)
    _Layer.__init_subclass__ = classmethod(_checkpoint_forward)
