"""shardtune, TRL and HF Trainer on one GPU: real shapes with random weights; writes
benchmarks/GPU.md.

python -m benchmarks.gpu --tokenizer DIR --peers .venv/peers/bin/python [--shapes qwen3-1.7b]
python -m benchmarks.gpu --tokenizer DIR --peers ... --tiny   # shows on a CPU that all of it runs

As in bench.py, all of the chats are one optimizer step, all sides begin with the same weights,
drawn once, and losses must be equal at every step. With random weights nearly all logits are alike
at first, and equal losses would say little. So the learning rate moves the loss by far more than
the tolerance; where it does not, there is no figure. Where float32 weights, gradients and moments
(16 bytes a parameter) do not fit the GPU, the model has fewer layers, and the table says how many.
A model with experts is refused where no layer with experts fits.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench import document_lengths, model_flops
from benchmarks.measure import (
    FAILED,
    REPOSITORY,
    TOLERANCE,
    Side,
    gated,
    in_turns,
    run_ours,
    run_peer,
    spread,
)
from distTest.workloads.chats import write_chats
from distTest.workloads.shapes import SHAPES
from shardtune.model.flops import measure_matmul_rate, published_peak

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 49152,
}
PEERS: dict[str, dict[str, Any]] = {
    "hf_trainer": {},
    "trl_packed": {},
    "hf_padded": {"batch-size": 8},
}
NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL, packed (bfd)",
    "hf_trainer": "HF Trainer (batches of 1, no padding)",
    "hf_padded": "HF Trainer (batches of 8)",
}
BYTES_PER_PARAMETER = 16  # float32: weight, gradient, two moments


def main() -> None:
    options = read_options()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        "# One GPU",
        "",
        f"- device: {device}",
        f"- date: {datetime.date.today().isoformat()}",
        f"- torch {version('torch')}, transformers {version('transformers')}; activation "
        f"checkpointing "
        f"{options.checkpointing}; forward and backward in {options.dtype}",
        "",
        "HF Trainer and TRL attend by flash-attn where it is installed, else by sdpa under a mask: "
        "the last column says which.",
        "",
        "| model | row | layers | side | tokens/s | MFU | peak memory | first and last loss "
        "| attention |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in options.shapes:
        try:
            model, layers = write_model(options, shape)
        except TooLarge as why:
            FAILED.append(str(why))
            lines.append(f"| {shape} | | | {why} | | | | | |")
            continue
        for length in options.lengths:
            lines += measure(options, shape, model, layers, length)
            options.results.write_text("\n".join([*lines, ""]), encoding="utf-8")
        shutil.rmtree(model)  # several times 10 GB
    print(f"Written: {options.results}")
    if FAILED:
        sys.exit(f"ERROR: {'; '.join(FAILED)} - see the logs in {options.work}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument(
        "--peers", type=Path, required=True, help="the Python of the peers' environment"
    )
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks/GPU.md")
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / "runs/gpu", help="inputs, logs and runs; emptied"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="of every shape, where the GPU is smaller")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--sides", nargs="+", choices=("ours", *PEERS), default=("ours", *PEERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=4, help="of each run; the first is not counted"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rows", type=int, default=8, help="full rows of one step, about")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.lengths, options.rows, options.steps, options.lr = [256], 3, 3, 1e-2
    return options


class TooLarge(Exception):
    """The GPU cannot hold the smallest slice that is like the shape; the message says how much
    that takes.
    """


def write_model(options: argparse.Namespace, shape: str) -> tuple[Path, str]:
    """Write a model directory with random weights and a tokenizer; return it and the number of its
    layers in words.

    Raises:
        TooLarge: the GPU has no room for one layer, or for the first layer with experts.
    """
    model_type, settings = SHAPES[shape]
    settings = {
        **settings,
        "max_position_embeddings": 2 * max(options.lengths),
        "pad_token_id": 2,
        "eos_token_id": 2,
    }
    if options.tiny:
        settings |= TINY
    folder = options.work / shape.replace(",", "").replace(" ", "-")
    dense = settings.get("first_k_dense_replace")  # layers before those with experts
    fewest = 1 if dense is None else dense + 1
    whole = settings["num_hidden_layers"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    beside = model.num_parameters() - sum(layer_sizes)
    room = 0.7 * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else math.inf

    def needed(layers: int) -> int:
        return BYTES_PER_PARAMETER * (beside + sum(layer_sizes[:layers]))

    layers = max(fewest, min(options.layers or whole, whole))
    while layers > fewest and needed(layers) > room:
        layers -= 1
    if needed(layers) > room:
        kind = "" if dense is None else ", the last of them the first with experts"
        raise TooLarge(
            f"{shape}: {layers} of {whole} layers{kind}, take {needed(layers) / 1e9:.0f} GB "
            f"of weights, gradients and "
            f"moments, and {room / 1e9:.0f} GB is what this GPU has for them - take a GPU "
            f"with more memory"
        )
    description = f"{layers} of {whole} layers" + (
        "" if dense is None else f", {layers - dense} of them with experts"
    )
    config = AutoConfig.for_model(model_type, **{**settings, "num_hidden_layers": layers})
    torch.manual_seed(1234)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(options.tokenizer / name, folder / name)
    return folder, description


def measure(
    options: argparse.Namespace, shape: str, model: Path, layers: str, length: int
) -> list[str]:
    """Return the lines of the table for one shape and row length."""
    chats = write_chats(options.work / f"chats-{length}.jsonl", options.rows * length, length)
    options.model, options.max_length = model, length
    lengths = document_lengths(options, chats)
    ours = {
        "model.path": model.resolve(),
        "model.compute_dtype": options.dtype,
        "model.activation_checkpointing": options.checkpointing,
        "data.train": chats.resolve(),
        "data.max_length": length,
        "train.epochs": options.steps,
        "optimizer.lr": options.lr,
    }
    peer_flags = {
        "model": model.resolve(),
        "data": chats.resolve(),
        "dtype": options.dtype,
        "max-length": length,
        "steps": options.steps,
        "lr": options.lr,
        **({"checkpointing": True} if options.checkpointing != "none" else {}),
    }
    runs: dict[str, list[Side]] = {name: [] for name in options.sides}
    for turn, name in in_turns(options.sides, options.rounds):
        run_name = f"{model.name}-{length}-{name}-{turn}"
        if name == "ours":
            script = ("-m", "distTest.workloads.unsaved")
            done = run_ours(run_name, options.work, ours, script=script)
            shutil.rmtree(options.work / run_name, ignore_errors=True)
        else:
            done = run_peer(
                name, run_name, options.work, options.peers, {**peer_flags, **PEERS[name]}
            )
        runs[name] += [done] if done else []
    return table_lines(options, f"| {shape} | {length} | {layers}", model, lengths, runs)


def table_lines(
    options: argparse.Namespace,
    start: str,
    model: Path,
    lengths: np.ndarray,
    runs: dict[str, list[Side]],
) -> list[str]:
    """Return a line for each side; a side that did unequal work has the reason."""
    reference = next(
        (name for name in (*PEERS, *runs) if runs.get(name)), next(iter(runs))
    )  # a peer's, if one ran
    equal, refused = gated(runs, reference, TOLERANCE[options.dtype])
    FAILED.extend(f"no figure for {NAMES[name]}: {why}" for name, why in refused.items())
    flops, peak = model_flops(model), peak_flops(options.dtype)
    lines = []
    for name, sides in equal.items():
        seconds = [value for side in sides for value in side.seconds]
        step_flops = flops.per_step(lengths, sides[0].trained_tokens)
        mfu = (
            f"{median(step_flops / value / peak for value in seconds):.1%}"
            if peak
            else "unknown peak"
        )
        memory = max(side.memory_bytes for side in sides) / 1e9
        speed = spread([side.tokens / value for side in sides for value in side.seconds])
        losses = f"{sides[0].losses[0]:.4f} {sides[0].losses[-1]:.4f}"
        lines.append(
            f"{start} | {NAMES[name]} | {speed} | {mfu} | {memory:.1f} GB | {losses} | "
            f"{sides[0].attention} |"
        )
    return lines + [f"{start} | {NAMES[name]} | {why} | | | | |" for name, why in refused.items()]


def peak_flops(dtype: str) -> float | None:
    if torch.cuda.is_available():
        return published_peak(torch.cuda.get_device_name(), getattr(torch, dtype))
    torch.set_num_threads(1)  # what the runs have
    return measure_matmul_rate(getattr(torch, dtype))


if __name__ == "__main__":
    main()
