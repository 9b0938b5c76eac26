"""Models with states, windows or sinks train as plain PyTorch, one document at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.packing_families import INDEXED, ONE_BY_ONE, STATES, WINDOWS, build
from helpers.plain_training import (
    encode,
    plain_training,
    save_new_model,
    settings,
    uneven_chats,
)
from helpers.ranks import train_each
from helpers.small_runs import steps_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

RATES = [3e-3] * 3
PACKED = "data.packing=true"
RUNS = {
    "packed": (2, PACKED, "model.activation_checkpointing=full"),
    "selective": (1, PACKED, "model.activation_checkpointing=selective"),
    "alone": (2, "data.packing=false"),
    "stages": (2, PACKED, "parallel.stages=2"),
}
# Their layers hand on more than hidden states, or share weights.
NO_STAGES = {"bamba", "falcon_h1", "zaya", "zamba", "zamba2", "recurrent_gemma", "glm_moe_dsa"}
NO_STAGES |= {"rwkv", "xlstm", *ONE_BY_ONE} - {"gemma2", "doge"}


def fill_zeros(model: torch.nn.Module) -> None:
    """Draw weights that begin at 0. Three steps leave them small, and rounding a large share."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.1)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5_moe_text", ["packed", "stages"]),
        ("gpt_oss", ["packed"]),
        ("gemma3_text", ["selective"]),
        *(
            pytest.param(
                family,
                [name for name in RUNS if name != "stages" or family not in NO_STAGES],
                marks=pytest.mark.full,
            )
            for family in (*STATES, *WINDOWS, *INDEXED, *ONE_BY_ONE)
            if family != "openai-gpt"  # it cannot compute layers again
        ),
    ],
)
def test_runs_equal_one_document_at_a_time(
    family: str, names: list[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    change = fill_zeros if family in ONE_BY_ONE else (lambda model: None)
    model = save_new_model(lambda: build(family), tokenizer, tmp_path / "model", change)
    records = uneven_chats()
    data = write_jsonl(tmp_path / "train.jsonl", records)
    runs = []
    for name in names:
        ranks, *more = RUNS[name]
        stages = 2 if name == "stages" else 1
        rows = 8 if PACKED in more else 16
        more += ["train.epochs=3", f"train.gradient_accumulation_steps={rows * stages // ranks}"]
        runs.append((ranks, settings(model, data, tmp_path / name, *more)))
    train_each(runs, tmp_path)
    expected = plain_training(model, [encode(tokenizer, record) for record in records], RATES)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained.load_state_dict(expected.final)
    trained.save_pretrained(tmp_path / "trained")
    rounding = 1e-5 if family in STATES else 1e-6
    for number, name in enumerate(names):
        said = (tmp_path / f"run{number}.out").read_text(encoding="utf-8")
        assert re.search(r"^Attention: .*; rows have no padding$", said, re.M), said
        steps = steps_of(tmp_path / name)
        assert [s["loss"] for s in steps] == pytest.approx(expected.losses, rel=rounding)
        assert [s["grad_norm"] for s in steps] == pytest.approx(expected.norms, rel=rounding)
        exported = load_file(tmp_path / name / "model/model.safetensors")
        stored = load_file(tmp_path / "trained/model.safetensors")
        assert exported.keys() == stored.keys()
        for key, tensor in stored.items():
            # DeepSeek V4 has a table of integers.
            off = (exported[key].double() - tensor.double()).norm()
            assert off <= 1e-5 * tensor.double().norm(), key


@pytest.mark.full
def test_ranks_reduce_what_only_some_of_them_use(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Ranks with short rows compress no keys, and have no gradient for what does."""
    model = save_new_model(
        lambda: build("deepseek_v4"), tokenizer, tmp_path / "model", lambda model: None
    )
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    given = "data.packing=false", "optimizer.weight_decay=0"
    meshes = [(1, 2), (2, 1)]
    runs = [
        (
            ranks,
            settings(
                *(model, data, tmp_path / f"{ranks} ranks", *given),
                f"train.gradient_accumulation_steps={rows}",
            ),
        )
        for ranks, rows in meshes
    ]
    train_each(runs, tmp_path)
    one, two = (steps_of(tmp_path / f"{ranks} ranks") for ranks, _ in meshes)
    for key in ("loss", "grad_norm"):
        assert [s[key] for s in two] == pytest.approx([s[key] for s in one], rel=1e-5)
