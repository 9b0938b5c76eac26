"""Run the steps of train_fsdp.py, and end before the checkpoint of the last one: a checkpoint of a
large model takes more time and disk than what is measured.

With DRAW_ON_DEVICE=1 weights of `model.init=random` are drawn on the device: other ones, in seconds
where a CPU takes minutes. PyTorch 2.11 will do.

python -m distTest.workloads.unsaved [arguments of train_fsdp.py] checkpoint.every_steps=0
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from distTest.workloads import older_torch


class Finished(BaseException):
    """All steps are taken, and in metrics.jsonl."""


def main() -> None:
    script: Any = import_module("train_fsdp")
    from shardtune.model import build

    script.save = finish
    if os.environ.get("DRAW_ON_DEVICE") == "1":
        draw = build.draw_weights

        def draw_on_device(model: Any, seed: int, device: torch.device) -> None:
            with device:
                draw(model, seed, device)

        build.draw_weights = draw_on_device
    try:
        script.main()
    except Finished:
        print("Finished: nothing is saved", flush=True)


def finish(*_: Any) -> None:
    raise Finished


if __name__ == "__main__":
    older_torch.adapt()  # before the project is imported
    from shardtune.distributed.exit_code import run

    run(main)
