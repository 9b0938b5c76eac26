"""Compare how a model learns in each way of training.

Fine-tunes SmolLM2 on the demo's chats with all weights, as replicas, in stages, with bfloat16
weights and 8-bit moments, and with LoRA, and trains a tiny mixture of experts on one rank and with
its experts divided over two. Writes convergence.json, benchmarks/CONVERGENCE.md and its picture.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.sides import copy_tokenizer
from benchmarks.tables import table
from distTest.workloads.script import REPOSITORY, absolute, environment, train_command
from distTest.workloads.shapes import shape_of
from examples.ask import exact_matches, read_chats
from shardtune.ask import Model
from shardtune.report.charts import Chart, Curve, XAxis
from shardtune.report.draw import write_svg
from shardtune.report.read_run import read_run

RESULTS = REPOSITORY / "benchmarks/convergence.json"
PAGE = REPOSITORY / "benchmarks/CONVERGENCE.md"
STEPS, ROWS = 44, 2  # an epoch, in rows of each step
_SHORT_FOLDER = REPOSITORY / "runs/convergence-short"
SHORT = {
    "steps": 2,
    "results": _SHORT_FOLDER / RESULTS.name,
    "page": _SHORT_FOLDER / PAGE.name,
}
_QUESTIONS = REPOSITORY / "examples/chats/short_eval.jsonl"
_EXPERTS = {"num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 8}
_EXPERTS |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
_EXPERTS |= {"first_k_dense_replace": 1, "tie_word_embeddings": True}
_HEADER = (
    "| run | ranks | training loss, last step | held-out perplexity "
    "| exact match on {} short answers | losses furthest from its reference's, first step and all |"
)
_EXACT = ("exact before", "exact after")
Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """A run and its settings. `reference`: the name of the run that it must equal."""

    shown: str
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    reference: str | None = None
    is_tiny: bool = False


_TINY = {"model.init": "random", "optimizer.lr": 5e-3}
VARIANTS = {
    "all weights": Variant("float32 weights and moments"),
    "replicas": Variant("`parallel.replicate=2`", {"parallel.replicate": 2}, 2, "all weights"),
    "stages": Variant("`parallel.stages=2`", {"parallel.stages": 2}, 2, "all weights"),
    "bfloat16, 8-bit moments": Variant(
        "`model.master_dtype=bfloat16 optimizer.name=adamw8bit`",
        {"model.master_dtype": "bfloat16", "optimizer.name": "adamw8bit"},
    ),
    "LoRA": Variant("`lora.rank=16 optimizer.lr=4e-3`", {"lora.rank": 16, "optimizer.lr": 4e-3}),
    "tiny experts": Variant(
        "a GLM-4 MoE, `model.init=random optimizer.lr=5e-3`", _TINY, is_tiny=True
    ),
    "tiny experts, divided": Variant(
        "the same, `parallel.expert=2`",
        _TINY | {"parallel.expert": 2},
        2,
        "tiny experts",
        is_tiny=True,
    ),
}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    model = REPOSITORY / "models/SmolLM2-135M-Instruct"
    add("--model", type=absolute, default=model, help="the one that all but the tiny experts train")
    add("--results", type=absolute, default=RESULTS, help="JSON file of every run's numbers")
    add("--page", type=absolute, default=PAGE, help="Markdown file; its picture is put beside it")
    add("--steps", type=int, default=STEPS, help="of each run")


def main(options: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_experts(options.model, Path(folder) / "tiny")
        names = {name: Path(folder) / str(number) for number, name in enumerate(VARIANTS)}
        alone = [name for name in names if VARIANTS[name].ranks == 1]
        for group in (alone, *([name] for name in names if name not in alone)):
            print(f"At the same time: {', '.join(group)}", flush=True)
            started = [start(VARIANTS[name], names[name], tiny, options) for name in group]
            if any(codes := [process.wait() for process in started]):
                sys.exit(f"ERROR: the runs ended with {codes} - see their output above")
        results = {name: read_results(run_dir) for name, run_dir in names.items()}
        before = _exact(options.model)
    for name, variant in VARIANTS.items():
        results[name] |= {} if variant.is_tiny else {"exact before": before}
    for file in (options.results, options.page):
        file.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    options.page.write_text(page(results), encoding="utf-8")
    write_svg(charts(results), options.page.with_suffix(".svg"))


def tiny_experts(model: Path, folder: Path) -> Path:
    """Write the configuration of a mixture of experts, and the model's tokenizer."""
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    sizes = shape_of(128, 256, 3, 4, _EXPERTS | {"vocab_size": vocabulary})
    AutoConfig.for_model("glm4_moe", **sizes).save_pretrained(folder)
    copy_tokenizer(model, folder)
    return folder


