"""Hand the objects of `metrics.jsonl` to trackers: TensorBoard and Weights & Biases.

Each tracker has a thread of its own. A tracker that fails is logged once, and a tracker that hangs
loses objects: neither stops nor slows the run.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardtune.config import Config, LoggingConfig
from shardtune.config_io import to_dict
from shardtune.errors import UserError, first_line
from shardtune.log import logger

_MOST_WAITING = 10_000  # objects that wait for a tracker that hangs
_CLOSE_TIMEOUT_S = 10.0  # for objects that a tracker has not sent when the run ends
_NOT_SHOWN = {"step", "time"}

Entry = Mapping[str, Any]
Write = Callable[[Entry], None]


def require_trackers(config: LoggingConfig) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    missing = [name for name, is_on in wanted.items() if is_on and find_spec(name) is None]
    problems = (
        f"logging.{name}: the package {name} is not installed - pip install -e .[{name}], "
        f"or switch logging.{name} off"
        for name in missing
    )
    if missing:
        raise UserError(*problems)


def open_sinks(config: Config, run_dir: Path, resumed_step: int | None) -> list[Sink]:
    """Start a thread for each tracker that the configuration names."""
    sinks = []
    if config.logging.tensorboard:
        sinks.append(Sink("TensorBoard", partial(_tensorboard, run_dir, resumed_step)))
    if config.logging.wandb is not None:
        sinks.append(Sink("Weights & Biases", partial(_wandb, config, run_dir, resumed_step)))
    return sinks


class Sink:
    """Hands objects to a tracker in a thread.

    `start` connects to the tracker, yields a function that takes an object, and then closes the
    tracker. It runs in the thread, because it may wait for a network.
    """

    def __init__(self, name: str, start: Callable[[], Iterator[Write]]) -> None:
        self._name, self._start = name, start
        self._queue: queue.Queue[Entry | None] = queue.Queue(_MOST_WAITING)
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Hand over an object without waiting."""
        if self._has_ended:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._end(f"does not take {_MOST_WAITING} objects")

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until the tracker has every object, but no longer than `timeout_s`."""
        if self._has_ended:
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._end(f"has not taken everything within {timeout_s:g} s")

    def _work(self) -> None:
        try:
            for write in self._start():
                while (entry := self._queue.get()) is not None:
                    write(entry)
        except Exception as error:  # a tracker may raise anything
            self._end(f"failed ({type(error).__name__}: {first_line(error)})")

    def _end(self, what: str) -> None:
        if not self._has_ended:
            logger.warning(
                f"{self._name} {what}, and gets no more: the run goes on, and metrics.jsonl has "
                "everything"
            )
        self._has_ended = True


def scalars(entry: Entry) -> dict[str, float]:
    """Return the numbers of an object by the names that trackers show, such as `eval/loss`."""
    kind = entry["kind"]
    prefix = {"step": "train", "eval": f"eval/{entry['set']}" if "set" in entry else "eval"}
    if kind == "experts":
        entry = _over_layers(entry["layers"])
    if kind == "score":
        entry = entry["scores"]
    return {
        f"{prefix.get(kind, kind)}/{name}": value
        for name, value in entry.items()
        if isinstance(value, int | float) and name not in _NOT_SHOWN
    }


def _over_layers(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of the worst layer, and the number of idle experts in all layers."""
    numbers = {
        "lowest_entropy": min(layer["entropy"] for layer in layers),
        "without_tokens": sum(layer["without_tokens"] for layer in layers),
    }
    if "rank_imbalance" in layers[0]:
        numbers["rank_imbalance"] = max(layer["rank_imbalance"] for layer in layers)
    return numbers


def _tensorboard(run_dir: Path, resumed_step: int | None) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    # The run repeats the steps behind the checkpoint: drop their points.
    purge_step = None if resumed_step is None else resumed_step + 1
    with SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step) as writer:

        def write(entry: Entry) -> None:
            for name, value in scalars(entry).items():
                writer.add_scalar(name, value, entry["step"])

        yield write


def _wandb(config: Config, run_dir: Path, resumed_step: int | None) -> Iterator[Write]:
    import wandb

    id_file = run_dir / "wandb_run_id"
    if resumed_step is None or not id_file.is_file():
        id_file.write_text(secrets.token_hex(4), encoding="utf-8")
    run = wandb.init(
        project=config.logging.wandb,
        id=id_file.read_text(encoding="utf-8"),
        name=run_dir.name,
        dir=run_dir,
        config=to_dict(config),
        resume="allow",
        # A run has nobody at the terminal to type a key.
        settings=wandb.Settings(silent=True, console="off", login_timeout=1),
    )
    run.define_metric("*", step_metric="step")  # objects of a save come some steps later

    def write(entry: Entry) -> None:
        run.log({**scalars(entry), "step": entry["step"]})

    yield write
    run.finish()
