"""Stages of layers: the numbers are those of plain PyTorch, in any mesh, before and after a resume
on another one; beside every other setting, the steps and the files of a run without stages."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.chats import write_jsonl
from helpers.commands import finish, read_metrics
from helpers.exact import (
    APART,
    BFLOAT16,
    EIGHT_BITS,
    FULL,
    SELECTIVE,
    STEPS,
    TWO_ROWS,
    Mesh,
)
from helpers.plain_training import (
    assert_same_steps,
    assert_same_weights,
    on_uneven_chats,
    uneven_chats,
)
from helpers.ranks import run_script, train, train_each, train_on_nodes
from helpers.small_runs import checkpoint
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardtune.training.observers.metrics import Metrics
from shardtune.training.pipeline import Stage
from shardtune.training.states import reshard

LOW_PRECISION = [BFLOAT16, EIGHT_BITS]
ADAPTERS = "lora.rank=4"


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        # The embedding of the first stage is the head of the last one.
        ("llama", Mesh(4, stages=2), [FULL]),
        pytest.param("glm", Mesh(3, stages=3), [], marks=pytest.mark.full),
        pytest.param("glm", Mesh(8, 2, 2, stages=2), [SELECTIVE], marks=pytest.mark.full),
        pytest.param("qwen3", Mesh(4, stages=2), [APART, TWO_ROWS], marks=pytest.mark.full),
    ],
)
def test_stages_equal_plain_pytorch(family, mesh, more, check_exact, sharp):
    (said,) = check_exact(family, [mesh], more)
    assert f" x {mesh.data_ranks} (data ranks) = " in said
    # Rank 0 speaks for all stages.
    size = AutoModelForCausalLM.from_pretrained(sharp[family]).num_parameters()
    assert f"\nParameters: {size:,} | " in said and "left unread" not in said
    stages = mesh.stages
    idle = re.escape(f"({stages} - 1) / ({8 // mesh.data_ranks} + {stages} - 1)")
    assert re.search(rf"^Stages: {stages}, of layers 0-.* \| Idle: {idle} = ", said, re.M)


def run_and_note(arguments: list[str]) -> None:
    """On a rank without room to keep parameters: write its passes and gathers of the last step."""
    gather, write = _fsdp_param_group.foreach_all_gather, Metrics.write
    noted: list[str] = []
    ahead: list[int] = []  # what an evaluation has sent and not waited for

    def noting(what: str, original: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            noted.append(what)
            return original(*given, **named)

        return call

    def write_noted(metrics: Metrics, *entries: Any) -> None:
        if entries[0]["kind"] == "step":
            Path(f"noted{os.environ['RANK']}").write_text("".join(noted), encoding="utf-8")
            noted.clear()
        write(metrics, *entries)

    def gather_noted(parameters: list[Any], *more: Any) -> Any:
        is_layer = isinstance(parameters[0]._module_info.module, nn.Linear)
        noted.append("L" if is_layer else "")
        return gather(parameters, *more)

    vars(_fsdp_param_group)["foreach_all_gather"] = gather_noted
    vars(dist)["irecv"] = noting("r", dist.irecv)
    Stage.forward, Stage.backward = noting("f", Stage.forward), noting("b", Stage.backward)
    Metrics.write = write_noted
    send = Stage._send

    def send_noted(stage: Stage, *given: Any) -> None:
        send(stage, *given)
        if not torch.is_grad_enabled():
            ahead.append(len(stage._sent))
            Path(f"ahead{os.environ['RANK']}").write_text(str(max(ahead)), encoding="utf-8")

    Stage._send = send_noted
    vars(reshard)["_SHARE"] = 0.0
    run_script(arguments)


@pytest.mark.full
def test_passes_receive_early_and_gather_each_layer_once(models, tmp_path):
    """No layer is gathered for a pass and freed by another before its own has used it."""
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    AutoConfig.from_pretrained(models["qwen3"], **layers).save_pretrained(tmp_path / "deep")
    AutoTokenizer.from_pretrained(models["qwen3"]).save_pretrained(tmp_path / "deep")
    ranks, stages = 8, 4
    given = ["model.init=random", "train.gradient_accumulation_steps=4", "train.max_steps=2"]
    given += [f"parallel.stages={stages}", "export.final=false"]
    given += [f"data.eval={tmp_path}/train.jsonl"]
    given = on_uneven_chats(tmp_path / "deep", tmp_path, *given)
    said = finish(train(ranks, *given, cwd=tmp_path, work=run_and_note))
    (line,) = re.findall(r"^Stages: .*, of layers (.*) \|", said, re.M)
    for stage, part in enumerate(line.split(" and ")):
        first, last = map(int, part.split("-"))
        noted = (tmp_path / f"noted{stage * ranks // stages}").read_text(encoding="utf-8")
        # In the forward and in the backward of each of the four micro-batches.
        assert noted.count("L") == 2 * 4 * (last - first + 1), noted
        passes = noted.replace("L", "")
        if stage == 0:
            assert (tmp_path / "ahead0").read_text(encoding="utf-8") == "2"
            assert passes == "ffffrbrbrbrb"
        if stage == stages - 1:
            assert passes == "rfbrfbrfbrfb"


def test_any_mesh_resumes_stages_and_stages_resume_any_mesh(sharp, plain, tmp_path):
    evaluated = write_jsonl(tmp_path / "eval.jsonl", uneven_chats()[:5])
    meshes = Mesh(2, 2), Mesh(4, 2, stages=2), Mesh(3, stages=3), Mesh(4, 2)
    for steps, mesh in enumerate(meshes, 1):
        given = ["checkpoint.keep=9", "eval.every_steps=1", f"data.eval={evaluated}"]
        given += [f"train.epochs={STEPS}", f"train.max_steps={steps}", *mesh.assignments()]
        given = on_uneven_chats(sharp["glm"], tmp_path, *given)
        said = finish(train(mesh.ranks, *given, cwd=tmp_path))
        assert steps == 1 or f"Resumed from checkpoint_{steps - 1:07d}" in said
    run_dir = tmp_path / "run"
    assert_same_steps(run_dir, plain("glm"))
    assert_same_weights(run_dir, plain("glm"))
    kinds = [
        {
            name: (entry["dtype"], entry["shape"])
            for name, entry in json.loads((file / "manifest.json").read_text("utf-8"))[
                "tensors"
            ].items()
            if not name.startswith("random.")
        }
        for file in (checkpoint(run_dir, step) for step in range(1, STEPS + 1))
    ]
    assert all(each == kinds[0] != {} for each in kinds)


@pytest.mark.full
def test_the_best_model_and_the_balance_of_experts_are_of_all_stages(sharp, tmp_path):
    results = []
    evaluated = write_jsonl(tmp_path / "eval.jsonl", uneven_chats()[:5])
    for stages in (1, 2):
        run, mesh = f"{stages}", Mesh(2 * stages, stages=stages)
        given = [f"data.eval={evaluated}", "eval.every_steps=2", "eval.keep_best=true"]
        given += [f"train.epochs={STEPS}", *mesh.assignments()]
        given = on_uneven_chats(sharp["glm"], tmp_path, *given, run=run)
        finish(train(mesh.ranks, *given, cwd=tmp_path))
        files = sorted(path.name for path in (tmp_path / run / "best").iterdir())
        evaluations = [entry["loss"] for entry in read_metrics(tmp_path / run, "eval")]
        layers = [entry["layers"] for entry in read_metrics(tmp_path / run, "experts")]
        counts = [[(each["layer"], each["tokens"]) for each in step] for step in layers]
        results.append((files, counts, evaluations))
    (*whole, losses), (*staged, staged_losses) = results
    assert staged == whole
    assert staged_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "stages", "more", "problem"),
    [
        ([2], 3, [], "parallel.stages=3 does not divide the world size, 2"),
        ([4], 4, [], "has 2 layers - use parallel.stages=2"),
        ([2], 2, ["train.gradient_accumulation_steps=1"], "steps=1 gives a step fewer micro"),
        ([1], 2, [], "parallel.stages=2 does not divide the world size, 1 - use parallel.stages=1"),
        ([1, 3], 2, [], "across part of two nodes - use parallel.stages=1"),
    ],
)
def test_impossible_stages_are_refused_by_name(ranks, stages, more, problem, sharp, tmp_path):
    more = ["train.gradient_accumulation_steps=4", *more, f"parallel.stages={stages}"]
    given = on_uneven_chats(sharp["llama"], tmp_path, *more)
    nodes = [(tmp_path / f"node{node}", n) for node, n in enumerate(ranks)]
    for folder, _ in nodes:
        folder.mkdir()
    done = train_on_nodes(nodes, *given)
    assert done.returncode == 2, done.stderr[-2000:]
    assert problem in done.stderr


# The family, the mesh, the micro-batches of a step, and more.
LIKE_TWO_RANKS = {
    "tied in 8 bits": ("deep_tied", Mesh(2, stages=2), 8, LOW_PRECISION),
    # An epoch has eight rows, and its last step one for each data rank.
    "last step": ("deep_qwen3", Mesh(4, stages=2), 3, []),
    "adapters of experts": ("deep_glm", Mesh(4, 2, stages=2), 4, [ADAPTERS, SELECTIVE]),
    "sixteen ranks": (
        "deep_deepseek",
        Mesh(16, 2, 2, stages=4),
        4,
        [*LOW_PRECISION, "data.max_length=130"],
    ),
    "shared rows in 8 bits": ("qwen3_moe", Mesh(4, 2, context=4), 8, LOW_PRECISION),
    "cut matrices in bfloat16": ("qwen3", Mesh(4, tensor=2), 4, [BFLOAT16]),
    "cut matrices and adapters": ("llama_of_4", Mesh(4, stages=2, tensor=2), 8, [ADAPTERS]),
}


def given(model: Path, folder: Path, run: str, *more: str) -> list[str]:
    """Six steps or more, clipped, with an evaluation of one or two micro-batches."""
    evaluated = write_jsonl(folder / "eval.jsonl", uneven_chats()[:5])
    usual = ["train.epochs=6", "train.max_grad_norm=1.0", f"data.eval={evaluated}"]
    return on_uneven_chats(model, folder, *usual, *more, run=run)


def numbers(run_dir: Path) -> tuple[list[float], list[float], list[float]]:
    """The losses and the norms of the steps, and the losses of the evaluations."""
    entries = read_metrics(run_dir, "step")
    evaluations = [entry["loss"] for entry in read_metrics(run_dir, "eval")]
    return [e["loss"] for e in entries], [e["grad_norm"] for e in entries], evaluations


@pytest.mark.full
@pytest.mark.parametrize("case", LIKE_TWO_RANKS)
def test_a_mesh_takes_the_steps_of_two_ranks(case, sharp, tmp_path):
    """A plain loop has no drawing, saving or export. Rounding of the sums over ranks may send a
    moment or a weight to the next value."""
    family, mesh, micro_batches, more = LIKE_TWO_RANKS[case]
    rows = "train.gradient_accumulation_steps="
    model, alone = sharp[family], f"{rows}{micro_batches * mesh.data_ranks // 2}"
    own = [*mesh.assignments(), f"{rows}{micro_batches}"]
    runs = [
        (2, given(model, tmp_path, "two", *more, alone)),
        (mesh.ranks, given(model, tmp_path, "mesh", *more, *own)),
    ]
    train_each(runs, tmp_path)
    of_two, of_mesh = (numbers(tmp_path / name) for name in ("two", "mesh"))
    assert len(of_two[0]) >= 6 and len(set(of_two[0])) == len(of_two[0])
    bounds = (1e-5, 1e-3, 1e-5) if BFLOAT16 in more else (1e-6, 1e-6, 1e-6)
    if mesh.context * mesh.tensor > 1:
        bounds = (1e-4, 1e-3, 1e-4)
    else:
        first, expected = ([each[0] for each in of] for of in (of_mesh, of_two))
        assert first[:2] == pytest.approx(expected[:2], rel=1e-6)
    for found, expected, rel in zip(of_mesh, of_two, bounds, strict=True):
        assert found == pytest.approx(expected, rel=rel)


def files(folder: Path) -> dict[str, bytes]:
    """The files of an exported folder, without those that name its checkpoint or its run."""
    named_after_runs = {"export.json", "README.md"}
    names = sorted(path.name for path in folder.iterdir() if path.name not in named_after_runs)
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.full
def test_the_same_stages_resume_to_the_bit(sharp, tmp_path):
    mesh = [*LOW_PRECISION, "parallel.stages=2", "train.gradient_accumulation_steps=4"]
    runs = [
        (4, given(sharp["deep_tied"], tmp_path, run, *mesh, f"train.max_steps={number}"))
        for run, number in (("whole", 6), ("parts", 2), ("parts", 6))
    ]
    train_each(runs, tmp_path)
    assert numbers(tmp_path / "parts")[:2] == numbers(tmp_path / "whole")[:2]
    assert files(tmp_path / "parts/model") == files(tmp_path / "whole/model")


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "exported", "more"),
    [
        ("deep_tied", "model", LOW_PRECISION),
        ("deep_deepseek", "adapter", [ADAPTERS, "parallel.expert=2"]),
    ],
)
def test_what_is_drawn_saved_and_exported_is_that_of_a_run_without_stages(
    family, exported, more, sharp, tmp_path
):
    """Nothing moves the weights, so that each file has the same bytes."""
    still = ["model.init=random", "optimizer.lr=0", "eval.every_steps=1", "eval.keep_best=true"]
    still += ["train.max_steps=2", "train.gradient_accumulation_steps=4", *more]
    runs = []
    for stages in (1, 4):
        own = [*still, f"parallel.stages={stages}"]
        runs.append((2 * stages, given(sharp[family], tmp_path, f"in{stages}", *own)))
    train_each(runs, tmp_path)
    for folder in (exported, "best"):
        assert files(tmp_path / "in4" / folder) == files(tmp_path / "in1" / folder)
