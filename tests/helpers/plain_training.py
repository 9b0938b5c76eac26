"""The oracle of exactness, which shares no code with the product: training in plain PyTorch, one
record at a time."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from helpers.chats import sentence, write_jsonl
from helpers.commands import read_metrics

Encoded = tuple[list[int], list[float]]  # the tokens, and how much each counts as a target

# Trained tokens as uneven as they get, in records of about one length: whatever averages over
# records, rows, micro-batches or ranks before it sums is wrong by a percent, 500 times the
# tolerance, or more.
ANSWER_WORDS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 10, 40, 80)
ROWS_PACKED = 8
MAX_LENGTH = 260


def uneven_chats() -> list[dict[str, Any]]:
    source = random.Random(5)
    return [
        {
            "messages": [
                {"role": "user", "content": sentence(source, source.randint(60, 100) - words // 2)},
                {
                    "role": "assistant",
                    "content": sentence(source, words)
                    if words < 40
                    else " ".join(["rank"] * 2 * words),
                },
            ]
        }
        for words in random.Random(1).sample(ANSWER_WORDS, len(ANSWER_WORDS))
    ]


def encode(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> Encoded:
    """The ids of a conversation in ChatML, and the weight of each that the assistant says: its
    contents, each with its end."""
    text, spans = "", []
    for message in record["messages"]:
        text += f"<|im_start|>{message['role']}\n"
        begin = len(text)
        text += f"{message['content']}<|im_end|>"
        if message["role"] == "assistant":
            spans.append((begin, len(text), message.get("weight", True)))
        text += "\n"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [
        next((weight for a, b, weight in spans if a <= start < b), False)
        for start, _ in encoded["offset_mapping"]
    ]


def summed_nll(model: Any, ids: list[int], trained: list[float]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return nll.double() @ torch.tensor(trained[1:], dtype=torch.float64)


@dataclass
class Trained:
    """What the plain loop saw and left."""

    losses: list[float]
    norms: list[float]
    record_sums: list[float]  # of each record, before the first update
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def plain_training(
    path: Path,
    records: list[Encoded],
    rates: Sequence[float],
    max_norm: float = math.inf,
    weight_decay: float = 0.0,
    opened: Any = AutoModelForCausalLM,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """AdamW over the loss per trained token of all records, one record at a time, a step for each
    rate. `opened`: the class that opens the model. `dtype`: float64 where this loop itself would
    round more in float32 than a test allows: how much differs between CPUs."""
    fused = dtype.itemsize < 8  # products of all experts at once take no float64
    how = {} if fused else {"experts_implementation": "eager"}
    model = opened.from_pretrained(path, dtype=dtype, **how)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    losses, norms, first_sums = take_steps(model, optimizer, records, rates, max_norm)
    return Trained(losses, norms, first_sums, initial, dict(model.state_dict()))


def take_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    records: list[Encoded],
    rates: Sequence[float],
    max_norm: float,
) -> tuple[list[float], list[float], list[float]]:
    """Return loss and gradient norm of each step, and the sums of each record in the first."""
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
    return losses, norms, first_sums


@torch.no_grad()
def plain_perplexity(path: Path, records: list[Encoded]) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return math.exp(
        sum(summed_nll(model, *record).item() for record in records)
        / sum(sum(trained[1:]) for _, trained in records)
    )


def save_new_model(
    build: Callable[[], Any],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    change: Callable[[Any], None] = lambda model: None,
) -> Path:
    """The directory of a model with the weights that `build` draws, changed by `change`."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_weights(source: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a model's directory, in float32, whose weights or configuration `change` has
    changed."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def sharpen(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)


def settings(model: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    """Assignments of a run in float32; a later one overrides."""
    given = [
        f"model.path={model}",
        f"data.train={data}",
        f"run.dir={run_dir}",
        "model.compute_dtype=float32",
        "optimizer.lr=3e-3",
        "optimizer.eps=1e-4",
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
        "train.max_grad_norm=null",
        f"data.max_length={MAX_LENGTH}",
        "checkpoint.every_steps=0",
        "export.dtype=float32",
        *more,
    ]
    return [f"{key}={value}" for key, value in dict(line.split("=", 1) for line in given).items()]


def on_uneven_chats(
    model: Path, folder: Path, *more: str, run: str = "run", records: Any = None
) -> list[str]:
    """The same for a run in this folder on `uneven_chats`, or on other records, as they are
    written there."""
    data = write_jsonl(folder / "train.jsonl", records or uneven_chats())
    return settings(model, data, folder / run, *more)


def step_losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(run_dir, "step")]


def assert_same_steps(run_dir: Path, expected: Trained, rel: float = 1e-5) -> None:
    assert step_losses(run_dir) == pytest.approx(expected.losses, rel=rel)
    norms = [step["grad_norm"] for step in read_metrics(run_dir, "step")]
    assert norms == pytest.approx(expected.norms, rel=rel)


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
