"""Write docs/models.csv, and counts in docs/models.md, from results of `models` and `runs`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import transformers

from distTest.workloads.script import REPOSITORY

PAGE, TABLE = REPOSITORY / "docs/models.md", REPOSITORY / "docs/models.csv"
RESULTS = REPOSITORY / "benchmarks/models.json"
RUNS = REPOSITORY / "benchmarks/runs.json"
LENGTHS = (5, 1, 23, 12, 40)  # tokens of documents; the windows of tiny models have 8
Row = dict[str, Any]
_MARKERS = "<!-- models: written by python -m benchmarks models -->", "<!-- end of models -->"
_COLUMNS = ["model type", "rows", "one rank", "two ranks", "two stages", "experts spread"]
_COLUMNS += ["rows shared", "tensor", "MFU", "LoRA", "causes"]
_RUNS = ("1 rank", "2 ranks", "2 stages", "experts spread", "rows shared", "matrices cut")
EXACT = 1e-6  # the largest distance of a loss or a norm that is rounding alone
_ROWS = {
    "flat": "flat",
    "by layer": "flat, by layer",
    "under a mask": "under a mask",
    "padded": "cannot pack",
}
_TITLES = {
    "rows": "rows",
    "mfu": "MFU",
    "spread": "experts",
    "lora": "LoRA",
    "stages": "stages",
    "context": "shared",
    "tensor": "tensor",
}
_LEFT_OUT = {
    "refused": "refused",
    "fails": "fails",
    "not causal": "not causal by default",
    "not built": "no tiny model",
}


def write_page() -> None:
    """Write the table and the counts again from the files of results."""
    results, runs = (json.loads(path.read_text("utf-8")) for path in (RESULTS, RUNS))
    PAGE.write_text(with_counts(PAGE.read_text("utf-8"), results, runs), encoding="utf-8")
    TABLE.write_text(as_csv(results, runs), encoding="utf-8")


def with_counts(text: str, results: Mapping[str, Row], runs: Mapping[str, Row]) -> str:
    """Return the page with the counts of these results between its markers."""
    begin, end = _MARKERS
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    tried = {kind: row for kind, row in results.items() if "rows" in row}
    rows = Counter(row["rows"] for row in tried.values())
    worst = max(row["gradients off"] for row in tried.values())
    counts = (
        f"transformers {transformers.__version__} opens {len(results)} model types for text. A "
        "tiny model that predicts each token from the earlier ones could be built of "
        f"{len(tried)}: "
        f"{rows['flat']} attend in flat rows, {rows['by layer']} in flat rows with one call of "
        f"each attention layer per document, {rows['under a mask']} under a mask, and "
        f"{rows['padded']} cannot be packed. The gradients of one step over documents of "
        f"{', '.join(map(str, LENGTHS))} tokens are within {worst:.0e} of those of a loop over "
        f"documents, relative to their norm. Losses of runs are within {_worst(runs, 'loss')} of "
        f"those of the loop, exported weights within {_worst(runs, 'weights')}. Windows are "
        "narrower than documents; an indexer chooses all keys."
    )
    return f"{before}{begin}\n\n{counts}\n\n{end}{after}"


def as_csv(results: Mapping[str, Row], runs: Mapping[str, Row]) -> str:
    """Return the table, a line for each model type."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for kind, row in results.items():
        if "rows" in row:
            lines.writerow(_table_row(kind, row, runs.get(kind, {})))
        for what in _LEFT_OUT.keys() & row.keys():
            unknown = [""] * (len(_COLUMNS) - 3)
            lines.writerow([kind, _LEFT_OUT[what], *unknown, _words(row[what], kind)])
    return file.getvalue()


def _table_row(kind: str, row: Row, runs: Row) -> list[str]:
    causes = [("rows", row["cannot pack"] or _cause(row["attention"]))]
    causes += [(name, row[name]) for name in _TITLES if name != "rows"]
    if row["rows"] == "flat":
        causes = causes[1:]
    if not row["experts"]:
        causes = [cause for cause in causes if cause[0] != "spread"]
    said = [f"{_TITLES[name]}: {_words(text, kind)}" for name, text in causes if text != "yes"]
    marks = ["yes" if row[name] == "yes" else "no" for name in ("mfu", "lora")]
    ended = {name: run for name, run in runs.items() if isinstance(run, str)}
    said += [f"{name}: {_words(text, kind)}" for name, text in ended.items()]
    offs = {ranks: distance_of(runs, ranks) for ranks in _RUNS}
    if max(off or 0.0 for off in offs.values()) > EXACT and runs["rounding"]:
        said.append(f"distance: the loop in float32 is {runs['rounding']:.0e} from one in float64")
    distances = ["no" if off is None else f"{off:.0e}" for off in offs.values()]
    if not row["experts"]:
        distances[list(offs).index("experts spread")] = ""
    return [kind, _ROWS[row["rows"]], *distances, *marks, "; ".join(said)]


def _worst(runs: Mapping[str, Row], what: str) -> str:
    distances = (run for row in runs.values() for run in row.values() if isinstance(run, dict))
    return f"{max((distance[what] for distance in distances), default=0.0):.0e}"


def distance_of(runs: Row, ranks: str) -> float | None:
    """Return the largest distance of losses and norms on these ranks; None if a run is missing."""
    distances = [run for name, run in runs.items() if name.endswith(ranks)]
    if not distances or any(isinstance(run, str) for run in distances):
        return None
    return max(max(run["loss"], run["norm"]) for run in distances)


def _cause(attention: str) -> str:
    """Return what stands in brackets at the end of the log's line on attention."""
    return attention.rpartition(" (")[2].removesuffix(")")


def _words(text: str, kind: str) -> str:
    """Return the first clause of a refusal, without the key and the name of the model."""
    clause = text.partition(" - ")[0]
    clause = re.sub(r"^(parallel|lora|model|data)\.[a-z_]+(=\S+)?:? ", "", clause)
    return re.sub(rf"^{re.escape(kind)} ", "", re.sub(r"/tmp/\w+", "a folder", clause))
