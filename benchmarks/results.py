"""Compare shardtune with its peers on this machine's CPU; writes RESULTS.md.

All sides train the same weights on the same chats. All of the chats are one optimizer step, so
every side has the same global batch, however it orders and packs. At every step its loss must
equal the reference's (HF Trainer's, or the first peer's without it) before any of its figures
counts. In each round the sides take turns, in another order each time. Each runs in its own process
on one pinned core with one thread. Its first step also sets things up and is not counted.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any

import torch

from benchmarks.sides import FAILED, TOLERANCE
from distTest.workloads.chats import MIXES
from distTest.workloads.machine import commit, cpu, output_of, versions
from distTest.workloads.script import REPOSITORY, absolute

# Modules with `measure(options)` and `lines(figures)`, in the order of the page. A module with
# `variants(options)` is measured once for each variant, which `measure` gets, too.
SECTIONS = ("one", "cable")
_PEERS = ("trl_packed", "trl_padded", "trl_single", "hf_trainer")
SHORT: dict[str, Any] = {"rounds": 1, "steps": 2, "tokens": 1024, "max_length": 512}
SHORT |= {"mixes": ["prompts"]}


def add_options(parser: ArgumentParser) -> None:
    add, sides = parser.add_argument, ("ours", *_PEERS)
    add("--model", type=absolute, default=REPOSITORY / "models/SmolLM2-135M-Instruct")
    peers = REPOSITORY / ".venv/peers/bin/python"
    add("--peers", type=absolute, default=peers, help="the Python of the peers' environment")
    add("--results", type=absolute, default=REPOSITORY / "benchmarks/RESULTS.md")
    add("--work", type=absolute, default=REPOSITORY / "runs/bench", help="inputs and runs; emptied")
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--sides", nargs="+", choices=sides, default=sides)
    add("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=default_dtypes())
    add("--mixes", nargs="+", choices=tuple(MIXES), default=tuple(MIXES), help="of chats")
    add("--rounds", type=int, default=2)
    add("--steps", type=int, default=3, help="of each run; the first is not counted")
    add("--tokens", type=int, default=1536, help="of one step, about")
    add("--max-length", type=int, default=2048)
    families = ("glm", "llama")  # families of the section `cable`
    add("--families", nargs="+", choices=families, default=families)


def default_dtypes() -> list[str]:
    """Return float32, and bfloat16 too if the CPU multiplies it natively."""
    return ["float32", "bfloat16"] if {"avx512_bf16", "amx_bf16"} & set(_native()) else ["float32"]


def _native() -> list[str]:
    flags = torch.cpu.get_capabilities()
    return [flag for flag in ("avx512_f", "avx512_bf16", "amx_bf16") if flags.get(flag)]


def main(options: Namespace) -> None:
    """Measure the sections of the options; results of others stay as they are."""
    if not options.peers.exists():
        remedy = "run `make .venv/peers/.installed`, or name another with --peers"
        sys.exit(f"ERROR: {options.peers} does not exist - {remedy}")
    torch.set_num_threads(1)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU ranks, on a machine with GPUs too
    os.environ["SHARDTUNE_CACHE"] = f"{options.work}/cache"  # without an earlier run's tokens
    options.results.parent.mkdir(parents=True, exist_ok=True)
    file = options.results.with_suffix(".json")
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    measured_with = machine(options)
    for section in options.sections:
        module = _module(section)
        for variant in module.variants(options) if hasattr(module, "variants") else [()]:
            name = f"{section} {', '.join(variant)}".strip()
            print(f"{name}:", flush=True)
            failures, figures = len(FAILED), module.measure(options, *variant)
            results[name] = {"measured_with": measured_with, "figures": figures}
            results[name]["failed"] = FAILED[failures:]
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    options.results.write_text(report(results), encoding="utf-8")
    print(f"Written: {options.results}")
    if FAILED:
        sys.exit(f"ERROR: {'; '.join(FAILED)} - see the logs in {options.work}")


def _module(section: str) -> Any:
    return import_module(f"benchmarks.{section}")


def machine(options: Namespace) -> dict[str, str]:
    code = (
        "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
        "('torch', 'transformers', 'trl', 'accelerate')))"
    )
    ours = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "CPU": f"{cpu()}, {', '.join(_native()) or 'no AVX-512'}",
        "ours": ours.replace("python", "Python"),
        "peers": output_of(options.peers, "-c", code),
        "command": options.command,
    }


def report(results: dict[str, Any]) -> str:
    """Return the results in Markdown, each part with the run that measured it."""
    runs: list[dict[str, str]] = []
    lines: list[str] = []
    for section in SECTIONS:
        for name, part in results.items():
            if name.split()[0] != section:
                continue
            if part["measured_with"] not in runs:
                runs.append(part["measured_with"])
            title, *rest = [f"## {name}", ""]
            if part["figures"]:
                title, *rest = _module(section).lines(part["figures"])
            lines += [title, "", f"Run {runs.index(part['measured_with']) + 1}.", *rest]
            lines += [f"Failed: {failure}.\n" for failure in part["failed"]]
    described = [
        f"{number}. " + "; ".join(f"{key}: {value}" for key, value in run.items())
        for number, run in enumerate(runs, 1)
    ]
    return "\n".join(["# Benchmarks", "", "Runs:", "", *described, "", *lines])
