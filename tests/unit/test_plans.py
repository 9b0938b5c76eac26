"""The plans of GLM-4.5-Air that docs/planner.md and config.yaml quote."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY

from benchmarks.plans import PAGE, plan_of, with_plans


def test_the_shipped_comments_have_the_bytes_of_weights_gradients_and_moments() -> None:
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#", "")
    plan = plan_of("--gpu-memory 80", reason="its shapes are enough")
    assert f"for {plan.parameters:,} parameters on 16 GPUs of 80 GB" in text
    for n_bytes in (plan.states.parameters, plan.states.gradients, plan.states.optimizer):
        assert f" {n_bytes / 1e9:.1f} GB per GPU" in text


@pytest.mark.full
def test_the_shipped_configuration_fits_and_takes_what_its_comments_say() -> None:
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#", "")
    plan = plan_of("--gpu-memory 80")
    assert plan.fits
    assert f"a GPU needs {plan.peak_bytes / 1e9:.0f} GB" in text
    (received, seconds) = re.findall(r"receives (\d+) GB a step from the other: (\d+) s", text)[0]
    assert int(seconds) == round(plan.floors_s["between nodes"])
    assert int(received) == round(
        plan.floors_s["between nodes"] * plan.machine.node_bytes_per_s / 1e9
    )


@pytest.mark.full
def test_the_page_has_what_the_code_computes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall("<!-- plans? ", text)) == 2
    assert with_plans(text) == text


@pytest.mark.full
def test_the_changes_of_one_line_need_what_the_shipped_comments_say() -> None:
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8")
    changes = re.findall(r"^#   .+ 16 x (\d+) GB,.* (\d+) GB: (\S.+)$", text, re.MULTILINE)
    changes += re.findall(r"^#   16 x (\d+) GB,.* (\d+) GB: (\S.+)$", text, re.MULTILINE)
    assert len(changes) == 2
    for memory, needed, change in changes:
        plan = plan_of(f"--gpu-memory {memory} {change}")
        assert plan.fits and round(plan.peak_bytes / 1e9) == int(needed)
