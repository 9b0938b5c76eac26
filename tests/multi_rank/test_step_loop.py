"""Ranks collect garbage at the same time, and ask the device for numbers once a step."""

import gc
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from helpers.commands import REPOSITORY, finish
from helpers.ranks import run_script, train
from helpers.small_runs import SETTINGS, write_inputs

from shardtune import garbage_collection
from shardtune.training import pipeline
from shardtune.training.observers.metrics import Metrics


def run_and_note_collections(arguments: list[str]) -> None:
    """Write to `collected<rank>` before which micro-batches garbage is collected."""
    vars(garbage_collection)["_EVERY_MICRO_BATCHES"] = 3
    micro_batches: Counter[str] = Counter()
    original = pipeline.summed_loss

    def counted(*given: Any) -> torch.Tensor:
        micro_batches["training" if torch.is_grad_enabled() else "evaluation"] += 1
        return original(*given)

    vars(pipeline)["summed_loss"] = counted

    def note(when: str, _: Any) -> None:
        if when == "start" and not gc.isenabled():
            with Path(f"collected{os.environ['RANK']}").open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps([micro_batches["training"], micro_batches["evaluation"]]) + "\n"
                )

    gc.callbacks.append(note)
    run_script(arguments)


def on_two_ranks(work: Any, folder: Path, model: Path, *assignments: str) -> None:
    """Run `work` with the arguments of a short run in this folder."""
    write_inputs(folder, model)
    given = [*SETTINGS, "export.final=false", "checkpoint.every_steps=0", *assignments]
    finish(train(2, *given, cwd=folder, work=work))


def test_every_rank_collects_garbage_at_the_same_micro_batches_of_training_and_evaluation(
    tmp_path, models
):
    each = ("data.eval=train.jsonl", "train.gradient_accumulation_steps=4", "train.max_steps=2")
    on_two_ranks(run_and_note_collections, tmp_path, models["llama"], *each)
    first, second = (
        (tmp_path / f"collected{rank}").read_text(encoding="utf-8").splitlines()
        for rank in range(2)
    )
    collected = [json.loads(line) for line in first]
    assert first == second
    assert [sum(at) for at in collected] == [3 * (n + 1) for n in range(len(collected))]
    assert {0, 8} < {training for training, _ in collected}, "around the steps and within them"


def run_and_count(arguments: list[str]) -> None:
    """Write to `asked<rank>` which functions asked a tensor for its numbers in each step."""
    asked: Counter[str] = Counter()
    ours = (str(REPOSITORY / "shardtune"), str(REPOSITORY / "train_fsdp.py"))

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def ask(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
            code = sys._getframe(1).f_code
            is_main = threading.current_thread() is threading.main_thread()
            on_host = code.co_name == "_count_step"  # whose tensors the host has, on GPUs too
            if is_main and not on_host and code.co_filename.startswith(ours):
                asked[code.co_name] += 1
            return original(tensor, *given, **named)

        return ask

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        setattr(torch.Tensor, name, counted(name))
    write = Metrics.write

    def write_asked(metrics: Metrics, *entries: Any) -> None:
        if entries[0]["kind"] == "step":
            with Path(f"asked{os.environ['RANK']}").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asked) + "\n")
            asked.clear()
        write(metrics, *entries)

    Metrics.write = write_asked
    run_script(arguments)


def test_a_step_asks_the_device_for_numbers_once(tmp_path, models):
    each = ("train.gradient_accumulation_steps=2", "train.max_steps=13", "train.epochs=99")
    on_two_ranks(run_and_count, tmp_path, models["glm"], *each)
    for rank in range(2):
        lines = (tmp_path / f"asked{rank}").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines[1:]] == [{"all_gather_step_stats": 1}] * 12, (
            "also where the slowest rank is looked for"
        )
