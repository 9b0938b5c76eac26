"""Models of steps, and `export.command`: a shell command that node 0 runs beside the training.

The command gets a written model, and its last line may be a score. Commands run one at a time, and
of those that wait the newest is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.live import StepModels
from shardtune.checkpoint.run_dir import COMMANDS
from shardtune.config import ExportConfig
from shardtune.data.schedule import Schedule
from shardtune.log import logger, quoted
from shardtune.metrics_schema import ScoreEntry
from shardtune.training.observers.metrics import Metrics, StepEnded, StepObserver

# The command is no rank, and must not take part in the run.
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "NNODES", "NODE_RANK", "GPUS_PER_NODE"),
    "OMP_NUM_THREADS",  # a rank's, one of many on its node
}
_OF_THE_LAUNCH = ("MASTER_", "TORCHELASTIC_", "TORCH_", "JOIN_", "SHARDTUNE_", "NCCL_", "GLOO_")
_LAST_BYTES = 1 << 16  # of the output, in which the last line is looked for


class _Running(NamedTuple):
    model: Path
    step: int
    process: subprocess.Popen[bytes]
    output: Path
    began: float


class ExportCommand:
    """Runs the command on rank 0. Leaving it as a context waits for commands, or ends them."""

    def __init__(
        self, command: str | None, run_dir: Path, keep: int, timeout_s: float, metrics: Metrics
    ):
        """`keep`: the number of step models' logs. `timeout_s`: the longest wait at the end."""
        self._command, self._run_dir, self._keep = command, run_dir, keep
        self._timeout_s, self._metrics = timeout_s, metrics
        self._running: _Running | None = None
        self._waiting: tuple[Path, int] | None = None

    def __enter__(self) -> ExportCommand:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._finish()
        finally:  # a signal may end the wait
            self._end("the run ends")

    def give_up(self) -> None:
        self._end("a signal asks the run to stop")
        self._command = None

    def models_in_use(self) -> Iterator[Path]:
        yield from (each[0] for each in (self._running, self._waiting) if each)

    def start(self, model: Path, step: int) -> None:
        """Run the command for a model, or let it wait for the command that runs."""
        if not self._command:
            return
        if self._waiting:
            logger.info(f"export.command: {self._waiting[0].name} is skipped for {model.name}")
        self._waiting = model, step
        self.poll()

    def poll(self) -> None:
        """Take the score of a command that has ended, and start the one that waits."""
        if self._running and self._running.process.poll() is not None:
            running, self._running = self._running, None
            _kill_group(running.process)
            self._take_score(running)
        if self._waiting and not self._running:
            (model, step), self._waiting = self._waiting, None
            self._launch(model, step)

    def _finish(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            while self._running:
                self._running.process.wait(deadline - time.monotonic())
                self.poll()
        self._end(f"it took longer than distributed.save_timeout_s={self._timeout_s:g}")

    def _launch(self, model: Path, step: int) -> None:
        assert self._command
        output = self._run_dir / COMMANDS / f"{model.name}.log"
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_RANKS and not name.startswith(_OF_THE_LAUNCH)
        }
        environment |= {"SHARDTUNE_MODEL": str(model.resolve()), "SHARDTUNE_STEP": f"{step}"}
        # Programs of the run's own Python are found, also if its environment is not active.
        paths = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(paths)
        try:
            output.parent.mkdir(exist_ok=True)
            with output.open("wb") as file:
                logs = sorted(sorted(output.parent.glob("step_*.log")), key=os.path.getmtime)
                for old in logs[: -self._keep]:
                    durable_fs.delete(old)
                process = subprocess.Popen(
                    self._command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # a Ctrl-C is the run's
                )
        except OSError as error:
            logger.warning(f"export.command cannot be started for {model.name}: {error}")
            return
        self._running = _Running(model, step, process, output, time.monotonic())
        logger.info(f"export.command runs for {model.name}, its output goes to {output}")

    def _take_score(self, running: _Running) -> None:
        name, code = running.model.name, running.process.returncode
        last = _last_line(running.output)
        scores = {} if code else _scores(last)
        seconds = time.monotonic() - running.began
        model = running.model.relative_to(self._run_dir)
        entry = ScoreEntry(
            kind="score", step=running.step, model=f"{model}", scores={**scores}, seconds=seconds
        )
        if code:
            self._metrics.write(entry | {"exit_code": code})
            said = f": {quoted(last)}" if last else ""
            logger.warning(f"export.command ended with {code} for {name}{said}")
            return
        if not scores:
            logger.info(f"export.command: its last line for {name} is no JSON object of numbers")
            return
        self._metrics.write(entry)
        shown = ", ".join(f"{quoted(key)} {value:g}" for key, value in scores.items())
        logger.info(f"Score of {name}, in {seconds:.1f} s: {shown}")

    def _end(self, why: str) -> None:
        running, waiting = self._running, self._waiting
        self._running = self._waiting = None
        if not running:
            return
        skipped = f", and not run for {waiting[0].name}" if waiting else ""
        logger.warning(f"export.command is ended for {running.model.name}{skipped}, since {why}")
        _kill_group(running.process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):  # all have ended, or belong to another user
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(output: Path) -> str:
    with contextlib.suppress(OSError), output.open("rb") as file:  # it may have deleted it
        file.seek(max(0, output.stat().st_size - _LAST_BYTES))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
    return ""


def _scores(line: str) -> dict[str, float]:
    """Return the numbers of a line that is a JSON object of finite numbers alone, else nothing."""
    with contextlib.suppress(ValueError, RecursionError, OverflowError):
        values = json.loads(line)
        if isinstance(values, dict) and {*map(type, values.values())} <= {int, float}:
            scores = {key: float(value) for key, value in values.items()}
            return scores if all(map(math.isfinite, scores.values())) else {}
    return {}


def is_due(step: int, schedule: Schedule, config: ExportConfig) -> bool:
    """Return whether the model of a step is due. The last step's is the final one, if any."""
    is_final = config.final and step == schedule.total_steps
    return schedule.is_due(step, config.every_steps) and not is_final


class StepExport(StepObserver):
    """Writes models between steps. `models`: None without `export.every_steps`."""

    def __init__(
        self,
        models: StepModels | None,
        command: ExportCommand,
        schedule: Schedule,
        config: ExportConfig,
    ) -> None:
        self._models, self._command = models, command
        self._schedule, self._config, self._step = schedule, config, 0

    def step_ended(self, ended: StepEnded) -> None:
        self._step = ended.step.number

    def between_steps(self) -> None:
        if is_due(self._step, self._schedule, self._config):
            self.write(self._step)
        self._command.poll()

    def write(self, step: int) -> None:
        if not self._models:
            return
        if model := self._models.write(step):
            self._command.start(model, step)
        self._models.delete_old(step, self._command.models_in_use())
