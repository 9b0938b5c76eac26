"""`shardtune report`: a page of one or several runs."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardtune.errors import UserError, all_of
from shardtune.report.page import write_report
from shardtune.report.read_run import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: RUN_DIR/report.html)"
    )


def require_page(out: Path) -> None:
    """Raise UserError if `out` is a file that is not a page."""
    if out.is_file() and out.stat().st_size:
        with out.open("rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise UserError(f"{out}: this file is not a page - name another one")


def report(options: argparse.Namespace) -> None:
    """Write the page, and say where it is and what it leaves out.

    Raises:
        UserError: a directory is not a run, or the page cannot be written.
    """
    runs = all_of(*(partial(read_run, path) for path in options.runs))
    names = Counter(run.name for run in runs)
    runs = [replace(run, name=str(run.path)) if names[run.name] > 1 else run for run in runs]
    out: Path = options.out or options.runs[0] / "report.html"
    require_page(out)
    try:
        notes = write_report(runs, out)
    except OSError as error:
        raise UserError(
            f"{out}: the page cannot be written ({error.strerror}) - name another file with --out"
        ) from error
    for note in notes:
        print(f"WARNING: {note}")
    print(f"Report: {out.resolve()}")
