"""What the trackers take of the training loop.

Hands over the objects of N steps as a run does, and times the calls alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from shardtune.config import Config
from shardtune.training.sinks import open_sinks

SHORT = {"steps": 10}
_STEP_S = 0.005  # between two steps, so that the trackers' threads run as well


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000)


def main(options: Namespace) -> None:
    os.environ.setdefault("WANDB_MODE", "offline")
    logging = {"tensorboard": True, "wandb": "benchmark" if find_spec("wandb") else None}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "logging": logging}
    )
    with tempfile.TemporaryDirectory() as folder:
        sinks = open_sinks(config, Path(folder), resumed_step=None)
        seconds = []
        for step in range(1, options.steps + 1):
            numbers = dict.fromkeys(("loss", "grad_norm", "lr", "mfu", "seconds", "tokens"), 0.5)
            entry = {"kind": "step", "step": step, **numbers}
            began = time.perf_counter()
            for sink in sinks:
                sink.put(entry)
            seconds.append(time.perf_counter() - began)
            time.sleep(_STEP_S)
        for sink in sinks:
            sink.close()
    names = " and ".join(name for name, is_on in logging.items() if is_on)
    print(
        f"{names}, {options.steps} steps: {1e6 * median(seconds):.1f} us of the loop per step "
        f"(median), {1e6 * max(seconds):.0f} us at most"
    )
