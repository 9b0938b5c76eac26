"""Hand the objects of `metrics.jsonl` to trackers: TensorBoard and Weights & Biases.

Both send in threads of their own. A tracker that fails is logged once, and does not stop the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardtune.config import Config, LoggingConfig
from shardtune.config_io import to_dict
from shardtune.errors import UserError, first_line
from shardtune.log import logger

_OPEN_TIMEOUT_S = 60  # for the server of a tracker, while the run waits
_CLOSE_TIMEOUT_S = 10  # for what is not sent when the run ends
_NOT_SHOWN = {"step", "time"}

Entry = Mapping[str, Any]
Tracker = tuple[Callable[[Entry], None], Callable[[], None]]  # takes an object; ends the tracker


def require_trackers(config: LoggingConfig) -> None:
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
    sinks = []
    if config.logging.tensorboard:
        sinks.append(Sink("TensorBoard", partial(_tensorboard, run_dir, resumed_step)))
    if config.logging.wandb is not None:
        sinks.append(Sink("Weights & Biases", partial(_wandb, config, run_dir, resumed_step)))
    return sinks


class Sink:
    """Hands objects to a tracker until it fails."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = self._try(open_tracker)

    def put(self, entry: Entry) -> None:
        if self._tracker:
            self._try(partial(self._tracker[0], entry))

    def close(self) -> None:
        if self._tracker:
            self._try(self._tracker[1])

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # a tracker may raise anything
            logger.warning(
                f"{self._name} failed ({type(error).__name__}: {first_line(error)}), and gets no "
                "more: metrics.jsonl has everything"
            )
            self._tracker = None
            return None


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


def _tensorboard(run_dir: Path, resumed_step: int | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # The run repeats the steps behind the checkpoint: drop their points.
    purge_step = None if resumed_step is None else resumed_step + 1
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(entry: Entry) -> None:
        for name, value in scalars(entry).items():
            writer.add_scalar(name, value, entry["step"])

    return write, writer.close


def _wandb(config: Config, run_dir: Path, resumed_step: int | None) -> Tracker:
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
        settings=wandb.Settings(
            silent=True,
            console="off",
            login_timeout=1,  # a run has nobody at the terminal to type a key
            init_timeout=_OPEN_TIMEOUT_S,
            finish_timeout=_CLOSE_TIMEOUT_S,
            finish_timeout_raises=True,
        ),
    )
    run.define_metric("*", step_metric="step")  # objects of a save come some steps later
    return lambda entry: run.log({**scalars(entry), "step": entry["step"]}), run.finish
