"""The machine that a plan is for, and what its links carry."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardtune.planner.tracker import Collective

# CUDA's context, NCCL's buffers, and memory that the allocator cannot use: no GPU has measured it.
GPU_ALLOWANCE_BYTES = 4 * 10**9
# A CPU process takes this for gloo's buffers, and for libraries that load at their first use.
CPU_ALLOWANCE_BYTES = 10**8
# A node's rate to its disk or to a shared one: an assumption for the time of a save.
DISK_BYTES_PER_S = 2 * 10**9


@dataclass(frozen=True)
class Machine:
    """The nodes that a plan is for. 1 GB is 1e9 bytes, and rates are those of one direction."""

    nodes: int
    ranks_per_node: int
    memory_bytes: float  # of one rank
    node_bytes_per_s: float  # between one node and all others
    rank_bytes_per_s: float  # between one rank and the others of its node
    flops_per_s: float  # of one rank, in the compute dtype
    is_gpu: bool = True  # else ranks are processes that share their node's memory

    @property
    def allowance_bytes(self) -> int:
        """Memory of the device or the process itself, beside tensors."""
        return GPU_ALLOWANCE_BYTES if self.is_gpu else CPU_ALLOWANCE_BYTES

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def link_bytes(
    traffic: Mapping[Collective, int], machine: Machine, ranks: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a node gets from other nodes, and a rank from the ranks of its node.

    `traffic`: of the first rank of a node, or of a stage; each of the `ranks` of its stage on its
    node has as much. By kind of collective, as in a ring: of an unsharded size S, a group of g
    ranks on n nodes moves S (n - 1) / n into each node and S (g - 1) / g into each rank; an
    all-reduce twice as much. In an all-to-all a rank keeps 1 / g of S, and sends an equal part to
    each other rank. A message of a stage moves S.
    """
    between: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    for (kind, group), size in traffic.items():
        nodes = Counter(rank // machine.ranks_per_node for rank in group)
        in_group, here = len(group), max(nodes.values())
        if kind == "send":
            between[kind] += ranks * size if here == 1 else 0.0
            inside[kind] += size if here > 1 else 0.0
        elif kind == "all-to-all":
            between[kind] += ranks * size * (in_group - here) / in_group
            inside[kind] += size * (here - 1) / in_group
        else:
            passes = 2 if kind == "all-reduce" else 1
            groups = ranks / here  # each rank of a node has an equal one
            between[kind] += passes * groups * size * (len(nodes) - 1) / len(nodes)
            inside[kind] += passes * size * (in_group - 1) / in_group if here > 1 else 0.0
    return dict(between), dict(inside)
