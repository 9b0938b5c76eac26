"""Gradients and moments divided over all ranks where each replica has all weights (ZeRO-2 between
replicas, arXiv 1910.02054).

FSDP2 gathers weights and reduces gradients within a replica, so that one rank of every replica has
the same slice of a weight. These ranks divide the slice by rows, and the optimizer of each updates
one part. As a backward leaves a layer, gradients go to the owners of their parts, and after the
update the new weights come back: one message for a layer each time, two if its experts are spread.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from shardtune.distributed.tensors import DTYPES, sharded_as, to_local
from shardtune.distributed.world import World
from shardtune.model.fsdp_groups import Group, groups_of, move_slices
from shardtune.model.source.masters import take_master


class OwnedParameters:
    """Holds the trained parameters that this rank's optimizer updates.

    They are FSDP2's slices, or with replicas this rank's parts of them, which share their memory.

    Attributes:
        by_name: the parameters by the model's names, in its order.
        by_group: FSDP2's groups with their parameters, if replicas or `optimizer.offload` need it.
        shared: the weight that the first stage has as embedding and the last stage as head.
    """

    def __init__(self, model: PreTrainedModel, world: World) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._world, self.layout = world, world.layout
        is_meta = any(p.is_meta for p in model.parameters())
        needs_groups = self.layout.replicate > 1 or self.layout.offloads
        # FSDP2 may move its slices once, before the first forward. Parts of the old memory would
        # miss a checkpoint that is loaded into the new one.
        if needs_groups and not is_meta:
            move_slices(model)
        parts = {p: p for p in trained.values()}
        if self.layout.replicate > 1:
            parts = {p: _own_part(cast(DTensor, p), world) for p in parts}
        self._slices: dict[torch.Tensor, nn.Parameter] = {
            part: each for each, part in parts.items()
        }
        self.by_name: dict[str, nn.Parameter] = {name: parts[p] for name, p in trained.items()}
        self.shared: nn.Parameter | None = None
        is_at_an_end = world.layout.stages > 1 and (world.stage == 0 or world.is_last_stage)
        if is_at_an_end and model.all_tied_weights_keys:
            # With adapters it is the rows of new tokens, or nothing.
            of_end = cast(Any, model.get_input_embeddings()).parameters()
            self.shared = next((parts[p] for p in of_end if p in parts), None)
        self.by_group: list[tuple[Group, list[nn.Parameter]]] = []
        self._divided: list[_DividedGroup] = []
        for group in groups_of(model) if needs_groups else ():
            pairs = [(each, parts[each]) for each in group.slices if each in parts]
            if pairs:
                self.by_group.append((group, [part for _, part in pairs]))
            if pairs and self.layout.replicate > 1:
                divided = _DividedGroup(pairs, DTYPES[self.layout.reduce_dtype], world)
                group.add_replicas = divided.reduce
                self._divided.append(divided)

    def take_master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a master weight, if the device has the weight rounded."""
        values = take_master(self._slices[parameter])
        if values is None or self.layout.replicate == 1:
            return values
        return _rows_of(values, self._world)

    def gather(self, *_: Any) -> None:
        """Gather the updated parts of this rank's slices from the other replicas. Collective."""
        for group in self._divided:
            group.gather()


class _DividedGroup:
    """Exchanges the trained parameters of one of FSDP2's groups between replicas."""

    def __init__(
        self, pairs: list[tuple[Any, nn.Parameter]], reduce_dtype: torch.dtype, world: World
    ) -> None:
        """`pairs`: slices, and this rank's parts of them."""
        self._pairs, self._reduce_dtype = pairs, reduce_dtype
        self._replicas, self._progress = world.layout.replicate, world.progress
        self._process_group = world.mesh["replicate"].get_group()

    @torch.no_grad()
    def reduce(self) -> None:
        """Send the parts of the slices' gradients to their owners, and add up the received ones."""
        reduced = [(each, part) for each, part in self._pairs if each.grad is not None]
        numels = [self._part_numel(each) for each, _ in reduced]
        sent = torch.empty(
            self._replicas, sum(numels), dtype=self._reduce_dtype, device=self._pairs[0][0].device
        )
        received = sent.new_empty(sent.shape[1])
        if sent.numel():
            gradients = [to_local(each.grad) for each, _ in reduced]
            torch._chunk_cat([g for g in gradients if g.numel()], 0, self._replicas, out=sent)
            del gradients
        for each, _ in reduced:
            each.grad = None  # frees the memory of parts that other replicas own
        if sent.numel():
            dist.reduce_scatter_single(received, sent.view(-1), group=self._process_group)
        for (_, part), gradient in zip(reduced, received.split(numels), strict=True):
            local = to_local(part)
            total = gradient[: local.numel()].view(local.shape).to(part.grad_dtype)
            if part.grad is None:
                part.grad = sharded_as(part, total)
            else:  # it has earlier micro-batches
                to_local(part.grad).add_(total)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the parts of the slices from their owners."""
        pairs = [(to_local(each), to_local(part)) for each, part in self._pairs]
        numels = [self._part_numel(each) for each, _ in pairs]
        sent = pairs[0][0].new_zeros(sum(numels))
        for place, (_, part) in zip(sent.split(numels), pairs, strict=True):
            place[: part.numel()] = part.flatten()
        gathered = sent.new_empty(self._replicas, len(sent))
        with self._progress.waiting():
            dist.all_gather_single(gathered.view(-1), sent, group=self._process_group)
        for parts, (each, _) in zip(gathered.split(numels, dim=1), pairs, strict=True):
            each.copy_(parts.flatten()[: each.numel()].view(each.shape))

    def _part_numel(self, each: torch.Tensor) -> int:
        """Return the elements of the largest part of a slice, to which all parts are padded."""
        local = to_local(each)
        return _part_rows(local, self._replicas) * math.prod(local.shape[1:])


def _own_part(each: DTensor, world: World) -> nn.Parameter:
    """Return this rank's part of its slice of a weight, as a view of it."""
    # A DTensor lists its cuts from the outermost one on: experts over ranks, slices, then parts.
    mesh = world.meshes.of_parts[each.device_mesh.mesh_dim_names or ()]
    placements = [Shard(cast(Shard, p).dim) for p in reversed(each.placements)]
    part = DTensor.from_local(
        _rows_of(each.to_local().detach(), world),
        mesh,
        [*placements, Shard(0)],
        run_check=False,
        shape=each.shape,
        stride=each.stride(),
    )
    parameter = nn.Parameter(part)
    parameter.grad_dtype = DTYPES[world.layout.gradient_dtype]
    return parameter


def _rows_of(local: torch.Tensor, world: World) -> torch.Tensor:
    rows = _part_rows(local, world.layout.replicate)
    replica = world.mesh.get_local_rank("replicate")
    return local[replica * rows : (replica + 1) * rows]


def _part_rows(local: torch.Tensor, replicas: int) -> int:
    """Return the rows of a slice's parts. The last parts may have fewer."""
    return -(-local.shape[0] // replicas)
