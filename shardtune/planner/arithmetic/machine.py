"""The machine of a plan, and the bytes that its links carry."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtune.cards import CARDS, Card
from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.figures import Collective

# CUDA's context and libraries of a process that is alone, or has NCCL's buffers for gathers, and
# the buffers of all-to-alls. docs/published.md has the evidence.
_ALONE_BYTES, _IN_GROUPS_BYTES, _EXCHANGES_BYTES = 1.3e9, 2.5e9, 3.3e9
_FRAGMENTED = 0.05  # share of the allocator's pools that it cannot use
# A CPU process takes this for gloo's buffers, and for libraries that load at their first use.
_CPU_BYTES = 10**8
# A node's rate to its disk or to a shared one: an assumption for the time of a save.
DISK_BYTES_PER_S = 2 * 10**9


@dataclass(frozen=True)
class Machine:
    """The nodes of a plan. 1 GB is 1e9 bytes. A rate counts the bytes of one direction."""

    nodes: int
    ranks_per_node: int
    memory_bytes: float  # per rank
    node_bytes_per_s: float  # between one node and all others
    rank_bytes_per_s: float  # between one rank and the others of its node
    flops_per_s: float  # per rank, in the compute dtype
    is_gpu: bool = True  # else ranks are processes that share their node's memory
    native_dtype: str | None = None  # the dtype of model.compute_dtype=auto, see `Layout.of`
    host_bytes: float = math.inf  # memory of a node, beside its GPUs'
    # Assumed: two sockets with DDR5-4800, whose rate is of reads and writes together.
    host_memory_bytes_per_s: float = 600e9
    card: Card | None = CARDS["H100"]  # None: its rates are not known
    measured_in: str = ""  # the run whose preflight measured some of the rates

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes/s between a rank's device and host memory, one way."""
        return (self.card or CARDS["H100"]).host_bytes_per_s

    def allowance_bytes(self, layout: Layout, pools_bytes: float = 0) -> int:
        """Return the memory of the device or the process itself, beside tensors.

        `pools_bytes`: memory that the allocator takes for tensors.
        """
        if not self.is_gpu:
            return _CPU_BYTES
        fixed = _IN_GROUPS_BYTES if layout.ranks > 1 else _ALONE_BYTES
        exchanges = _EXCHANGES_BYTES * (layout.expert > 1 or layout.context > 1)
        return round(fixed + exchanges + _FRAGMENTED * pools_bytes)

    @property
    def backend(self) -> str:
        """The backend of `distributed.backend=auto`."""
        return "nccl" if self.is_gpu else "gloo"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def layout(self, config: Config) -> Layout:
        """Return the layout of a run on this machine."""
        return Layout.of(config, self.ranks, self.is_gpu, self.native_dtype)


def collective_bytes(
    kind: str, size: float, ranks_of_nodes: Sequence[int], backend: str
) -> tuple[float, float]:
    """Return the bytes of one collective that enter a node, and a rank from its own node.

    `size`: bytes of its unsharded side (`Tracker.traffic`). `ranks_of_nodes`: the number of the
    group's ranks on each node. `backend`: "nccl" or "gloo".

    In a ring of g ranks (nccl-tests, doc/PERFORMANCE.md) every rank gets size (g - 1) / g from its
    neighbour, which is on another node for the first rank of a node. An all-reduce goes round
    twice; gloo's reduce-scatter is an all-reduce. In an all-to-all a rank keeps 1 / g and sends an
    equal part to each other rank.
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

    The bytes are by kind of collective. `traffic`: one rank's, which each of the `ranks` of its
    stage on its node has, too.
    """
    between: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    for (kind, group), size in traffic.items():
        nodes = Counter(rank // machine.ranks_per_node for rank in group)
        node_bytes, rank_bytes = collective_bytes(kind, size, [*nodes.values()], machine.backend)
        # Ranks of one group share its collective; each rank has a message of its own.
        groups = ranks if kind == "send" else ranks / max(nodes.values())
        between[kind] += groups * node_bytes
        inside[kind] += rank_bytes
    return dict(between), dict(inside)
