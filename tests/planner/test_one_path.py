"""A row of the table, `--config`, the API and a run plan the same mesh alike."""

import random
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

import pytest
from helpers.planned import GLM, LLAMA

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


def options_of(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*arguments])


@pytest.mark.parametrize(
    ("name", "values"),
    [  # ranks that share rows, and spread experts
        ("llama", {"parallel.context": 2, "model.activation_checkpointing": "full"}),
    ],
)
def test_a_drawn_mesh_has_one_plan_whoever_asks(name, values, tmp_path):
    MODELS[name].save_pretrained(tmp_path)
    given_keys = {
        "model.path": str(tmp_path),
        "model.init": "random",
        "data.train": "-",
        "data.max_length": 256,
    }
    config = load_config(given_keys | values, ["train.gradient_accumulation_steps=4"], {})
    machine = machine_of(options_of("--gpus-per-node", "4", "--nodes", "1"), config)
    # As rows of a table share them: nothing of the first mesh may be left in the second one.
    search = Search(bound_plan(config, MODELS[name], machine), Simulations(MODELS[name]))
    _, row = map(search._simulate, random.Random(1).sample(search._estimates({}, ""), 2))
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
