"""LoRA on any number of ranks is a plain training loop around peft's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import read_metrics
from helpers.plain_lora import TARGETS, initial_factors, loss_of, peft_model, plain_lora_training
from helpers.plain_training import (
    encode,
    finish,
    settings,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import train
from peft import get_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardtune.config import LoraConfig

RATES = [3e-3] * 4
LORA = ("lora.rank=3", "lora.alpha=12")


@pytest.fixture(scope="module")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(models[name], root / name, sharpen) for name in ("llama", "glm")}


@pytest.fixture(scope="module")
def expected(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the trained peft model of each kind with its losses and norms."""
    records = [encode(tokenizer, record) for record in uneven_chats()]
    trained = {}
    for kind, path in sharp.items():
        factors = initial_factors(path, LoraConfig(rank=3, alpha=12))
        model = peft_model(path, factors, 3, 12, **TARGETS[kind])
        trained[kind] = (model, records, *plain_lora_training(model, records, RATES))
    return trained


def run(model: Path, folder: Path, ranks: int, *more: str) -> tuple[str, Path]:
    """Take four steps over all the data; return the output and the run's folder."""
    data, run_dir = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run"
    accumulation = f"train.gradient_accumulation_steps={8 // ranks}"
    given = settings(model, data, run_dir, "train.epochs=4", accumulation, *LORA, *more)
    return finish(train(ranks, *given, cwd=folder)), run_dir


def assert_steps(run_dir: Path, expected: Any) -> None:
    _, _, losses, norms = expected
    steps = read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        ("glm", 1, []),
        ("glm", 2, []),
        ("llama", 2, []),
        ("glm", 2, ["parallel.expert=2", "model.activation_checkpointing=full"]),
        pytest.param(
            "glm", 4, ["parallel.expert=2", "parallel.replicate=2"], marks=pytest.mark.full
        ),
    ],
)
def test_steps_equal_a_plain_loop_around_peft(
    kind: str,
    ranks: int,
    more: list[str],
    sharp: dict[str, Path],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    _, run_dir = run(sharp[kind], tmp_path, ranks, *more)
    assert_steps(run_dir, expected[kind])
    assert_exported(run_dir, sharp[kind], expected[kind])


def assert_exported(run_dir: Path, base: Path, expected: Any) -> None:
    """Expect that adapter/ and model/ are the trained model."""
    model, records, *_ = expected
    loss = loss_of(model, records)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, run_dir / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    assert loss_of(adapted, records) == pytest.approx(loss, rel=1e-6)
    assert loss_of(merged, records) == pytest.approx(loss, rel=1e-6)
    trained = get_peft_model_state_dict(model)
    for name, factor in get_peft_model_state_dict(adapted).items():
        torch.testing.assert_close(factor, trained.pop(name), rtol=1e-4, atol=1e-5)
    assert not trained
