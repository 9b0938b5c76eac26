"""The planner: what a cut model shows of a whole one, and what a plan says."""

import copy
import gzip
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.built import simulate
from helpers.chats import chats, write_jsonl
from helpers.planned import (
    CONFIG,
    DEEP,
    GLM,
    GPT_OSS,
    LLAMA,
    MACHINE,
    STEPS,
    configured,
)
from transformers import AutoModelForCausalLM

from shardtune.__main__ import run
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.model.build import read_facts
from shardtune.model.source.quantised import piece_bytes
from shardtune.planner.arithmetic.figures import Cause, Collective
from shardtune.planner.arithmetic.machine import Machine, collective_bytes, link_bytes
from shardtune.planner.arithmetic.run_length import RunLength, run_length
from shardtune.planner.command.text import describe, verdict
from shardtune.planner.make_plan import _Planner, bound_plan, make_plan
from shardtune.planner.simulation.extrapolate import Simulations, cuts, extrapolate, with_layers
from shardtune.planner.simulation.simulate import Step, fake_world
from shardtune.training.states.reshard import ReshardPolicy

SHALLOW = with_layers(GLM, 2)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("d" + "m" * 45, (4, 5)),
        ("dd" + "m" * 44, (6, 7)),  # a dense layer must not stand where experts do in the other
        ("ddd" + "m" * 43, (8, 9)),
        ("m" * 32, (4, 5)),
        ("sssssf" * 5, (6, 12)),
        ("sssssf" * 4 + "ss", (8, 14)),
        ("abcdefgh", None),
        ("mmmm", None),
    ],
)
def test_a_cut_model_ends_as_the_whole_one_does(kinds, expected):
    assert cuts(kinds) == expected
    if expected:
        short, long = expected
        assert (len(kinds) - long) % (long - short) == 0
        assert kinds[short:long] == kinds[-(long - short) :]


@pytest.mark.parametrize(
    ("model_config", "assignments"),
    [
        (GLM, ["parallel.expert=4", "parallel.replicate=2"]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (GLM, ["lora.rank=8", "model.activation_checkpointing=selective"]),
                (DEEP, ["model.activation_checkpointing=none"]),
            )
        ),
    ],
)
def test_two_cut_models_show_the_peaks_and_the_traffic_of_the_whole_one(model_config, assignments):
    config, policy = configured(*assignments), ReshardPolicy(0, False)
    with fake_world(Layout.of(config, 8), 4) as world:
        lengths = cuts(read_facts(config, model_config, world.layout).layers)
        assert lengths
        short, long, whole = (
            simulate(Step(config, policy, world), with_layers(model_config, layers))
            for layers in (*lengths, model_config.num_hidden_layers)
        )
    extrapolated = extrapolate(short, long, model_config.num_hidden_layers)
    assert extrapolated.traffic == whole.traffic
    assert extrapolated.kernels == whole.kernels
    for phase in ("evaluate", "forward", "backward"):
        highest = [
            max(peak.n_bytes for (name, _), peak in measured.peaks.items() if name == phase)
            for measured in (extrapolated, whole)
        ]
        assert highest[0] == highest[1], phase
        pools = [
            max(n for (name, *_), n in measured.pools.items() if name == phase)
            for measured in (extrapolated, whole)
        ]
        assert pools[0] == pools[1], phase


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_a_world_of_one_keeps_what_its_run_keeps(reduce_dtype):
    """Its compute copies, and the gradients unless they are added up in another dtype."""
    machine = Machine(1, 1, 80e9, 1e9, 1e9, 1e12)
    plan = bound_plan(configured(f"model.reduce_dtype={reduce_dtype}"), LLAMA, machine)
    assert plan.policies[0] == ReshardPolicy(1 + LLAMA.num_hidden_layers, reduce_dtype == "float32")


