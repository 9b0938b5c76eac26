"""Plans of published models and of runs that others measured."""

import argparse
import json
import shlex
from argparse import Namespace
from pathlib import Path
from statistics import median

import pytest
from helpers.commands import REPOSITORY

from benchmarks import published
from benchmarks.plans import CONFIGS, plan_of
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.model.facts.trial import require_exact_copy
from shardtune.model.source.files import read_model_config
from shardtune.planner.command.options import add_plan_arguments, split_runs
from shardtune.planner.command.plan_command import plan_run

GROUPS, FIGURES = published.read()
ROWS = [*GROUPS["best"], *GROUPS["others"]]


def _ratios(place: int) -> list[float]:
    pairs = (published.compare(row, FIGURES)[place] for row in GROUPS["best"])
    return [planned / measured for measured, planned in pairs if measured == measured]


def test_plans_of_the_best_runs_are_near_what_was_measured():
    memory, seconds = _ratios(0), _ratios(1)
    assert (len(ROWS), len(memory), len(seconds)) == (44, 15, 17)
    assert all(0.9 <= ratio <= 1.1 for ratio in memory) and 0.97 <= median(memory) <= 1.03
    assert all(0.7 <= ratio <= 1.3 for ratio in seconds)


def test_every_run_has_its_source_settings_and_figures():
    for row in ROWS:
        assert row["link"].startswith("https://") and row["settings"] and row["hardware"]
        assert row["measured"]["step_s"] and published._plan_id(row) in FIGURES


@pytest.mark.full
# Together they take all choices of other programs, and balanced experts.
@pytest.mark.parametrize(
    "name",
    [
        "prime-06b-sft-8k",
        "titan-8b-8-b1",
        "kempner-7b-4",
        "automodel-gptoss-20b",
    ],
)
def test_the_command_plans_a_run_anew_and_writes_the_page(name, tmp_path, monkeypatch):
    others = {key: counted for key, counted in FIGURES.items() if key != name}
    (tmp_path / "published.json").write_text(json.dumps(others), encoding="utf-8")
    monkeypatch.setattr(published, "FIGURES", tmp_path / "published.json")
    page = published.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(published, "PAGE", tmp_path / "published.md")
    published.main(Namespace(names=[name]))
    assert published.read()[1] == FIGURES
    assert published.PAGE.read_text(encoding="utf-8") == page


# Of each: nodes, the billions of parameters in its name or card, and settings.
EXPERTS = "parallel.expert=8"
SHAPES = {
    "gpt-oss-120b": (1, 117, EXPERTS),  # sinks and windows
    "deepseek-v3": (16, 671, EXPERTS),  # latent attention
}


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_is_simulated_and_its_documents_are_told_apart(name):
    nodes, billions, settings = SHAPES[name]
    given = [f"model.path={CONFIGS / name}", "data.train=unread", "data.max_length=4096"]
    given += ["train.gradient_accumulation_steps=2", "model.activation_checkpointing=full"]
    plan = plan_of(f"--config /dev/null --nodes {nodes} {shlex.join(given)} {settings}")
    assert plan.reason == "" and plan.step_flops
    assert round(plan.parameters / 1e9) == billions
    config = load_config(REPOSITORY / "examples/demo.yaml", [*given, "model.init=random"], {})
    require_exact_copy(Layout.of(config), read_model_config(config.model))


def test_every_shape_has_a_source():
    lines = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in lines for name in SHAPES)


@pytest.mark.full
def test_a_type_of_its_own_is_planned_as_its_class_and_said(tmp_path, capsys):
    config = json.loads((CONFIGS / "kimi-k2/config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "n_routed_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan_run(_options(tmp_path, EXPERTS))
    printed = capsys.readouterr().out
    assert "Architecture: kimi_k2, read as deepseek_v3" in printed
    assert "bound from shapes" not in printed and "The run fits" in printed


def _options(folder: Path, *settings: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    given = [f"model.path={folder}", "data.train=unread", "data.max_length=512", *settings]
    arguments = ["--config", "/dev/null", "--nodes", "1", *given]
    (run,) = split_runs(parser.parse_intermixed_args(arguments))
    return run
