"""Low-precision weights and moments over ranks: the same bits on every mesh, sums of gradients in
`reduce_dtype`, exact sizes, and resumes to the bit."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import moe_families
from helpers.built import build_model
from helpers.chats import write_jsonl
from helpers.commands import finish, launch, read_metrics
from helpers.documented import require_error_line
from helpers.exact import BFLOAT16, EIGHT_BITS
from helpers.plain_training import on_uneven_chats, save_new_model, step_losses
from helpers.ranks import config_for, on_ranks, run_script, train, train_until
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    digests,
    run_without_room,
    steps_of,
    write_inputs,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig

from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import build_meshes
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import copy_slice, to_local
from shardtune.optimizers.rules import AdamW, AdamW8bit
from shardtune.training.optim import build_optimizer
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer, state_bytes


class Weights(nn.Module):
    """A stack of experts, a matrix and a vector, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(6, 10, 1024).bfloat16())
        self.matrix = nn.Parameter(torch.randn(37, 300).bfloat16())
        self.vector = nn.Parameter(torch.randn(301).bfloat16())


def update_on_meshes(out: Path) -> None:
    """Take three equal updates on several meshes, and compare what is stored, bit by bit."""
    dist.init_process_group("gloo")
    outcomes = {}
    one = None
    for mesh, dimension in (
        (None, 0),
        ((4,), 0),
        ((4,), -1),
        ((2, 2), 0),
        ((2, 2), -1),
        ("strided", 0),
    ):
        for eight_bit in (False, True):
            outcomes[f"{mesh} {dimension} {eight_bit}"] = updated(mesh, dimension, eight_bit)
    if dist.get_rank() == 0:
        one = {key: outcomes[f"None 0 {key}"] for key in (False, True)}
        problems = [
            (key, name)
            for key, tensors in outcomes.items()
            for name, tensor in one[key.endswith("True")].items()
            if not torch.equal(tensors[name], tensor)
        ]
        out.write_text(json.dumps([problems, len(outcomes), sorted(one[True])]), encoding="utf-8")


def updated(mesh: Any, dimension: int, eight_bit: bool) -> dict[str, torch.Tensor]:
    """`mesh`: of FSDP2; of two dimensions, the first one's replicas divide moments, too."""
    model = Weights()
    layout = Layout(4, master_dtype="bfloat16", replicate=mesh[0] if len(mesh or ()) == 2 else 1)
    world: Any = SimpleNamespace(layout=layout)
    if mesh == "strided":  # whole experts spread over one dimension, and sharded over the other
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
        model.stack = nn.Parameter(
            distribute_tensor(model.stack.detach(), grid["expert"], [Shard(0)])
        )
        fully_shard(model, mesh=grid["shard"], mp_policy=MixedPrecisionPolicy())
    elif mesh is not None:
        if len(mesh) == 2:
            world.progress = Progress(torch.device("cpu"))
        world.meshes = build_meshes(torch.device("cpu"), layout)
        world.mesh = world.meshes.mesh
        fully_shard(
            model,
            mesh=world.mesh["shard"],
            # FSDP2 divides dimensions but the first evenly; 300 columns are cut by any rank.
            shard_placement_fn=lambda p: (
                Shard(p.dim() - 1) if p is model.stack and dimension else None
            ),
        )
    owned = OwnedParameters(model, world)
    optimizer = ShardedOptimizer(
        [{"params": list(owned.by_name.items()), "weight_decay": 0.1}],
        AdamW8bit if eight_bit else AdamW,
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        seed=5,
    )
    torch.manual_seed(1)
    for _ in range(3):
        for parameter in owned.by_name.values():
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            copy_slice(torch.randn(parameter.shape), parameter.grad)
        optimizer.step()
        owned.gather()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in owned.by_name.items():
        tensors |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in tensors.items()
    }