@pytest.mark.parametrize(
    ("kind", "ranks_of_nodes", "backend", "into_a_node", "into_a_rank"),
    [
        # 48 bytes, or 12 for each of 4 ranks: a ring hands on every part but its last stop's.
        ("all-gather", [2, 2], "nccl", 36, 36),
        ("all-gather", [2, 2], "gloo", 36, 36),
        ("reduce-scatter", [2, 2], "nccl", 36, 36),
        ("reduce-scatter", [2, 2], "gloo", 72, 72),  # of gloo an all-reduce
        ("all-reduce", [2, 2], "nccl", 72, 72),
        ("all-reduce", [2, 2], "gloo", 72, 72),
        ("all-to-all", [2, 2], "nccl", 48, 12),  # 12 from each of 2 ranks to each of 2
        ("all-gather", [1, 1], "nccl", 24, 0),
        ("all-reduce", [1, 1], "nccl", 48, 0),
        ("reduce-scatter", [4], "nccl", 0, 36),
        ("send", [1, 1], "nccl", 48, 0),
        ("send", [2], "gloo", 0, 48),
    ],
)
def test_a_collective_moves_as_much_as_its_ring(
    kind, ranks_of_nodes, backend, into_a_node, into_a_rank
):
    moved = collective_bytes(kind, 48, ranks_of_nodes, backend)
    assert moved == (into_a_node, into_a_rank)


def test_links_carry_what_leaves_a_node_and_what_passes_through_a_rank():
    machine = Machine(2, 8, 1, 1, 1, 1)
    everyone, node, pair = tuple(range(16)), tuple(range(8)), (0, 8)
    traffic = {
        Collective("all-gather", everyone): 16,
        Collective("reduce-scatter", node): 8,
        Collective("all-reduce", pair): 10,
        Collective("all-to-all", everyone): 32,
        Collective("send", pair): 3,
    }
    between, inside = link_bytes(traffic, machine, 8)
    assert between == {
        "all-gather": 15,  # one ring enters the node once
        "reduce-scatter": 0,
        "all-reduce": 80,  # each rank of a node sends its own, and gets the sum
        "all-to-all": 128,  # of each rank's 32, 16 go to the other node
        "send": 24,
    }
    received = {"all-gather": 15, "reduce-scatter": 7, "all-reduce": 0, "all-to-all": 14, "send": 0}
    assert inside == received


@pytest.mark.parametrize(
    ("model_config", "assignments", "attention"),
    [
        pytest.param(GPT_OSS, [], "within each document, without a mask", marks=pytest.mark.full),
        (SHALLOW, ["model.compute_dtype=float32"], "within each document, without a mask"),
        (
            with_layers(LLAMA, 2),
            ["data.packing=false", "model.attention=sdpa"],
            "sdpa under a mask of row x row, up to 256 tokens a side (model.attention=sdpa)",
        ),
    ],
)
def test_a_step_under_a_mask_or_in_float32_is_simulated(model_config, assignments, attention):
    plan = make_plan(configured(*assignments), model_config, MACHINE)
    assert attention in plan.attention
    assert not plan.reason


@pytest.mark.full
def test_what_stays_gathered_takes_half_of_what_is_left():
    """A step that keeps as many groups sends what the plan counts, and takes no more memory."""
    settings = ["parallel.expert=4", "data.max_length=64", *STEPS]
    config, model_config = configured(*settings), with_layers(GLM, 4)
    machine = replace(MACHINE, memory_bytes=5.848e9)
    plan = make_plan(config, model_config, machine)
    layers, layers_with_experts = 4, 3
    (kept,) = plan.kept_groups
    assert 1 + layers < kept < 1 + layers + layers_with_experts
    assert plan.needed_bytes < plan.peak_bytes
    assert plan.peak_bytes - plan.needed_bytes <= (machine.memory_bytes - plan.needed_bytes) / 2
    with fake_world(Layout.of(config, 8), 4) as world:
        measured = simulate(Step(config, plan.policies[0], world), model_config)
    assert plan.traffic == (measured.step_traffic(4),)
    for phase in ("evaluate", "forward", "backward"):
        simulated = max(peak.n_bytes for (name, _), peak in measured.peaks.items() if name == phase)
        planned = plan.peaks[phase].n_bytes - plan.states.optimizer
        # The layer that computes, and the next one, are counted twice where they stay gathered.
        assert simulated <= planned < 1.15 * simulated, phase
    assert f"Gathered once a step, since memory is left: {kept} groups" in "".join(describe(plan))


