"""Verification cards: what was really run with a model, and what came out.

MODEL is a directory with weights, or the name of an architecture (`qwen3_moe`): then the card makes
a tiny model with random weights. Writes docs/models/NAME.yaml and the page of all cards; without a
model, the page alone.
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distTest.rehearse.tiny_model import make_model, write_chats
from distTest.workloads.machine import commit, cpu, versions
from distTest.workloads.script import REPOSITORY, environment, launch
from shardtune.report.read_run import RunRecord, read_run

CARDS, PAGE = REPOSITORY / "docs/models", REPOSITORY / "docs/cards.md"
_STEPS, _SAVED_AT, _RANKS = 8, 4, 2
_SAME = ("whole", "resumed")
_WITHIN = 1e-4  # of losses after a resume on other ranks, as a part of the loss
# Runs refuse to pack their rows: documents would mix in transformers' implementation.
_UNPACKED = {"gpt_oss"}
_QUESTION = "What does a rank do?"
_HEAD = """\
# Verification cards

What was run with a model, and what came out: not what should work. Each card is a file with the
command, the machine, the versions and the model's literal answer to a question, made by `make card
MODEL=...`. For the name of an architecture it makes a tiny model of random weights, and chats.
`unverified` means that nobody ran it.

"""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a directory, or the name of an architecture")


def main(options: Namespace) -> None:
    if options.model:
        with tempfile.TemporaryDirectory() as folder:
            card = make_card(options.model, Path(folder))
        path = CARDS / f"{card['model']}.yaml"
        path.write_text(yaml.safe_dump(card, sort_keys=False, allow_unicode=True), "utf-8")
        print(path.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")


def make_card(model: str, folder: Path) -> dict[str, Any]:
    """Train, resume, reshard and export the model, and return what came out."""
    is_real = Path(model).is_dir()
    if is_real:
        path, given = Path(model).resolve(), ["--config", str(REPOSITORY / "examples/demo.yaml")]
    else:
        path, given = _tiny(model, folder)
    given += [f"model.path={path}", f"train.max_steps={_STEPS}"]
    given += [f"checkpoint.every_steps={_SAVED_AT}", "checkpoint.keep=9"]
    whole = _train(folder / "whole", _RANKS, given)
    shown = " ".join(["train_fsdp.py", *given]).replace(str(path), model)
    shown = shown.replace(f"{REPOSITORY}/", "").replace(f"{folder}/", "")
    resumed = _resume(folder / "whole", folder / "resumed", _RANKS, given)
    accumulated = [*given, f"train.gradient_accumulation_steps={_RANKS}"]
    resharded = _resume(folder / "whole", folder / "resharded", 1, accumulated)
    config = AutoConfig.from_pretrained(path)
    evaluations = [entry["perplexity"] for entry in whole.of_kind("eval")]
    mfu = [entry["mfu"] for entry in whole.of_kind("step") if entry["mfu"]]
    furthest = max(_differences(whole, resharded))
    weights = [(folder / name / "model/model.safetensors").read_bytes() for name in _SAME]
    is_exact = max(_differences(whole, resumed)) == 0.0 and weights[0] == weights[1]
    is_verified = is_exact and furthest < _WITHIN and evaluations[-1] < evaluations[0]
    parameters = AutoModelForCausalLM.from_pretrained(folder / "whole/model").num_parameters()
    return {
        "model": Path(model).name if is_real else f"tiny-{model}",
        "architecture": config.model_type,
        "parameters": parameters,
        "weights": "real" if is_real else "random",
        "date": datetime.date.today().isoformat(),
        "machine": cpu(),
        "versions": {"shardtune": commit(), **versions()},
        "made_by": f"make card MODEL={model}",
        "command": f"torchrun --nproc_per_node={_RANKS} {shown}",
        "cpu": {
            "status": "verified" if is_verified else "failed",
            "baseline_perplexity": round(evaluations[0], 4),
            "final_perplexity": round(evaluations[-1], 4),
            "steps": whole.last_step,
            "step_seconds": round(median(entry["seconds"] for entry in whole.of_kind("step")), 3),
            "mfu": round(median(mfu), 4) if mfu else None,
            "resume": "steps and exported weights equal to the bit" if is_exact else "not equal",
            "reshard": f"{_RANKS} ranks to 1: losses and norms within {furthest:.0e}",
            "question": _QUESTION,
            "answer": _answer(folder / "whole/model"),
        },
        "gpu": {"status": "unverified"},
    }


def _tiny(architecture: str, folder: Path) -> tuple[Path, list[str]]:
    remedy = "name a directory with weights, or an architecture such as qwen3_moe"
    try:
        AutoConfig.for_model(architecture).save_pretrained(folder / "source")
    except (ValueError, KeyError):
        sys.exit(f"ERROR: {architecture} is neither a directory nor an architecture - {remedy}")
    described = make_model(str(folder / "source"), _RANKS, folder / "model")
    if ", because " in described:
        sys.exit(f"ERROR: no tiny causal model of {architecture} can be made - {remedy}")
    write_chats(folder / "train.jsonl", 64, seed=0)
    write_chats(folder / "eval.jsonl", 8, seed=1)
    text = "model: {init: random}\ndata: {max_length: 128}\noptimizer: {lr: 1e-2}\n"
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")
    data = [f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]
    data += ["data.packing=false"] * (architecture in _UNPACKED)
    return folder / "model", ["--config", str(folder / "tiny.yaml"), *data]


def _train(run_dir: Path, ranks: int, given: list[str]) -> RunRecord:
    command = launch(["train_fsdp.py", *given, f"run.dir={run_dir}"], ranks)
    done = subprocess.run(
        command, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nERROR: the run failed - see the lines above")
    return read_run(run_dir)


def _resume(whole: Path, run_dir: Path, ranks: int, given: list[str]) -> RunRecord:
    """Resume a copy of the run from its checkpoint in the middle."""
    shutil.copytree(whole, run_dir, ignore=shutil.ignore_patterns("model", "*.lock"))
    shutil.rmtree(run_dir / f"checkpoints/checkpoint_{_STEPS:07d}")
    return _train(run_dir, ranks, given)


def _differences(a: RunRecord, b: RunRecord) -> list[float]:
    """Return the relative difference of the losses and norms of each step after the resume."""
    assert len(a.of_kind("step")) == len(b.of_kind("step")) == _STEPS
    return [
        abs(x[name] - y[name]) / x[name]
        for x, y in zip(a.of_kind("step")[_SAVED_AT:], b.of_kind("step")[_SAVED_AT:], strict=True)
        for name in ("loss", "grad_norm")
    ]


def _answer(path: Path) -> str:
    """Return the exported model's most likely answer, of at most 40 tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": _QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = generated[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer))


def page() -> str:
    """Return the page that lists all cards, as Markdown."""
    cards = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(CARDS.glob("*.yaml"))]
    cards.sort(key=lambda card: (card["weights"] != "real", card["model"]))
    heads = "model, parameters, weights, CPU, GPU, perplexity, step, resumed, other ranks, date"
    lines = [f"| {heads.replace(', ', ' | ')} |", "|---" * 10 + "|"]
    for card in cards:
        cpu, name = card["cpu"], card["model"]
        values = [f"[{name}](models/{name}.yaml)", f"{card['parameters']:,}", card["weights"]]
        values += [cpu["status"], card["gpu"]["status"]]
        values += [f"{cpu['baseline_perplexity']} to {cpu['final_perplexity']}"]
        values += [f"{cpu['step_seconds']} s", cpu["resume"], cpu["reshard"], card["date"]]
        lines.append(f"| {' | '.join(values)} |")
    return _HEAD + "\n".join(lines) + "\n"
