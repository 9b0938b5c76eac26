"""The plans of GLM-4.5-Air that docs/planner.md quotes, and those of long rows."""

import json
import re

import pytest
from helpers.commands import REPOSITORY
from transformers import AutoConfig

from benchmarks.plans import CONFIGS, MEMORY, PAGE, PLANS, plan_of, row
from shardtune.planner.command.text import describe, verdict
from shardtune.planner.make_plan import bound_plan
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations


def test_the_shipped_comments_have_the_bytes_of_weights_gradients_and_moments():
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8")
    plan = plan_of("--gpu-memory 80", bound_plan)
    for n_bytes in (plan.states.parameters, plan.states.gradients, plan.states.optimizer):
        assert f" {n_bytes / 1e9:.1f} GB per GPU" in text


@pytest.mark.full
def test_the_shipped_configuration_does_what_it_is_for():
    plan = plan_of("--gpu-memory 80")
    received = plan.floors_s["between nodes"] * plan.machine.node_bytes_per_s / 1e9
    assert plan.fits and plan.layout.bubble == 0.2
    assert received <= 3 and plan.floor_s <= 2 and plan.needed_bytes <= 62e9
    lines = "".join(f"{line}\n" for line in [verdict(plan), *describe(plan)])
    assert f"<!-- plan --gpu-memory 80 -->\n\n```text\n{lines}```" in PAGE.read_text("utf-8")


# The others are written by `python -m benchmarks plans` alone.
@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "number"),
    [
        (PAGE, 7),  # replicas, without stages, which do not fit
        (MEMORY, 2),  # long rows, in tiles
    ],
)
def test_the_page_has_what_the_code_computes(page, number, tmp_path, monkeypatch):
    for name in ("config.yaml", "examples", "tests"):  # what the pages name, without a preflight
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    line = PLANS.search(page.read_text(encoding="utf-8"))[2].splitlines()[number]
    assert row(line) == f"{line}\n"


@pytest.mark.full
def test_longer_rows_take_what_the_page_says(tmp_path):
    settings = json.loads((CONFIGS / "glm-4.5-air/config.json").read_text(encoding="utf-8"))
    more = settings | {"max_position_embeddings": 262144}
    (tmp_path / "config.json").write_text(json.dumps(more), encoding="utf-8")
    options = f"--config examples/long-rows-glm-4.5-air.yaml model.path={tmp_path}"
    plan = plan_of(f"{options} data.max_length=196608 model.activation_checkpointing=offload")
    gpu, host = (f"{size / 1e9:.1f} GB" for size in (plan.peak_bytes, plan.storage.inputs_bytes))
    page = " ".join(MEMORY.read_text(encoding="utf-8").split())
    assert plan.fits and f"takes {gpu} of each GPU so, and {host} of a node's own memory" in page


@pytest.mark.full
def test_plans_of_other_keys_have_steps_of_as_many_tokens():
    table = PLANS.search(PAGE.read_text(encoding="utf-8"))[2]
    for options in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE):
        if "data.max_length" not in options:
            assert plan_of(options, bound_plan).step_tokens == 32 * 4096


@pytest.mark.full
def test_the_shipped_configuration_is_the_fastest_mesh_of_its_network():
    plan = plan_of("--gpu-memory 80 --nic-gbps 100")
    model_config = AutoConfig.from_pretrained(CONFIGS / "glm-4.5-air")
    assert not list(Search(plan, Simulations(model_config)).changes())
