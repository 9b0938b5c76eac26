"""FSDP2's groups of parameters, such as a layer's. Private names of FSDP2 stand here alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import shardtune.distributed.older_torch  # noqa: F401, gives older ones what is used here
from shardtune.distributed.tensors import is_spread


class Group:
    """One of FSDP2's groups, which calls this in place of its method `post_backward`.

    Attributes:
        add_replicas: adds the gradients of other replicas, on the stream of reductions, in the
            micro-batches that `ReshardPolicy` chooses.
        send_to_host: sends the sums to host memory.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.add_replicas: Callable[[], None] | None = None
        self.send_to_host: Callable[[], None] | None = None
        group.post_backward = self

    def __call__(self, *arguments: Any) -> None:
        """Reduce within the replica, then add the other replicas' gradients, then send the sums."""
        # The order decides the sums: replicas exchange what FSDP2 has reduced, and host memory
        # gets what is complete. All ranks must call these collectives in one order.
        group = self._group
        with self._waiting():
            type(group).post_backward(group, *arguments)
            if self.add_replicas and group.reduce_grads and group.all_reduce_grads:
                with self.device.stream(self.reductions):
                    self.add_replicas()
                    # FSDP2 waits for this event before it uses or frees gradients, so that it must
                    # stand behind the exchange between replicas, too.
                    group._post_reduce_event = self.reductions.record_event()
                group.comm_ctx._last_post_reduce_events[self.reductions] = group._post_reduce_event
            if self.send_to_host:
                self.send_to_host()

    def time(self, waiting: Callable[[], ContextDecorator]) -> None:
        """Count the time of each gather and reduction as `waiting`."""
        self._waiting = cast(Any, waiting)
        for name in ("unshard", "wait_for_unshard", "finalize_backward"):
            setattr(self._group, name, waiting()(getattr(self._group, name)))

    @property
    def slices(self) -> list[nn.Parameter]:
        """This rank's slices of the parameters."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def device(self) -> Any:
        """The module of torch with the streams of its device."""
        return self._group.device_handle

    @property
    def reductions(self) -> Any:
        """The stream of all groups' reductions."""
        return self._group.comm_ctx.reduce_scatter_stream

    def reduce_in(self, groups: Mapping[str, dist.ProcessGroup], dtype: torch.dtype) -> None:
        """Reduce in the process group that FSDP2 gathers in, and sum micro-batches in `dtype`."""
        mesh_info = self._group.mesh_info
        (dimension,) = mesh_info.mesh.mesh_dim_names
        # `set_separate_reduce_scatter_group` makes groups here. A stage without experts would make
        # one fewer, and NCCL, which splits the group of all ranks, would wait for it.
        mesh_info.reduce_scatter_process_group = groups.get(dimension)
        self._group._init_mp_dtypes = partial(self._init_dtypes, dtype)  # called at first forward

    def average_over(self, ranks: int) -> None:
        """Divide gradients by `ranks`, which may be more than those of the group."""
        shards = self._group.mesh_info.shard_mesh_size
        if shards == ranks:
            return
        self._group.gradient_divide_factor = ranks
        # Else FSDP2 scales within the collective, which gloo cannot do. A group of one rank has no
        # collective: it divides by itself, and with this setting it would divide twice.
        self._group.force_sum_reduction_for_comms = shards > 1

    def _init_dtypes(self, dtype: torch.dtype) -> None:
        group = self._group
        type(group)._init_mp_dtypes(group)
        for weight in filter(lambda each: each.requires_grad, self.slices):  # all have one dtype
            # FSDP2 would cast a reduced gradient to the weight's dtype: in bfloat16 a small
            # gradient that is added to a large sum is lost.
            group._orig_dtype = weight.grad_dtype = dtype


def groups_of(model: nn.Module) -> Iterator[Group]:
    for module in filter(is_sharded, model.modules()):
        for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
            yield vars(group).get("post_backward") or Group(group)


def move_slices(model: PreTrainedModel) -> None:
    """Let FSDP2 move its slices to their final memory now instead of at the first forward."""
    cast(Any, model)._get_fsdp_state()._lazy_init()


def gather_ahead(model: Any, layers: Sequence[nn.Module]) -> None:
    """Let each layer begin to gather the next one with its spread experts, both ways."""
    # FSDP2 itself would gather spread experts only after the host's wait for the sizes of their
    # exchange, while the network is idle. And its backward follows the order of the last forwards:
    # with several micro-batches in flight it would gather a layer of another one for nothing.
    groups: list[list[Any]] = [list(filter(is_sharded, layer.modules())) for layer in layers]
    for group in chain(*groups):
        group.set_modules_to_backward_prefetch([group])  # nothing: the group is gathered already
    for before, behind in pairwise([[model], *groups]):
        before[0].set_modules_to_forward_prefetch(behind)
    for before, behind in pairwise([*groups, [model]]):
        behind[0].set_modules_to_backward_prefetch(before)


def gathered_groups(model: Any) -> dict[Any, list[nn.Parameter]]:
    """Return FSDP2's groups and their parameters, in the order in which they may stay gathered."""
    # The root's parameters come first, then the layers, then their spread experts, whose gathers
    # cost least: they travel between fewer ranks.
    groups = [model, *(each for each in model.modules() if is_sharded(each) and each is not model)]
    parameters: dict[Any, list[nn.Parameter]] = {}
    inner_parameters: set[nn.Parameter] = set()
    for group in reversed(groups):  # inner groups come before those around them
        sharded = [p for p in group.parameters() if isinstance(cast(Any, p), DTensor)]
        parameters[group] = [p for p in sharded if p not in inner_parameters]
        inner_parameters.update(parameters[group])
    groups.sort(key=lambda group: any(map(is_spread, parameters[group])))
    return {group: parameters[group] for group in groups}


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


@contextmanager
def forward_only(model: PreTrainedModel) -> Iterator[None]:
    """Run forwards without dropout or gradients, and shard every parameter again at the end."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        # FSDP2 keeps the root's parameters gathered until a backward, which does not come here.
        for module in filter(is_sharded, model.modules()):
            cast(Any, module).reshard()
