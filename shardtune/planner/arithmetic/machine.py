"""The machine that a plan is for, and what its links carry."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.figures import Collective

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
    native_dtype: str | None = None  # what model.compute_dtype=auto is, see `Layout.of`
    host_bytes: float = math.inf  # memory of a node, beside its GPUs'
    # Assumed: between a GPU and that memory by PCIe 5 x16, and of two sockets with DDR5-4800, both
    # ways together.
    host_bytes_per_s: float = 50e9
    host_memory_bytes_per_s: float = 600e9

    @property
    def allowance_bytes(self) -> int:
        """Memory of the device or the process itself, beside tensors."""
        return GPU_ALLOWANCE_BYTES if self.is_gpu else CPU_ALLOWANCE_BYTES

    @property
    def backend(self) -> str:
        """The one that `distributed.backend=auto` takes."""
        return "nccl" if self.is_gpu else "gloo"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def layout(self, config: Config) -> Layout:
        """Decide what its ranks are."""
        return Layout.of(config, self.ranks, self.is_gpu, self.native_dtype)


def collective_bytes(
    kind: str, size: float, ranks_of_nodes: Sequence[int], backend: str
) -> tuple[float, float]:
    """Return the bytes that one collective moves into a node, and into a rank from its own node.

    `size`: of its unsharded side in bytes (`Tracker.traffic`). `ranks_of_nodes`: how many ranks of
    the group each of its nodes has. `backend`: "nccl" or "gloo".

    In a ring (nccl-tests, doc/PERFORMANCE.md) every rank gets S (g - 1) / g of its neighbour, the
    first one of a node from another node; an all-reduce goes round twice, and so does gloo's
    reduce-scatter, which is one. In an all-to-all a rank keeps 1 / g of S, and sends an equal part
    to each other rank. A message moves S.
    """
    in_group, here = sum(ranks_of_nodes), max(ranks_of_nodes)
    if kind == "send":
        return (0.0, size) if here > 1 else (size, 0.0)
    if kind == "all-to-all":
        part = size / in_group
        return here * (in_group - here) * part, (here - 1) * part
    is_twice = kind == "all-reduce" or (kind, backend) == ("reduce-scatter", "gloo")
    passed = (2 if is_twice else 1) * size * (in_group - 1) / in_group
    return passed if len(ranks_of_nodes) > 1 else 0.0, passed if here > 1 else 0.0


def link_bytes(
    traffic: Mapping[Collective, int], machine: Machine, ranks: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a node gets from other nodes, and a rank from the ranks of its node.

    `traffic`: of the first rank of a node, or of a stage; each of the `ranks` of its stage on its
    node has as much. The bytes are by kind of collective.
    """
    between: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    for (kind, group), size in traffic.items():
        nodes = Counter(rank // machine.ranks_per_node for rank in group)
        of_node, of_rank = collective_bytes(kind, size, [*nodes.values()], machine.backend)
        # Each rank of the node has an equal collective; of a message it is one of the two sides.
        groups = ranks if kind == "send" else ranks / max(nodes.values())
        between[kind] += groups * of_node
        inside[kind] += of_rank
    return dict(between), dict(inside)
