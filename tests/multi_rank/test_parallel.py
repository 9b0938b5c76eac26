"""However a step is spread and its memory spent, its numbers are those of plain PyTorch: replicas,
whole gradients or a reduction in each micro-batch, layers computed again, compiled layers."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import finish, launch, read_metrics
from helpers.documented import refused
from helpers.exact import COMPILED, STEPS, Mesh
from helpers.plain_training import (
    assert_same_steps,
    assert_same_weights,
    on_uneven_chats,
)
from helpers.ranks import run_script, train
from helpers.small_runs import checkpoint, digests, run_without_room
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardtune.model import sharding
from shardtune.training.states import reshard

BFLOAT16 = "model.compute_dtype=bfloat16"
FULL = pytest.mark.full
Run = Callable[..., str]


@pytest.fixture
def run(sharp: dict[str, Path], tmp_path: Path) -> Run:
    """Takes steps over all the data; returns what was said."""

    def train_on(family: str, mesh: Mesh, *more: str, room: bool = True) -> str:
        given = on_uneven_chats(
            sharp[family], tmp_path, f"train.epochs={STEPS}", *mesh.assignments(), *more
        )
        work = run_script if room else run_without_room
        return finish(train(mesh.ranks, *given, cwd=tmp_path, work=work))

    return train_on


def test_a_resumed_run_decides_on_resharding_anew_where_it_must(run):
    """With one micro-batch a step there was nothing to decide about gradients."""
    rows = "train.gradient_accumulation_steps="
    assert "Gradients:" not in run("llama", Mesh(2), f"{rows}1", "train.max_steps=1")
    assert "Gradients: reduced once a step" in run(
        "llama", Mesh(2), f"{rows}2", "train.max_steps=2"
    )


def test_the_decision_on_resharding_is_said_with_its_bytes(run):
    """Whole gradients stay whole after a resume, where there is no room left for anything."""
    first = run("llama", Mesh(2), "train.max_steps=1")
    assert "Gradients: reduced once a step (0.00 GB unsharded, as planned)\n" in first
    resumed = run("llama", Mesh(2), "train.max_steps=2", room=False)
    assert "Resumed from checkpoint_0000001" in resumed
    how = "gathered in each forward and each backward"
    assert f"Parameters: {how} (0.00 GB unsharded)\n" in resumed
    assert "Gradients: reduced once a step (0.00 GB unsharded, as before" in resumed


@pytest.mark.parametrize(
    ("family", "replicate", "room"),
    [
        ("glm", 2, True),
        pytest.param("llama", 2, False, marks=FULL),
        pytest.param("llama", 4, True, marks=FULL),
        pytest.param("glm", 1, False, marks=FULL),
    ],
)
def test_replicas_and_reductions_equal_plain_pytorch(family, replicate, room, check_exact):
    work = run_script if room else run_without_room
    (said,) = check_exact(family, [Mesh(4, replicate=replicate)], [], work=work)
    made = "whole on each rank, copied" if replicate == 4 else "gathered"
    when = "once a step" if room else "in each forward and each backward"
    assert f"Parameters: {made} {when} (" in said
    reduced = "once a step" if room else "in each micro-batch"
    if not room and replicate > 1:
        reduced += ", between replicas as often"
    assert f"Gradients: reduced {reduced} (" in said


@pytest.mark.full
def test_a_checkpoint_resumes_on_another_number_of_replicas(run, plain, tmp_path):
    """Down to one rank's disk: 4 = 1 x 4, then 4 = 2 x 2, then 2 = 2 x 1, then one."""
    meshes = Mesh(4), Mesh(4, replicate=2), Mesh(2, replicate=2), Mesh(1)
    for steps, mesh in enumerate(meshes, 1):
        said = run("glm", mesh, f"train.max_steps={steps}", "checkpoint.keep=9")
        assert steps == 1 or f"Resumed from checkpoint_{steps - 1:07d}" in said
    manifest = json.loads((checkpoint(tmp_path / "run", 2) / "manifest.json").read_text("utf-8"))
    assert manifest["world"]["mesh"] == {"replicate": 2, "shard": 2}
    assert_same_steps(tmp_path / "run", plain("glm"))
    assert_same_weights(tmp_path / "run", plain("glm"))


