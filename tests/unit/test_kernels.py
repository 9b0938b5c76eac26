"""Published figures of GPUs, which kernel an operator launches there, and how long it takes."""

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operators

from shardtune.cards import CARDS, card_named, card_of
from shardtune.errors import UserError
from shardtune.planner.arithmetic.figures import Kernel, Kind
from shardtune.planner.arithmetic.machine import LAUNCH_S, gpu_of, seconds, with_gathers
from shardtune.planner.simulation.tracker import kernel_of

aten = torch.ops.aten
H100, H200 = gpu_of(CARDS["H100"]), gpu_of(CARDS["H200"])


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def kernel(func: Any, *args: Any, **kwargs: Any) -> Kernel | None:
    return kernel_of(func, args, kwargs, func(*args, **kwargs), "cpu")


HALVES = [zeros(4, 8, dtype=torch.bfloat16), zeros(8, 2, dtype=torch.bfloat16)]
ROWS = torch.tensor([5, 0, 5])


@pytest.mark.parametrize(
    ("func", "args", "n_bytes", "flops"),
    [
        (aten.mm.default, HALVES, 2 * (32 + 16 + 8), 2 * 4 * 8 * 2),
        (aten.addmm.default, [zeros(2).bfloat16(), *HALVES], 2 * (2 + 32 + 16 + 8), 128),
        (aten.mul.Tensor, [zeros(10), zeros(10)], 120, 0),
        (aten.add_.Tensor, [zeros(10), zeros(10)], 120, 0),  # read, read and written
        (aten.copy_.default, [zeros(10), zeros(10).bfloat16()], 60, 0),  # written, not read
        (aten.fill_.Scalar, [zeros(10), 1.0], 40, 0),
        (aten.mul.Tensor, [zeros(9, 10), zeros(9, 1).expand(9, 10)], 360 + 36 + 360, 0),
        (aten.cat.default, [[zeros(10), zeros(5)]], 120, 0),
        (aten.index.Tensor, [zeros(1000, 4), [ROWS]], 48 + 48 + 24, 0),  # not all of the table
        (aten.embedding.default, [zeros(1000, 4), ROWS], 48 + 48 + 24, 0),
        (aten.index_put_.default, [zeros(1000, 4), [ROWS], zeros(3, 4)], 3 * 48 + 24, 0),
        (aten.topk.default, [zeros(10), 2], 40 + 2 * (4 + 8), 0),
    ],
)
def test_a_kernel_reads_its_inputs_once_and_writes_its_outputs_once(func, args, n_bytes, flops):
    launched = kernel(func, *args)
    assert launched and (launched.n_bytes, launched.flops) == (n_bytes, flops)
    assert launched.kind == (Kind.PRODUCT if flops else Kind.OTHER)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, [zeros(10), [2, 5]]),
        (aten.transpose.int, [zeros(2, 5), 0, 1]),
        (aten.empty_like.default, [zeros(10)]),
        (aten._local_scalar_dense.default, [zeros(1)]),
        (aten._has_same_storage_numel.default, [zeros(1), zeros(1)]),
        (aten.add.Tensor, [zeros(0), zeros(0)]),
    ],
)
def test_views_and_allocations_launch_nothing(func, args):
    assert kernel(func, *args) is None