@pytest.mark.full
def test_experts_that_are_not_shared_do_not_stay_gathered():
    """They would be copied once instead of in each pass, and travel in neither case."""
    machine, model_config = replace(MACHINE, memory_bytes=5.8425e9), with_layers(GLM, 4)
    config = configured("parallel.expert=8", "data.max_length=64", *STEPS)
    plan = make_plan(config, model_config, machine)
    assert plan.kept_groups == [1 + model_config.num_hidden_layers]


def test_the_run_takes_as_many_hours_as_its_steps(models, tmp_path, capsys):
    data = write_jsonl(tmp_path / "train.jsonl", chats(40))
    given = [f"model.path={models['llama']}", "data.max_length=64"]
    given += ["data.packing=false", "data.eval=null", "train.epochs=3", "train.max_steps=null"]
    given += ["train.micro_batch_size=1", "train.gradient_accumulation_steps=2"]
    machine = ["--nodes", "1", "--gpus-per-node", "2"]
    # As a pair of ranks shares rows, a step has half of them: 40 rows in steps of 1 (micro-batch) x
    # 2 (accumulation) x 1 (pair).
    arguments = [*given, *machine, f"data.train={data}", "parallel.context=2"]
    assert run(["plan", "--config", str(CONFIG), *arguments]) == 0
    hours = r"The run takes at least \S+ h, about \S+ h: 60 steps, [\d,]+ tokens"
    assert re.search(hours, capsys.readouterr().out)
    plan = bound_plan(configured(), LLAMA, MACHINE)
    with data.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    for file, words in (
        ("none.jsonl", "1e9 tokens take at least"),
        (data.name, "train.jsonl:41: "),
    ):
        config = load_config(CONFIG, [*given, f"data.train={tmp_path / file}"], {})
        assert words in "\n".join(describe(plan, run_length(config, Layout.of(config, 2))))


@pytest.mark.parametrize(
    "suffix", [".gz", *(pytest.param(each, marks=pytest.mark.full) for each in ("", ".parquet"))]
)
def test_a_sample_stands_for_as_many_records_as_are_read(suffix, models, tmp_path):
    draw = random.Random(0)
    sizes = range(500, 3500) if suffix == ".parquet" else [1000] * 3000
    records = [{"text": draw.randbytes(size).hex()} for size in sizes]
    data = write_jsonl(tmp_path / "train.jsonl", records)
    if suffix == ".parquet":  # which knows its rows, long ones at the end
        data = data.with_suffix(suffix)
        pq.write_table(pa.Table.from_pylist(records), data)
    elif suffix:
        data = Path(f"{data}.gz")
        data.write_bytes(gzip.compress(data.with_suffix("").read_bytes()))
    given = [f"model.path={models['llama']}", "data.max_length=64", "data.packing=false"]
    given += ["data.overflow=truncate", "data.eval=null", "train.epochs=1"]
    given += ["train.micro_batch_size=1", "train.gradient_accumulation_steps=2"]
    for most, weight, records_read in ((1200, 1, 1200), ("null", 0.5, 1500)):
        source = f"data.train=[{{path: {data}, max_records: {most}, weight: {weight}}}]"
        config = load_config(CONFIG, [*given, source], {})
        found = run_length(config, Layout.of(config, 2))
        assert isinstance(found, RunLength) and not found.is_counted
        assert found.steps == pytest.approx(records_read / 4, rel=0.02)
        assert found.tokens == pytest.approx(records_read * 64, rel=0.02)


def test_loading_takes_a_piece_of_quantised_weights_beside_the_slice(tmp_path):
    """Each of 8 ranks of a node dequantises its slice in float32, the dtype of masters."""
    sizes = []
    for quantization in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        values = LLAMA.to_dict() | quantization
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        given = (f"model.path={tmp_path}", "model.init=pretrained", "model.master_dtype=float32")
        config = configured(*given)
        model_config = copy.deepcopy(LLAMA)
        model_config.dtype = torch.bfloat16
        plan = bound_plan(config, model_config, Machine(1, 8, 80e9, 1, 1, 1))
        sizes.append(plan.storage.loading_bytes)
    plain, quantised = sizes
    assert quantised == plain * 8 // 6 + 8 * piece_bytes(tmp_path)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_all_nodes_together_copy_what_one_checkpoint_has(replicas):
    config = configured(f"parallel.replicate={replicas}", "checkpoint.mode=async")
    storage = bound_plan(config, LLAMA, Machine(2, 4, 80e9, 1, 1, 1)).storage
    assert 2 * storage.staging_bytes == pytest.approx(storage.checkpoint_bytes, rel=0.01)


