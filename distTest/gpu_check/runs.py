"""Runs of train_fsdp.py as users start them, with a tokenizer and data that need no network."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast

from distTest.gpu_check.checks import Failed
from distTest.workloads import chats
from distTest.workloads.script import REPOSITORY, environment, train_command
from shardtune.report.read_run import read_run

_TOKENS = 4000  # the tokenizer's vocabulary


def work_folder() -> Path:
    """Return the folder for what this check writes; it is removed at the end."""
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

    `ways`: those of wrapped.py.

    Raises:
        Failed: the run ended with another code than 0.
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
    """Write a model's config.json and a tokenizer; its weights are drawn when a run starts."""
    folder = work_folder() / name
    save_tokenizer(folder)
    settings = {"pad_token_id": 2, "eos_token_id": 1, "bos_token_id": None} | settings
    AutoConfig.for_model(model_type, **settings).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the words of the demo's chats, with SmolLM2's chat template."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train(
        [str(chats.SOURCE)],
        trainers.BpeTrainer(
            vocab_size=_TOKENS,
            special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chats.TEMPLATE
    tokenizer.save_pretrained(folder)


def write_chats(rows: int, length: int) -> Path:
    """Write chats of about `rows` full rows."""
    return chats.write_chats(work_folder() / "chats.jsonl", rows * length, length)


def write_rows(rows: int, length: int) -> Path:
    """Write texts of a token or more a word; data.overflow=truncate cuts each to a full row."""
    words = chats.SOURCE.read_text(encoding="utf-8").split()
    path = work_folder() / "text.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            text = " ".join(words[(row * 7919 + n) % len(words)] for n in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    return path
