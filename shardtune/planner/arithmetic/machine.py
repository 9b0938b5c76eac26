"""The machine of a plan: bytes that its links carry, and a GPU's time for counted kernels.

The time of kernels is an assumption, held against runs that others measured. Rates are the shares
of a card's published peaks that large kernels reach:

- matrix products in bfloat16: cuBLAS reaches about 650 of H100's 989 TFLOP/s at 700 W, and 220 of
  A100's 312;
- attention: FlashAttention-2 on H100 and A100, causal, heads of 128, and FlashAttention-3 on H100
  (arXiv 2407.08608, figures 5 and 6);
- memory: 84% of the published rate;
- a launch: the host's time for one operator of PyTorch, eager, forward or backward;
- exchanges of tokens inside a node: 350 of the 450 GB/s of H100's NVLink, and gathers 330.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardtune.cards import CARDS, Card
from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.figures import Collective, Kernel, Kind

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


LAUNCH_S = 4.5e-6
_HOPPER_FLOPS_PER_S = 700e12  # slower cards are of Ampere, Ada or GeForce


class Gpu(NamedTuple):
    """Rates that kernels reach on a card: FLOP/s and bytes/s."""

    card: Card
    products: float
    attention: float
    attention_backward: float

    @property
    def bytes_per_s(self) -> float:
        return 0.84 * self.card.bytes_per_s

    @property
    def exchange_bytes_per_s(self) -> float:
        return 350 / 450 * self.card.link_bytes_per_s

    @property
    def gather_bytes_per_s(self) -> float:
        return 330 / 450 * self.card.link_bytes_per_s


def gpu_of(card: Card) -> Gpu:
    """Return the rates that kernels reach on a card."""
    peak = card.flops_per_s
    if peak < _HOPPER_FLOPS_PER_S:
        return Gpu(card, 220 / 312 * peak, 190 / 312 * peak, 150 / 312 * peak)
    # FlashAttention-2 uses the instructions of Ampere, so later cards run it at H100's rate.
    of_h100 = min(1, peak / 989e12)
    return Gpu(card, 650 / 989 * peak, 350e12 * of_h100, 270e12 * of_h100)


def kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Return a kernel's seconds on the device. Gathers and reductions hide behind other kernels."""
    if kernel.kind == Kind.COLLECTIVE:
        return kernel.n_bytes / gpu.exchange_bytes_per_s if "alltoall" in kernel.operator else 0.0
    rates = {
        Kind.PRODUCT: gpu.products,
        Kind.ATTENTION: gpu.attention,
        Kind.ATTENTION_BACKWARD: gpu.attention_backward,
    }
    arithmetic = kernel.flops / rates[kernel.kind] if kernel.kind in rates else 0.0
    return max(arithmetic, kernel.n_bytes / gpu.bytes_per_s)


def seconds(kernels: Mapping[Kernel, float], gpu: Gpu) -> float:
    """Return the seconds of counted kernels: the device's, or the host's to launch them."""
    device = sum(n * kernel_seconds(kernel, gpu) for kernel, n in kernels.items())
    return max(device, launched(kernels) * LAUNCH_S)


def with_gathers(kernels_s: float, n_bytes: float, gpu: Gpu, is_hidden: bool) -> float:
    """Return the seconds of kernels and of gathers and reductions inside a node.

    `is_hidden`: they run beside the products, as in dense layers. Experts that are not spread are
    gathered for few products, and take that time besides.
    """
    gathers_s = n_bytes / gpu.gather_bytes_per_s
    return max(kernels_s, gathers_s) if is_hidden else kernels_s + gathers_s


def launched(kernels: Mapping[Kernel, float]) -> float:
    """Return the number of kernels, collectives left out."""
    return sum(n for kernel, n in kernels.items() if kernel.kind != Kind.COLLECTIVE)