@pytest.mark.parametrize("lora", [[], ["lora.rank=8"]])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_run_takes_the_planned_disk_and_hours(lora, stages):
    given = [f"parallel.stages={stages}", "train.gradient_accumulation_steps=6"]
    config = configured(*lora, *given)
    plan = bound_plan(config, LLAMA, Machine(1, 2 * stages, 80e9, 1e30, 1e30, 1e12))
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    trained = model.num_parameters()
    if lora:
        layers = [each for each in model.model.modules() if isinstance(each, torch.nn.Linear)]
        trained = sum(8 * (each.in_features + each.out_features) for each in layers)
    # Weights and two moments of float32, beside the number of each weight's step.
    assert plan.storage.checkpoint_bytes == pytest.approx(12 * trained, rel=0.01)
    # The first micro-batch passes the stages before the last one, too.
    assert plan.step_flops and plan.floor_s == pytest.approx(
        plan.step_flops / 2e12 / stages * (6 + stages - 1) / 6
    )
    said = "\n".join(describe(plan, RunLength(9, 9, True)))
    (hours,) = re.findall(r"at least (\S+) h: 9 steps", said)
    assert float(hours) == pytest.approx(9 * plan.floor_s / 3600, rel=0.01)


def test_a_node_must_hold_the_inputs_of_its_ranks_layers():
    given = "model.activation_checkpointing=offload", "train.gradient_accumulation_steps=2"
    given += "data.max_length=1000", "model.compute_dtype=bfloat16"
    config = configured(*given)
    needed = 4 * LLAMA.num_hidden_layers * 1000 * LLAMA.hidden_size * 2  # 4 ranks
    for host_bytes, fits in ((needed, True), (needed - 1, False)):
        plan = bound_plan(config, LLAMA, replace(MACHINE, host_bytes=host_bytes))
        assert (plan.fits, not plan.cannot_fit) == (fits, fits)
        assert ("0.0 GB of layers' inputs" in verdict(plan)) is not fits
    # Two micro-batches are in flight in the first of two stages, with half of the layers each.
    config = configured(*given, "parallel.stages=2")
    assert bound_plan(config, LLAMA, MACHINE).storage.inputs_bytes == needed


def test_a_node_must_hold_the_states_that_its_gpus_do_not():
    config = configured("optimizer.offload=true", "model.compute_dtype=bfloat16")
    plan = bound_plan(config, LLAMA, MACHINE)
    numel = plan.parameters // MACHINE.ranks  # of a rank
    assert plan.states.parameters == pytest.approx(2 * numel, rel=1e-3)
    assert plan.states.optimizer < 1e4  # the numbers of steps
    layer = (numel - 2001 * LLAMA.hidden_size / MACHINE.ranks) / LLAMA.num_hidden_layers
    assert plan.states.gradients == pytest.approx(2 * 4 * layer, rel=1e-3)  # one leaves, one comes
    needed = plan.storage.states_bytes
    assert needed == pytest.approx(16 * numel * MACHINE.ranks_per_node, rel=1e-3)
    copied = [each / numel for each in (*plan.host_link.gradients, *plan.host_link.update)]
    assert copied == pytest.approx([4, 0, 12, 16], rel=1e-3)
    assert plan.floors_s["with host memory"] == plan.host_link.seconds(MACHINE) > 0
    short = bound_plan(config, LLAMA, replace(MACHINE, host_bytes=needed - 1))
    assert short.cannot_fit and "gradients (optimizer.offload=true)" in verdict(short)
    # One checkpoint is as large as without, and copies of it have no room.
    without = bound_plan(configured("model.compute_dtype=bfloat16"), LLAMA, MACHINE)
    assert plan.storage.checkpoint_bytes == without.storage.checkpoint_bytes
    full = bound_plan(config, LLAMA, replace(MACHINE, host_bytes=needed))
    assert full.fits and "saves are synchronous" in "".join(describe(full))
    # A CPU has no other memory, and adapters have small states.
    on_cpu = replace(MACHINE, is_gpu=False)
    assert bound_plan(config, LLAMA, on_cpu).states.host == 0
    adapted = configured("optimizer.offload=true", "lora.rank=4")
    assert bound_plan(adapted, LLAMA, MACHINE).states.host == 0


