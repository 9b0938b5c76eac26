"""Layers of a run on pretended GPUs: compiled where the GPU can, else eager, said once."""

import re
from functools import partial

import pytest
import torch
from helpers.commands import finish, read_metrics
from helpers.pretended import needs_compiler, on_gpus, train_on_gpus, train_script, waits_of
from helpers.small_runs import SETTINGS, write_inputs
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from shardtune.distributed import compiling

pytestmark = needs_compiler

RUN = (*SETTINGS, "model.compute_dtype=bfloat16", "train.max_steps=3", "export.final=false")


def train_compiled(assignments: list[str]) -> None:
    """Train with graphs that PyTorch runs operator by operator, in place of Triton's kernels."""
    torch.compile = partial(torch.compile, backend="eager")
    compiling.can_compile = lambda _: True
    train_script(assignments)


def train_without_transformers_experts(assignments: list[str]) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the gradient of a token's copies is a sum in any order")

    for name in ("eager", "batched_mm", "grouped_mm"):
        ALL_EXPERTS_FUNCTIONS[name] = refuse
    train_script(assignments)


def said(output: str) -> list[str]:
    return re.findall("^Compile: (.+)", output, re.MULTILINE)


@pytest.mark.full
def test_a_gpu_without_triton_runs_eager_and_says_so_once(tmp_path, models):
    folder = write_inputs(tmp_path, models["llama"])
    given = [*RUN, "optimizer.name=adamw8bit", "model.compile=false", "data.eval=train.jsonl"]
    done = on_gpus(1, train_script, [*given, "train.max_steps=1"], cwd=folder)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert said(output) == ["nothing is compiled for this GPU (Triton is not installed)"]


def test_experts_that_are_not_spread_gather_both_ways_on_a_gpu(tmp_path, models):
    folder = write_inputs(tmp_path, models["glm"])
    one_step = [*RUN, "train.max_steps=1", "eval.baseline=false"]
    finish(on_gpus(1, train_without_transformers_experts, one_step, cwd=folder))


@pytest.mark.full
def test_compiled_layers_have_the_losses_and_the_waits_of_eager_ones(tmp_path, models):
    """Selective checkpointing looks into graphs whose operators run one by one."""
    folder = write_inputs(tmp_path, models["glm"])
    given = [*RUN, "parallel.expert=2", "model.activation_checkpointing=selective"]
    train_on_gpus(2, *given, "model.compile=false", "run.dir=eager", cwd=folder)
    done = on_gpus(2, train_compiled, [*given, "run.dir=compiled"], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done.stdout) == ["layers, each at its first use"]
    eager, compiled = (read_metrics(folder / kind, "step") for kind in ("eager", "compiled"))
    for one, other in zip(eager, compiled, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2.0**-10)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2.0**-6)
    for rank in range(2):
        counts = [
            [len(waits) for waits in waits_of(folder / kind, rank)[1:]]
            for kind in ("eager", "compiled")
        ]
        assert counts[0] == counts[1]
