"""Published figures of GPUs: a name finds its card, and a device its own."""

from __future__ import annotations

import pytest

from shardtune.cards import CARDS, card_named, card_of
from shardtune.errors import UserError


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
