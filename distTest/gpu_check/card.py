"""Write the card of a run of the checks.

Imports the standard library alone; without PyYAML the card is JSON, which YAML reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from distTest.workloads.script import versions

_PRETENDED = ", pretended, with small shapes: losses count, and rates, times and MFU say nothing"
_OF_RUN = ("model", "parameters", "command", "memory", "eager", "compiled")  # of a check of speed


def make_card(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    figures = {row["check"]: row["figures"] for row in rows}
    device = figures.get("device", {})
    card: dict[str, Any] = {
        "weights": "random",
        "date": about["date"][:10],
        "device": device.get("device", "unknown") + (_PRETENDED if about["tiny"] else ""),
        "driver": device.get("driver", "unknown"),
        "versions": {"shardtune": about["commit"], "python": about["python"]},
        "made_by": about["command"],
    }
    with contextlib.suppress(PackageNotFoundError):
        card["versions"] |= versions() | {"cuda": device.get("cuda")}
    for name, run in figures.items():
        if "eager" in run:
            card[name] = {key: run[key] for key in _OF_RUN if key in run}
    if ms := figures.get("optimizer", {}).get("ms_per_1e6_parameters"):
        card["update_ms_per_1e6_parameters"] = {way: round(took, 4) for way, took in ms.items()}
    card["checks"] = {row["check"]: row["verdict"] for row in rows}
    return card


def write_card(out: Path, card: dict[str, Any]) -> None:
    (out / "card.yaml").write_text(_yaml(card), encoding="utf-8")


def _yaml(card: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        return json.dumps(card, indent=1) + "\n"
    text: str = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)
    return text
