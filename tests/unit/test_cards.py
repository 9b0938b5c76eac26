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
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("a100-80gb", "A100-80"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("l40s 48GB", "L40S"),
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
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40 PCIe"),
        ("NVIDIA H800 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A6000", None),
    ],
)
def test_a_device_has_the_card_of_its_words(device, card):
    assert card_of(device) is (CARDS[card] if card else None)


def test_figures_are_those_of_the_data_sheets():
    """Dense TFLOP/s in bfloat16, TB/s and GB."""
    sheets = {
        "H100": (989, 3.35, 80),
        "H200": (989, 4.8, 141),
        "B200": (2250, 8.0, 180),
        "A100-80": (312, 2.039, 80),
        "A100-40": (312, 1.555, 40),
        "L40S": (362, 0.864, 48),
        "A10": (125, 0.600, 24),
        "RTX 4090": (165.2, 1.008, 24),
        "RTX 5090": (209.5, 1.792, 32),
        "RTX 6000 Ada": (364.2, 0.960, 48),
    }
    for name, (tflops, tb_per_s, memory_gb) in sheets.items():
        card = CARDS[name]
        figures = card.flops_per_s / 1e12, card.bytes_per_s / 1e12, card.memory_bytes / 1e9
        assert figures == pytest.approx((tflops, tb_per_s, memory_gb)), name


def test_cards_without_nvlink_have_the_rate_of_pcie_inside_a_node():
    for name in ("RTX 4090", "L40S", "A10"):
        assert CARDS[name].link_bytes_per_s == CARDS[name].host_bytes_per_s == 25e9
    assert CARDS["H100"].link_bytes_per_s == 450e9
