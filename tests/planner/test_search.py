"""The search of the fastest mesh that fits: by arithmetic, then by at most four simulations."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY
from transformers import (
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)

from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.command.text import describe, describe_room, lacking
from shardtune.planner.make_plan import bound_plan, make_plan
from shardtune.planner.mesh import ADAPTERS, launch_command, same_training, with_values
from shardtune.planner.plan import Plan
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations

CONFIGS = REPOSITORY / "tests/data/configs"
WIDE = {
    "max_position_embeddings": 65536,
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LLAMA = LlamaConfig(**WIDE, intermediate_size=16384)
DENSE = LlamaConfig(**WIDE | {"num_key_value_heads": 8}, intermediate_size=16384)
GLM = Glm4MoeConfig(
    **WIDE,
    intermediate_size=2048,
    moe_intermediate_size=1024,
    n_routed_experts=16,
    num_experts_per_tok=2,
)
MESH = {f"parallel.{key}" for key in ("stages", "replicate", "expert", "context", "tensor")}
MESH |= {"train.micro_batch_size", "train.gradient_accumulation_steps"}
NARROW_LINK, WIDE_LINK = 1e8, 1e13


def configured(*assignments: str) -> Config:
    given = ["model.path=unread", "data.train=unread", "model.compute_dtype=bfloat16"]
    given += ["data.max_length=64", "model.activation_checkpointing=full"]
    return load_config(Path("/dev/null"), [*given, *assignments], {})


def machine(memory_bytes: float, node_bytes_per_s: float = NARROW_LINK) -> Machine:
    return Machine(2, 4, memory_bytes, node_bytes_per_s, 1e12, 1e14)


def searched(
    config: Config, model_config: PreTrainedConfig, machine: Machine
) -> tuple[Plan, list[Plan], int]:
    """Return the plan, the changes found and how many plans were simulated for them."""
    said: list[str] = []
    plan = make_plan(config, model_config, machine)
    return plan, Search(plan, Simulations(model_config), say=said.append).changes(), len(said)


@pytest.mark.full
def test_on_a_narrow_link_the_fastest_mesh_is_one_of_stages():
    config = configured("train.gradient_accumulation_steps=4", "parallel.expert=4")
    plan, (change,), simulated = searched(config, GLM, machine(40e9))
    assert simulated == 1
    assert change.values["parallel.stages"] == 2
    assert change.fits and change.step_tokens == plan.step_tokens
    assert change.floor_s < plan.floor_s / 4
    # By arithmetic alone it is named, too, with the seconds that the simulation gives.
    search = Search(plan, Simulations(GLM))
    fastest = search.much_faster_mesh()
    assert fastest and fastest.values == change.values
    assert fastest.floors_s == pytest.approx(change.floors_s, rel=0.02)
    assert search.configured.floors_s == pytest.approx(plan.floors_s, rel=0.02)
    # Nothing is faster than the fastest one.
    again = bound_plan(change.config, GLM, machine(40e9))
    assert Search(again, Simulations(GLM)).changes() == []
    assert Search(again, Simulations(GLM)).much_faster_mesh() is None


@pytest.mark.full
def test_no_mesh_that_fits_is_faster_than_the_one_that_is_named():
    """Those that shapes alone show to be slower by half are not simulated."""
    config = configured("train.gradient_accumulation_steps=2", "parallel.expert=4")
    plan, changes, _ = searched(config, GLM, machine(5e9, 5e9))
    best = changes[0] if changes else plan
    for stages, replicate, expert in (
        (stages, replicate, expert)
        for stages in (1, 2)
        for replicate in (1, 2, 4, 8)
        for expert in (1, 2, 4, 8)
        if stages * replicate * expert <= 8
    ):
        mesh = [f"parallel.stages={stages}", f"parallel.replicate={replicate}"]
        mesh.append(f"parallel.expert={expert}")
        mesh.append(f"train.gradient_accumulation_steps={2 * stages}")
        asked = configured(*mesh), GLM, machine(5e9, 5e9)
        if bound_plan(*asked).floor_s < 1.5 * best.floor_s:
            other = make_plan(*asked)
            assert not other.fits or best.floor_s < 1.06 * other.floor_s, mesh


def test_a_run_that_no_mesh_fits_gets_the_fewest_settings_and_their_price():
    config = configured("train.gradient_accumulation_steps=2")
    whole = LlamaConfig(**WIDE | {"num_key_value_heads": 1}, intermediate_size=16384)
    plan, changes, simulated = searched(config, whole, machine(3.34e9))  # no ranks share matrices
    assert not plan.fits
    assert simulated == 4
    found = Search(plan, Simulations(whole))._estimates({}, "")
    assert any(each.fits for each in found), "by arithmetic alone it is not offered"
    settings = [set(change.values) - MESH for change in changes]
    assert settings and all(len(keys) == 1 for keys in settings)
    for change in changes:
        assert change.fits and change.price
        assert change.step_tokens == plan.step_tokens
    seconds = [change.floor_s for change in changes]
    assert seconds == sorted(seconds)


ODD = LlamaConfig(**WIDE | {"num_key_value_heads": 8}, intermediate_size=1280)
TENSOR = "data.max_length=16384 parallel.tensor=4 train.gradient_accumulation_steps=8"


@pytest.mark.parametrize(
    ("model_config", "given", "degrees"),
    [
        (DENSE, "data.max_length=64", {1, 2, 4}),
        (DENSE, "data.max_length=8192", {1}),  # each block would wait for its long row
        (DENSE, TENSOR, {1}),  # ranks share such rows and no matrices
        (ODD, "optimizer.name=adamw", {1, 2, 4}),
        (ODD, "optimizer.name=adamw8bit", {1}),  # two ranks would cut five blocks of 256
    ],
)
def test_ranks_of_a_node_are_offered_to_cut_what_they_can(model_config, given, degrees):
    config = configured("train.gradient_accumulation_steps=2", *given.split())
    plan = bound_plan(config, model_config, machine(1e12, WIDE_LINK))
    layouts = [each.layout for each in Search(plan, Simulations(model_config))._estimates({}, "")]
    assert {layout.tensor for layout in layouts} == degrees
    assert {layout.rows_per_step for layout in layouts} == {plan.layout.rows_per_step}
    assert given != TENSOR or {layout.context for layout in layouts} == {4}


@pytest.mark.full
def test_ranks_share_long_rows_before_these_are_halved():
    """As many more micro-batches keep the rows of a step."""
    more = ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"]
    more.append("model.reduce_dtype=bfloat16")
    config = configured("data.max_length=12288", "train.gradient_accumulation_steps=2", *more)
    wide = LlamaConfig(**WIDE, intermediate_size=65536)
    plan, (change,), _ = searched(config, wide, machine(13e9, WIDE_LINK))
    assert not plan.fits and change.fits
    values = change.values
    assert values["train.gradient_accumulation_steps"] == 2 * values["parallel.context"]
    assert values.keys() <= MESH
    assert change.step_tokens == plan.step_tokens
    assert f"parallel.context={values['parallel.context']}" in launch_command(change, [])


def test_a_model_whose_rows_ranks_cannot_share_is_not_offered_that():
    """GPT-J attends under a mask, and Mamba keeps a state."""
    config = configured("data.max_length=2048", "train.gradient_accumulation_steps=2")
    small = {"vocab_size": 100, "hidden_size": 64}
    gptj = GPTJConfig(**small, n_head=4, n_layer=2, rotary_dim=4)
    mamba = MambaConfig(**small, num_hidden_layers=2)
    offered = []
    for model_config in (LLAMA, gptj, mamba):
        plan = bound_plan(config, model_config, machine(1e6))
        groups = same_training(plan.layout, plan.shapes, plan.machine)
        shared = [v for group in groups for v, _ in group if "parallel.context" in v]
        for values in shared:  # a step has as many rows
            assert values["train.gradient_accumulation_steps"] == 2 * values["parallel.context"]
        offered.append(
            bool(shared) and Search(plan, Simulations(model_config))._is_exact("context")
        )
    assert offered == [True, False, False]


@pytest.mark.full
def test_states_go_to_host_memory_before_less_is_trained():
    """On one GPU that holds neither them nor those of fewer digits."""
    of_one = replace(machine(6e9), nodes=1, ranks_per_node=1)
    deep = LlamaConfig(**WIDE | {"num_hidden_layers": 8}, intermediate_size=16384)
    plan, (change,), _ = searched(configured(), deep, of_one)
    assert not plan.fits
    assert change.fits and change.values == {"optimizer.offload": True}
    assert change.storage.states_bytes == pytest.approx(16 * plan.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "back"),
    [
        ("optimizer.offload=true", {"optimizer.offload": False}),
        ("model.activation_checkpointing=offload", {"model.activation_checkpointing": "full"}),
    ],
)
def test_where_host_memory_is_short_what_it_holds_goes_back(given, back):
    config = configured(given, "train.gradient_accumulation_steps=2", "parallel.replicate=2")
    plan = bound_plan(config, LLAMA, replace(machine(1e12), host_bytes=1e5))
    search = Search(plan, Simulations(LLAMA))
    changes = search.changes()
    (pinned,) = (line for line in describe(plan) if line.startswith("Pinned"))
    assert not plan.host_fits and "do not hold" in pinned
    assert search._estimates({}, "") == []  # no simulation goes to what a node cannot hold
    offered = [{k: n for k, n in each.values.items() if k not in MESH} for each in changes]
    assert back in offered
    for each in changes:
        assert each.fits and not each.storage.pinned_bytes
    # A node's part of layers' inputs is the same on more nodes.
    host = "more host memory" + " or nodes" * (given == "optimizer.offload=true")
    assert lacking(plan) == host
    smaller = bound_plan(config, LLAMA, replace(plan.machine, memory_bytes=1e6))
    assert lacking(smaller) == f"{host}, and more or larger GPUs"


@pytest.mark.parametrize("replicate", [1, 4])
@pytest.mark.parametrize("stages", [1, 2])
def test_host_memory_by_arithmetic_is_that_of_the_plan(stages, replicate):
    """Else the few simulations would go to meshes that a node cannot hold."""
    mesh = [f"parallel.stages={stages}", f"parallel.replicate={replicate}"]
    more = [*mesh, "train.gradient_accumulation_steps=4", "optimizer.offload=true"]
    config = configured(*more, "model.activation_checkpointing=offload", "data.max_length=4096")
    plan = bound_plan(config, GLM, machine(80e9))
    held = plan.storage.states_bytes + plan.storage.inputs_bytes
    assert Search(plan, Simulations(GLM)).configured.pinned_bytes == pytest.approx(held, rel=0.02)


def test_the_fewest_nodes_that_hold_a_large_model_are_said():
    deep = LlamaConfig(**WIDE | {"num_hidden_layers": 64}, intermediate_size=16384)
    plan = bound_plan(configured(), deep, machine(5.2e9))
    assert plan.states.total > plan.machine.memory_bytes
    search = Search(plan, Simulations(deep))
    found = search.fewest_nodes()
    assert found and found.peak_bytes <= 0.95 * 5.2e9
    nodes = found.machine.nodes
    assert [n for n in range(2, nodes + 1) if search._on_nodes(n)] == [nodes]
    more = search.fewest_nodes(more_than=nodes)
    assert more and more.machine.nodes > nodes
    *_, head, fits, never = describe_room(plan, {"all weights": found, "adapters": None})
    assert head.split()[:3] == ["trained", "from", "nodes"]
    assert fits.split()[:3] == ["all", "weights", f"{nodes}"] and "parallel.stages=" in fits
    assert never.split() == ["adapters", "-", "-", "-"]
    too_small = replace(plan, machine=machine(2.5e9))  # the device takes that itself
    assert Search(too_small, Simulations(deep)).fewest_nodes() is None


def test_nodes_are_counted_for_layers_that_keep_their_inputs_alone():
    """With all activations of these rows it fits on no number of them."""
    config = configured("model.activation_checkpointing=none", "data.max_length=4096")
    deep = LlamaConfig(**WIDE | {"num_hidden_layers": 24}, intermediate_size=4096)
    plan = bound_plan(config, deep, machine(6e9))
    found = Search(plan, Simulations(deep)).fewest_nodes()
    assert found and found.values["model.activation_checkpointing"] == "full"


def test_where_another_mesh_fits_no_setting_changes():
    config = configured("train.gradient_accumulation_steps=2", "parallel.replicate=8")
    plan, (change,), _ = searched(config, LLAMA, machine(3.445e9))
    assert not plan.fits
    assert change.fits and not change.price
    assert change.values.keys() <= MESH and change.values["parallel.replicate"] == 1


def test_a_much_faster_run_with_one_more_setting_goes_before_a_mesh_that_fits():
    """Ranks that share matrices hold it by slow links, full checkpointing with them idle."""
    config = configured("model.activation_checkpointing=none", "data.max_length=2048")
    deep = LlamaConfig(
        **WIDE | {"num_hidden_layers": 4, "num_key_value_heads": 8}, intermediate_size=4096
    )
    config = with_values(config, {"train.gradient_accumulation_steps": 4})
    plan = make_plan(config, deep, Machine(2, 4, 3.25e9, 2e9, 2e9, 1e14))
    fastest, *_, mesh = Search(plan, Simulations(deep)).changes()
    assert not plan.fits and fastest.fits and mesh.fits
    assert fastest.values["model.activation_checkpointing"] == "full" and not mesh.price
    assert fastest.floor_s < mesh.floor_s / 1.5


def test_an_architecture_that_cannot_be_cut_is_offered_no_stages():
    """GPT-2 adds positions to what its embedding gives."""
    config = configured("train.gradient_accumulation_steps=4")
    faster = []
    for model_config in (LLAMA, GPT2Config(n_layer=2, n_embd=1024, n_head=8, n_inner=16384)):
        plan = bound_plan(config, model_config, machine(40e9))
        faster.append(Search(plan, Simulations(model_config)).much_faster_mesh())
    assert faster[0] and faster[0].config.parallel.stages == 2
    assert faster[1] is None


def test_a_resumed_run_is_offered_only_keys_that_it_may_change():
    config = configured("train.gradient_accumulation_steps=2")
    simulations = Simulations(LLAMA)
    plan = make_plan(config, LLAMA, machine(2.92e9), simulations)
    changes = Search(plan, simulations, lambda key: key in ADAPTERS).changes()
    assert [change.values for change in changes] == [ADAPTERS]


def test_a_command_keeps_what_was_given_and_names_the_whole_mesh():
    config = configured("parallel.expert=4", "train.gradient_accumulation_steps=4")
    given = ["--config=my run.yaml", "optimizer.lr=1e-4", "parallel.replicate=2"]
    values = {"parallel.stages": 2, "parallel.replicate": 1}
    plan = bound_plan(config, GLM, Machine(2, 8, 1, 1, 1, 1))
    changed = replace(plan, config=with_values(config, values), values=values)
    assert launch_command(changed, given) == (
        "./launch_node0.sh '--config=my run.yaml' optimizer.lr=1e-4 parallel.stages=2 "
        "parallel.replicate=1 parallel.expert=4 train.gradient_accumulation_steps=4"
    )
    one_node = launch_command(replace(plan, machine=Machine(1, 4, 1, 1, 1, 1)), [])
    assert one_node.startswith("shardtune train --processes=4 parallel.expert=4")
