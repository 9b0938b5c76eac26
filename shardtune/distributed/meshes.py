"""How the ranks are divided: into stages of layers, replicas, shards and groups that share experts.

Stages, replicas and groups of experts have consecutive ranks, so that ranks that exchange most
share a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtune.distributed.layout import Layout


class Link(NamedTuple):
    """The rank of a neighbouring stage that sees the same rows, and a group for each direction.

    With one group for both directions a send could wait for a receiver that itself waits for this
    rank's answer behind it.
    """

    rank: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True)
class Meshes:
    """The groups of a rank, as `World` describes them."""

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    before: Link | None = None  # to the stage before this rank's
    behind: Link | None = None  # to the stage behind it
    # With replicas: the mesh of all copies, whose dimensions are in the order in which they cut a
    # weight, `replicate` last.
    of_parts: Mapping[tuple[str, ...], DeviceMesh] = field(default_factory=dict)
    # On GPUs second groups of the ranks that shard: collectives of one group would queue,
    # reductions behind gathers.
    for_reductions: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    rows: dist.ProcessGroup | None = None  # the ranks that share each row with this one

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups but the default group of all ranks."""
        meshes = filter(None, (self.mesh, self.expert_mesh, self.tensor_mesh))
        links = filter(None, (self.before, self.behind))
        return [
            *(group for mesh in meshes for group in mesh.get_all_groups()),
            *(group for link in links for group in link[1:]),
            *self.for_reductions.values(),
            *filter(None, [self.rows]),
        ]


def build_meshes(device: torch.device, layout: Layout) -> Meshes:
    """Divide all ranks of the run, as `Layout.problems` has allowed. Collective."""
    stages = {"stage": layout.stages} if layout.stages > 1 else {}
    replicas = {"replicate": layout.replicate} if layout.replicate > 1 else {}
    within = replicas | {"shard": layout.shards}
    mesh, expert_mesh, tensor_mesh = _mesh(device, stages | within), None, None
    whole_meshes = {"shard": mesh}
    if layout.expert > 1:
        spread = replicas | {"expert_shard": layout.expert_shards, "expert": layout.expert}
        whole_meshes["expert_shard"] = _mesh(device, stages | spread)
        expert_mesh = whole_meshes["expert_shard"][tuple(spread)]
    if layout.tensor > 1:
        cut = replicas | {"tensor_shard": layout.tensor_shards, "tensor": layout.tensor}
        whole_meshes["tensor_shard"] = _mesh(device, stages | cut)
        tensor_mesh = whole_meshes["tensor_shard"][tuple(cut)]
    links: tuple[Link | None, Link | None] = None, None
    if stages:
        mesh, links = mesh[tuple(within)], _links(layout)
    of_parts = {}
    for each in filter(None, (mesh, expert_mesh, tensor_mesh)) if replicas else ():
        _, *others = each.mesh_dim_names or ()
        of_parts[tuple(others)] = _reversed(each)
    for_reductions = {}
    # On a CPU the host itself waits for each collective, one after another.
    for dimension, whole in whole_meshes.items() if device.type == "cuda" else ():
        if group := _second_group(whole, dimension):
            for_reductions[dimension] = group
    rows, firsts = None, range(0, layout.ranks, layout.context)
    if layout.context > 1:  # those of `tensor` have a mesh
        groups = [[*range(first, first + layout.context)] for first in firsts]
        rows, _ = dist.new_subgroups_by_enumeration(groups)
    return Meshes(mesh, expert_mesh, tensor_mesh, *links, of_parts, for_reductions, rows)


def _second_group(mesh: DeviceMesh, dimension: str) -> dist.ProcessGroup | None:
    """Return another group of several ranks in a dimension of a mesh of all ranks. Collective."""
    place = (mesh.mesh_dim_names or ()).index(dimension)
    if mesh.size(place) == 1:
        return None
    ranks = mesh.mesh.movedim(place, -1).reshape(-1, mesh.size(place))
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return group


def _reversed(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh with its dimensions in the order in which they cut a weight."""
    ranks = mesh.mesh.permute(*reversed(range(mesh.ndim)))
    names = tuple(reversed(mesh.mesh_dim_names or ()))
    return DeviceMesh.from_group(
        mesh.get_all_groups()[::-1], mesh.device_type, ranks, mesh_dim_names=names
    )


def _links(layout: Layout) -> tuple[Link | None, Link | None]:
    """Return this rank's links to the stages before and behind its own. Collective."""
    stage_ranks, rank = layout.stage_ranks, dist.get_rank()
    before, behind = None, None
    for first in range(0, layout.ranks - stage_ranks, stage_ranks):
        pairs = [[number, number + stage_ranks] for number in range(first, first + stage_ranks)]
        forward, _ = dist.new_subgroups_by_enumeration(pairs)
        backward, _ = dist.new_subgroups_by_enumeration(pairs)
        if forward and backward and rank < first + stage_ranks:
            behind = Link(rank + stage_ranks, forward, backward)
        elif forward and backward:
            before = Link(rank - stage_ranks, forward, backward)
    return before, behind


def _mesh(device: torch.device, shape: dict[str, int]) -> DeviceMesh:
    return dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
