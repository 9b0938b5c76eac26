"""The order of collectives on a GPU: each layer is gathered while the one before it computes."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.commands import finish
from helpers.configs import configured
from helpers.moe_families import FAMILIES, SMALL
from helpers.pretended import needs_compiler, on_gpus
from pretend_gpu.trace import trace_of
from transformers import AutoConfig

from shardtune.distributed.join import join_world

pytestmark = needs_compiler

MODELS = {
    "llama": SMALL,
    "qwen3_moe": SMALL | FAMILIES["qwen3_moe"],
    "glm4_moe": SMALL | FAMILIES["glm4_moe"] | {"n_routed_experts": 16},
}
BASE = ["data.train=none", "data.max_length=64", "model.compute_dtype=bfloat16"]
FULL = "model.activation_checkpointing=full"
NO_ROOM = "[0, false, false]"  # nothing stays gathered


def order(
    tmp_path: Path,
    family: str,
    *assignments: str,
    layers: int = 4,
    stage: int = 0,
) -> list[str]:
    """Return a line for each pass, of gathers, attention, exchanges of sizes, waits, reductions."""
    settings = MODELS[family] | {"num_hidden_layers": layers}
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path / family)
    (tmp_path / "config.yaml").touch()
    given = [*BASE, *assignments]
    lines = trace_of(
        tmp_path / "config.yaml", tmp_path / family, *given, planned=NO_ROOM, stage=stage
    )
    return [" ".join(event for event in line.split() if event not in "Xg") for line in lines]


def test_layers_and_spread_experts_are_gathered_before_the_exchange_of_the_one_before(tmp_path):
    """The first layer is dense. Layers that are computed again gather nothing."""
    forward = "forward: A A0 A1 A1e f A2 A2e f x S A3 A3e f x S f x S"
    backward = (
        "backward: A3 A3e A2 A2e f x S R3e b R3 A1 A1e f x S R2e b R2 A0 f x S R1e b R1 f b R0 R"
    )
    again = "train.gradient_accumulation_steps=2"
    assert order(tmp_path, "glm4_moe", "parallel.expert=8", FULL, again) == 2 * [forward, backward]


@pytest.mark.full
def test_dense_layers_are_gathered_one_ahead(tmp_path):
    assert order(tmp_path, "llama") == [
        "forward: A A0 A1 f A2 f A3 f f",
        "backward: A3 A2 b R3 A1 b R2 A0 b R1 b R0 R",
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("stages", "stage", "gathered"),
    [(2, 0, "A0 A0e A1 A1e A2 A2e A3 A3e"), (4, 1, "A2 A2e A3 A3e"), (4, 3, "A7 A7e")],
)
def test_a_stage_gathers_its_layers_once_a_pass_with_several_micro_batches_in_flight(
    stages, stage, gathered, tmp_path
):
    more = [f"parallel.stages={stages}", "parallel.expert=2", "train.gradient_accumulation_steps=4"]
    lines = order(tmp_path, "qwen3_moe", *more, layers=8, stage=stage)
    assert len(lines) == 8
    for line in lines:
        gathers = [event for event in line.split() if event.startswith("A") and event != "A"]
        assert sorted(gathers) == gathered.split(), line


def test_reductions_have_groups_of_their_own_that_time_out_with_the_others(tmp_path):
    finish(on_gpus(4, write_groups, cwd=tmp_path))
    for rank in range(4):
        ranks = {"shard": [0, 1, 2, 3], "expert_shard": [rank % 2, rank % 2 + 2]}
        groups = json.loads((tmp_path / f"groups{rank}").read_text(encoding="utf-8"))
        assert groups == {name: [each, True, True] for name, each in ranks.items()}


def write_groups() -> None:
    """On a rank: write the ranks of each group for reductions, and what is particular to it."""
    config = configured("parallel.expert=2")
    world = join_world(config)
    assert world.expert_mesh
    gathering = {"shard": world.mesh, "expert_shard": world.expert_mesh}
    world.limit_steps(100)
    groups = {
        dimension: [
            dist.get_process_group_ranks(group),
            group.group_name != gathering[dimension].get_group(dimension).group_name,
            group in world.meshes.groups,
        ]
        for dimension, group in world.meshes.for_reductions.items()
    }
    Path(f"groups{world.rank}").write_text(json.dumps(groups), encoding="utf-8")
