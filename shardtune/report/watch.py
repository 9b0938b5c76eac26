"""`shardtune watch`: a run in a terminal, from its metrics.jsonl and config.yaml.

It reads files and nothing else, so the run does not notice.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shardtune.errors import UserError, counted
from shardtune.report.charts import smooth
from shardtune.report.read_run import (
    Entry,
    FloatArray,
    RunRecord,
    before_first_step,
    read_entry,
    read_settings,
)
from shardtune.report.summary import NO_MFU, figures, spoken
from shardtune.run_files import LOCK, METRICS, is_locked

_EVERY_S = 1.0
_GPUS_EVERY_S = 5.0
_STEPS_OF_ETA = 20
_WIDTH = 48  # characters of the bar and the curve
_SPARKS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR")


def watch(options: argparse.Namespace) -> None:
    """Show the run until Ctrl-C, or once if the output is not a terminal.

    Raises:
        UserError: there is no run, and nobody at a terminal who may wait for it.
    """
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # Ctrl-C ends the view without an error
    console = Console()
    if not console.is_terminal:
        follower = Follower(options.run)
        follower.read()
        console.print(view(follower.run, _gpus()))
        return
    with contextlib.suppress(KeyboardInterrupt):
        follower = _wait_for_run(options.run, console)
        follower.read()
        _follow(follower, console)


def _wait_for_run(path: Path, console: Console) -> Follower:
    is_said = False
    while True:
        try:
            return Follower(path)
        except UserError as error:
            if not is_said:
                is_said = True
                console.print(f"{error}\nWaiting for a run there. Ctrl-C ends this.", markup=False)
        time.sleep(_EVERY_S)


def _follow(follower: Follower, console: Console) -> None:
    asked_at, gpus = time.monotonic(), _gpus()
    with Live(view(follower.run, gpus), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_S)
            follower.read()
            if gpus and time.monotonic() - asked_at > _GPUS_EVERY_S:
                asked_at, gpus = time.monotonic(), _gpus()
            live.update(view(follower.run, gpus), refresh=True)


class Follower:
    """Reads the lines that a run adds to its metrics.jsonl.

    Raises:
        UserError: no run has begun in this directory, or it ended before its first step.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / METRICS
        self._position, self._inode, self._rest = 0, 0, b""
        self.run = RunRecord(path, path.resolve().name, settings=read_settings(path))
        # A run that still loads has its lock and no metrics yet.
        if not self._file.is_file() and not (path / LOCK).exists():
            raise UserError(
                f"{path}: no run (neither {METRICS} nor {LOCK} is there) - name the run.dir of a "
                "run that has begun"
            )
        if not self._file.is_file() and is_locked(path) is False:
            raise UserError(f"{path}: {before_first_step(is_alive=False)}")

    def read(self) -> None:
        """Read new complete lines, or all lines of a file that was replaced."""
        self.run = replace(self.run, is_locked=is_locked(self.run.path))
        try:
            with self._file.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._position:
                    settings = read_settings(self.run.path)
                    self.run = replace(self.run, entries={}, settings=settings, unread=0)
                    self._inode, self._position, self._rest = status.st_ino, 0, b""
                file.seek(self._position)
                added = file.read()
        except OSError:
            return  # the run still loads; a resume replaces the file; a disk hangs for a moment
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        entries = {kind: list(objects) for kind, objects in self.run.entries.items()}
        known = list(filter(None, map(read_entry, lines)))
        for entry in known:
            entries.setdefault(entry["kind"], []).append(entry)
        unread = self.run.unread + len(lines) - len(known)
        self.run = replace(self.run, entries=entries, unread=unread, _columns={})


