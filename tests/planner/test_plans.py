"""The plans of GLM-4.5-Air that docs/planner.md and config.yaml quote."""

from __future__ import annotations

import json
import re

import pytest
from conftest import REPOSITORY
from transformers import AutoConfig

from benchmarks.plans import CONFIGS, LONG_ROWS, PAGE, plan_of, with_plans
from shardtune.planner.plan import bound_plan
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations


def test_the_shipped_comments_have_the_bytes_of_weights_gradients_and_moments():
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#", "")
    plan = plan_of("--gpu-memory 80", bound_plan)
    assert f"for {plan.parameters:,} parameters on 16 GPUs of 80 GB" in text
    for n_bytes in (plan.states.parameters, plan.states.gradients, plan.states.optimizer):
        assert f" {n_bytes / 1e9:.1f} GB per GPU" in text


@pytest.mark.full
def test_the_shipped_configuration_fits_and_takes_what_its_comments_say():
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#", "")
    plan = plan_of("--gpu-memory 80")
    assert plan.fits
    assert f"a GPU needs {plan.needed_bytes / 1e9:.0f} GB" in text
    assert f"takes {plan.peak_bytes / 1e9:.0f} GB where it has them" in text
    between, arithmetic = plan.floors_s["between nodes"], plan.floors_s["arithmetic"]
    received = between * plan.machine.node_bytes_per_s / 1e9
    assert f"A node receives {received:.1f} GB a step from the other: {between:.2f} s" in text
    assert f"the arithmetic takes {arithmetic:.2f} s at best, a fifth of it without work" in text
    assert plan.bubble == 0.2
    # What the configuration is for.
    assert received <= 3 and plan.floor_s <= 2 and plan.needed_bytes <= 62e9


@pytest.mark.full
def test_the_page_has_what_the_code_computes():
    for page, plans in ((PAGE, 2), (LONG_ROWS, 4)):
        text = page.read_text(encoding="utf-8")
        assert len(re.findall("<!-- plans? ", text)) == plans
        assert with_plans(text) == text


@pytest.mark.full
def test_rows_twice_as_long_take_what_the_page_says(tmp_path):
    settings = json.loads((CONFIGS / "glm-4.5-air/config.json").read_text(encoding="utf-8"))
    more = settings | {"max_position_embeddings": 262144}
    (tmp_path / "config.json").write_text(json.dumps(more), encoding="utf-8")
    options = f"--config examples/long-rows-glm-4.5-air.yaml model.path={tmp_path}"
    plan = plan_of(f"{options} data.max_length=262144 model.activation_checkpointing=offload")
    gpu, host = (f"{size / 1e9:.1f} GB" for size in (plan.peak_bytes, plan.storage.inputs_bytes))
    page = " ".join(LONG_ROWS.read_text(encoding="utf-8").split())
    assert plan.fits and f"takes {gpu} of each GPU so, and {host} of a node's own memory" in page


@pytest.mark.full
def test_the_changes_of_one_line_need_what_the_shipped_comments_say():
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#     ", " ")
    changes = re.findall(r"^#   .*16 x (\d+) GB.* (\d+) GB: (\S.+)$", text, re.MULTILINE)
    assert len(changes) == 3
    for memory, needed, change in changes:
        plan = plan_of(f"--gpu-memory {memory} --nic-gbps 3200 {change}")
        assert plan.fits and round(plan.needed_bytes / 1e9) == int(needed)
        assert plan.step_tokens == 32 * 4096


@pytest.mark.full
@pytest.mark.parametrize(("nic_gbps", "is_shipped"), [(100, True), (3200, False)])
def test_the_shipped_configuration_is_the_fastest_mesh_of_its_network(nic_gbps, is_shipped):
    """And on the faster one that of its comments."""
    plan = plan_of(f"--gpu-memory 80 --nic-gbps {nic_gbps}")
    model_config = AutoConfig.from_pretrained(CONFIGS / "glm-4.5-air")
    changes = Search(plan, Simulations(model_config)).changes()
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8").replace("\n#     ", " ")
    named = re.findall(r"with 8 x 400 Gb/s a node.*: (\S.+)$", text, re.MULTILINE)[0].split()
    found = {f"{key}={n}" for change in changes for key, n in change.values.items()}
    assert found == (set() if is_shipped else set(named))
