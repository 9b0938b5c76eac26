"""Stages of layers on every architecture and beside every other setting: the steps of plain FSDP,
the same resume and the same files. The comparison of both with plain PyTorch is in test_stages.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.chats import write_jsonl
from helpers.commands import read_metrics
from helpers.moe_families import build
from helpers.plain_training import save_new_model, settings, sharpen, uneven_chats
from helpers.ranks import train_each
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.full

DENSE = {"num_hidden_layers": 5, "intermediate_size": 64, "tie_word_embeddings": False}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", DENSE | {"tie_word_embeddings": True}),
    "llama": ("llama", DENSE),
    "qwen3": ("qwen3", DENSE),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 5}),
    "glm": ("glm4_moe", {"num_hidden_layers": 5, "n_routed_experts": 8}),
    "deepseek": ("deepseek_v3", {"num_hidden_layers": 5, "n_group": 2}),
}
LOW_PRECISION = ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"]
CASES = {
    # Architecture, ranks, stages, micro-batches of a step, more.
    "tied": ("tied", 4, 2, 4, ["model.activation_checkpointing=full"]),
    "tied in 8 bits": ("tied", 2, 2, 8, LOW_PRECISION),
    "four stages": ("llama", 8, 4, 4, ["model.activation_checkpointing=selective"]),
    "adapters": ("qwen3", 4, 4, 8, ["lora.rank=4"]),
    # An epoch has eight rows, and its last step one for each data rank.
    "last step": ("qwen3", 4, 2, 3, []),
    "bfloat16": ("qwen3_moe", 4, 2, 4, ["parallel.expert=2", "model.master_dtype=bfloat16"]),
    "replicas": ("glm", 8, 2, 2, ["parallel.expert=2", "parallel.replicate=2"]),
    "adapters of experts": (
        "glm",
        4,
        2,
        4,
        ["parallel.expert=2", "lora.rank=4", "model.activation_checkpointing=selective"],
    ),
    "latent attention": (
        "deepseek",
        4,
        2,
        4,
        ["parallel.expert=2", "model.activation_checkpointing=full"],
    ),
    "sixteen ranks": (
        "deepseek",
        16,
        4,
        4,
        [*LOW_PRECISION, "parallel.expert=2", "parallel.replicate=2", "data.max_length=130"],
    ),
}


@pytest.fixture(scope="module")
def architectures(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    return {
        name: save_new_model(partial(build, family, **more), tokenizer, root / name, sharpen)
        for name, (family, more) in ARCHITECTURES.items()
    }


def given(model: Path, folder: Path, run: str, *more: str) -> list[str]:
    data = write_jsonl(folder / "train.jsonl", uneven_chats())
    evaluated = write_jsonl(folder / "eval.jsonl", uneven_chats()[:5])
    # Six steps or more, clipped, with an evaluation of one or two micro-batches.
    usual = ["train.epochs=6", "train.max_grad_norm=1.0", f"data.eval={evaluated}"]
    return settings(model, data, folder / run, *usual, *more)


def steps(run_dir: Path) -> tuple[list[float], list[float], list[float]]:
    """The losses and the norms of the steps, and the losses of the evaluations."""
    entries = read_metrics(run_dir, "step")
    evaluations = [entry["loss"] for entry in read_metrics(run_dir, "eval")]
    return [e["loss"] for e in entries], [e["grad_norm"] for e in entries], evaluations


@pytest.mark.parametrize("case", CASES)
def test_stages_take_the_steps_of_plain_fsdp(case, architectures, tmp_path):
    name, ranks, stages, micro_batches, more = CASES[case]
    alike = [each for each in more if not each.startswith("parallel.")]
    alone = micro_batches * ranks // stages // 2
    plain = [*alike, f"train.gradient_accumulation_steps={alone}"]
    staged = [*more, f"train.gradient_accumulation_steps={micro_batches}"]
    staged += [f"parallel.stages={stages}"]
    runs = [
        (2, given(architectures[name], tmp_path, "plain", *plain)),
        (ranks, given(architectures[name], tmp_path, "staged", *staged)),
    ]
    train_each(runs, tmp_path)
    losses, norms, evaluations = steps(tmp_path / "plain")
    of_stages, norms_of_stages, evaluations_of_stages = steps(tmp_path / "staged")
    assert len(losses) >= 6 and len(set(losses)) == len(losses)
    assert [of_stages[0], norms_of_stages[0]] == pytest.approx([losses[0], norms[0]], rel=1e-6)
    rounds = any("bfloat16" in each for each in more)
    assert of_stages == pytest.approx(losses, rel=1e-5 if rounds else 1e-6)
    assert norms_of_stages == pytest.approx(norms, rel=1e-3 if rounds else 1e-6)
    assert evaluations_of_stages == pytest.approx(evaluations, rel=1e-5 if rounds else 1e-6)


def files(folder: Path) -> dict[str, bytes]:
    """The files of an exported folder, without those that name its checkpoint or its run."""
    named_after_runs = {"export.json", "README.md"}
    names = sorted(path.name for path in folder.iterdir() if path.name not in named_after_runs)
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("more", [[], LOW_PRECISION, ["lora.rank=4", "parallel.expert=2"]])
def test_the_same_stages_resume_to_the_bit(more, architectures, tmp_path):
    mesh = [*more, "parallel.stages=2", "train.gradient_accumulation_steps=4"]
    model = architectures["glm" if "parallel.expert=2" in more else "tied"]
    runs = [
        (4, given(model, tmp_path, run, *mesh, f"train.max_steps={number}"))
        for run, number in (("whole", 6), ("parts", 2), ("parts", 6))
    ]
    train_each(runs, tmp_path)
    assert steps(tmp_path / "parts")[:2] == steps(tmp_path / "whole")[:2]
    assert files(tmp_path / "parts/model") == files(tmp_path / "whole/model")


def test_stages_resume_none_and_others(architectures, tmp_path):
    meshes = [(8, 4, 4), (2, 1, 4), (4, 2, 4), (8, 4, 4), (4, 1, 2), (2, 2, 8)]
    model, usual = architectures["glm"], ["train.gradient_accumulation_steps=4"]
    runs = [(2, given(model, tmp_path, "whole", *usual))]
    for number, (ranks, stages, micro_batches) in enumerate(meshes):
        mesh = [f"parallel.stages={stages}", f"train.max_steps={number + 1}"]
        mesh += [f"train.gradient_accumulation_steps={micro_batches}"]
        runs.append((ranks, given(model, tmp_path, "parts", *mesh)))
    train_each(runs, tmp_path)
    for part, whole in zip(
        steps(tmp_path / "parts")[:2], steps(tmp_path / "whole")[:2], strict=True
    ):
        assert part == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "exported", "more"),
    [
        ("tied", ["model", "best"], []),
        ("glm", ["model", "best"], ["parallel.expert=2", *LOW_PRECISION]),
        ("deepseek", ["adapter", "best"], ["lora.rank=4"]),
    ],
)
def test_what_is_drawn_saved_and_exported_is_that_of_a_run_without_stages(
    name, exported, more, architectures, tmp_path
):
    """Nothing moves the weights, so that each file has the same bytes."""
    still = ["model.init=random", "optimizer.lr=0", "eval.every_steps=1", "eval.keep_best=true"]
    runs = [
        (
            2 * stages,
            given(
                architectures[name],
                tmp_path,
                f"in{stages}",
                *still,
                *more,
                "train.max_steps=2",
                f"parallel.stages={stages}",
                "train.gradient_accumulation_steps=4",
            ),
        )
        for stages in (1, 2, 4)
    ]
    train_each(runs, tmp_path)
    expected = {folder: files(tmp_path / "in1" / folder) for folder in exported}
    for stages in (2, 4):
        found = {folder: files(tmp_path / f"in{stages}" / folder) for folder in exported}
        assert found == expected
