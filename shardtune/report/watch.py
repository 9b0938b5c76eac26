"""`shardtune watch`: the card of a run in a terminal, drawn anew while the run goes on.

It reads files and nothing else, so the run does not notice.
"""

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardtune.errors import UserError
from shardtune.report.read_run import FloatArray, RunRecord, read_run
from shardtune.report.summary import figures, smooth, spoken

_EVERY_S = 1.0
_MOST_BUSY = 0.1  # share of the time that reading a long run may take
_STEPS_OF_ETA = 20
_WIDTH = 48  # characters of the bar and the curve
_SPARKS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR")


def watch(options: argparse.Namespace) -> None:
    """Show the run until Ctrl-C, or once if the output is not a terminal. Raises UserError."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it ends the view without an error
    console = Console()
    if not console.is_terminal:
        console.print(view(read_run(options.run)))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            try:
                shown = view(read_run(options.run))
            except UserError as error:
                shown = Text(f"{error}\nWaiting for a run there. Ctrl-C ends this.")
            live.update(shown, refresh=True)
            time.sleep(max(_EVERY_S, (time.monotonic() - began) / _MOST_BUSY))


def view(run: RunRecord) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(run):
        table.add_row(name, Text(value))
    if run.total_steps:
        table.add_row("", ProgressBar(run.total_steps, run.last_step, width=_WIDTH))
    return table


def _rows(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the figures of the run's card, with the loss as a curve, and the time that is left."""
    rows = {"run": run.name} | figures(run)
    if run.of_kind("step"):
        rows["loss"] += "\n" + sparkline(run.column("step", "loss"))
    seconds = run.column("step", "seconds")[-_STEPS_OF_ETA:]
    steps_left = (run.total_steps or run.last_step) - run.last_step
    if len(seconds) and steps_left and run.is_locked is not False:
        rows["left"] = spoken(steps_left * float(np.nanmean(seconds)))
    committed = [save["step"] for save in run.of_kind("save") if not save.get("problem")]
    rows["checkpoint"] = f"checkpoint_{committed[-1]:07d}" if committed else "(none yet)"
    for entry in run.of_kind("ranks")[-1:]:
        rows["slowest"] = f"rank {entry.get('slowest_rank', '?')} on {entry.get('host', '?')}"
    notes = {"unread": run.unread_note, "missing": run.missing_note}
    yield from (rows | {name: note for name, note in notes.items() if note}).items()


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
