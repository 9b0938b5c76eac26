"""Ranks agree on weights that only some of them use."""

from __future__ import annotations

import pytest
from helpers.chats import write_jsonl
from helpers.packing_families import build
from helpers.plain_training import save_new_model, settings, uneven_chats
from helpers.ranks import train_each
from helpers.small_runs import steps_of


@pytest.mark.full
def test_ranks_reduce_what_only_some_of_them_use(tokenizer, tmp_path):
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
