"""shardtune, eager and compiled, TRL and HF Trainer on one GPU: real shapes with random weights;
writes benchmarks/GPU.md.

All of the chats are one optimizer step, all sides begin with the same weights, drawn once, and
losses must be equal at every step. With random weights nearly all logits are alike at first, and
equal losses would say little. So the learning rate moves the loss by far more than the tolerance;
a loss that moves less gives no figure. If float32 weights, gradients and moments (16 bytes a
parameter) do not fit the GPU, the model has fewer layers, and the table says how many. A model with
experts is refused where no layer with experts fits. `--tiny` shows on a CPU that all of it runs.
"""

from __future__ import annotations

import datetime
import math
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.one import document_lengths, model_flops
from benchmarks.sides import FAILED, NAMES, TOLERANCE, Job, Side, copy_tokenizer, counted, in_turns
from benchmarks.tables import spread, table
from distTest.workloads.chats import write_chats
from distTest.workloads.machine import versions
from distTest.workloads.script import REPOSITORY, absolute
from distTest.workloads.shapes import SHAPES, slice_of
from shardtune.model.flops import measure_matmul_rate, published_peak

_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152}
_TINY |= {"n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 2}
_TINY |= {"moe_intermediate_size": 32}
_PEERS = ("hf_trainer", "trl_packed", "hf_padded")
_BYTES_PER_PARAMETER = 16  # float32: weight, gradient, two moments


def add_options(parser: ArgumentParser) -> None:
    add, sides = parser.add_argument, ("ours", "ours_compiled", *_PEERS)
    add("--tokenizer", type=absolute, required=True)
    add("--peers", type=absolute, required=True, help="the Python of the peers' environment")
    add("--results", type=absolute, default=REPOSITORY / "benchmarks/GPU.md")
    add("--work", type=absolute, default=REPOSITORY / "runs/gpu", help="inputs and runs; emptied")
    add("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    add("--layers", type=int, help="of every shape, where the GPU is smaller")
    add("--lengths", type=int, nargs="+", default=[4096, 8192])
    add("--sides", nargs="+", choices=sides, default=sides)
    add("--rounds", type=int, default=2)
    add("--steps", type=int, default=4, help="of each run; the first is not counted")
    add("--lr", type=float, default=1e-4)
    add("--rows", type=int, default=8, help="full rows of one step, about")
    add("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    add("--checkpointing", choices=("none", "selective", "full"), default="full")
    add("--tiny", action="store_true")


def main(options: Namespace) -> None:
    if options.tiny:
        options.lengths, options.rows, options.steps, options.lr = [256], 3, 3, 1e-2
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = [
        "# One GPU",
        "",
        f"- device: {device}",
        f"- date: {datetime.date.today().isoformat()}",
        f"- torch {versions()['torch']}, transformers {versions()['transformers']}; activation "
        f"checkpointing {options.checkpointing}; forward and backward in {options.dtype}",
        "",
        "HF Trainer and TRL attend by flash-attn where it is installed, else by sdpa under a mask: "
        "the last column says which.",
        "",
    ]
    header = "| model | row | layers | side | tokens/s | MFU | peak memory | first and last loss "
    rows: list[str] = []
    for shape in options.shapes:
        try:
            model, layers = write_model(options, shape)
        except TooLarge as why:
            FAILED.append(str(why))
            rows.append(f"| {shape} | | | {why} | | | | | |")
            continue
        for length in options.lengths:
            rows += measure(options, shape, model, layers, length)
            text = "\n".join([*about, *table(f"{header}| attention |", rows)])
            options.results.write_text(text, encoding="utf-8")
        shutil.rmtree(model)  # its files have several times 10 GB
    print(f"Written: {options.results}")
    if FAILED:
        sys.exit(f"ERROR: {'; '.join(FAILED)} - see the logs in {options.work}")


class TooLarge(Exception):
    """The GPU cannot hold the smallest slice of a shape; the message has the slice's size."""


def write_model(options: Namespace, shape: str) -> tuple[Path, str]:
    """Write a model of random weights and a tokenizer; return its folder and layers, in words.

    Raises:
        TooLarge: the GPU has no room for one layer, or for the first layer with experts.
    """
    room = 0.7 * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else math.inf
    small = _TINY if options.tiny else None
    most = room / _BYTES_PER_PARAMETER
    part = slice_of(shape, max(options.lengths), most, options.layers, small)
    if part.parameters > most:
        kind = "" if part.dense is None else ", the last of them the first with experts"
        needed = part.parameters * _BYTES_PER_PARAMETER
        raise TooLarge(
            f"{shape}: {part.layers} of {part.whole} layers{kind}, take {needed / 1e9:.0f} GB of "
            f"weights, gradients and moments, and {room / 1e9:.0f} GB is what this GPU has for "
            "them - take a GPU with more memory"
        )
    folder: Path = options.work / shape.replace(",", "").replace(" ", "-")
    ends = {"pad_token_id": 2, "eos_token_id": 2}
    config = AutoConfig.for_model(part.model_type, **part.settings, **ends)
    # Weights are drawn once, on the GPU: all sides must begin with the same.
    torch.manual_seed(1234)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    copy_tokenizer(options.tokenizer, folder)
    return folder, str(part)


def measure(options: Namespace, shape: str, model: Path, layers: str, length: int) -> list[str]:
    """Return the rows of the table for one shape and row length."""
    chats = write_chats(options.work / f"chats-{length}.jsonl", options.rows * length, length)
    given = (options.dtype, options.lr, options.checkpointing)
    job = Job(model, chats, length, options.steps, *given, overflow="turns")
    runs: dict[str, list[Side]] = {name: [] for name in options.sides}
    for turn, name in in_turns(options.sides, options.rounds):
        run_dir = options.work / f"{model.name}-{length}-{name}-{turn}"
        done = job.run(name, run_dir, options.peers, ways="unsaved")
        runs[name] += [done] if done else []
    return rows_of(f"| {shape} | {length} | {layers}", options.work, job, runs)


def rows_of(start: str, work: Path, job: Job, runs: dict[str, list[Side]]) -> list[str]:
    """Return a row for each side, with figures or with the reason why there are none."""
    names = (*_PEERS, *runs)
    reference = next((name for name in names if runs.get(name)), next(iter(runs)))  # a peer's
    equal, refused = counted(runs, reference, job.dtype)
    flops, lengths = model_flops(job.model), document_lengths(work, job)
    rows, peak = [], peak_flops(job.dtype)
    for name, sides in equal.items():
        step = flops.per_step(lengths, sides[0].trained_tokens)
        seconds = [value for side in sides for value in side.seconds]
        mfu = f"{median(step / s / peak for s in seconds):.1%}" if peak else "unknown peak"
        memory = max(side.memory_bytes for side in sides) / 1e9
        speed = spread([side.tokens / value for side in sides for value in side.seconds])
        losses = f"{sides[0].losses[0]:.4f} {sides[0].losses[-1]:.4f}"
        cells: list[Any] = [NAMES[name], speed, mfu, f"{memory:.1f} GB", losses]
        rows.append(" | ".join([start, *cells, f"{sides[0].attention} |"]))
    return rows + [f"{start} | {NAMES[name]} | {why} | | | | |" for name, why in refused.items()]


def peak_flops(dtype: str) -> float | None:
    if torch.cuda.is_available():
        return published_peak(torch.cuda.get_device_name(), getattr(torch, dtype))
    torch.set_num_threads(1)  # as in the runs
    return measure_matmul_rate(getattr(torch, dtype), seconds=0.3)