def run_and_count_copies(
    arguments: list[str], share: float = 0.5, groups: int | None = None, copies_all: bool = False
) -> None:
    """On a rank: print a line whenever a group's weights are copied for forward or backward.

    `groups`: those that the plan keeps gathered.
    """
    reshard._SHARE = share
    if groups is not None:
        planned, choose = reshard.ReshardPolicy(groups, True), reshard.choose_reshard_policy
        vars(reshard)["choose_reshard_policy"] = lambda model, saved, _, world: choose(
            model, saved, planned, world
        )
    if copies_all:
        vars(sharding)["_needs_no_copy"] = lambda *_: False
    to_unsharded = FSDPParamGroup._to_unsharded

    def counting(group: FSDPParamGroup) -> None:
        print("A copy", flush=True)
        to_unsharded(group)

    vars(fsdp)["FSDPParamGroup"]._to_unsharded = counting
    run_script(arguments)


def copies_in(said: str) -> set[int]:
    """The numbers of copies in the steps."""
    _, *step_parts = said.split("\nStep ")  # a copy after a step's line belongs to the next step
    return {part.count("A copy") for part in step_parts[:-1]}


def on_one_rank(
    model: Path, folder: Path, run: str, *more: str, **options: Any
) -> tuple[str, set[int], list[tuple[float, float]]]:
    """Return what four steps said, the copies in a step, and their losses and norms."""
    given = [f"train.epochs={STEPS}", *Mesh(1).assignments(), *more]
    given = on_uneven_chats(model, folder, *given, run=run)
    said = finish(train(1, *given, cwd=folder, work=partial(run_and_count_copies, **options)))
    assert "Gradients:" not in said
    steps = [(line["loss"], line["grad_norm"]) for line in read_metrics(folder / run, "step")]
    return said, copies_in(said), steps


def test_a_world_of_one_copies_its_weights_once_a_step(sharp, tmp_path):
    """Without room, in each forward and backward, with the same numbers to the last bit."""
    given = sharp["llama"], tmp_path
    _, once, expected = on_one_rank(*given, "once", BFLOAT16)
    _, often, steps = on_one_rank(*given, "often", BFLOAT16, share=0.0)
    assert steps == expected
    groups, micro_batches = 3, 8  # two layers and the root
    assert once == {groups}
    # The root's copies stay from a forward to its backward.
    assert often == {micro_batches * (2 * groups - 1)}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ["model.compute_dtype=float32"]),
        pytest.param(
            "glm",
            [BFLOAT16, "model.master_dtype=bfloat16", "model.reduce_dtype=bfloat16"],
            marks=FULL,
        ),
    ],
)
def test_a_world_of_one_copies_no_weight_that_is_stored_as_it_computes(
    family, more, sharp, plain, tmp_path
):
    """The numbers are those of copied ones, and the checkpoint, to the last bit."""
    given = sharp[family], tmp_path
    said, in_steps, steps = on_one_rank(*given, "held", *more)
    assert in_steps == {0} and "Parameters: whole on each rank, not copied" in said
    _, in_steps, all_copied = on_one_rank(*given, "copied", *more, copies_all=True)
    assert min(in_steps) > 0 and steps == all_copied
    held, copied = (
        digests(checkpoint(tmp_path / name, STEPS), "*.safetensors") for name in ("held", "copied")
    )
    assert held == copied
    if family == "llama":
        assert_same_steps(tmp_path / "held", plain("llama"))
        assert_same_weights(tmp_path / "held", plain("llama"))


def test_groups_that_have_room_are_gathered_once_a_step(check_exact):
    """These are what stands around the layers, and one layer."""
    work = partial(run_and_count_copies, groups=2)
    (said,) = check_exact("glm", [Mesh(2, expert=2)], [], work=work)
    how = r"gathered once a step in 2 of 6 groups \(0\.00 GB\), in each forward and each backward"
    assert re.search(rf"^Parameters: {how} in the others \(", said, re.MULTILINE)
    # In the forward and the backward of micro-batches.
    assert copies_in(said) == {2 + (6 - 2) * 2 * 4}


@pytest.mark.full
def test_a_compile_that_fails_names_the_layer(sharp, tmp_path):
    given = on_uneven_chats(sharp["llama"], tmp_path, COMPILED)
    failed = launch(0, f"--config={os.devnull}", *given, cwd=tmp_path, env={"CXX": "/nowhere/c++"})
    what = r"ERROR: model\.compile=true: LlamaDecoderLayer cannot be compiled here \(.+\) - "
    assert re.match(what, refused(failed, 1))
