"""What a run is, is decided in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.configs import configured
from hypothesis import given
from hypothesis import strategies as st

from shardtune.distributed.layout import Layout

REPOSITORY = Path(__file__).parents[2]
OFFLOAD = "optimizer.offload=true"
BF16, F32 = "model.master_dtype=bfloat16", "float32 float32 float32 float32"
# Keys that say what a run is. The configuration itself and its layout read them.
DECIDED = {
    *("parallel", "offload", "compute_dtype", "master_dtype", "reduce_dtype"),
    *("activation_checkpointing", "micro_batch_size", "gradient_accumulation_steps"),
}
READERS = {"config.py", "config_io.py", "config_schema.py", "distributed/layout.py"}
SAID = {  # what a user asked for, in words
    ("training/start_log.py", "config.optimizer.offload"),
    ("training/data_and_schedule.py", "config.model.compute_dtype"),
    ("model/source/config_json.py", "config.parallel"),  # without a device
    ("cluster/node_info.py", "config.parallel"),
    ("planner/command/team_table.py", "config.model.activation_checkpointing"),
}
# A run, a machine that is planned for, a trial before there is one.
MAKERS = {"distributed/join.py", "planner/arithmetic/machine.py", "planner/command/plan_command.py"}
MAKERS |= {"distTest/rehearse/__main__.py", "benchmarks/models.py"}


def test_no_other_file_asks_the_configuration_what_a_run_is():
    asked, makers = set(), set()
    folders = ("shardtune", "distTest", "benchmarks")
    files = (file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    for file in [REPOSITORY / "train_fsdp.py", *files]:
        name = file.relative_to(REPOSITORY).as_posix().removeprefix("shardtune/")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in DECIDED and name not in READERS:
                text = ast.unparse(node)
                if not text.rpartition(".")[0].endswith(("layout", "policy")):
                    asked.add((name, text))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "Layout.of":
                makers.add(name)
    assert asked == SAID and makers == MAKERS


@given(st.data())
def test_what_the_degrees_leave_fits_together(data):
    draw = st.integers(1, 4)
    stages, replicate, shards = (data.draw(draw) for _ in range(3))
    ranks = stages * replicate * shards
    expert = data.draw(st.sampled_from([n for n in range(1, 5) if shards % n == 0]))
    context = data.draw(st.sampled_from([n for n in range(1, 5) if replicate * shards % n == 0]))
    degrees = {"stages": stages, "replicate": replicate, "expert": expert, "context": context}
    layout = Layout.divided(ranks, degrees)
    assert layout.problems() == []
    assert layout.expert_shards * layout.expert == layout.shards == shards
    assert layout.data_ranks * layout.row_ranks * layout.stages == layout.ranks


@pytest.mark.parametrize(
    ("given_", "is_gpu", "dtypes", "offloads"),
    # Of computing, of masters, of weights on the device and of gradients.
    [
        ("", True, "bfloat16 float32 float32 float32", False),
        (OFFLOAD, False, F32, False),
        (OFFLOAD, True, "bfloat16 float32 bfloat16 float32", True),
        (f"{OFFLOAD} model.compute_dtype=float32", True, F32, True),
        (f"{BF16} model.reduce_dtype=bfloat16", True, F32.replace("float32", "bfloat16"), False),
        (BF16, True, "bfloat16 bfloat16 bfloat16 float32", False),
        (
            f"lora.rank=4 {BF16} optimizer.offload=true",
            True,
            "bfloat16 float32 bfloat16 float32",
            0,
        ),
    ],
)
def test_dtypes_and_places_follow_from_the_keys_and_the_device(given_, is_gpu, dtypes, offloads):
    config = configured(*given_.split())
    assert Layout.of(config, 1, is_gpu, "float32").compute_dtype == "float32"
    layout = Layout.of(config, is_gpu=is_gpu)
    found = layout.compute_dtype, layout.master_dtype, layout.device_dtype, layout.gradient_dtype
    assert (" ".join(found), layout.offloads) == (dtypes, offloads)