def test_a_recomputed_forward_takes_a_third_more_time_but_for_the_head():
    plain, full = (
        bound_plan(configured(f"model.activation_checkpointing={name}"), LLAMA, MACHINE)
        for name in ("none", "full")
    )
    assert full.step_flops == plain.step_flops
    more_s = full.floors_s["arithmetic"] - plain.floors_s["arithmetic"]
    layout, head = full.layout, 2 * LLAMA.vocab_size * LLAMA.hidden_size
    trained = layout.rows_per_step * (layout.max_length - 1)
    forward = full.step_flops / 3 - head * trained
    assert more_s == pytest.approx(forward / (MACHINE.ranks * MACHINE.flops_per_s))


def test_an_update_holds_weights_gradients_and_moments():
    plan = make_plan(configured("data.max_length=32"), with_layers(LLAMA, 2), MACHINE)
    assert plan.peaks["optimizer"].n_bytes >= plan.states.total
    assert plan.peaks["load"].n_bytes == plan.states.parameters


def test_the_most_loaded_rank_of_the_experts_has_more_tokens_than_the_mean():
    config = configured("parallel.expert=4", "train.gradient_accumulation_steps=1")
    cut, policy = SHALLOW, ReshardPolicy(0, False)
    with fake_world(Layout.of(config, 4), 4) as world:
        even, uneven = (
            simulate(Step(config, policy, world, imbalance=factor), cut) for factor in (1.0, 2.0)
        )
    assert even.traffic == uneven.traffic
    highest = [max(peak.n_bytes for peak in measured.peaks.values()) for measured in (even, uneven)]
    # A layer's experts see 256 tokens x 4, in both widths, and keep what they make of them.
    assert highest[1] - highest[0] > 256 * 4 * (256 + 2 * 128) * 2


@pytest.mark.parametrize("vocabulary", [1000, 152_000])
def test_chunks_of_logits_and_the_workspace_of_attention_are_those_of_the_device(vocabulary):
    """Of 4096 tokens of 152,000 words a GPU has all logits at once, and a CPU 0.27 GB."""
    model_config = with_layers(LLAMA, 2)
    model_config.vocab_size = vocabulary
    gpu, cpu = (
        make_plan(configured("data.max_length=4096"), model_config, machine).peaks
        for machine in (MACHINE, replace(MACHINE, is_gpu=False))
    )
    if vocabulary > 1000:
        row = 2 * vocabulary
        more = (4095 - (1 << 28) // row) * row
        assert gpu["evaluate"].n_bytes - cpu["evaluate"].n_bytes == more
    else:  # attention has the peak of the backward
        sums = -(-132 // 8) * (4096 + 128) * 8 * 32 * 4
        mine, other = (peaks["backward"].by_cause[Cause.BACKWARD] for peaks in (gpu, cpu))
        assert other < sums < mine < 1.2 * sums


def test_each_further_micro_batch_sends_as_much():
    def sent(micro_batches: int) -> int:
        config = configured(f"train.gradient_accumulation_steps={micro_batches}")
        with fake_world(Layout.of(config, 4), 4) as world:
            cut, policy = with_layers(LLAMA, 2), ReshardPolicy(0, False)
            return simulate(Step(config, policy, world), cut).step_traffic(micro_batches).total()

    two, three, four = map(sent, (2, 3, 4))
    assert four - three == three - two > 0


def test_a_stage_in_the_middle_is_planned_as_the_first_one_there_that_is_alike():
    """With the ranks of its own groups."""
    config = configured("parallel.stages=4", "train.gradient_accumulation_steps=4")
    plan = bound_plan(config, DEEP, MACHINE)
    with fake_world(MACHINE.layout(config), MACHINE.ranks_per_node, stage=2) as world:
        own = _Planner(config, MACHINE, Simulations(DEEP), is_bound=True).stage(world)
    assert plan.traffic[2] == own.traffic[0] != plan.traffic[1]
