"""Choose which outputs of a layer's forward stay for the backward; others are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

import shardtune.model.older_transformers  # noqa: F401, gives older ones what is used here
from shardtune.distributed.layout import Layout
from shardtune.model.documents import cpu_attention

# Selective checkpointing keeps the outputs of these, which are most of a layer's cost, and
# recomputes the rest.
_KEPT_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    cpu_attention.OPERATOR,
]

# transformers adds the biases of stacked experts (GPT-OSS) into these, and PyTorch refuses to keep
# an output that is changed afterwards. Gemma 3n adds to products in its AltUp, behind a view, where
# PyTorch does not notice it and makes wrong gradients.
_CHANGED_IN_PLACE = [torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default]

# FSDP2's hooks of spread experts run within the layer. They call these operators, labels for the
# profiler, more often in recomputation than in the forward. Selective checkpointing would take
# them for part of the layer, and end the run.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def prepare_for_training(model: PreTrainedModel, layout: Layout) -> PreTrainedModel:
    """Let layers be computed again as configured, and return the model in training mode."""
    if layout.recomputes:
        contexts: Callable[[], Any] = noop_context_fn
        if layout.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, kept_operators(model))
        if layout.expert > 1:
            # Ranks exchange tokens by these choices, which must not change: see `keep_choices`.
            contexts = partial(keep_choices, contexts)
        # transformers before 5.23 has the older name alone.
        older: Any = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False, "context_fn": contexts})
    # A cache would keep all keys, and transformers' masks for a cache do not keep documents apart.
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model.train()


def kept_operators(model: PreTrainedModel) -> list[Any]:
    """Return the operators whose outputs selective checkpointing keeps in this model."""
    is_changed = any(
        getattr(module, "has_bias", False) or hasattr(module, "altup") for module in model.modules()
    )
    return [op for op in _KEPT_OPERATORS if not (is_changed and op in _CHANGED_IN_PLACE)]


_MAX, _TOP_K = torch.ops.aten.max.dim, torch.ops.aten.topk.default  # PhiMoE's routers, all others
_MOST_EXPERTS = 64  # a larger `topk` chooses attention's keys, not experts
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_choices(contexts: Callable[[], _Contexts] = noop_context_fn) -> _Contexts:
    """Return `contexts` of a checkpointed forward and its repetition that keep choices, too.

    The second forward of a layer may round otherwise than the first, and a tie then goes to another
    expert: ranks that exchange tokens would wait for tokens that never come, or receive more than
    they expect. So in the second forward the operators of routers return what they returned in the
    first. A compiled layer still calls `topk` as an operator, but not `max` (PhiMoE's): there a tie
    may end the run.
    """
    # Both share one list: the repetition takes the choices in the order in which the forward made
    # them.
    kept: list[tuple[torch.Tensor, ...]] = []
    first, again = contexts()
    return _both(_Choices(kept), first), _both(_Choices(kept, is_again=True), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Choices(TorchDispatchMode):
    supports_higher_order_operators = True  # else torch refuses them within this mode

    def __init__(self, kept: list[tuple[torch.Tensor, ...]], is_again: bool = False) -> None:
        super().__init__()
        self._kept, self._again = kept, iter(kept) if is_again else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled layers within this mode: they call `topk` as an operator, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _MAX and not (func is _TOP_K and args[1] <= _MOST_EXPERTS):
            return func(*args, **(kwargs or {}))
        if self._again:
            return next(self._again)
        chosen = func(*args, **(kwargs or {}))
        # Copies, since some routers normalise the weights of their choices in place.
        self._kept.append(tuple(x.clone() for x in chosen))
        return chosen
