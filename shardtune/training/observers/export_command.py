"""`export.command`: a shell command of the user's that node 0 runs beside the training.

It gets a written model, and its last line may be a score. Commands run one at a time, and of those
that wait the newest is kept. The run starts the command of its own configuration alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardtune.checkpoint.run_dir import COMMANDS
from shardtune.log import logger, quoted
from shardtune.metrics_schema import ScoreEntry
from shardtune.training.observers.metrics import Metrics

# The command is no rank, and must not take part in the run.
_OF_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "NNODES", "NODE_RANK", "GPUS_PER_NODE"),
    "OMP_NUM_THREADS",  # a rank's, one of many on its node
}
_OF_THE_LAUNCH = ("MASTER_", "TORCHELASTIC_", "TORCH_", "JOIN_", "SHARDTUNE_", "NCCL_", "GLOO_")
_MOST_BYTES = 1 << 30  # of the output, which shares the disk with the checkpoints
# Runs the command, and ends all of its processes once it has ended, or the rank. Workers of a
# launcher have sessions of their own, and become children of this process when it ends.
_SUPERVISOR = f"""
import ctypes, os, signal, subprocess, sys
def end(code):
    while pids := open(f"/proc/self/task/{{os.getpid()}}/children").read().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os._exit(code)
signal.signal(signal.SIGTERM, lambda *_: end(1))
prctl = ctypes.CDLL(None).prctl
prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[2]):
    end(1)
command = subprocess.Popen(sys.argv[1], shell=True)
while os.fstat(1).st_size <= {_MOST_BYTES}:
    try:
        end(command.wait(1) & 255)
    except subprocess.TimeoutExpired:
        pass
print("its output is larger than {_MOST_BYTES:,} bytes", flush=True)
end(1)
"""
_END_TIMEOUT_S = 10.0
_LAST_BYTES = 1 << 16  # of the output, in which the last line is looked for


class _Running(NamedTuple):
    model: Path
    step: int
    process: subprocess.Popen[bytes]
    output: Path
    began: float


class ExportCommand:
    """Runs the command on rank 0. Leaving it as a context waits for commands, or ends them."""

    def __init__(self, command: str | None, run_dir: Path, timeout_s: float, metrics: Metrics):
        """`timeout_s`: the longest wait at the end."""
        self._command, self._run_dir, self._timeout_s = command, run_dir, timeout_s
        self._metrics = metrics
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
        """End the command, and run it for no further model."""
        self._end("a signal asks the run to stop")
        self._command = None

    def models_in_use(self) -> Iterator[Path]:
        """Yield the models that a command reads, or waits for."""
        if self._running:
            yield self._running.model
        if self._waiting:
            yield self._waiting[0]

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
            self._take_score(running)
        if self._waiting and not self._running:
            (model, step), self._waiting = self._waiting, None
            self._launch(model, step)

    def _finish(self) -> None:
        """Wait until all commands have ended, but no longer than the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while self._running and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.process.wait(min(1.0, max(0.0, deadline - time.monotonic())))
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
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _SUPERVISOR, self._command, str(os.getpid())],
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
        if code:
            said = f": {quoted(last)}" if last else ""
            logger.warning(f"export.command ended with {code} for {name}{said}")
            return
        if not (scores := _scores(last)):
            logger.info(
                f"export.command: its last line for {name} is no JSON object of numbers, so "
                f"{name} has no score"
            )
            return
        seconds = time.monotonic() - running.began
        model = running.model.relative_to(self._run_dir)
        self._metrics.write(
            ScoreEntry(
                kind="score",
                step=running.step,
                model=f"{model}",
                scores={**scores},
                seconds=seconds,
            )
        )
        shown = ", ".join(f"{quoted(key)} {value:g}" for key, value in scores.items())
        logger.info(f"Score of {name}, in {seconds:.1f} s: {shown}")

    def _end(self, why: str) -> None:
        """End the command that runs, with all of its processes."""
        running, waiting = self._running, self._waiting
        self._running = self._waiting = None
        if not running:
            return
        skipped = f", and not run for {waiting[0].name}" if waiting else ""
        logger.warning(f"export.command is ended for {running.model.name}{skipped}, since {why}")
        running.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may hang in the system
            running.process.wait(_END_TIMEOUT_S)


def _last_line(output: Path) -> str:
    """Return the last line of a command's output that is not blank; "" where it is not there."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:  # the command may have deleted it
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _scores(line: str) -> dict[str, float]:
    """Return the numbers of a line that is a JSON object of numbers alone, else nothing."""
    try:
        values = json.loads(line)
        is_object = isinstance(values, dict) and not any(map(_is_no_number, values.values()))
        scores = {str(key): float(value) for key, value in values.items()} if is_object else {}
    except (ValueError, RecursionError, OverflowError):
        return {}
    return scores if all(map(math.isfinite, scores.values())) else {}


def _is_no_number(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | float)
