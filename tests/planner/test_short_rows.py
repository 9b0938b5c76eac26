"""Gated delta rules of a simulated step: what long rows take shows in short ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers import packing_families
from helpers.planned import configured

from shardtune.distributed.layout import Layout
from shardtune.model.documents.state_layers import state_mixers
from shardtune.planner.simulation import short_rows
from shardtune.planner.simulation.short_rows import shorten_rows
from shardtune.planner.simulation.simulate import Measured, Step, fake_world, simulate
from shardtune.training.states.reshard import ReshardPolicy

_ROW = 512


@pytest.fixture(scope="module")
def delta_rule() -> Any:
    """Its heads are as wide as those of large models."""
    config = copy.deepcopy(packing_families.build("qwen3_next").config)
    config.max_position_embeddings = 2 * _ROW
    config.linear_key_head_dim = config.linear_value_head_dim = 128
    return config


def step(model_config: Any, *assignments: str) -> Measured:
    config = configured("parallel.expert=1", *assignments)
    with fake_world(Layout.of(config, 4, is_gpu=True), 4) as world:
        return simulate(Step(config, ReshardPolicy(0, False), world), model_config)


def n_kernels(measured: Measured) -> int:
    return sum(each.total() for each in measured.kernels)


@pytest.mark.full
@pytest.mark.parametrize("rows", ["", "data.packing=false"])
def test_gated_delta_rules_keep_as_much_of_short_rows(delta_rule, rows, monkeypatch):
    given = f"data.max_length={_ROW}", "train.micro_batch_size=2", *filter(None, [rows])
    short = step(delta_rule, *given)
    monkeypatch.setattr(short_rows, "_TOKENS_OF_PIECE", 2 * _ROW)
    whole = step(delta_rule, *given)
    assert short.peaks.keys() == whole.peaks.keys()
    highest = [max(peak.n_bytes for peak in each.peaks.values()) for each in (short, whole)]
    assert highest[0] == pytest.approx(highest[1], rel=0.001)
    for key, peak in whole.peaks.items():
        # More than one chunk is computed at a time.
        assert 0.99 * peak.n_bytes < short.peaks[key].n_bytes < 1.15 * peak.n_bytes, key
    assert short.traffic == whole.traffic
    assert n_kernels(short) < n_kernels(whole)


@pytest.mark.parametrize(
    ("architecture", "are_cut"), [("qwen3_next", True), ("kimi_linear", False)]
)
def test_rows_stay_where_each_channel_has_a_decay(architecture, are_cut):
    """Of short ones Kimi Linear would hold up to 4% less."""
    mixers = state_mixers(packing_families.build(architecture))
    shorten_rows(mixers)
    assert mixers and {"forward" in vars(mixer) for mixer in mixers} == {are_cut}
