"""Rows that ranks share train as plain PyTorch trains records, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import moe_families, packing_families
from helpers.chats import write_jsonl
from helpers.commands import finish, read_metrics
from helpers.plain_training import (
    assert_same_weights,
    encode,
    models_on_demand,
    plain_perplexity,
    plain_training,
    settings,
    sharpen,
    uneven_chats,
)
from helpers.ranks import config_for, on_ranks, train_each
from helpers.small_runs import steps_of
from transformers import AutoConfig, PreTrainedTokenizerFast

from shardtune.distributed.join import join_world
from shardtune.errors import RunFailed
from shardtune.model.build import build_model
from shardtune.model.documents.attention_choice import choose_attention

RATES = [1e-3] * 4
MAX_NORM = 0.5
WINDOWS = ("gpt_oss", "gemma3_text")
THREE_KEY_HEADS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
VARIANTS = {
    "llama_of_4": ("llama", {"num_key_value_heads": 4}),
    "tied_llama": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_with_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "glm_with_norms": ("glm4_moe", {"use_qk_norm": True}),
    "llama": ("llama", THREE_KEY_HEADS),
    # Sinks. All experts take each token: rounding sends none to another one.
    "gpt_oss_of_2": ("gpt_oss", THREE_KEY_HEADS | {"num_local_experts": 2}),
}
ROWS = {"true": 8, "false": 16}  # of a step, by data.packing


class Mesh(NamedTuple):
    ranks: int
    context: int
    expert: int = 1
    replicate: int = 1
    stages: int = 1
    tensor: int = 1

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.stages // self.context // self.tensor

    def assignments(self, rows: int) -> list[str]:
        degrees = ("context", "expert", "replicate", "stages", "tensor")
        return [
            *(f"parallel.{key}={getattr(self, key)}" for key in degrees),
            f"train.gradient_accumulation_steps={rows // self.data_ranks}",
        ]


# A family, the mesh that saves after two steps, the mesh that resumes, and settings.
Case = tuple[str, Mesh, Mesh, list[str]]
FULL, SELECTIVE, NONE = (
    [f"model.activation_checkpointing={how}"] for how in ("full", "selective", "none")
)
APART = "data.packing=false"
CASES: list[Case] = [
    ("gpt_oss_of_2", Mesh(2, 2), Mesh(4, 4), FULL),  # three key heads for two ranks, and for four
    ("glm4_moe", Mesh(4, 1, 4, tensor=2), Mesh(4, 1, tensor=2), SELECTIVE),
]
MATRIX: list[Case] = [  # each mesh and kind of attention once
    ("llama_of_4", Mesh(2, 1), Mesh(4, 1, stages=2, tensor=2), SELECTIVE),
    ("llama_of_4", Mesh(4, 1, tensor=4), Mesh(4, 1, tensor=2), ["model.compile=true", *NONE]),
    ("tied_llama", Mesh(4, 1, tensor=2), Mesh(2, 2), FULL),
    ("qwen3", Mesh(4, 1, replicate=2, tensor=2), Mesh(2, 1), [APART]),
    ("qwen3_moe", Mesh(8, 1, 2, 2, 2, 2), Mesh(2, 1, tensor=2), NONE),
    ("glm_with_norms", Mesh(2, 1, tensor=2), Mesh(4, 2, 2), SELECTIVE),
    ("gemma3_text", Mesh(2, 1, tensor=2), Mesh(4, 1, tensor=2), FULL),
    ("llama_with_biases", Mesh(2, 1, tensor=2), Mesh(4, 1, tensor=2), FULL),
    ("gpt_oss", Mesh(4, 2, 2), Mesh(2, 1), [APART]),  # sinks and windows
    ("llama", Mesh(4, 2, stages=2), Mesh(4, 4), FULL),
    ("qwen3_moe", Mesh(8, 2, 2, 2, 2), Mesh(4, 2, 4), ["eval.keep_best=true", *SELECTIVE]),
    ("glm4_moe", Mesh(4, 2, 2), Mesh(2, 2), ["train.micro_batch_size=2", *FULL]),
    ("mixtral", Mesh(4, 1), Mesh(4, 2), SELECTIVE),
    ("deepseek_v3", Mesh(2, 2), Mesh(4, 4, 2), NONE),
    ("gemma3_text", Mesh(4, 2), Mesh(2, 1), [APART, *SELECTIVE]),
]


def build(family: str) -> Any:
    if family in VARIANTS:
        kind, more = VARIANTS[family]
        return moe_families.build(kind, **more)
    if family in WINDOWS:
        return packing_families.build(family)
    return moe_families.build(family)


@pytest.fixture(scope="module")
def models(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    def change_of(family: str) -> Callable[[Any], None]:
        # The weights of families with windows are sharp enough, and sharper ones send tokens that
        # round otherwise to other experts.
        return (lambda model: None) if family in WINDOWS else sharpen

    return models_on_demand(tmp_path_factory.mktemp("families"), tokenizer, build, change_of)


@pytest.mark.parametrize(
    ("family", "first", "second", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MATRIX)],
)
def test_shared_rows_equal_one_record_at_a_time(
    family, first, second, more, models, tokenizer, tmp_path
):
    """Two steps on one mesh, and two after a resume on another; clipped, with a baseline."""
    records = uneven_chats()
    data = write_jsonl(tmp_path / "train.jsonl", records)
    rows = ROWS["false" if APART in more else "true"]
    given = settings(models(family), data, tmp_path / "run", f"data.eval={data}")
    given += [f"optimizer.lr={RATES[0]}", "train.epochs=4", f"train.max_grad_norm={MAX_NORM}"]
    runs = [
        (mesh.ranks, [*given, *more, f"train.max_steps={steps}", *mesh.assignments(rows)])
        for steps, mesh in ((2, first), (4, second))
    ]
    logs = []
    for run in runs:  # each in new processes: DTensor's caches keep the meshes of the first run
        train_each([run], tmp_path)
        logs.append((tmp_path / "run0.out").read_text(encoding="utf-8").splitlines())
    encoded = [encode(tokenizer, record) for record in records]
    expected = plain_training(models(family), encoded, RATES, MAX_NORM, dtype=torch.float64)
    steps = steps_of(tmp_path / "run")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-6)
    baseline, *_ = read_metrics(tmp_path / "run", "eval")
    perplexity = plain_perplexity(models(family), encoded)
    assert baseline["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert_same_weights(tmp_path / "run", expected)
    heads = 12 if family in ("llama", "gpt_oss_of_2") else 4
    for log, mesh in zip(logs, (first, second), strict=True):
        shared = f"Rows: each shared by {mesh.context} ranks, {heads // mesh.context} of {heads}"
        cut = f"Rows: each shared by {mesh.tensor} ranks, which cut the matrices of each layer in "
        assert (f"{shared} heads each" in log) == (mesh.context > 1)
        assert (f"{cut}{mesh.tensor}" in log) == (mesh.tensor > 1)
        (batch,) = (line for line in log if line.startswith("Effective batch size: "))
        assert f" x {mesh.data_ranks} (" in batch


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("qwen3_moe", Mesh(4, 4, 2), ["optimizer.name=adamw8bit"]),
        ("qwen3_moe", Mesh(4, 4, 2), ["model.master_dtype=bfloat16"]),
        ("qwen3", Mesh(4, 1, tensor=2), ["model.master_dtype=bfloat16"]),
        ("qwen3", Mesh(4, 1, tensor=2), ["lora.rank=4", "lora.targets=all-linear"]),
        ("llama_of_4", Mesh(4, 1, stages=2, tensor=2), ["lora.rank=4"]),
    ],
)
def test_other_states_take_the_steps_of_rows_that_one_rank_has(
    family, mesh, more, models, tmp_path
):
    """Rounding of the sums over ranks may send a moment or a weight to the next value."""
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    for ranks_of_rows, run_mesh in (("one", Mesh(2, 1)), ("several", mesh)):
        given = settings(models(family), data, tmp_path / ranks_of_rows, *more)
        given += ["train.epochs=4", *run_mesh.assignments(ROWS["true"])]
        train_each([(run_mesh.ranks, given)], tmp_path)
    alone, shared = (steps_of(tmp_path / name) for name in ("one", "several"))
    assert len(alone) == 4
    for key, rounding in (("loss", 1e-4), ("grad_norm", 1e-3)):
        assert [s[key] for s in shared] == pytest.approx([s[key] for s in alone], rel=rounding)


@pytest.mark.full
@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("key", ["context", "tensor"])
def test_rows_of_fewer_tokens_than_ranks_train_exactly(key, packing, models, tokenizer, tmp_path):
    records = [{"text": text} for text in ("a", "b c", "rank", "rank step d")]
    encoded = [[*tokenizer(r["text"])["input_ids"], tokenizer.eos_token_id] for r in records]
    assert min(map(len, encoded)) < 4
    data = write_jsonl(tmp_path / "train.jsonl", records)
    more = [f"data.packing={packing}", "data.max_length=16", "train.epochs=2"]
    given = settings(models("llama_of_4"), data, tmp_path / "run", *more, f"parallel.{key}=4")
    train_each([(4, [*given, "train.gradient_accumulation_steps=4"])], tmp_path)
    expected = plain_training(
        models("llama_of_4"), [(ids, [True] * len(ids)) for ids in encoded], [3e-3] * 2
    )
    steps = steps_of(tmp_path / "run")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-6)


def try_attention(model: Path, folder: Path) -> None:
    """On a rank: let a model attend that counts places from the beginning of what it is given."""
    more = ["parallel.context=2", "data.max_length=64", "model.compute_dtype=float32"]
    config = config_for(model, folder, *more)
    world = join_world(config)
    built = build_model(config, AutoConfig.from_pretrained(model), world)

    def count_from_own_begin(_: Any, given: Any, named: dict[str, Any]) -> Any:
        places = named.get("position_ids")
        return given, named if places is None else named | {"position_ids": places - places[0, 0]}

    built.register_forward_pre_hook(count_from_own_begin, with_kwargs=True)
    with pytest.raises(RunFailed, match=r"parallel\.context=2 .* change without the mask"):
        choose_attention(built, 64, world)


@pytest.mark.full
def test_a_model_that_goes_by_the_place_in_a_slice_ends_the_run(models, tmp_path):
    finish(on_ranks(2, try_attention, models("llama"), tmp_path, cwd=tmp_path))
