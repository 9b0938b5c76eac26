"""Rows that ranks share train as plain PyTorch trains records, one at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.commands import finish, read_metrics
from helpers.exact import APART, FULL, NONE, SELECTIVE, Mesh
from helpers.plain_training import (
    assert_same_steps,
    encode,
    on_uneven_chats,
    plain_perplexity,
    plain_training,
    uneven_chats,
)
from helpers.ranks import config_for, on_ranks, train
from helpers.small_runs import run_in_graphs
from transformers import AutoConfig

from shardtune.distributed.join import join_world
from shardtune.errors import RunFailed
from shardtune.model.documents.attention_choice import choose_attention

# A family, the mesh that saves after two steps, the mesh that resumes, and settings.
Case = tuple[str, Mesh, Mesh, list[str]]
CASES: list[Case] = [
    # Three key heads for two ranks, and for four.
    ("gpt_oss_of_2", Mesh(2, context=2), Mesh(4, context=4), [FULL]),
    ("glm4_moe", Mesh(4, 4, tensor=2), Mesh(4, tensor=2), [SELECTIVE]),
]
MATRIX: list[Case] = [  # each mesh and kind of attention once
    ("llama_with_biases", Mesh(2, tensor=2), Mesh(4, tensor=2), [FULL]),
    ("llama_of_4", Mesh(4, tensor=4), Mesh(4, tensor=2), [NONE]),
    ("tied_llama", Mesh(4, tensor=2), Mesh(2, context=2), [FULL]),
    ("qwen3", Mesh(4, replicate=2, tensor=2), Mesh(2), [APART]),
    ("qwen3_moe", Mesh(8, 2, 2, 2, tensor=2), Mesh(2, tensor=2), [NONE]),
    ("gemma3_text", Mesh(2, tensor=2), Mesh(4, stages=2, tensor=2), [FULL]),
    ("windows_gpt_oss", Mesh(4, 2, context=2), Mesh(2), [APART]),  # sinks and windows
    ("llama_of_3", Mesh(4, stages=2, context=2), Mesh(4, context=4), [FULL]),
    (
        "qwen3_moe",
        Mesh(8, 2, 2, 2, context=2),
        Mesh(4, 4, context=2),
        ["eval.keep_best=true", SELECTIVE],
    ),
    ("deepseek_v3", Mesh(2, context=2), Mesh(4, 2, context=4), [NONE]),
]


@pytest.mark.parametrize(
    ("family", "first", "second", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MATRIX)],
)
def test_shared_rows_equal_one_record_at_a_time(
    family, first, second, more, check_exact, sharp, tokenizer, tmp_path
):
    """Two steps on one mesh, and two after a resume on another; clipped, with a baseline."""
    more = [*more, f"data.eval={tmp_path}/train.jsonl"]
    bounds = {"rel": 1e-6, "rate": 1e-3, "dtype": torch.float64, "work": run_in_graphs}
    logs = check_exact(family, [first, second], more, **bounds)
    baseline, *_ = read_metrics(tmp_path / "run", "eval")
    records = [encode(tokenizer, record) for record in uneven_chats()]
    perplexity = plain_perplexity(sharp[family], records)
    assert baseline["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    heads = AutoConfig.from_pretrained(sharp[family]).num_attention_heads
    for log, mesh in zip(logs, (first, second), strict=True):
        shared = f"Rows: each shared by {mesh.context} ranks, {heads // mesh.context} of {heads}"
        cut = f"Rows: each shared by {mesh.tensor} ranks, which cut the matrices of each layer in "
        assert (f"\n{shared} heads each\n" in log) == (mesh.context > 1)
        assert (f"\n{cut}{mesh.tensor}\n" in log) == (mesh.tensor > 1)
        (batch,) = (line for line in log.splitlines() if line.startswith("Effective batch size: "))
        assert f" x {mesh.data_ranks} (" in batch


@pytest.mark.full
@pytest.mark.parametrize(("key", "packing"), [("context", "true"), ("tensor", "false")])
def test_rows_of_fewer_tokens_than_ranks_train_exactly(key, packing, sharp, tokenizer, tmp_path):
    records = [{"text": text} for text in ("a", "b c", "rank", "rank step d")]
    encoded = [[*tokenizer(r["text"])["input_ids"], tokenizer.eos_token_id] for r in records]
    assert min(map(len, encoded)) < 4
    given = [f"data.packing={packing}", "data.max_length=16", "train.epochs=2"]
    given += [f"parallel.{key}=4", "train.gradient_accumulation_steps=4"]
    given = on_uneven_chats(sharp["llama_of_4"], tmp_path, *given, records=records)
    finish(train(4, *given, cwd=tmp_path))
    expected = plain_training(
        sharp["llama_of_4"], [(ids, [True] * len(ids)) for ids in encoded], [3e-3] * 2
    )
    assert_same_steps(tmp_path / "run", expected, rel=1e-6)


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
def test_a_model_that_goes_by_the_place_in_a_slice_ends_the_run(sharp, tmp_path):
    finish(on_ranks(2, try_attention, sharp["llama_of_3"], tmp_path, cwd=tmp_path))
