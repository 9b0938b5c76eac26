"""The sections of the benchmarks that measure this product alone; bench.py has its peers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig

from benchmarks.measure import (
    REPOSITORY,
    TOLERANCE,
    Unequal,
    launch,
    require_equal_losses,
    require_equal_work,
    require_moving_loss,
    run_ours,
    run_pinned,
    settings,
)
from distTest.workloads.chats import write_chats

SMALL_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
VOCABULARY = 151552  # GLM-4.5's, for the memory of the head
# In float32: logit, log-probability, gradient. In bfloat16: logit and gradient.
NAIVE_BYTES_PER_LOGIT = 16


def traffic(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """Count the bytes that one step of two ranks moves, and the rows through its head.

    It is a run of three steps less a run of two.
    """
    vocabulary = AutoConfig.from_pretrained(options.model).vocab_size
    per_rank_counts: list[list[dict[str, dict[str, int]]]] = []
    (options.work / "empty.yaml").touch()
    for steps in (2, 3):
        ours, _ = settings(options, chats, "float32", options.model)
        name = f"traffic-{steps}"
        few: dict[str, Any] = {
            "train.max_steps": steps,
            "train.epochs": 99,
            "train.gradient_accumulation_steps": 2,
        }
        few |= {"data.max_length": 256, "data.overflow": "truncate", "export.final": "false"}
        few |= {"run.dir": options.work / name, "run.resume": "never", "checkpoint.every_steps": 0}
        script = ["-m", "benchmarks.traffic", options.work / name, vocabulary, "--config"]
        script += [
            options.work / "empty.yaml",
            *(f"{key}={value}" for key, value in {**ours, **few}.items()),
        ]
        if not run_pinned(
            launch(script, sys.executable, 2), None, options.work / f"{name}.log", 3600
        ):
            return {}
        per_rank_counts.append(
            [
                json.loads(Path(f"{options.work / name}.{rank}.json").read_text())
                for rank in range(2)
            ]
        )
        shutil.rmtree(options.work / name / "checkpoints", ignore_errors=True)
    before, after = per_rank_counts

    def more(rank: int, name: str, key: str) -> int:
        return after[rank][name][key] - before[rank].get(name, {}).get(key, 0)

    metrics = (options.work / "traffic-3/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(metrics[-1])
    collectives = {
        name: {"count": more(0, name, "count"), "bytes": more(0, name, "bytes")}
        for name in sorted(after[0])
        if name != "head" and more(0, name, "count")
    }
    head = {"rows": sum(more(rank, "head", "count") for rank in range(2))}
    return {
        "collectives": collectives,
        "head": head | {key: last[key] for key in ("tokens", "trained_tokens")},
    }


def loss_memory(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """Peak memory of forward and backward of the head and the loss, each way in a process of its
    own.

    Raises:
        Unequal: their losses differ.
    """
    peaks, tokens = {}, options.head_tokens
    while NAIVE_BYTES_PER_LOGIT * VOCABULARY * tokens > psutil.virtual_memory().available:
        tokens //= 2
    for way in ("naive", "ours"):
        out = options.work / f"head-{way}.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.head_memory",
            way,
            out,
            tokens,
            VOCABULARY,
        ]
        if run_pinned(command, None, options.work / f"head-{way}.log", 1800):
            peaks[way] = json.loads(out.read_text(encoding="utf-8"))
    if len(peaks) == 2:
        # Both round the same logits to bfloat16, and go on in float32.
        require_equal_losses(
            [peaks["ours"]["loss"]], [peaks["naive"]["loss"]], TOLERANCE["float32"]
        )
    return peaks


def small_model(options: argparse.Namespace) -> Path:
    model: Path = options.work / "small"
    config = AutoConfig.from_pretrained(options.model, **SMALL_MODEL)
    config.num_key_value_heads, config.head_dim = SMALL_MODEL["num_attention_heads"], 64
    config.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(options.model / name, model / name)
    return model


def many_records(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """Take a few steps on few and on many records, tokenizing first, then from the cache.

    Return the seconds outside the steps, and the tokens per second within them.
    """
    settings = {
        "model.path": small_model(options),
        "model.init": "random",
        "model.compute_dtype": "float32",
        "data.max_length": 512,
        "train.gradient_accumulation_steps": 4,
        "train.max_steps": 5,
        "run.resume": "never",
        "export.final": "false",
    }
    (options.work / "empty.yaml").touch()
    figures = {}
    for count in options.records:
        data = options.work / f"records-{count}.jsonl"
        with data.open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"text": f"{number}" + " word" * (number % 24)}) + "\n"
                for number in range(count)
            )
        outside_s = {}
        for state in ("tokenised", "cached"):
            name = f"records-{count}-{state}"
            run_settings = settings | {"data.train": data, "run.dir": options.work / name}
            script = [REPOSITORY / "train_fsdp.py", "--config", options.work / "empty.yaml"]
            script += [f"{key}={value}" for key, value in run_settings.items()]
            started = time.monotonic()
            if not run_pinned([sys.executable, *script], None, options.work / f"{name}.log", 3600):
                break
            lines = (options.work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
            outside_s[state] = time.monotonic() - started - sum(step["seconds"] for step in steps)
            figures[count] = {
                "outside_s": outside_s,
                "tokens_per_s": [step["tokens_per_second"] for step in steps[1:]],
            }
    return figures


def spread_experts(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """CPU seconds of a micro-batch whose experts' weights travel, and of one whose tokens do.

    Raises:
        Unequal: their losses differ.
    """
    out = options.work / "experts.json"
    script = ["-m", "benchmarks.expert_speed", out, 3 * options.rounds]
    command = launch([*script, *options.expert_tokens], sys.executable, 2)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if not run_pinned(command, cores, options.work / "experts.log", 1800):
        return {}
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    for row in figures["by_tokens"].values():
        losses = row["losses"]
        require_equal_losses([losses["expert"]], [losses["fsdp"]], TOLERANCE["float32"])
    return figures


def scaling(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """The same global batches of a small model on 1 to 16 ranks, which share this machine's cores.

    Raises:
        Unequal: the losses of two numbers of ranks differ, or hardly move.
    """
    model = small_model(options)
    length = options.max_length // 4
    tokens = (max(options.ranks) + 4) * length  # a full row for each rank, and some more
    many = write_chats(options.work / "many.jsonl", tokens, length, seed=1)
    figures, first = {}, None
    for ranks in options.ranks:
        ours, _ = settings(options, many, "float32", model)
        more = {"model.init": "random", "data.max_length": length}
        name = f"scaling-{ranks}"
        side = run_ours(name, options.work, {**ours, **more}, ranks=ranks)
        if side:
            first = first or side
            require_moving_loss(first, TOLERANCE["float32"])
            try:
                require_equal_work(side, first, TOLERANCE["float32"])
            except Unequal as difference:
                raise Unequal(
                    f"on {ranks} and {options.ranks[0]} ranks {difference}"
                ) from difference
            figures[ranks] = {
                "trained_tokens_per_s": [side.trained_tokens / value for value in side.seconds],
                "mfu": side.mfu,
                "data_share": side.data_share,
                "memory_bytes": side.memory_bytes,
                "losses": side.losses,
            }
        shutil.rmtree(options.work / name / "checkpoints", ignore_errors=True)
    return figures
