"""Compare runs of small models: on the GPU with a CPU's, and resumed with whole.

Runs are of train_fsdp.py as users start them, with a tokenizer and data that need no network.
"""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from distTest.gpu_check.checks import Failed, Outcome, is_tiny, require
from distTest.workloads.chats import SOURCE, write_chats, write_jsonl
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


# Runs at the same time: each mostly takes one core.
_AT_ONCE = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
# Relative, of losses: sums have another order, and bfloat16 sends some tokens to other experts.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
_STEPS, _STOP = 8, 4  # a run that resumes stops after _STOP
_SMALL: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024}
_SMALL |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
_SMALL |= {"head_dim": 64, "initializer_range": 0.1, "max_position_embeddings": 4096}
_EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4}
_EXPERTS |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
_FAMILIES = {"llama": _SMALL, "glm4_moe": _SMALL | _EXPERTS}


def losses() -> Outcome:
    """Compare losses of a dense model and one with experts with the CPU's, and a resume's bits."""
    settings = {family: _settings(family) for family in _FAMILIES}
    pairs = list(product(_FAMILIES, _TOLERANCE))
    if is_tiny():  # each run takes seconds for its imports, so fewer are tried
        pairs = pairs[::3]

    def run(family: str, dtype: str, device: str) -> Run:
        name, more = f"{family}-{dtype}-{device}", f"model.compute_dtype={dtype}"
        return train(name, *settings[family], more, on_cpu=device == "cpu")

    cases = [(*pair, device) for pair in pairs for device in ("cuda", "cpu")]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        resuming = pool.submit(_resume, settings["glm4_moe"])
        by_case = dict(zip(cases, pool.map(lambda case: run(*case), cases), strict=True))
    problems, texts, figures = list[str](), list[str](), dict[str, Any]()
    for family, dtype in pairs:
        name, tolerance = f"{family} in {dtype}", _TOLERANCE[dtype]
        here, there = (
            [step["loss"] for step in by_case[family, dtype, device].steps]
            for device in ("cuda", "cpu")
        )
        apart = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
        moved = abs(there[-1] / there[0] - 1)
        figures[name] = {"cuda": here, "cpu": there, "apart": apart, "moved": moved}
        texts.append(f"{apart:.1e} ({name})")
        if not apart <= tolerance:
            problems.append(f"{name}: losses differ by {apart:.1e}")
        if moved < 5 * tolerance:
            problems.append(f"{name}: the loss moved by {moved:.1e}, which shows nothing")
    resumed, whole = resuming.result(), _bits(by_case["glm4_moe", "bfloat16", "cuda"])
    figures |= {"whole": whole, "resumed": _bits(resumed)}
    text = f"losses of GPU and CPU differ by {', '.join(texts)}"
    if figures["resumed"] == whole:
        text += f"; resumed after {_STOP} of {_STEPS} steps, losses and norms are equal to the bit"
    else:
        problems.append("the resumed run has other losses or norms than the whole one")
    if not any(line.startswith(f"Resumed from checkpoint_{_STOP:07d}") for line in resumed.lines):
        problems.append("the second half did not resume")
    return require(problems, text, figures)


def _settings(family: str) -> list[str]:
    length = 128 if is_tiny() else 512
    model = save_model(family, family, _FAMILIES[family] | (_TINY if is_tiny() else {}))
    return [
        f"model.path={model}",
        "model.init=random",
        f"data.train={write_chats(work_folder() / 'chats.jsonl', 8 * length, length)}",
        f"data.max_length={length}",
        "train.epochs=99",
        f"train.max_steps={_STEPS}",
        "train.gradient_accumulation_steps=2",
        "optimizer.lr=3e-3",  # a high rate moves losses far enough to compare
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
    ]


def _resume(settings: list[str]) -> Run:
    more = ["model.compute_dtype=bfloat16", "export.final=false"]
    train("resumed", *settings, *more, f"train.max_steps={_STOP}", saves=True)
    return train("resumed", *settings, *more, saves=True)


def _bits(run: Run) -> list[tuple[str, str]]:
    return [(step["loss"].hex(), step["grad_norm"].hex()) for step in run.steps]
