"""Choose which outputs of a layer stay for the backward, and where; others are computed again.

Full activation checkpointing keeps the input of each layer and nothing else. With `offload` it goes
to host memory while its layer computes, and comes back while the layer behind it is computed again,
so that a GPU holds two of them. Copies change no bit.

Experts and MLPs may run on a part of a row's tokens at a time, so that long rows fit. The
activations of a tile are dropped after it and computed again in its backward. So these modules run
twice, and hold the activations of one tile at a time. All ranks run the same number of tiles, even
with few tokens, since spread experts exchange tokens in each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardtune.distributed.host_memory import pinned_zeros, unpin
from shardtune.distributed.layout import Layout
from shardtune.model.documents import cpu_attention
from shardtune.model.parts import is_stack, stacked_experts

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


class Copies(Protocol):
    """Copies tensors to host memory and back while the device computes."""

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Begin to copy a tensor, and return its copy."""

    def to_device(self, copy: Any) -> torch.Tensor:
        """Begin to copy a tensor back."""

    def wait(self) -> None:
        """Let later kernels of the device wait for all copies that have begun."""

    def drop(self, copy: Any) -> None:
        """Use the memory of a copy again, which the device may still read."""


class _LayerInput:
    """Holds the copy of one input in host memory and, for a while, the tensor on the device."""

    def __init__(self, copy: Any, tensor: torch.Tensor, previous: _LayerInput | None) -> None:
        self.copy = copy
        self.tensor: torch.Tensor | None = tensor
        # A weak reference: autograd alone knows how long an input is needed.
        self._previous = weakref.ref(previous) if previous else None

    @property
    def previous(self) -> _LayerInput | None:
        """Return the input of the layer before, unless that layer has been computed again."""
        return self._previous() if self._previous else None


class LayerInputs:
    """Holds the inputs of a model's layers in host memory until each layer is computed again."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: weakref.ref[_LayerInput] | None = None

    def around(self, checkpointed: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function of transformers' that keeps inputs in host memory."""

        def forward(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            # Tensors without a gradient, such as masks, stay: all layers share them.
            inputs = {_storage(x) for x in arguments if torch.is_tensor(x) and x.requires_grad}

            def keep(tensor: torch.Tensor) -> Any:
                return self._keep(tensor) if _storage(tensor) in inputs else tensor

            with saved_tensors_hooks(keep, self._restore):
                return checkpointed(function, *arguments, **options)

        return forward

    def _keep(self, tensor: torch.Tensor) -> _LayerInput:
        last = self._last() if self._last else None
        if last:
            # The copy has had a whole layer's time. The device must not reuse the memory of the
            # tensor before the copy has ended.
            self._copies.wait()
            last.tensor = None
        kept = _LayerInput(self._copies.to_host(tensor), tensor, last)
        weakref.finalize(kept, self._copies.drop, kept.copy)
        self._last = weakref.ref(kept)
        return kept

    def _restore(self, kept: _LayerInput | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        # The input of the last layer has not left the device.
        tensor = self._copies.to_device(kept.copy) if kept.tensor is None else kept.tensor
        self._copies.wait()
        kept.tensor = None
        # The input of the layer before comes back while this layer computes.
        if (previous := kept.previous) and previous.tensor is None:
            previous.tensor = self._copies.to_device(previous.copy)
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PinnedCopies:
    """Copies in pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: list[torch.Tensor] = []  # uint8

    def to_host(self, tensor: torch.Tensor) -> _PinnedCopy:
        buffer = self._take(tensor.nbytes)
        copy = _PinnedCopy(buffer, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.values.copy_(tensor, non_blocking=True)
        return copy

    def to_device(self, copy: _PinnedCopy) -> torch.Tensor:
        # The tensor is allocated on the computing stream, whose earlier kernels may still use this
        # memory. So the copy waits for them.
        tensor = torch.empty_like(copy.values, device=self._stream.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(copy.values, non_blocking=True)
        return tensor

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def drop(self, copy: _PinnedCopy) -> None:
        self._free.append(copy.buffer)  # the next copy into it comes later on the stream

    def _take(self, n_bytes: int) -> torch.Tensor:
        """Return pinned memory of `n_bytes` or more. Soon all buffers fit the longest row."""
        if not self._free:
            return _pinned(n_bytes)
        self._free.sort(key=len)
        buffer = self._free.pop()
        if len(buffer) >= n_bytes:
            return buffer
        self._stream.synchronize()
        unpin(buffer)
        return _pinned(n_bytes)


class _PinnedCopy(NamedTuple):
    buffer: torch.Tensor
    values: torch.Tensor


def _pinned(n_bytes: int) -> torch.Tensor:
    return pinned_zeros(n_bytes, "the layers' inputs", "use model.activation_checkpointing=full")


def keep_inputs_on_host(model: PreTrainedModel, copies: Copies) -> None:
    """Let each layer whose activations are computed again have its input in host memory."""
    inputs = LayerInputs(copies)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            layer: Any = module
            layer._gradient_checkpointing_func = inputs.around(layer._gradient_checkpointing_func)


def tile_layers(model: PreTrainedModel, layers: list[nn.Module], tiles: int) -> None:
    """Let the experts and dense MLPs of all layers run on their tokens in `tiles` parts."""
    module: Any
    for _, module, _ in stacked_experts(model):
        module.tiles = tiles
        module.forward = _tiled(module.forward, tiles, dim=0)
    for layer in layers:
        for module in filter(_is_mlp, layer.modules()):
            module.forward = _tiled(module.forward, tiles, dim=-2)


def _is_mlp(module: nn.Module) -> bool:
    """Whether this is transformers' dense MLP, which maps each token by itself."""
    is_named_so = any(kind.__name__.endswith("MLP") for kind in type(module).__mro__)
    return is_named_so and not any(map(is_stack, module.parameters()))  # GPT-OSS' MLP has stacks


def _tiled(forward: Callable[..., torch.Tensor], tiles: int, dim: int) -> Callable[..., Any]:
    """Return a forward on `tiles` parts of its tensors, cut at dimension `dim`."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.tensor_split(tiles, dim) for tensor in tensors), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([forward(*part) for part in parts], dim)
        outputs = [checkpoint(forward, *part, use_reentrant=False) for part in parts]
        return torch.cat(outputs, dim)

    return torch.compiler.disable(run)


# transformers 5.17 to 5.22 get the checkpointing of layers that 5.23 has.
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
