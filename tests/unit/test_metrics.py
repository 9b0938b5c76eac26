"""How numbers are written."""

from __future__ import annotations

import pytest

from shardtune.training.metrics import three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.03124, "0.0312"),
        (0.0099996, "0.0100"),
        (0.99961, "1.00"),
        (4.3, "4.30"),
        (9.9951, "10.0"),
        (26.249, "26.2"),
        (1540.6, "1541"),
    ],
)
def test_speed_has_three_significant_digits(value: float, text: str) -> None:
    assert three_digits(value) == text