def view(run: RunRecord, gpus: Sequence[str]) -> RenderableType:
    """Return the run's state, for a terminal of any width."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(run):
        table.add_row(name, value)
    for line in gpus:
        table.add_row("GPU", line)
    if run.total_steps:
        table.add_row("", ProgressBar(run.total_steps, run.last_step, width=_WIDTH))
    return table


def _rows(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the figures of the run's card, some as they are in the last steps, and more."""
    rows = {"run": run.name} | figures(run)
    if steps := run.of_kind("step"):
        last = steps[-1]
        rows["steps"] = _progress(run)
        rows["loss"] += "\n" + sparkline(run.column("step", "loss"))
        rows["speed"] = _speed(run)
        rows["update"] = (
            f"gradient norm {_shown(last, 'grad_norm', '.3f')}, lr {_shown(last, 'lr', '.2e')}"
        )
    yield from rows.items()
    if slowest := run.of_kind("ranks"):
        entry = slowest[-1]
        yield (
            "slowest",
            f"rank {entry.get('slowest_rank', '?')} on {entry.get('host', '?')}, "
            f"{_shown(entry, 'ratio', '.2f')} x the median, in {entry.get('phase', '?')}",
        )
    saves = run.of_kind("save")
    if committed := [save for save in saves if not save.get("problem")]:
        step, seconds = committed[-1]["step"], committed[-1].get("seconds")
        took = f", in {spoken(seconds)}" if seconds is not None else ""
        yield "checkpoint", f"checkpoint_{step:07d}{took}, {_ago(run.last_step - step)}"
    elif run.entries:
        yield "checkpoint", "(none yet)"
    if saves and saves[-1].get("problem"):
        yield "not saved", f"checkpoint_{saves[-1]['step']:07d}: {saves[-1]['problem']}"
    if run.unread_note:
        yield "unread", run.unread_note
    if run.missing_note:
        yield "missing", run.missing_note


def _ago(steps: int) -> str:
    return f"{counted(steps, 'step')} ago" if steps > 0 else "of the last step"


def _progress(run: RunRecord) -> str:
    step, total = run.last_step, run.total_steps
    if step == total:
        return figures(run)["steps"]
    seconds = run.column("step", "seconds")[-_STEPS_OF_ETA:]
    seconds = seconds[np.isfinite(seconds)]
    parts = [f"{step} of {total} ({step / total:.0%})" if total else f"{step}"]
    if len(seconds):
        parts.append(f"{spoken(seconds.mean())} each")
    if run.is_locked is False:
        parts.append("stopped: no process of the run is left")
    elif total and len(seconds):
        parts.append(f"{spoken((total - step) * seconds.mean())} left")
    with contextlib.suppress(ValueError, TypeError):  # a time in another form
        written = datetime.datetime.fromisoformat(run.of_kind("step")[-1].get("time", ""))
        age = (datetime.datetime.now(datetime.UTC) - written).total_seconds()
        parts.append(f"its last step ended {spoken(age)} ago")
    return ", ".join(parts)


def _speed(run: RunRecord) -> str:
    tokens, seconds, waited = (
        float(np.nansum(run.column("step", name)[-_STEPS_OF_ETA:]))
        for name in ("tokens", "seconds", "data_seconds")
    )
    last = run.of_kind("step")[-1]
    parts = [f"{tokens / seconds:,.0f} tokens/s" if seconds else "(no time is known)"]
    parts.append(f"MFU {last['mfu']:.1%}" if last.get("mfu") else NO_MFU)
    is_known = "data_seconds" in last and seconds
    parts.append(f"waiting for data {waited / seconds:.1%}" if is_known else "")
    return ", ".join(filter(None, parts))


def _shown(entry: Entry, name: str, form: str) -> str:
    value = entry.get(name)
    if isinstance(value, int | float):
        return format(value, form)
    return "not finite" if name in entry else "not known"


def sparkline(values: FloatArray) -> str:
    """Draw the values as at most `_WIDTH` bars, each the mean of a stretch."""
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    stretch = -(-len(values) // _WIDTH)
    means = smooth(values, stretch)[stretch - 1 :: stretch]
    low, high = means.min(), means.max()
    heights = (means - low) / max(high - low, 1e-12) * (len(_SPARKS) - 1)
    return "".join(_SPARKS[round(height)] for height in heights)


def _gpus() -> list[str]:
    """Return a line for each GPU of this node; none where nvidia-smi does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = "index,utilization.gpu,memory.used,memory.total,power.draw"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        rows = [re.split(r",\s*", line) for line in output.splitlines()]
        return [
            f"{i}: {use}% | {used} of {all_} MiB | {power} W" for i, use, used, all_, power in rows
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
