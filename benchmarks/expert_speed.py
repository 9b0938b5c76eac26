"""Compare a mixture of experts whose weights travel (FSDP) with one whose tokens do
(parallel.expert): CPU seconds of one micro-batch.

torchrun --nproc_per_node=N -m benchmarks.expert_speed OUT.json ROUNDS TOKENS [MORE TOKENS]

Both have the same random weights, in the same processes, and take turns. The CPU time of all ranks
counts, waiting does not: it is steady on a busy machine. Weights are gathered and gradients reduced
in each micro-batch, as they are where a model is too large for anything else.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Glm4MoeConfig, PreTrainedModel

from shardtune.config_io import load_config
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.model.build import build_model
from shardtune.model.files import read_model_config

EXPERTS = 64
VOCABULARY = 512


def main() -> None:
    out, rounds, lengths = Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:]))
    with tempfile.TemporaryDirectory() as folder:
        Glm4MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_hidden_layers=4,
            first_k_dense_replace=1,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=max(lengths),
        ).save_pretrained(folder)
        yaml = Path(folder) / "config.yaml"
        yaml.touch()
        settings = load_config(
            yaml,
            [
                f"model.path={folder}",
                f"data.train={folder}",
                "model.init=random",
                "model.compute_dtype=float32",
                "parallel.expert=2",
            ],
            {},
        )
        world = join_world(settings.distributed, settings.parallel)
        model_config = read_model_config(settings.model, min(lengths))
        models = {
            "fsdp": build_model(
                settings, model_config, dataclasses.replace(world, expert_mesh=None)
            ),
            "expert": build_model(settings, model_config, world),
        }
    figures = {}
    for tokens in lengths:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        losses = {}
        for number in range(rounds + 1):
            order = list(models) if number % 2 else list(reversed(models))
            for name in order:
                before = time.process_time()
                losses[name] = micro_batch(models[name], tokens, world.rank)
                spent = time.process_time() - before
                all_ranks = float(world.all_gather_scalars(spent).sum())
                if number:  # the first one sets things up
                    seconds[name].append(all_ranks / world.size)
        figures[tokens] = {"seconds": seconds, "losses": losses}
    if world.is_main:
        out.write_text(json.dumps({"experts": EXPERTS, "by_tokens": figures}), encoding="utf-8")


def micro_batch(model: PreTrainedModel, tokens: int, rank: int) -> float:
    """Run forward and backward over one row of this rank's own; return its loss."""
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(rank))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad()
    return loss.item()


if __name__ == "__main__":
    run(main)