def test_attention_is_two_products_forward_and_five_backward():
    """Of causal documents as long as the longest. The backward computes the scores again."""
    documents, longest, heads, width = 4, 8, 2, 16
    x = zeros(documents * longest, heads, width)
    ends = torch.arange(documents + 1, dtype=torch.int32) * longest
    sums = zeros(heads, len(x))
    products = 2 * documents * (longest * (longest + 1) // 2) * heads * width
    given = (ends, ends, longest, longest)
    operators = torch.ops.torch_attn
    forward = kernel_of(
        operators._varlen_attn.default, (x, x, x, *given), {}, (x, sums, zeros(1)), "cpu"
    )
    arguments = (x, x, x, x, x, sums, *given, True, zeros(1))
    backward = kernel_of(operators._varlen_attn_backward.default, arguments, {}, (x, x, x), "cpu")
    assert forward and (forward.kind, forward.flops) == (Kind.ATTENTION, 2 * products)
    assert backward and (backward.kind, backward.flops) == (Kind.ATTENTION_BACKWARD, 5 * products)


def test_an_operator_of_the_host_is_no_kernel_of_the_gpu():
    x = zeros(10)
    assert kernel_of(aten.neg.default, (x,), {}, -x, "cuda") is None


def test_kernels_take_the_longer_of_arithmetic_and_memory_and_are_launched_one_by_one():
    product = Kernel(Kind.PRODUCT, "mm", n_bytes=8, flops=int(H100.products))
    copy = Kernel(Kind.OTHER, "copy_", n_bytes=int(H100.bytes_per_s))
    assert seconds({product: 2, copy: 3}, H100) == pytest.approx(5)
    assert seconds({copy: 3}, H200) == pytest.approx(3 * H100.bytes_per_s / H200.bytes_per_s)
    tiny = Kernel(Kind.OTHER, "add", n_bytes=8)
    assert seconds({tiny: 1000}, H100) == pytest.approx(1000 * LAUNCH_S)


def test_of_collectives_only_exchanges_of_tokens_take_time_of_their_own():
    gather = Kernel(Kind.COLLECTIVE, "_allgather_base_", n_bytes=10**12)
    exchange = Kernel(Kind.COLLECTIVE, "alltoall_base_", n_bytes=int(H100.exchange_bytes_per_s))
    assert seconds({gather: 1, exchange: 1}, H100) == pytest.approx(1)


def test_gathers_hide_behind_dense_layers_and_not_behind_experts():
    n_bytes = 3 * H100.gather_bytes_per_s  # three seconds
    for kernels_s, dense_s, experts_s in ((4.0, 4, 7), (1.0, 3, 4)):
        assert with_gathers(kernels_s, n_bytes, H100, is_hidden=True) == pytest.approx(dense_s)
        assert with_gathers(kernels_s, n_bytes, H100, is_hidden=False) == pytest.approx(experts_s)


def test_a_collective_is_counted_whose_result_is_no_tensor():
    sent, received = zeros(10), zeros(12)
    exchange = torch.ops.c10d.alltoall_base_.default
    work = object()  # which the host waits for
    assert kernel_of(exchange, (received, sent), {}, work, "cpu") == Kernel(
        Kind.COLLECTIVE, "alltoall_base_", 48
    )


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("h100", "H100"),
        ("H100-SXM5", "H100"),
        ("a100-80gb", "A100-80"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("A100 40GB", "A100-40"),
        ("A100 SXM4 40GB", "A100-40"),
    ],
)
def test_a_card_is_found_however_its_name_is_written(name, card):
    assert card_named(name) is CARDS[card]


def test_an_unknown_card_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"^--gpu 4090: .* use one of RTX 4090, "):
        card_named("4090")
    with pytest.raises(UserError, match=f"use one of {', '.join(CARDS)};"):
        card_named("abacus")


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40 PCIe"),
        ("NVIDIA H800 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A6000", None),
    ],
)
def test_a_device_has_the_card_of_its_words(device, card):
    assert card_of(device) is (CARDS[card] if card else None)


def test_figures_are_those_of_the_data_sheets():
    """Dense TFLOP/s in bfloat16, TB/s and GB; NVLink in both directions, GB/s, and how the host is
    reached: PCIe of a version, which reaches 25 and 50 GB/s, or a Grace, in both directions."""
    sheets = {
        "A10": (125, 0.600, 24, 0, 4),
        "A10G": (70, 0.600, 24, 0, 4),
        "A40": (149.7, 0.696, 48, 0, 4),
        "A100-40": (312, 1.555, 40, 600, 4),
        "A100-80": (312, 2.039, 80, 600, 4),
        "A100-40 PCIe": (312, 1.555, 40, 0, 4),
        "A100 PCIe": (312, 1.935, 80, 0, 4),
        "L4": (121, 0.300, 24, 0, 4),
        "L40S": (362, 0.864, 48, 0, 4),
        "H100": (989, 3.35, 80, 900, 5),
        "H100 PCIe": (756, 2.0, 80, 0, 5),
        "H100 NVL": (835, 3.9, 94, 0, 5),
        "H200": (989, 4.8, 141, 900, 5),
        "H200 NVL": (835, 4.8, 141, 0, 5),
        "GH200": (989, 4.0, 96, 900, 900),
        "B200": (2250, 8.0, 180, 1800, 5),
        "B300": (2250, 8.0, 270, 1800, 5),
        "GB200": (2500, 8.0, 186, 1800, 900),
        "GB300": (2500, 8.0, 279, 1800, 900),
        "RTX 3090": (71, 0.936, 24, 0, 4),
        "RTX 4090": (165.2, 1.008, 24, 0, 4),
        "RTX 5090": (209.5, 1.792, 32, 0, 5),
        "RTX 6000 Ada": (364.2, 0.960, 48, 0, 4),
        "RTX PRO 6000": (503.8, 1.792, 96, 0, 5),
    }
    assert sheets.keys() == CARDS.keys()
    for name, (tflops, tb_per_s, memory_gb, nvlink, host) in sheets.items():
        card, host_gb = CARDS[name], {4: 25, 5: 50}.get(host, host / 2)
        figures = card.flops_per_s / 1e12, card.bytes_per_s / 1e12, card.memory_bytes / 1e9
        assert figures == pytest.approx((tflops, tb_per_s, memory_gb)), name
        links = card.link_bytes_per_s / 1e9, card.host_bytes_per_s / 1e9
        assert links == (nvlink / 2 or host_gb, host_gb), name
