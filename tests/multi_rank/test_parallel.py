"""However a step is spread and its memory spent, its numbers are those of plain PyTorch: replicas,
whole gradients or a reduction in each micro-batch, layers computed again, compiled layers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import finish, launch, read_metrics
from helpers.documented import require_error_line
from helpers.plain_training import (
    Trained,
    assert_same_steps,
    assert_same_weights,
    encode,
    plain_training,
    settings,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import on_ranks, run_script, train
from helpers.small_runs import checkpoint, digests
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import PreTrainedTokenizerFast

from shardtune.model import sharding
from shardtune.training.states import reshard

RATES = (3e-3,) * 4
BFLOAT16 = "model.compute_dtype=bfloat16"
FREE = 6.12e5  # bytes of memory, with room for two groups of the tiny GLM


@pytest.fixture(scope="module")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(models[name], root / name, sharpen) for name in ("llama", "glm")}


@pytest.fixture(scope="module")
def expected(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> dict[str, Trained]:
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return {name: plain_training(path, records, list(RATES)) for name, path in sharp.items()}


def run_without_room(arguments: list[str]) -> None:
    """On a rank: as if no memory were free."""
    reshard._SHARE = 0.0
    run_script(arguments)


def run(model: Path, folder: Path, ranks: int, *more: str, room: bool = True) -> tuple[str, Path]:
    """Four steps over all the data; what was said, and the run's folder."""
    data, run_dir = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run"
    given = settings(
        model,
        data,
        run_dir,
        "train.epochs=4",
        f"train.gradient_accumulation_steps={8 // ranks}",
        *more,
    )
    if room:
        return finish(train(ranks, *given, cwd=folder)), run_dir
    (folder / "config.yaml").touch()
    return finish(
        on_ranks(ranks, run_without_room, ["--config", "config.yaml", *given], cwd=folder)
    ), run_dir


def test_a_resumed_run_decides_on_resharding_anew_where_it_must(sharp, tmp_path):
    """With one micro-batch a step there was nothing to decide about gradients."""
    said, _ = run(
        sharp["llama"], tmp_path, 2, "train.gradient_accumulation_steps=1", "train.max_steps=1"
    )
    assert "Gradients:" not in said
    more = ("train.gradient_accumulation_steps=2", "train.max_steps=2", "run.resume=auto")
    assert "Gradients: reduced once a step" in run(sharp["llama"], tmp_path, 2, *more)[0]


def test_the_decision_on_resharding_is_said_with_its_bytes(sharp, tmp_path):
    """Whole gradients stay whole after a resume, where there is no room left for anything."""
    first, _ = run(sharp["llama"], tmp_path, 2, "train.max_steps=1")
    assert re.search(
        r"^Gradients: .+ \(0\.00 GB unsharded, room for \d+\.\d\d GB\)$",
        first,
        re.MULTILINE,
    )
    resumed, _ = run(
        sharp["llama"], tmp_path, 2, "train.max_steps=2", "run.resume=auto", room=False
    )
    assert "Resumed from checkpoint_0000001" in resumed
    assert re.search(
        r"^Parameters: gathered in each forward and each backward "
        r"\(0\.00 GB unsharded, room for 0\.00 GB\)$",
        resumed,
        re.MULTILINE,
    )
    assert ("Gradients: reduced once a step (0.00 GB unsharded, as before the resume)\n") in resumed


def check(run_dir: Path, expected: Trained) -> None:
    assert_same_steps(run_dir, expected)
    assert_same_weights(run_dir, expected)


@pytest.mark.parametrize(
    ("family", "replicate", "room"),
    [
        ("glm", 2, True),
        pytest.param("llama", 2, False, marks=pytest.mark.full),
        pytest.param("llama", 4, True, marks=pytest.mark.full),
        pytest.param("glm", 1, True, marks=pytest.mark.full),
        pytest.param("glm", 1, False, marks=pytest.mark.full),
    ],
)
def test_replicas_and_reductions_equal_plain_pytorch(
    family, replicate, room, sharp, expected, tmp_path
):
    said, run_dir = run(sharp[family], tmp_path, 4, f"parallel.replicate={replicate}", room=room)
    made = "whole on each rank, copied" if replicate == 4 else "gathered"
    when = "once a step" if room else "in each forward and each backward"
    assert f"Parameters: {made} {when} (" in said
    reduced = "once a step" if room else "in each micro-batch"
    if not room and replicate > 1:
        reduced += ", between replicas as often"
    assert f"Gradients: reduced {reduced} (" in said
    check(run_dir, expected[family])


