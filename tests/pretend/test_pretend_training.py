"""Runs on pretended GPUs have the CPU's numbers within bfloat16, resume to the bit, and wait for
the GPU once a step."""

import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY
from helpers.pretended import assert_close, needs_compiler, train_on_gpus, waits_of
from helpers.ranks import train_each
from helpers.small_runs import CONSTANT, SETTINGS, checkpoint, digests, steps_of, write_inputs

pytestmark = needs_compiler

RUN = (
    *SETTINGS,
    "model.compute_dtype=bfloat16",
    "data.eval=eval.jsonl",
    "train.gradient_accumulation_steps=2",
    "train.max_steps=3",
    "checkpoint.every_steps=2",
)
EXPERTS = "parallel.expert=2"
FULL = "model.activation_checkpointing=full"
BF16 = "model.master_dtype=bfloat16"
EIGHT_BIT = "optimizer.name=adamw8bit"
# The expert layers of the tiny `glm`, of which each waits once for its split sizes.
EXPERT_LAYERS, MICRO_BATCHES = 2, 2


LORA, SELECTIVE = "lora.rank=8", "model.activation_checkpointing=selective"
LONG_CASES = [
    (2, "glm", [[LORA, EXPERTS], [BF16, EIGHT_BIT, EXPERTS]]),
    (
        4,
        "glm",
        [
            ["parallel.replicate=2", EXPERTS, EIGHT_BIT, SELECTIVE],
            ["parallel.context=2", "parallel.stages=2"],
        ],
    ),
    (2, "llama", [["data.packing=false"], [LORA, FULL], [BF16], [EIGHT_BIT]]),
    (4, "qwen3", [["parallel.replicate=4"]]),
    (1, "glm", [[], [LORA]]),
]


@pytest.mark.parametrize(
    ("gpus", "model", "runs"),
    [
        (2, "glm", [[EXPERTS, FULL]]),
        *(pytest.param(*case, marks=pytest.mark.full) for case in LONG_CASES),
    ],
)
def test_numbers_are_those_of_a_cpu_and_the_host_waits_once_a_step(
    gpus, model, runs, tmp_path, models
):
    folder = write_inputs(tmp_path, models[model])
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    train_each([(gpus, [*RUN, *run, f"run.dir=cpu{i}"]) for i, run in enumerate(runs)], folder)
    for i, run in enumerate(runs):
        train_on_gpus(gpus, *RUN, *run, f"run.dir=gpu{i}", cwd=folder)
        assert_close(folder / f"gpu{i}", folder / f"cpu{i}")
        of_gpu, of_cpu = (digests(folder / f"{device}{i}/model") for device in ("gpu", "cpu"))
        assert sorted(of_gpu) == sorted(of_cpu)
        for rank in range(gpus):
            assert_waits(folder / f"gpu{i}", rank, run)


def assert_waits(run_dir: Path, rank: int, run: list[str]) -> None:
    """One wait a step, for its numbers, and one for each expert layer and pass with spread ones.

    A pass is a forward, or one that is computed again. An async save adds none: step 2 has one.
    The last step has an evaluation, whose sums the host reads too.
    """
    is_computed_again = any("activation_checkpointing" in setting for setting in run)
    passes = MICRO_BATCHES * (2 if is_computed_again else 1)
    for waits in waits_of(run_dir, rank)[:2]:
        places = Counter(
            re.sub(r":\d+", "", wait.where.removeprefix(f"{REPOSITORY}/")) for wait in waits
        )
        expected = {"shardtune/training/observers/metrics.py all_gather_step_stats": 1}
        if EXPERTS in run:
            expected["shardtune/model/moe/token_exchange.py __call__"] = EXPERT_LAYERS * passes
        assert places == expected


@pytest.mark.parametrize(
    ("model", "run"),
    [
        ("llama", ["data.packing=false"]),
        pytest.param("glm", [EXPERTS, BF16, EIGHT_BIT], marks=pytest.mark.full),
        pytest.param("glm", ["lora.rank=8", "lora.dropout=0.1"], marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(model, run, tmp_path, models):
    """With dropout, whose random numbers are the GPU's."""
    folder = write_inputs(tmp_path, models[model], dropout=0.2)
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    settings = [*RUN, *CONSTANT, *run]
    for run_dir, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        given = [*settings, f"train.max_steps={steps}", f"run.dir={run_dir}"]
        train_on_gpus(2, *given, cwd=folder)
    assert steps_of(folder / "parts") == steps_of(folder / "whole")
    assert digests(folder / "parts/model", "*.safetensors") == digests(
        folder / "whole/model", "*.safetensors"
    )
    tensors = [digests(checkpoint(folder / of, 4), "*.safetensors") for of in ("parts", "whole")]
    assert tensors[0] == tensors[1]
