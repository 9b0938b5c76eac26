"""`shardtune report`: a page of one or several runs, which needs no network and no script."""

import argparse
import datetime
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from shardtune.errors import UserError, all_of
from shardtune.report.charts import COLOURS, chart_svg, make_charts
from shardtune.report.read_run import Entry, RunRecord, read_run
from shardtune.report.summary import (
    NOT_WRITTEN,
    OF_CONFIG,
    PHASE_NAMES,
    card,
    figures,
    no_step,
    when,
)
from shardtune.run_files import METRICS

# The anchor and the heading of each table that has rows.
_HEADINGS = {
    "samples": ("samples", "Samples"),
    "slow_ranks": ("ranks-table", "Slow ranks"),
    "divisions": ("profile", "Profiled steps"),
    "starts": ("starts", "Starts and what changed"),
    "data_lines": ("data", "Data"),
    "settings": ("configuration", "Configuration"),
}


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


def write_page(out: Path, template: str, **values: object) -> None:
    """Write the page that a template of this package makes of values. Raises UserError."""
    text = files(__package__).joinpath(template).read_text(encoding="utf-8")
    html = jinja2.Environment(autoescape=True).from_string(text).render(colours=COLOURS, **values)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a page.
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise UserError(
            f"{out}: the page cannot be written ({error.strerror}) - name another file"
        ) from error


def report(options: argparse.Namespace) -> None:
    """Write the page, and say where it is and what it leaves out. Raises UserError."""
    runs = all_of(*(partial(read_run, path) for path in options.runs))
    names = Counter(run.name for run in runs)
    runs = [replace(run, name=str(run.path)) if names[run.name] > 1 else run for run in runs]
    out: Path = options.out or options.runs[0] / "report.html"
    require_page(out)
    notes = list(_notes(runs))
    tables = {
        "starts": _rows(runs, _starts),
        "samples": _rows(runs, _samples),
        "slow_ranks": _rows(runs, _slow_ranks),
        "divisions": _rows(runs, _divisions),
        "data_lines": _rows(runs, _data_lines),
        "settings": _settings(runs),
    }
    write_page(
        out,
        "page.html.jinja",
        title=" against ".join(run.name for run in runs),
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        sources=[str(run.path / METRICS) for run in runs],
        notes=notes,
        heads=[run.name for run in runs],
        cards="\n\n".join(map(card, runs)),
        overview=_overview(runs) if len(runs) > 1 else [],
        charts=[{"chart": chart, "svg": chart_svg(chart)} for chart in make_charts(runs)],
        sections=[heading for name, heading in _HEADINGS.items() if tables[name]],
        profiles=[link for run in runs for link in _profiles(run, out.parent)],
        **tables,
    )
    for note in notes:
        print(f"WARNING: {note}")
    print(f"Report: {out.resolve()}")


def _row(name: str, values: Sequence[str], differs: bool = False) -> dict[str, Any]:
    return {"name": name, "values": values, "differs": differs}


def _rows(
    runs: Sequence[RunRecord], rows_of: Callable[[RunRecord], Iterator[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of a table. Those of one of several runs begin with its name."""
    return [
        row | {"name": f"{run.name}: {row['name']}"} if len(runs) > 1 else row
        for run in runs
        for row in rows_of(run)
    ]


def _notes(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        for note in filter(None, (run.unread_note, run.missing_note)):
            yield f"{run.path}: {note}"
        if not run.of_kind("step"):
            yield f"{run.path}: {no_step(run)}"
    if len({run.model for run in runs if run.model}) > 1:
        named = "; ".join(f"{run.name}: {run.model}" for run in runs)
        yield f"The models differ, so losses and perplexities may not be comparable ({named})"


def _overview(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    columns = [figures(run) for run in runs]
    rows = [_row(name, [column[name] for column in columns]) for name in columns[0]]
    return [row | {"differs": row["name"] in OF_CONFIG and _differ(row["values"])} for row in rows]


def _differ(values: Sequence[str]) -> bool:
    return len(set(values)) > 1


def _starts(run: RunRecord) -> Iterator[dict[str, Any]]:
    for entry in run.of_kind("start"):
        changes = "; ".join(
            f"{change['key']}: {change['old']} to {change['new']}"
            for change in entry.get("changes") or []
        )
        ranks = str(entry.get("world_size", NOT_WRITTEN))
        values = [str(entry["step"]), ranks, changes or "(nothing)"]
        yield _row(when(entry.get("time", "")), values)


def _samples(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the answers of the last evaluation, each beside its reference."""
    samples = run.of_kind("sample")
    last = max((entry["step"] for entry in samples), default=None)
    for entry in samples:
        if entry["step"] == last:
            texts = [str(entry.get(key)) for key in ("prompt", "answer", "reference")]
            texts[1] += " (cut off)" * ("is_cut" in entry)
            yield _row(f"step {last}", texts)


def _slow_ranks(run: RunRecord) -> Iterator[dict[str, Any]]:
    by_rank: dict[str, list[Entry]] = {}
    for entry in run.of_kind("ranks"):
        name = f"{entry.get('slowest_rank')} on {entry.get('host')}"
        by_rank.setdefault(name, []).append(entry)
    for name, entries in sorted(by_rank.items(), key=lambda item: -len(item[1]))[:16]:
        phase, _ = Counter(entry.get("phase") for entry in entries).most_common(1)[0]
        most = max(entry.get("ratio") or 0 for entry in entries)
        values = [str(len(entries)), f"{most:.2f} x the median", str(phase)]
        yield _row(name, values)


def _divisions(run: RunRecord) -> Iterator[dict[str, Any]]:
    for entry in run.of_kind("profile"):
        seconds_by_phase = entry.get("seconds", {})
        total = sum(seconds_by_phase.values()) or math.nan
        for phase, seconds in seconds_by_phase.items():
            steps = f"steps {entry.get('first_step')} to {entry['step']}"
            name = f"{steps}: {PHASE_NAMES.get(phase, phase)}"
            yield _row(name, [f"{seconds:.4g}", f"{seconds / total:.1%}"])


def _profiles(run: RunRecord, folder: Path) -> list[str]:
    files_ = sorted((run.path / "profile").glob("*")) if run.of_kind("profile") else []
    return [quote(os.path.relpath(file.resolve(), folder.resolve())) for file in files_]


def _data_lines(run: RunRecord) -> Iterator[dict[str, Any]]:
    yield from (_row(line, []) for line in run.start.get("data") or [])


def _settings(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row for each key: its value and origin in each run. Keys that differ come first."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        pairs = [run.settings.get(key, (_missing(run), "")) for run in runs]
        shown = [f"{value} ({origin})" if origin else value for value, origin in pairs]
        rows.append(_row(key, shown, differs=_differ([value for value, _ in pairs])))
    return sorted(rows, key=lambda row: not row["differs"])


def _missing(run: RunRecord) -> str:
    return "(not a key of its version)" if run.settings else "(config.yaml is missing)"
