"""The numbers of real runs against plain PyTorch in one process, which shares no code with the product."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import chats, launch, read_metrics, sentence, write_jsonl
from ranks import on_ranks, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from shardtune.packing import deal, plan_rows

FAMILIES = ("llama", "qwen3", "glm")
Encoded = tuple[list[int], list[bool]]

# Trained tokens as uneven as they get, in records of about one length: whatever averages over records, rows,
# micro-batches or ranks before it sums is wrong by percents.
ANSWER_WORDS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 10, 40, 80)
ROWS_PACKED = 8
MAX_LENGTH = 260


def uneven_chats() -> list[dict[str, Any]]:
    source = random.Random(5)
    return [
        {"messages": [
            {"role": "user", "content": sentence(source, source.randint(60, 100) - words // 2)},
            {"role": "assistant", "content": sentence(source, words) if words < 40 else " ".join(["rank"] * 2 * words)},
        ]}
        for words in random.Random(0).sample(ANSWER_WORDS, len(ANSWER_WORDS))
    ]


def encode(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> Encoded:
    """The ids of a conversation in ChatML, and which of them the assistant says: its contents, each with its end."""
    text, spans = "", []
    for message in record["messages"]:
        text += f"<|im_start|>{message['role']}\n"
        begin = len(text)
        text += f"{message['content']}<|im_end|>"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
        text += "\n"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(a <= start < b for a, b in spans) for start, _ in encoded["offset_mapping"]]


def summed_nll(model: Any, ids: list[int], trained: list[bool]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    nll = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return nll[torch.tensor(trained[1:])].double().sum()


@dataclass
class Trained:
    """What the plain loop saw and left."""

    losses: list[float]
    norms: list[float]
    record_sums: list[float]  # of each record, before the first update
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def plain_training(
    path: Path, records: list[Encoded], rates: list[float], max_norm: float = math.inf, weight_decay: float = 0.0,
) -> Trained:
    """AdamW over the loss per trained token of all records, one record at a time, a step for each rate."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ], betas=(0.9, 0.95), eps=1e-4)
    tokens = sum(sum(trained[1:]) for _, trained in records)
    losses, norms, first_sums = [], [], []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums = []
        for ids, trained in records:
            nll = summed_nll(model, ids, trained)
            (nll / tokens).backward()
            sums.append(nll.item())
        first_sums = first_sums or sums
        losses.append(sum(sums) / tokens)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, first_sums, initial, dict(model.state_dict()))


@torch.no_grad()
def plain_perplexity(path: Path, records: list[Encoded]) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return math.exp(sum(summed_nll(model, *record).item() for record in records)
                    / sum(sum(trained[1:]) for _, trained in records))


@pytest.fixture(scope="session")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models with weights eight times as large: losses that differ from token to token, as after pretraining."""
    root = tmp_path_factory.mktemp("sharp")
    for name, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
        model.save_pretrained(root / name)
        for file in path.glob("*token*"):
            (root / name / file.name).write_bytes(file.read_bytes())
        for file in path.glob("chat_template*"):
            (root / name / file.name).write_bytes(file.read_bytes())
    return {name: root / name for name in models}


def settings(model: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    """Assignments of a run in float32; a later one overrides."""
    given = [f"model.path={model}", f"data.train={data}", f"run.dir={run_dir}", "model.compute_dtype=float32",
             "optimizer.lr=3e-3", "optimizer.eps=1e-4", "scheduler.name=constant", "scheduler.warmup_ratio=0",
             "train.max_grad_norm=null", f"data.max_length={MAX_LENGTH}", "checkpoint.every_steps=0",
             "export.dtype=float32", *more]
    return [f"{key}={value}" for key, value in dict(line.split("=", 1) for line in given).items()]


def finish(finished: Any) -> str:
    assert finished.returncode == 0, finished.stderr[-3000:]
    return str(finished.stdout)


def step_losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(run_dir, "step")]


def assert_same_weights(run_dir: Path, expected: Trained) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    final = model.state_dict()
    assert final.keys() == expected.final.keys()
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in final.items():
        update = (expected.final[name] - expected.initial[name]).norm()
        difference = (tensor - expected.final[name]).norm()
        assert difference <= 1e-5 * expected.final[name].norm(), name
        assert difference <= 1e-3 * update or not update, name
        assert bool(update > 1e-4 * expected.initial[name].norm()) == (name in trained), name


def mean_of_means_errors(records: list[Encoded], sums: list[float], ranks: int, packed: bool) -> list[float]:
    """How wrong the loss of the first step would be if averaged over micro-batches, and if averaged over ranks."""
    counts = [sum(trained[1:]) for _, trained in records]
    lengths = torch.tensor([len(ids) for ids, _ in records]).numpy()
    rows = plan_rows(lengths, MAX_LENGTH, packed, 1234, 0)
    dealt = [deal([rows[row].tolist() for row in range(len(rows))], rank, ranks, 1 if packed else 2)
             for rank in range(ranks)]

    def mean(group: list[int]) -> float:
        return sum(sums[i] for i in group) / sum(counts[i] for i in group)

    exact = mean(list(range(len(records))))
    by_micro_batch = [mean(group) for groups in dealt for group in groups]
    by_rank = [mean([i for group in groups for i in group]) for groups in dealt]
    return [abs(sum(means) / len(means) / exact - 1) for means in (by_micro_batch, by_rank)]


@pytest.fixture(scope="session")
def plain(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> Callable[..., Trained]:
    """The plain loop over `uneven_chats`, once for each family and setting."""
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return cache(lambda family, *arguments: plain_training(sharp[family], records, list(arguments[0]), *arguments[1:]))


def check_equality(
    family: str, ranks: int, accumulation: int, packed: bool, sharp: dict[str, Path], plain: Callable[..., Trained],
    tokenizer: PreTrainedTokenizerFast, folder: Path,
) -> None:
    """One optimizer step an epoch, so that the plain loop need not know the order of the data."""
    data, run_dir, rows = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run", 1 if packed else 2
    said = finish(train(ranks, *settings(
        sharp[family], data, run_dir, f"data.packing={str(packed).lower()}", "train.epochs=4",
        f"train.micro_batch_size={rows}", f"train.gradient_accumulation_steps={accumulation}"), cwd=folder))
    assert f"Rows per epoch: {ROWS_PACKED * rows} of" in said
    assert "Steps per epoch: 1 | Total steps: 4" in said
    expected, steps = plain(family, (3e-3,) * 4), read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)
    records = [encode(tokenizer, record) for record in uneven_chats()]
    by_micro_batch, by_rank = mean_of_means_errors(records, expected.record_sums, ranks, packed)
    assert by_micro_batch > 0.01
    assert by_rank > 0.01 or ranks == 1


@pytest.mark.parametrize(("family", "ranks", "accumulation", "packed"), [
    ("llama", 1, 8, True), ("qwen3", 2, 4, False), ("glm", 4, 2, True), ("llama", 8, 1, False)])
def test_losses_norms_and_weights_equal_plain_pytorch(family, ranks, accumulation, packed, sharp, plain, tokenizer,
                                                      tmp_path):
    check_equality(family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path)