def start(
    variant: Variant, run_dir: Path, tiny: Path, options: Namespace
) -> subprocess.Popen[bytes]:
    """Start a run of the demo's configuration with all of its chats and these settings."""
    data_ranks = variant.ranks // variant.settings.get("parallel.stages", 1)
    chats = REPOSITORY / "examples/chats"
    train = f"[{{path: {chats}/train.jsonl}}, {{path: {chats}/short_train.jsonl, weight: 3}}]"
    settings = {
        "data.train": train,
        "data.max_length": 512,
        "optimizer.lr": 4e-4,
        "model.path": tiny if variant.is_tiny else options.model,
        "train.epochs": 99,
        "train.max_steps": options.steps,
        "train.gradient_accumulation_steps": ROWS // data_ranks,
        "export.dtype": "float32",
        "run.dir": run_dir,
        **variant.settings,
    }
    config = REPOSITORY / "examples/demo.yaml"
    command = train_command(settings, ranks=variant.ranks, config=config)
    return subprocess.Popen(command, env=environment(), cwd=REPOSITORY)


def read_results(run_dir: Path) -> dict[str, Any]:
    """Return the losses, perplexities and answers of a run."""
    record = read_run(run_dir)
    return {
        "losses": [entry["loss"] for entry in record.of_kind("step")],
        "perplexities": [entry["perplexity"] for entry in record.of_kind("eval")],
        "exact after": _exact(run_dir / "model"),
    }


def _exact(folder: Path) -> int:
    return exact_matches(Model(str(folder), torch.float32, {}), read_chats(_QUESTIONS))


def furthest(results: Results, name: str, steps: int | None = None) -> float:
    """Return the largest relative difference of the first losses from the reference's."""
    losses, expected = (
        np.array(results[run]["losses"][:steps]) for run in (name, VARIANTS[name].reference)
    )
    return float(np.abs(losses / expected - 1).max())


def _apart(results: Results, name: str) -> str:
    if not furthest(results, name):
        return "equal to the bit"
    return f"{furthest(results, name, steps=1):.2g} and {furthest(results, name):.2g}, relative"


def charts(results: Results) -> list[Chart]:
    """Return the training losses of SmolLM2 and of the experts.

    Equal curves would hide one another, so each has dashes of its own.
    """
    shown = []
    for is_tiny, subject in ((False, "SmolLM2"), (True, "tiny experts")):
        curves = []
        for colour, name in enumerate(VARIANTS):
            if VARIANTS[name].is_tiny == is_tiny:
                losses = np.array(results[name]["losses"])
                steps = {"step": np.arange(1.0, len(losses) + 1)}
                curves.append(Curve(name, steps, losses, colour, dash=len(curves)))
        x_axes = {"step": XAxis("step", 1, len(losses))}
        shown.append(
            Chart(subject, subject, f"training loss, {subject}", "", curves, x_axes=x_axes)
        )
    return shown


def page(results: Results) -> str:
    steps = len(results["all weights"]["losses"])
    rows = []
    for name, result in results.items():
        variant = VARIANTS[name]
        first, last = result["perplexities"][0], result["perplexities"][-1]
        cells = [
            f"{name}: {variant.shown}",
            f"{variant.ranks}",
            f"{result['losses'][-1]:.4f}",
            f"{first:,.2f} to {last:,.2f}",
            " to ".join(f"{result[key]}" for key in _EXACT if key in result),
            _apart(results, name) if variant.reference else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    text = f"""# Convergence

Written by `python -m benchmarks convergence`, on CPUs. Each run takes {steps} steps of {ROWS} rows
of 512 tokens, with all chats of `examples/chats`, a learning rate of 4e-4, the other settings of
`examples/demo.yaml`, and those below. Forward and backward are in bfloat16 where the CPU computes
it natively. All see the same records in the same order. So replicas, stages and divided experts
must lose what their reference loses, the same model on one rank. They do so within 1e-5 at the
first step; later the rounding of bfloat16 grows with the steps. The tests compare them in float32,
where they stay within 1e-6.

![Training loss of each run](CONVERGENCE.svg)

The exact match counts [the demo's short answers](../docs/start.md#the-demo). Their facts are
trained, in different words: held out is the wording of the questions. The perplexity is over chats
that are held out whole.
"""
    header = _HEADER.format(len(read_chats(_QUESTIONS)))
    return "\n".join([text, *table(header, rows)])
