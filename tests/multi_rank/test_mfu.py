"""The MFU that a run logs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import packing_families
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.ranks import train
from helpers.small_runs import SETTINGS
from transformers import AutoModelForCausalLM

from shardtune.model.flops import count_flops


def run_steps(
    model: Path, folder: Path, ranks: int, *more: str
) -> tuple[str, list[dict[str, Any]]]:
    write_jsonl(folder / "train.jsonl", chats(30))
    given = [*SETTINGS, "train.max_steps=3", "logging.every_steps=3", "export.final=false"]
    said = finish(train(ranks, *given, f"model.path={model}", *more, cwd=folder))
    return said, read_metrics(folder / "runs/config", "step")


def test_a_run_says_its_mfu(tmp_path, models):
    said, steps = run_steps(models["glm"], tmp_path, 2)
    (peak,) = re.findall(
        r"^MFU counts model FLOPs against (\S+) TFLOP/s \(measured on .* float32\) x 2 \(ranks\)$",
        said,
        re.M,
    )
    model = AutoModelForCausalLM.from_pretrained(models["glm"])
    flops = count_flops(model)
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["seconds"])
        # Without attention, which is the documents': the least, and with one document of all tokens
        # the most.
        least = 3 * (
            flops.per_token * step["tokens"] + flops.per_trained_token * step["trained_tokens"]
        )
        most = flops.per_step(np.array([step["tokens"]]), step["trained_tokens"])
        done = step["mfu"] * step["seconds"] * 2e12 * float(peak)
        assert 0.99 * least < done < 1.01 * most, "the peak is said with three digits"
        assert 1e8 < step["memory_bytes"] < 1e11
    mean = sum(step["mfu"] * step["seconds"] for step in steps) / sum(
        step["seconds"] for step in steps
    )
    (line,) = re.findall(r"^Step 3/3 .*$", said, re.M)
    assert f"tok/s | MFU {mean:.1%} | {steps[-1]['memory_bytes'] / 1e9:.1f} GB | ETA" in line


def test_a_run_without_mfu_says_so_once(tmp_path, models):
    packing_families.build("deepseek_v4").save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((models["llama"] / name).read_bytes())
    said, steps = run_steps(tmp_path / "model", tmp_path, 1, "data.packing=false")
    assert said.count("MFU") == said.count("MFU is left out: deepseek_v4 ") == 1
    assert [step["mfu"] for step in steps] == [None] * 3