def test_equal_gradients_give_the_same_bits_on_every_mesh(tmp_path):
    finish(on_ranks(4, update_on_meshes, tmp_path / "seen", cwd=tmp_path))
    problems, n_outcomes, names = json.loads((tmp_path / "seen").read_text(encoding="utf-8"))
    assert problems == [] and n_outcomes == 12
    assert "matrix exp_avg_sq_scale" in names and "vector exp_avg_sq_scale" not in names


@pytest.mark.parametrize("room", [True, pytest.param(False, marks=pytest.mark.full)])
def test_micro_batches_are_added_up_in_float32(room, models, tmp_path):
    """The norm of 8 micro-batches is that of float32 masters with the same bfloat16 weights.

    Sums in bfloat16 are off by 1e-3. Two replicas without room add up in each micro-batch.
    """
    write_inputs(tmp_path, models["llama"])
    norms = []
    for dtype, replicate in (("float32", 1), ("bfloat16", 1), ("bfloat16", 2)):
        has_room = room and replicate == 1
        source = tmp_path / "model" / "model.safetensors"
        rounded = {k: t.bfloat16().float() for k, t in load_file(source).items()}
        save_file(rounded, source, {"format": "pt"})
        given = [*SETTINGS, f"run.dir={dtype}{replicate}", f"model.master_dtype={dtype}"]
        given += ["train.gradient_accumulation_steps=8", "train.max_steps=1", "export.final=false"]
        work = run_script if has_room else run_without_room
        said = finish(train(2, *given, f"parallel.replicate={replicate}", cwd=tmp_path, work=work))
        assert f"Gradients: reduced {'once a step' if has_room else 'in each micro-batch'}" in said
        (step,) = read_metrics(tmp_path / f"{dtype}{replicate}", "step")
        norms.append((step["loss"], step["grad_norm"]))
    assert norms[1:] == [pytest.approx(norms[0], rel=1e-6)] * 2


@pytest.mark.full
def test_a_killed_run_resumes_to_the_bit(models, tmp_path):
    given = (*SETTINGS, *CONSTANT, BFLOAT16, EIGHT_BITS, "train.max_steps=4")
    given += ("parallel.replicate=2", "parallel.expert=2", "checkpoint.every_steps=2")
    given += ("checkpoint.mode=sync",)  # else the kill may come before the commit
    for folder in ("whole", "killed"):
        write_inputs(tmp_path / folder, models["glm"])
    finish(train(4, *given, cwd=tmp_path / "whole"))
    train_until(3, 0, 4, *given, cwd=tmp_path / "killed")
    said = finish(train(4, *given, cwd=tmp_path / "killed"))
    assert "Resumed from checkpoint_0000002" in said
    whole, killed = tmp_path / "whole/run", tmp_path / "killed/run"
    assert steps_of(killed) == steps_of(whole)
    assert digests(checkpoint(killed, 4), "rank_*") == digests(checkpoint(whole, 4), "rank_*")


