"""Measure the peak memory of head and loss, forward and backward, for shardtune's loss head or
plain logits.

python -m benchmarks.head_memory naive|ours OUT.json TOKENS VOCABULARY

The model has one thin layer, in bfloat16, and every token is trained: its memory beyond the
weights is the loss's. Each way has a process of its own, because freed memory is not returned at
once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedModel

from shardtune.config_io import load_config
from shardtune.data.batch import Batch
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.distributed.world import World
from shardtune.model.build import build_model
from shardtune.model.files import read_model_config
from shardtune.model.loss import summed_loss, use_loss_head

WIDTH = 1024


def main() -> None:
    way, out, tokens, vocabulary = (
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=16,
            max_position_embeddings=2 * tokens,
            tie_word_embeddings=True,  # one gradient of the weight's size, not two
        )
        config.save_pretrained(folder)
        yaml = Path(folder) / "config.yaml"
        assignments = [f"model.path={folder}", f"data.train={folder}", "model.init=random"]
        yaml.touch()
        settings = load_config(
            yaml,
            [*assignments, "model.compute_dtype=bfloat16", f"data.max_length={2 * tokens}"],
            {},
        )
        world: World = join_world(settings.distributed)
        model_config = read_model_config(settings.model, settings.data.max_length)
        model = build_model(settings, model_config, world)
    if way == "ours" and (which := use_loss_head(model, world.device)):
        raise SystemExit(f"logits are made {which}")
    step(model, way, 16)  # allocates the buffers of FSDP2 and of the gradients
    for parameter in model.parameters():
        parameter.grad = None
    process = psutil.Process()
    before, peak, ended = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    loss = step(model, way, tokens)
    ended.set()
    watcher.join()
    gradients = sum(
        p.grad.to_local().nbytes for p in model.parameters() if isinstance(p.grad, DTensor)
    )
    figures: dict[str, float] = {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "width": WIDTH,
        "loss": loss,
    }
    figures |= {"peak_bytes": peak, "gradient_bytes": gradients}
    out.write_text(json.dumps(figures), encoding="utf-8")


def step(model: PreTrainedModel, way: str, tokens: int) -> float:
    """Run forward and backward over one row, all of it trained; return the loss of a token."""
    ids = torch.arange(tokens).view(1, -1) * 7919 % model.config.vocab_size
    positions = torch.arange(tokens).view(1, -1)
    predicting = torch.arange(tokens - 1)
    if way == "ours":
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        loss = summed_loss(
            model, Batch(ids, positions, None, predicting, ids[0, 1:], [tokens], ends)
        )
    else:
        logits = model(input_ids=ids, position_ids=positions).logits
        loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
    loss.backward()
    return loss.item() / (tokens - 1)


if __name__ == "__main__":
    run(main)
