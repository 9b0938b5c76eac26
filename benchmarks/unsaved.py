#!/usr/bin/env python3
"""Run the steps of train_fsdp.py, and end before the checkpoint of the last one: a checkpoint of a
large model takes more time and disk than what is measured.

With DRAW_ON_DEVICE=1 weights of `model.init=random` are drawn on the device: other ones, in seconds
where a CPU takes minutes. PyTorch 2.11 will do.

PYTHONPATH=. python benchmarks/unsaved.py [arguments of train_fsdp.py] checkpoint.every_steps=0
"""

from __future__ import annotations

import os
from typing import Any

import older_torch
import torch

older_torch.adapt()

import train_fsdp  # noqa: E402
from shardtune.distributed.exit import run  # noqa: E402
from shardtune.model import build  # noqa: E402


class Finished(BaseException):
    """All steps are taken, and in metrics.jsonl."""


def main() -> None:
    train_fsdp.save = finish
    if os.environ.get("DRAW_ON_DEVICE") == "1":
        build.draw_weights = draw_on_device
    try:
        train_fsdp.main()
    except Finished:
        print("Finished: nothing is saved", flush=True)


def finish(*_: Any) -> None:
    raise Finished


def draw_on_device(
    model: Any, seed: int, device: torch.device, draw: Any = build.draw_weights
) -> None:
    with device:
        draw(model, seed, device)


if __name__ == "__main__":
    run(main)
