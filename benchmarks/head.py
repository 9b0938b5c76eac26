"""Measure the peak memory of head and loss, for shardtune's loss head and for plain logits.

The model has one thin layer, in bfloat16, and every token is trained: its memory beyond the
weights is the loss's. Each way has a process of its own, because freed memory is not returned at
once: python -m benchmarks.head naive|ours OUT.json TOKENS VOCABULARY
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedModel

from benchmarks.sides import TOLERANCE, require_equal_losses, run_pinned
from benchmarks.tables import section
from distTest.workloads.batch import batch_of
from distTest.workloads.shapes import shape_of
from shardtune.config_io import load_config
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.model import documents
from shardtune.model.build import build_model
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.model.source.files import read_model_config

VOCABULARY = 151552  # as GLM-4.5 has
_WIDTH = 1024
# Logit, log-probability and gradient in float32; logit and gradient in bfloat16, too.
_NAIVE_BYTES_PER_LOGIT = 16


def measure(options: Namespace) -> dict[str, Any]:
    """Return the figures of each way.

    Raises:
        Unequal: the ways have different losses.
    """
    peaks, tokens = {}, options.head_tokens
    while _NAIVE_BYTES_PER_LOGIT * VOCABULARY * tokens > psutil.virtual_memory().available:
        tokens //= 2
    for way in ("naive", "ours"):
        out = options.work / f"head-{way}.json"
        command = [sys.executable, "-m", "benchmarks.head", way, out, tokens, VOCABULARY]
        if run_pinned(command, out.with_suffix(".log")):
            peaks[way] = json.loads(out.read_text(encoding="utf-8"))
    if len(peaks) == 2:
        # Both sides round the same logits to bfloat16, and compute the loss in float32.
        ours, naive = ([peaks[way]["loss"]] for way in ("ours", "naive"))
        require_equal_losses(ours, naive, TOLERANCE["float32"])
    return peaks


class PeakMemory:
    """The most bytes of this process above those at the start, sampled at 200 Hz."""

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that earlier work freed
        self._process, self._ended = psutil.Process(), threading.Event()
        self._start, self.extra = self._process.memory_info().rss, 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.extra = max(self.extra, self._process.memory_info().rss - self._start)

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()


def worker() -> None:
    way, out, tokens, vocabulary = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
    model = _model(way, tokens, vocabulary)
    _step(model, way, 16)  # allocates the buffers of FSDP2 and of the gradients
    for parameter in model.parameters():
        parameter.grad = None
    with PeakMemory() as memory:
        loss = _step(model, way, tokens)
    gradients = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
    figures = {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "width": _WIDTH,
        "loss": loss,
        "peak_bytes": memory.extra,
        "gradient_bytes": sum(gradient.to_local().nbytes for gradient in gradients),
    }
    Path(out).write_text(json.dumps(figures), encoding="utf-8")


def _model(way: str, tokens: int, vocabulary: int) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        more = {"vocab_size": vocabulary, "max_position_embeddings": 2 * tokens}
        more |= {"tie_word_embeddings": True}  # one gradient of the weight's size, not two
        LlamaConfig(**shape_of(_WIDTH, 16, 1, 16, more)).save_pretrained(folder)
        assignments = [f"model.path={folder}", f"data.train={folder}", "model.init=random"]
        assignments += ["model.compute_dtype=bfloat16", f"data.max_length={2 * tokens}"]
        config = load_config(Path(os.devnull), assignments, {})
        world = join_world(config)
        model = build_model(config, read_model_config(config.model, 2 * tokens), world)
    if way == "ours" and (which := use_loss_head(model, world.device)):
        raise SystemExit(f"logits are made {which}")
    return model


def _step(model: PreTrainedModel, way: str, tokens: int) -> float:
    """Run forward and backward over one row, all of it trained; return the loss of a token."""
    positions = torch.arange(tokens).view(1, -1)
    ids = positions * 7919 % model.config.vocab_size
    batch = batch_of([ids[0]])
    with documents.of(batch):
        if way == "ours":
            loss = summed_loss(model, batch)
        else:
            logits = model(input_ids=ids, position_ids=positions).logits
            loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
        loss.backward()
    return loss.item() / (tokens - 1)


def lines(figures: dict[str, Any]) -> list[str]:
    rest = {way: row["peak_bytes"] - row["gradient_bytes"] for way, row in figures.items()}
    rows = [
        f"| {way} | {row['tokens']} | {row['vocabulary']} | {row['width']} | "
        f"{row['peak_bytes'] / 1e9:.3f} GB | {rest[way] / 1e9:.3f} GB |"
        for way, row in figures.items()
    ]
    header = (
        "| | tokens | vocabulary | width | peak beyond weights | without the weight's gradient |"
    )
    shown = section("Memory of head and loss, forward and backward", header=header, rows=rows)
    if len(figures) == 2:
        share = figures["ours"]["peak_bytes"] / figures["naive"]["peak_bytes"]
        losses = " and ".join(f"{row['loss']:.5f}" for row in figures.values())
        shown += [
            f"shardtune takes {share:.1%} of the naive peak, {rest['ours'] / rest['naive']:.1%} "
            "without the weight's gradient. On both sides that gradient, its sum in float32 and "
            "the copies that FSDP reduces grow with the width, so the share is larger for a wider "
            "model.",
            f"Losses of a token: {losses}.",
            "",
        ]
    return shown


if __name__ == "__main__":
    run(worker)
