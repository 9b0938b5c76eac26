"""Write the card of a run of the checks, beside the committed card of the same device.

Imports the standard library alone; without PyYAML the card is JSON, which YAML reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from distTest.workloads.machine import versions
from distTest.workloads.script import REPOSITORY

COMMITTED = REPOSITORY / "docs/gpu_cards"
_PRETENDED = ", pretended, with small shapes: losses count, and rates, times and MFU say nothing"
_BESIDE = ("losses", "tokens_per_second", "mfu", "peak_bytes")
_RUN = "speed-glm-4.5-air"  # the check whose losses, rate and memory the card has


def make_card(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """Return what a stranger needs to repeat and compare the run of the shipped settings."""
    figures = {row["check"]: row["figures"] for row in rows}
    device, run = figures.get("device", {}), figures.get(_RUN, {})
    card: dict[str, Any] = {
        "model": run.get("model", "none ran"),
        "parameters": run.get("parameters"),
        "weights": "random",
        "date": about["date"][:10],
        "device": device.get("device", "unknown") + (_PRETENDED if about["tiny"] else ""),
        "driver": device.get("driver", "unknown"),
        "versions": {"shardtune": about["commit"], "python": about["python"]},
        "made_by": about["command"],
        "command": run.get("command"),
    }
    with contextlib.suppress(PackageNotFoundError):
        card["versions"] |= versions() | {"cuda": device.get("cuda")}
    for side, measured in run.get("sides", {}).items():
        card[side] = {
            "losses": measured["losses"],
            "tokens_per_second": _least_median_most(measured["tokens_per_second"], 0),
            "mfu": measured["mfu"] and _least_median_most(measured["mfu"], 4),
            "idle_ms_of_a_step": round(measured["kernels"].get("idle_ms", 0.0), 1),
        }
    card |= {
        name: {
            side: {key: sides[side][key] for key in _BESIDE}
            for side in ("shardtune", "trainer")
            if side in sides
        }
        for name, sides in figures.items()
        if "shardtune" in sides
    }
    if mfu := figures.get("ceiling", {}).get("mfu"):
        card["ceiling_mfu"] = round(mfu, 4)
    if memory := run.get("memory"):
        names = ("planned_bytes", "measured_bytes", "reserved_bytes")
        card["memory"] = {name: memory[name] for name in names}
    if ms := figures.get("optimizer", {}).get("ms_per_1e6_parameters"):
        card["update_ms_per_1e6_parameters"] = {way: round(took, 4) for way, took in ms.items()}
    card["checks"] = {row["check"]: row["verdict"] for row in rows}
    return card


def _least_median_most(values: Sequence[float], digits: int) -> dict[str, float]:
    names = ("least", "median", "most")
    return {name: round(value, digits) for name, value in zip(names, values, strict=True)}


def write_card(out: Path, card: dict[str, Any]) -> None:
    """Write card.yaml, and card.md beside the committed card of the device, where there is one."""
    (out / "card.yaml").write_text(_yaml(card), encoding="utf-8")
    path = COMMITTED / f"{slug(card)}.yaml"
    committed = dict(_flat(_read(path))) if path.is_file() else {}
    heads = ["", "here"] + ([f"committed, {path.name}"] if committed else [])
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, value in _flat(card):
        cells = [name, value] + ([committed.get(name, "")] if committed else [])
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    (out / "card.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def slug(card: dict[str, Any]) -> str:
    """Return the name of the device's committed card: `nvidia-h200`, `pretended`."""
    name: str = card["device"]
    return "pretended" if name.endswith(_PRETENDED) else "-".join(name.lower().split())


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a card with its path, such as `eager.losses.0`."""
    if not isinstance(value, (dict, list)):
        yield name, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _yaml(card: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        return json.dumps(card, indent=1) + "\n"
    text: str = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)
    return text


def _read(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        return {}
    return yaml.safe_load(path.read_text(encoding="utf-8"))
