"""Runs of train_fsdp.py as users start them, with a tokenizer and data that need no network."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from distTest.gpu_check.checks import Failed
from distTest.workloads.chats import SOURCE, write_jsonl
from distTest.workloads.script import REPOSITORY, environment, train_command
from distTest.workloads.small_models import make_tokenizer, save_untrained, token_settings
from shardtune.report.read_run import read_run

_TOKENS = 4000  # the tokenizer's vocabulary


def work_folder() -> Path:
    return Path(os.environ["GPU_CHECK_WORK"])


@dataclass
class Run:
    """A finished run: its directory and its lines."""

    directory: Path
    lines: list[str]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return read_run(self.directory).of_kind("step")


def train(
    name: str,
    *assignments: str,
    on_cpu: bool = False,
    saves: bool = False,
    ways: Sequence[str] = (),
) -> Run:
    """Run train_fsdp.py without compilation; resume if a run has this name.

    `ways`: those of wrapped.py. Raises Failed.
    """
    folder = work_folder() / name
    settings: dict[str, Any] = {"run.dir": folder, "model.compile": "false"}
    settings |= dict(assignment.split("=", 1) for assignment in assignments)
    if not saves:  # `unsaved` ends the run before its first checkpoint
        settings |= {"checkpoint.every_steps": 0, "checkpoint.mode": "sync", "export.final": False}
        ways = [*ways, "unsaved"]
    more = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    lines = list[str]()
    with subprocess.Popen(
        train_command(settings, ways=",".join(ways)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PYTHONUNBUFFERED="1", **more),
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            print(f"{name}: {line}", end="", flush=True)
    if process.returncode:
        errors = [line for line in lines if "ERROR" in line] or lines[-1:]
        raise Failed(f"{name} ended with {process.returncode}: {errors[-1]}")
    return Run(folder, lines)


def save_model(name: str, model_type: str, settings: dict[str, Any]) -> Path:
    """Write a model's config.json and a tokenizer of the words of the demo's chats."""
    tokenizer = make_tokenizer(SOURCE.read_text(encoding="utf-8").splitlines(), _TOKENS)
    config = AutoConfig.for_model(model_type, **token_settings(tokenizer) | settings)
    return save_untrained(work_folder() / name, config, tokenizer)


def write_rows(rows: int, length: int) -> Path:
    """Write texts of a token or more a word; data.overflow=truncate cuts each to a full row."""
    words = SOURCE.read_text(encoding="utf-8").split()
    texts = (
        " ".join(words[(row * 7919 + n) % len(words)] for n in range(length)) for row in range(rows)
    )
    return write_jsonl(work_folder() / "text.jsonl", [{"text": text} for text in texts])