@pytest.mark.full
def test_a_checkpoint_resumes_on_another_number_of_replicas(sharp, expected, tmp_path):
    """Down to one rank's disk: 4 = 1 x 4, then 4 = 2 x 2, then 2 = 2 x 1, then one."""
    for steps, ranks, replicate in ((1, 4, 1), (2, 4, 2), (3, 2, 2), (4, 1, 1)):
        more = [f"train.max_steps={steps}", f"parallel.replicate={replicate}", "checkpoint.keep=9"]
        said, run_dir = run(sharp["glm"], tmp_path, ranks, *more)
        assert steps == 1 or f"Resumed from checkpoint_{steps - 1:07d}" in said
    manifest = json.loads(
        (run_dir / "checkpoints/checkpoint_0000002/manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["world"]["mesh"] == {"replicate": 2, "shard": 2}
    check(run_dir, expected["glm"])


def run_and_count_copies(
    arguments: list[str], share: float = 0.5, free: float | None = None, copies_all: bool = False
) -> None:
    """On a rank: print a line whenever a group's weights are copied for forward or backward."""
    reshard._SHARE = share
    if free is not None:
        vars(reshard)["_free_bytes"] = lambda world: free
    if copies_all:
        vars(sharding)["_needs_no_copy"] = lambda *_: False
    to_unsharded = FSDPParamGroup._to_unsharded

    def counting(group: FSDPParamGroup) -> None:
        print("A copy", flush=True)
        to_unsharded(group)

    vars(fsdp)["FSDPParamGroup"]._to_unsharded = counting
    run_script(arguments)


def on_one_rank(
    model: Path, folder: Path, run: str, *more: str, **options: Any
) -> tuple[str, list[int], list[tuple[float, float]]]:
    """Return what four steps said, the copies of each, and their losses and norms."""
    data = write_jsonl(folder / "train.jsonl", uneven_chats())
    (folder / "config.yaml").touch()
    eight = "train.gradient_accumulation_steps=8"
    given = settings(model, data, folder / run, "train.epochs=4", eight, *more)
    work = partial(run_and_count_copies, **options)
    said = finish(on_ranks(1, work, ["--config", "config.yaml", *given], cwd=folder))
    assert "Gradients:" not in said
    _, *step_parts = said.split("\nStep ")  # a copy after a step's line belongs to the next step
    steps = [(line["loss"], line["grad_norm"]) for line in read_metrics(folder / run, "step")]
    return said, [part.count("A copy") for part in step_parts[:-1]], steps


def test_a_world_of_one_copies_its_weights_once_a_step(sharp, tmp_path):
    """Without room, in each forward and backward, with the same numbers to the last bit."""
    given = sharp["llama"], tmp_path
    _, once, expected = on_one_rank(*given, "once", BFLOAT16)
    _, often, steps = on_one_rank(*given, "often", BFLOAT16, share=0.0)
    assert steps == expected
    groups, micro_batches = 3, 8  # two layers and the root
    assert set(once) == {groups}
    # The root's copies stay from a forward to its backward.
    assert set(often) == {micro_batches * (2 * groups - 1)}


@pytest.mark.parametrize(
    ("family", "more", "copies", "words"),
    [
        pytest.param("llama", ["model.compute_dtype=float32"], 0, "not copied", id="float32"),
        pytest.param(
            *("glm", [BFLOAT16, "lora.rank=4", "lora.dropout=0.1"], 3),
            "copied once a step (0.00 GB",
            marks=pytest.mark.full,
            id="adapters",
        ),
        pytest.param(
            "glm",
            [BFLOAT16, "model.master_dtype=bfloat16", "model.reduce_dtype=bfloat16"],
            *(0, "not copied"),
            marks=pytest.mark.full,
            id="bfloat16",
        ),
    ],
)
def test_a_world_of_one_copies_no_weight_that_is_stored_as_it_computes(
    family, more, copies, words, sharp, expected, tmp_path
):
    """The numbers are those of copied ones, and the checkpoint, to the last bit."""
    given = sharp[family], tmp_path
    said, copies_by_step, steps = on_one_rank(*given, "held", *more)
    assert set(copies_by_step) == {copies} and f"Parameters: whole on each rank, {words}" in said
    _, copies_by_step, all_copied = on_one_rank(*given, "copied", *more, copies_all=True)
    assert min(copies_by_step) > copies and steps == all_copied
    held, copied = (
        digests(checkpoint(tmp_path / name, 4), "*.safetensors") for name in ("held", "copied")
    )
    assert held == copied
    if family == "llama":
        check(tmp_path / "held", expected["llama"])


def test_groups_that_have_room_are_gathered_once_a_step(sharp, expected, tmp_path):
    """These are what stands around the layers, and one layer."""
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    more = ["train.epochs=4", "train.gradient_accumulation_steps=4", "parallel.expert=2"]
    given = settings(sharp["glm"], data, tmp_path / "run", *more)
    (tmp_path / "config.yaml").touch()
    arguments = ["--config", "config.yaml", *given]
    said = finish(on_ranks(2, run_and_count_copies, arguments, 0.5, FREE, cwd=tmp_path))
    assert re.search(
        r"^Parameters: gathered once a step in 2 of 6 groups \(0\.00 GB\), in each forward and "
        r"each backward in the others \(",
        said,
        re.MULTILINE,
    )
    _, *step_parts = said.split("\nStep ")
    copies = {part.count("A copy") for part in step_parts[:-1]}
    assert copies == {2 + (6 - 2) * 2 * 4}  # in the forward and the backward of micro-batches
    check(tmp_path / "run", expected["glm"])


def test_replicas_that_do_not_divide_the_ranks_are_refused(sharp, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    given = settings(
        sharp["llama"], tmp_path / "train.jsonl", tmp_path / "run", "parallel.replicate=3"
    )
    refused = train(2, *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        "parallel.replicate=3 does not divide the world size, 2 - "
        in refused.stderr.splitlines()[-1]
    )
    require_error_line(refused.stderr.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_computed_again_change_no_number(how, sharp, expected, tmp_path):
    _, run_dir = run(sharp["glm"], tmp_path, 2, f"model.activation_checkpointing={how}")
    check(run_dir, expected["glm"])


@pytest.mark.full
@pytest.mark.parametrize(("family", "checkpointing"), [("llama", "none"), ("glm", "selective")])
def test_compiled_layers_are_compiled_and_change_no_number(
    family, checkpointing, sharp, expected, tmp_path
):
    more = ["model.compile=true", f"model.activation_checkpointing={checkpointing}"]
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    (tmp_path / "config.yaml").touch()
    given = settings(
        sharp[family], data, run_dir, "train.epochs=4", "train.gradient_accumulation_steps=4", *more
    )
    done = on_ranks(
        2,
        train_and_count_operations,
        ["--config", "config.yaml", *given],
        cwd=tmp_path,
        timeout_s=900,
    )
    finish(done)
    assert int(re.findall("^Compiled operations: (.+)", done.stdout, re.MULTILINE)[-1]) > 50
    check(run_dir, expected[family])


def train_and_count_operations(arguments: list[str]) -> None:
    before_backward = reshard.ReshardPolicy.before_backward

    def counting(*given: Any, **options: Any) -> None:
        captured = torch._dynamo.utils.counters["stats"]["calls_captured"]
        print("Compiled operations:", captured, flush=True)
        before_backward(*given, **options)

    vars(reshard)["ReshardPolicy"].before_backward = counting
    run_script(arguments)


@pytest.mark.full
def test_a_compile_that_fails_names_the_layer(sharp, tmp_path):
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    given = settings(sharp["llama"], data, tmp_path / "run", "model.compile=true")
    (tmp_path / "config.yaml").touch()
    failed = launch(0, "--config", "config.yaml", *given, cwd=tmp_path, env={"CXX": "/nowhere/c++"})
    last = failed.stderr.splitlines()[-1]
    assert failed.returncode == 1
    assert re.match(
        r"ERROR: model\.compile=true: LlamaDecoderLayer cannot be compiled here \(.+\) - ", last
    ), last
