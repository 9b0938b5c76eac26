"""The tracker counts as PyTorch's own does, and short rows show what long ones take."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import packing_families
from helpers.built import build_on_meta, simulate
from helpers.moe_families import FAMILIES, SMALL
from helpers.planned import configured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig

from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import sharded_as
from shardtune.model import documents
from shardtune.model.documents.one_by_one import state_mixers
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.planner.arithmetic.figures import Cause
from shardtune.planner.simulation import simulate as simulation
from shardtune.planner.simulation.simulate import (
    Measured,
    Step,
    fake_world,
    full_batch,
    shorten_rows,
)
from shardtune.planner.simulation.tracker import Tracker
from shardtune.training.states.reshard import ReshardPolicy


@pytest.mark.parametrize(
    ("family", "assignment"),
    [
        ("llama", "model.activation_checkpointing=none"),
        ("qwen3_moe", "model.activation_checkpointing=full"),
        ("qwen3_moe", "lora.rank=4"),
    ],
)
def test_peaks_are_those_of_pytorchs_tracker(family, assignment):
    given = ["model.path=unread", "model.compute_dtype=bfloat16", "data.train=unread"]
    config = load_config(Path("/dev/null"), [*given, "data.max_length=64", assignment], {})
    model_config = AutoConfig.for_model(family, **SMALL | FAMILIES.get(family, {}))
    policy = ReshardPolicy(0, False)
    with fake_world(Layout.of(config, 4), 4) as world:
        ours = simulate(Step(config, policy, world), model_config)
        model = build_on_meta(config, model_config, world)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=world.device)
            model.tie_weights()
            model.set_attn_implementation("documents")
            use_loss_head(model, world.device)
            batch = full_batch(world.layout, True, world.device)
            with FSDPMemTracker(model) as theirs:
                policy.before_backward(model, is_last_micro_batch=True)
                with documents.of(batch):
                    summed_loss(model, batch).backward()
    peak = max(ours.peaks.values(), key=lambda each: each.n_bytes)
    snapshot = theirs.get_tracker_snapshot("peak")[world.device]
    found = {str(kind).rpartition(".")[2]: n_bytes for kind, n_bytes in snapshot.items()}
    rows = (batch.input_ids, batch.position_ids, batch.predicting, batch.targets, batch.boundaries)
    # They do not count the batch, and ours does.
    assert (
        0 <= peak.n_bytes - found["Total"] <= sum(each.nbytes for each in rows if each is not None)
    )
    assert peak.by_cause[Cause.PARAMETERS] == found["SHARDED_PARAM"] + found["BUFFER"]
    assert peak.by_cause[Cause.GATHERED] == found["UNSHARDED_PARAM"] + found["ALL_GATHER"]
    assert peak.by_cause[Cause.GRADIENTS] == found["SHARDED_GRAD"]
    assert peak.by_cause[Cause.REDUCED] == found["REDUCE_SCATTER"] + found["UNSHARDED_GRAD"]


def test_an_operator_that_dtensor_has_not_met_counts_its_shard_alone():
    config = load_config(Path("/dev/null"), ["model.path=unread", "data.train=unread"], {})
    tracker = Tracker()
    with (
        fake_world(Layout.of(config, 4), 4) as world,
        FakeTensorMode(),
        tracker.following(),
    ):
        shard = torch.zeros(1009, 3)  # a shape that no other test has: DTensor remembers it
        sharded = DTensor.from_local(shard, world.meshes.mesh, [Shard(0)], run_check=False)
        tracker.begin("backward", Cause.BACKWARD)
        sharded.exp()
        sharded_as(sharded, sharded.to_local())  # a part of a whole without contents
    assert tracker.peaks["backward", sys.maxsize].by_cause[Cause.BACKWARD] == 1009 * 3 * 4


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
    monkeypatch.setattr(simulation, "_TOKENS_OF_PIECE", 2 * _ROW)
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
