"""A mixture of experts whose weights travel (FSDP) and one whose tokens do (parallel.expert): CPU
seconds of one micro-batch.

Both have the same random weights, in the same processes, and take turns. The CPU time of all ranks
counts, waiting does not: it is steady on a busy machine. Weights are gathered and gradients reduced
in each micro-batch, as they are where a model is too large for anything else. The processes:
torchrun --nproc_per_node=2 -m benchmarks.experts OUT.json ROUNDS TOKENS [MORE TOKENS]
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Glm4MoeConfig, PreTrainedModel

from benchmarks.sides import TOLERANCE, require_equal_losses, run_pinned
from benchmarks.tables import section, spread
from distTest.workloads.script import launch
from distTest.workloads.shapes import shape_of
from shardtune.config_io import load_config
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.distributed.meshes import Meshes
from shardtune.distributed.world import World
from shardtune.model.build import build_model
from shardtune.model.files import read_model_config

_EXPERTS = 64
_VOCABULARY = 512


def measure(options: Namespace) -> dict[str, Any]:
    """Return the figures of both ways.

    Raises:
        Unequal: their losses differ.
    """
    out = options.work / "experts.json"
    program = ["-m", "benchmarks.experts", out, 3 * options.rounds, *options.expert_tokens]
    cores = sorted(os.sched_getaffinity(0))[:2]
    if not run_pinned(launch(program, 2), out.with_suffix(".log"), cores):
        return {}
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    for row in figures["by_tokens"].values():
        losses = row["losses"]
        require_equal_losses([losses["expert"]], [losses["fsdp"]], TOLERANCE["float32"])
    return figures


def worker() -> None:
    out, rounds, lengths = Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:]))
    models, world = _models(lengths)
    figures = {}
    for tokens in lengths:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        losses = {}
        for number in range(rounds + 1):
            for name in list(models) if number % 2 else reversed(models):
                before = time.process_time()
                losses[name] = _micro_batch(models[name], tokens, world.rank)
                spent = time.process_time() - before
                all_ranks = float(world.all_gather_scalars(spent).sum())
                if number:  # the first one sets things up
                    seconds[name].append(all_ranks / world.size)
        figures[tokens] = {"seconds": seconds, "losses": losses}
    if world.is_main:
        out.write_text(json.dumps({"experts": _EXPERTS, "by_tokens": figures}), encoding="utf-8")


def _models(lengths: list[int]) -> tuple[dict[str, PreTrainedModel], World]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"vocab_size": _VOCABULARY, "max_position_embeddings": max(lengths)}
        sizes |= {"n_routed_experts": _EXPERTS, "num_experts_per_tok": 4, "head_dim": 64}
        sizes |= {"first_k_dense_replace": 1, "moe_intermediate_size": 256}
        shape = shape_of(256, 512, 4, 4, sizes | {"num_key_value_heads": 2})
        Glm4MoeConfig(**shape).save_pretrained(folder)
        assignments = [f"model.path={folder}", f"data.train={folder}", "model.init=random"]
        assignments += ["model.compute_dtype=float32", "parallel.expert=2"]
        config = load_config(Path(os.devnull), assignments, {})
        world = join_world(config.distributed, config.parallel)
        model_config = read_model_config(config.model, min(lengths))
        worlds = {"fsdp": dataclasses.replace(world, meshes=Meshes(world.mesh)), "expert": world}
        models = {name: build_model(config, model_config, each) for name, each in worlds.items()}
    return models, world


def _micro_batch(model: PreTrainedModel, tokens: int, rank: int) -> float:
    """Run forward and backward over one row of this rank's own; return its loss."""
    ids = torch.randint(_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(rank))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad()
    return loss.item()


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    rows = []
    for tokens, row in figures["by_tokens"].items():
        fsdp, expert = (row["seconds"][name] for name in ("fsdp", "expert"))
        ratio = median(fsdp) / median(expert)
        rows.append(f"| {tokens} | {spread(fsdp)} | {spread(expert)} | {ratio:.2f} x |")
    text = (
        "CPU seconds of a micro-batch (forward and backward) per rank, medians (smallest to "
        f"largest), of a small Glm4Moe in float32 with equal losses: {figures['experts']} experts "
        "in each of 3 layers, 4 of them for a token. Weights are gathered and gradients reduced in "
        "each micro-batch. Spread experts save the traffic of weights and gradients, so the fewer "
        "tokens a rank has, the more they gain. CPU seconds do not show the time of a network."
    )
    header = "| tokens per rank | FSDP | `parallel.expert=2` | gain |"
    return section("Spread experts, two ranks", text, header=header, rows=rows)


if __name__ == "__main__":
    run(worker)