def test_a_checkpoint_resumes_on_another_mesh(models, tmp_path):
    """The codes and scales are cut anew: from 2 ranks to 3, with the losses of one that stayed."""
    given = (*SETTINGS, *CONSTANT, BFLOAT16, EIGHT_BITS, "train.gradient_accumulation_steps=6")
    write_inputs(tmp_path, models["glm"])
    finish(train(1, *given, "train.max_steps=2", "checkpoint.keep=9", cwd=tmp_path))
    said = finish(
        train(3, *given, "train.gradient_accumulation_steps=2", "train.max_steps=3", cwd=tmp_path)
    )
    assert "Resumed from checkpoint_0000002" in said
    moved = steps_of(tmp_path / "run")
    finish(train(1, *given, "train.max_steps=3", "run.dir=stayed", cwd=tmp_path))
    for ours, theirs in zip(moved, steps_of(tmp_path / "stayed"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    changed = train(1, *SETTINGS, *CONSTANT, "train.max_steps=4", cwd=tmp_path)
    assert changed.returncode == 2
    for key in ("model.master_dtype", "optimizer.name"):
        assert key in changed.stderr


def measure_bytes(config: Config, out: Path) -> None:
    """Count the bytes of all tensors of a rank after a step, and those that were said before it."""
    world = join_world(config)
    model = build_model(config, AutoConfig.from_pretrained(config.model.path), world)
    optimizer = build_optimizer(OwnedParameters(model, world), config)
    said = state_bytes(model, optimizer, world.layout)
    ids = torch.arange(12)[None]
    model(input_ids=ids, position_ids=ids).logits.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    held = {
        "parameters": sum(to_local(p).nbytes for p in model.parameters()),
        "gradients": sum(to_local(gradient).nbytes for gradient in gradients),
        "optimizer": sum(
            to_local(value).nbytes for state in optimizer.state.values() for value in state.values()
        ),
    }
    elements = sum(to_local(p).numel() for p in model.parameters())
    moments = sum(
        to_local(state[key]).nbytes
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    out.with_suffix(f".{world.rank}").write_text(
        json.dumps([vars(said), held, elements, moments]), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("more", "weight", "moments"),
    [((), 4, 8), ((BFLOAT16,), 2, 4), ((BFLOAT16, EIGHT_BITS), 2, 2)],
)
def test_the_states_of_each_rank_take_the_bytes_that_the_log_says(
    more, weight, moments, models, tmp_path
):
    config = config_for(models["qwen3"], tmp_path, "model.compute_dtype=float32", *more)
    finish(on_ranks(2, measure_bytes, config, tmp_path / "seen", cwd=tmp_path))
    for rank in range(2):
        said, held, elements, moment_bytes = json.loads(
            (tmp_path / f"seen.{rank}").read_text(encoding="utf-8")
        )
        assert {state: n_bytes for state, n_bytes in said.items() if n_bytes} == held
        assert held["parameters"] == weight * elements
        assert held["gradients"] == 4 * elements
        # With 8 bits the moments of norms are bfloat16.
        assert moment_bytes == pytest.approx(moments * elements, rel=0.02 if moments == 2 else 0)


def test_shards_that_cut_blocks_are_refused(models, tmp_path):
    """6 experts on 4 ranks are divided by their 32 columns. No record is read before."""
    data = write_jsonl(tmp_path / "train.jsonl", [{"broken": True}])
    given = (f"model.path={models['glm']}", f"data.train={data}", f"run.dir={tmp_path / 'run'}")
    more = ("data.max_length=128", "data.eval=nothing.jsonl")
    refused = train(4, *given, BFLOAT16, EIGHT_BITS, *more, cwd=tmp_path)
    assert refused.returncode == 2
    line, missing = refused.stderr.splitlines()[-2:]
    assert missing.startswith("ERROR: data.eval=nothing.jsonl")
    assert "optimizer.name=adamw8bit: model.layers.1.mlp.experts." in line
    assert "parts of 8 columns" in line
    require_error_line(line)


def test_a_router_that_is_float32_by_its_class_has_masters_of_the_asked_dtype(tokenizer, tmp_path):
    """FSDP2 refuses a group whose trained weights have several dtypes."""
    ernie = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    model = save_new_model(
        lambda: moe_families.build("ernie4_5_moe", **ernie), tokenizer, tmp_path / "model"
    )
    losses = []
    for dtype in ("float32", "bfloat16"):
        more = ("train.max_steps=2", f"model.master_dtype={dtype}")
        finish(train(2, *on_uneven_chats(model, tmp_path, *more, run=dtype), cwd=tmp_path))
        losses.append(step_losses(tmp_path / dtype))
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_auto_is_bfloat16_where_the_cpu_computes_in_it(models, tmp_path):
    given = ["model.compute_dtype=auto", "train.max_steps=1", "export.final=false"]
    given = on_uneven_chats(models["llama"], tmp_path, *given)
    has_it = {"TESTS_HAVE_BFLOAT16": "1"}
    said = finish(launch(0, f"--config={os.devnull}", *given, cwd=tmp_path, env=has_it))
    assert "Precision: bfloat16 in forward and backward" in said
