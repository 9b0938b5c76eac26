"""A tiny real model directory, records for it, and what one start of a run makes of them."""

import contextlib
import datetime
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from distTest.workloads.small_models import SPECIAL, make_tokenizer
from shardtune.config import DataConfig, ModelConfig
from shardtune.data.dataset import (
    PreparedData,
    TokenDataset,
    build_encoder,
    open_prepared,
    prepare_data,
)
from shardtune.errors import UserError
from shardtune.log import logger

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(
    folder: Path, template: str | None = TEMPLATE, eos: str = "<|im_end|>", more: Sequence[str] = ()
) -> Path:
    """A tokenizer and a configuration as a model's directory holds them, without weights."""
    words = ["hello world how are you user assistant system"] * 9
    fast = make_tokenizer(words, 300, SPECIAL[:2])
    fast.add_special_tokens({"eos_token": eos})  # new ones, too
    fast.add_tokens([*more], special_tokens=True)
    fast.chat_template = template
    fast.save_pretrained(folder)
    LlamaConfig(vocab_size=len(fast), eos_token_id=fast.eos_token_id).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """The lines that the code within logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Run:
    """The data of one start of a run; `lines` are those that it logs meanwhile."""

    def __init__(
        self, model: Path, train: Path | list[Any], date: str = "2026-01-31", **data: Any
    ) -> None:
        config = DataConfig(train=str(train) if isinstance(train, Path) else train, **data)
        self.encoder = build_encoder(
            ModelConfig(path=str(model)), config, datetime.date.fromisoformat(date)
        )
        with log_lines() as self.lines:
            self.entry = prepare_data(config, self.encoder)
        self.prepared: PreparedData = open_prepared(self.entry)

    def texts(self) -> list[tuple[str, str]]:
        """Text and trained text of each sequence of the training set."""
        decode = self.encoder.tokenizer.decode
        rows = [self.prepared.train[i] for i in range(len(self.prepared.train))]
        return [(decode(tokens), decode(tokens[trained > 0])) for tokens, trained in rows]


def chat(question: Any, answer: Any = "fine", **fields: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
        **fields,
    }


def calling(function: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


def write(file: Path, records: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def problems_of(model: Path, train: Path | list[Any], **data: Any) -> list[str]:
    with pytest.raises(UserError) as refused:
        Run(model, train, **data)
    return refused.value.problems


def random_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count).astype(np.int32)


def log_normal_lengths(count: int, mean: float, longest: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - 0.5, 1, count)
    return np.clip(drawn, 1, longest).astype(np.int32)


def write_dataset(
    folder: Path,
    sequences: list[tuple[list[int], list[float]]],
    record: Any = None,
    source: Any = None,
) -> TokenDataset:
    """The columns of a data cache, written by hand; by default each sequence is a record."""
    lengths = [len(ids) for ids, _ in sequences]
    weights = [weight for _, each in sequences for weight in each]
    between = [i for i, weight in enumerate(weights) if 0 < weight < 1]
    columns = {
        "tokens": np.array([i for ids, _ in sequences for i in ids], np.uint32),
        "trained": np.array([weight > 0 for weight in weights], np.bool_),
        "lengths": np.array(lengths, np.int32),
        "trained_counts": np.array([sum(map(bool, each)) for _, each in sequences], np.int32),
        "trained_weights": np.array([sum(each) for _, each in sequences], np.float64),
        "record": np.asarray(range(len(lengths)) if record is None else record, np.int64),
        "source": np.asarray([0] * len(lengths) if source is None else source, np.uint16),
        "starts": np.cumsum([0, *lengths[:-1]], dtype=np.int64),
        "weighted": np.array(between, np.int64),
        "weights": np.array([weights[i] for i in between], np.float32),
    }
    for name, column in columns.items():
        (folder / f"train.{name}").write_bytes(column.tobytes())
    return TokenDataset(folder, "train")
