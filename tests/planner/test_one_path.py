"""A row of the table, `--config`, the API and a run plan the same mesh alike."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.planned import GLM, LLAMA
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import shardtune
from shardtune.config_io import load_config, to_dict
from shardtune.planner.arithmetic.figures import Cause
from shardtune.planner.command.options import add_arguments
from shardtune.planner.command.plan_command import machine_of
from shardtune.planner.command.text import verdict
from shardtune.planner.make_plan import bound_plan
from shardtune.planner.run_plan import _predict_in_process, as_prediction
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations

MODELS = {"llama": LLAMA, "glm": GLM}
# Each draw is one of the meshes of these runs.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"lora.rank": 4}),
    ("llama", {"parallel.context": 2, "model.activation_checkpointing": "full"}),
    ("glm", {}),
    ("glm", {"lora.rank": 4, "model.activation_checkpointing": "selective"}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        model.save_pretrained(folder / name)
    return {name: folder / name for name in MODELS}


def options_of(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*arguments])


SHARED = {name: Simulations(model) for name, model in MODELS.items()}  # as rows of a table share


@pytest.mark.parametrize("number", [3, pytest.param(12, marks=pytest.mark.full)])
def test_a_drawn_mesh_has_one_plan_whoever_asks(number, folders):
    @settings(max_examples=number, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def plan_alike(data: st.DataObject) -> None:
        name, values = data.draw(st.sampled_from(KINDS))
        given_keys = {
            "model.path": str(folders[name]),
            "model.init": "random",
            "data.train": "-",
            "data.max_length": 256,
        }
        config = load_config(given_keys | values, ["train.gradient_accumulation_steps=4"], {})
        machine = machine_of(options_of("--gpus-per-node", "4", "--nodes", "1"), config)
        search = Search(bound_plan(config, MODELS[name], machine), SHARED[name])
        row = search._simulate(data.draw(st.sampled_from(search._estimates({}, ""))))
        assert row and row.is_simulated
        own = row.config
        asked = shardtune.plan(to_dict(own), nodes=1, gpus_per_node=4)
        assert (asked.fits, asked.verdict, asked.peak_bytes) == (
            row.fits,
            verdict(row),
            row.peak_bytes,
        )
        assert (asked.step_seconds, asked.about_seconds) == (row.floor_s, row.about_s)
        assert asked.memory == [
            {"phase": phase, "total": peak.n_bytes} | {f"{c}": peak.by_cause[c] for c in Cause}
            for phase, peak in row.peaks.items()
        ]
        request = {"config": to_dict(own), "machine": asdict(machine), "is_resumed": False}
        assert _predict_in_process(request) == as_prediction(row)

    plan_alike()
