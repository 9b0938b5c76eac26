"""Name each step whose loss stands far above the losses of the steps before it."""

from __future__ import annotations

from collections import deque
from statistics import median

from shardtune.config import Config
from shardtune.log import logger
from shardtune.training.observers.observer import StepEnded, StepObserver

_WINDOW = 50  # earlier steps, whose losses a loss is compared with
_FEWEST = 20
_DEVIATIONS = 10  # median deviations: 6.7 standard deviations of normally scattered losses
_RATIO = 1.2  # a loss near 0 hardly scatters


def inspect_command(config: Config, step: int) -> str:
    """Return the command that shows the records of a step."""
    return f"python -m shardtune inspect-data --config {config.run.dir}/config.yaml --step {step}"


class LossSpikes(StepObserver):
    """Logs each spike, with the command that shows its records."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def step_ended(self, ended: StepEnded) -> None:
        loss, before = ended.stats.loss, self._losses
        if len(before) >= _FEWEST:
            middle = median(before)
            scatter = median(abs(each - middle) for each in before)
            if loss > max(middle + _DEVIATIONS * scatter, _RATIO * middle):
                logger.warning(
                    f"loss spike: {loss:.4f} in step {ended.step.number}, and the median "
                    f"of the {len(before)} steps before it is {middle:.4f} - look at its records: "
                    f"{inspect_command(self._config, ended.step.number)}"
                )
        before.append(loss)
