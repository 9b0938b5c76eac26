"""Log the line of each step, write its object to `metrics.jsonl`, and name spikes of the loss."""

import time
from collections import deque
from statistics import median

from shardtune.checkpoint import Saver
from shardtune.config import Config
from shardtune.log import logger
from shardtune.metrics_schema import StepEntry
from shardtune.model.flops import MfuMeter
from shardtune.training.observers.metrics import Metrics, StepEnded, StepObserver
from shardtune.units import gb

_WINDOW = 50  # earlier steps, whose losses a loss is compared with
_FEWEST = 20
_DEVIATIONS = 10  # median deviations: 6.7 standard deviations of normally scattered losses
_RATIO = 1.2  # a loss near 0 hardly scatters


class StepLog(StepObserver):
    """Writes each step to `metrics.jsonl`, and logs a line of each that is due.

    A line has the mean speed since the line before it, and a failure of the last save.
    """

    def __init__(
        self,
        metrics: Metrics,
        mfu: MfuMeter,
        total_steps: int,
        saver: Saver,
    ) -> None:
        self._metrics, self._mfu, self._total_steps, self._saver = metrics, mfu, total_steps, saver
        # Seconds, tokens, and MFU x seconds of each step since the last line.
        self._unlogged: list[tuple[float, int, float]] = []

    def step_ended(self, ended: StepEnded) -> None:
        step, stats, seconds = ended.step, ended.stats, ended.seconds
        mfu = self._mfu.per_step(step.lengths, step.trained_tokens, seconds)
        entry = StepEntry(
            kind="step",
            step=step.number,
            epoch=step.epoch,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=ended.lr,
            tokens=step.tokens,
            trained_tokens=step.trained_tokens,
            tokens_per_second=step.tokens / seconds,
            seconds=seconds,
            mfu=mfu,
            memory_bytes=stats.peak_memory_bytes,
            data_seconds=stats.data_seconds,
            reserved_memory_bytes=stats.reserved_memory_bytes or None,
        )
        self._metrics.write(entry)
        self._unlogged.append((seconds, step.tokens, (mfu or 0.0) * seconds))
        if ended.is_due:
            self._log(ended, mfu)

    def _log(self, ended: StepEnded, mfu: float | None) -> None:
        stats, number, total = ended.stats, ended.step.number, self._total_steps
        steps = len(self._unlogged)
        seconds, tokens, mfu_seconds = map(sum, zip(*self._unlogged, strict=True))
        reserved = stats.reserved_memory_bytes
        fields = [
            f"Step {number}/{total}",
            f"Loss: {stats.loss:.4f}",
            f"Grad Norm: {stats.grad_norm:.3f}",
            f"LR: {ended.lr:.2e}",
            f"{steps / seconds:#.3g}".rstrip(".") + " it/s",
            f"{tokens / seconds:.0f} tok/s",
            *([f"MFU {mfu_seconds / seconds:.1%}"] if mfu is not None else []),
            f"{gb(stats.peak_memory_bytes)} GB",
            f"ETA {_duration((total - number) * seconds / steps)}",
            time.strftime("%H:%M:%S"),
            *([f"{gb(reserved)} GB reserved"] if reserved else []),
            *filter(None, [self._saver.not_saved]),
        ]
        logger.info(" | ".join(fields))
        self._unlogged.clear()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def inspect_command(config: Config, step: int) -> str:
    return f"python -m shardtune inspect-data --config {config.run.dir}/config.yaml --step {step}"


class LossSpikes(StepObserver):
    """Names each step whose loss stands far above those before it, and how to see its records."""

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
