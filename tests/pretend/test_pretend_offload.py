"""States in host memory: the numbers and the checkpoints of a run without them, to the bit."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus, train_script, waits_of
from helpers.ranks import config_for
from helpers.small_runs import CONSTANT, SETTINGS, checkpoint, digests, steps_of, write_inputs
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from shardtune.checkpoint.load import read_tensor
from shardtune.checkpoint.manifest import open_checkpoint
from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local
from shardtune.model.source.masters import take_master
from shardtune.training.states import host_states

pytestmark = needs_compiler

RUN = (
    *SETTINGS,
    *CONSTANT,
    "model.compute_dtype=bfloat16",
    "train.gradient_accumulation_steps=2",
    "train.max_grad_norm=0.5",
    "train.max_steps=4",
    "checkpoint.every_steps=2",
    "export.final=false",
)
BFLOAT16, EIGHT_BITS = "model.master_dtype=bfloat16", "optimizer.name=adamw8bit"
OFFLOAD = "optimizer.offload=true"


def train_in_pieces(assignments: list[str]) -> None:
    """Run train_fsdp.py with pieces of which a weight has several."""
    host_states.PIECE = 1 << 9
    train_script(assignments)


def train(gpus: int, cwd: Path, *assignments: Any) -> str:
    done = on_gpus(gpus, train_in_pieces, [*RUN, *map(str, assignments)], cwd=cwd)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def tensors_of(run_dir: Path, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint has, but the states of random generators."""
    saved = open_checkpoint(checkpoint(run_dir, step))
    for name in sorted(saved.chunks):
        if not name.startswith("random."):
            yield name, read_tensor(saved, name)


def assert_alike(run_dir: Path, expected: Path, first_step: int = 1) -> None:
    offloaded, plain = (
        [step for step in steps_of(run) if step["step"] >= first_step]
        for run in (run_dir, expected)
    )
    assert offloaded == plain != []
    pairs = zip(tensors_of(run_dir, 4), tensors_of(expected, 4), strict=True)
    for (name, tensor), (of_expected, other) in pairs:
        assert (name, tensor.dtype) == (of_expected, other.dtype)
        assert torch.equal(tensor, other), name


def test_losses_norms_and_checkpoints_are_those_of_a_run_without(tmp_path, models):
    folder = write_inputs(tmp_path / "runs", models["llama"])
    train(1, folder, "run.dir=without")
    said = train(1, folder, OFFLOAD, "run.dir=with")
    assert "Host memory: 0.00 GB pinned per rank = " in said
    assert_alike(folder / "with", folder / "without")
    # Where nothing is saved the host waits no more often.
    with_offload, without = (
        [len(waits) for waits in waits_of(folder / kind)] for kind in ("with", "without")
    )
    assert with_offload[::2] == without[::2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("gpus", "name", "assignments"),
    [
        (2, "qwen3", [EIGHT_BITS]),
        (2, "glm", ["parallel.expert=2", BFLOAT16, EIGHT_BITS]),
        (2, "llama", ["parallel.replicate=2", "model.reduce_dtype=bfloat16"]),
        (2, "llama", ["parallel.stages=2"]),
        (2, "qwen3", ["parallel.stages=2", BFLOAT16, "model.init=random"]),
        (4, "glm", ["parallel.stages=2", "parallel.expert=2", "train.micro_batch_size=2"]),
    ],
)
def test_runs_with_and_without_resume_one_another(gpus, name, assignments, tmp_path, models):
    folder = write_inputs(tmp_path / "runs", models[name])
    for kind, value in (("without", "false"), ("with", "true")):
        train(gpus, folder, *assignments, f"optimizer.offload={value}", f"run.dir={kind}")
    assert_alike(folder / "with", folder / "without")
    for kind, value, other in (("on", "true", "without"), ("off", "false", "with")):
        resume = f"run.resume={checkpoint(folder / other, 2)}"
        given = [*assignments, f"optimizer.offload={value}", resume, f"run.dir={kind}"]
        assert "Resumed from" in train(gpus, folder, *given)
        assert_alike(folder / kind, folder / "without", first_step=3)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [["parallel.replicate=2"], ["parallel.stages=2"]])
def test_exported_weights_have_all_digits_of_masters(mesh, tmp_path, models):
    folder = write_inputs(tmp_path / "runs", models["llama"])
    given = [*mesh, "data.eval_fraction=0.2", "eval.keep_best=true", "eval.every_steps=2"]
    given += ["export.final=true", "export.dtype=float32", "checkpoint.mode=sync"]
    for kind, value in (("without", "false"), ("with", "true")):
        train(2, folder, *given, f"optimizer.offload={value}", f"run.dir={kind}")
    for kind in ("best", "model"):
        of_with, of_without = (
            digests(folder / run / kind, "*.safetensors") for run in ("with", "without")
        )
        assert of_with == of_without != {}


@pytest.mark.full
def test_a_step_without_a_finite_norm_names_the_gradient(tmp_path, models):
    folder = write_inputs(tmp_path / "runs", models["llama"])
    said = []
    for kind, value in (("without", "false"), ("with", "true")):
        given = [*RUN, "optimizer.lr=1e30", f"optimizer.offload={value}", f"run.dir={kind}"]
        done = on_gpus(1, train_in_pieces, given, cwd=folder)
        said.append(done.stderr.strip().splitlines()[-1].replace(f"{kind}/config.yaml", ""))
    assert said[0] == said[1]
    assert re.match("ERROR: step 2 was not taken: .*, first in the gradient of ", said[0])


@pytest.mark.full
def test_weights_are_loaded_in_little_more_than_the_gpu_keeps_of_them(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 99}
    deep = LlamaConfig(**shape, num_hidden_layers=16, num_attention_heads=4)
    LlamaForCausalLM(deep).save_pretrained(tmp_path / "deep")
    for init in ("pretrained", "random"):
        given = ["model.compute_dtype=bfloat16", OFFLOAD, f"model.init={init}"]
        config = config_for(tmp_path / "deep", tmp_path, *given)
        finish(on_gpus(1, load_and_measure, config, cwd=tmp_path))


def load_and_measure(config: Config) -> None:
    world = join_world(config)
    model = build_model(config, AutoConfig.from_pretrained(config.model.path), world)
    sizes = [p.numel() for p in model.parameters()]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # A parameter is read in float32 and rounded; blocks are multiples of 512 bytes.
    most = 2 * sum(sizes) + 6 * max(sizes) + 1024 * len(sizes)
    assert torch.cuda.max_memory_allocated() <= most < 3 * sum(sizes)
    masters = [take_master(p) for p in model.parameters()]
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert master is not None and master.dtype == torch.float32
        assert torch.equal(to_local(parameter).cpu(), master.bfloat16())
