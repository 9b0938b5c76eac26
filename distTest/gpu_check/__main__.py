"""Run each check in a process of its own; write a table, a JSON of all figures, and a card.

python -m distTest.gpu_check [--limit-s 510] [--only NAME ...] [--out DIR]

This file needs the standard library alone, so an old Python can run it. A check is skipped by name
if its PyTorch is too old. A check that crashes is a failure by name, and the next ones go on. Ends
with 1 if a check failed.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from distTest.gone import refuse_gone
from distTest.gpu_check.checks import CHECKS, DEVICE, LIMIT_S, Check
from distTest.workloads.script import REPOSITORY, commit, offline, versions

_PRETENDED = ", pretended, with small shapes: losses count, and rates, times and MFU say nothing"
_OF_RUN = ("model", "parameters", "command", "memory", "eager", "compiled")  # of a check of speed
MARKS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


def main() -> None:
    options = read_options()
    # A check has a session of its own, and would hold the GPU after this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ERROR: ended by SIGTERM - run it again"))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"ERROR: {error} - name another folder with --out")
    started, results = time.monotonic(), earlier_results(options)
    rows: list[dict[str, Any]] = []
    for check in selected(options):
        left_s = options.limit_s - (time.monotonic() - started)
        if check.is_timed and any(refuses_times(row) for row in rows):
            row = {"check": check.name, **skipped(f"no figure is believed: {DEVICE.name} failed")}
        else:
            row = {"check": check.name, **run(check, left_s, options)}
        rows.append(row)
        if row["verdict"] != "skipped" or check.name not in results:
            results[check.name] = row
        print(f"{row['check']}: {MARKS[row['verdict']]} ({row['seconds']:.0f} s): {row['summary']}")
        sys.stdout.flush()
        write_results(options, list(results.values()), time.monotonic() - started)
    print(f"\n{table(list(results.values()))}\n")
    print(f"Written: {options.out}: results.md, results.json, card.json")
    if failed := [row["check"] for row in rows if row["verdict"] == "failed"]:
        sys.exit(f"ERROR: {', '.join(failed)} failed - see the logs in {options.out}")
    if not any(row["verdict"] == "ok" for row in rows):
        sys.exit("ERROR: no check could be made - see why in the table")


def selected(options: argparse.Namespace) -> list[Check]:
    """Return the checks to make: the device's before those that are timed."""
    if not options.only:
        return CHECKS
    checks = [check for check in CHECKS if check.name in options.only]
    is_missing = any(check.is_timed for check in checks) and DEVICE not in checks
    return [DEVICE, *checks] if is_missing else checks


def earlier_results(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the results in the folder, if the same commit made them."""
    try:
        earlier = json.loads((options.out / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = (earlier.get("commit"), earlier.get("tiny")) == (options.commit, options.tiny)
    is_named = not options.commit.endswith(("-dirty", "--commit"))
    return {row["check"]: row for row in earlier["checks"]} if same and is_named else {}


def refuses_times(row: dict[str, Any]) -> bool:
    return row["check"] == DEVICE.name and row["verdict"] == "failed"


def skipped(why: str) -> dict[str, Any]:
    return {"verdict": "skipped", "summary": why, "figures": {}, "seconds": 0.0}


def read_options() -> argparse.Namespace:
    refuse_gone("gpu-check", sys.argv[1:])
    parser = argparse.ArgumentParser(prog="python -m distTest.gpu_check", description=__doc__)
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/gpu-check")
    limit = f"seconds for all checks (default {LIMIT_S}, with --only or --tiny none)"
    parser.add_argument("--limit-s", type=float, help=limit)
    parser.add_argument("--commit", help="the commit that a card names where there is no .git")
    parser.add_argument("--tiny", action="store_true", help="shapes for a GPU that is pretended")
    options = parser.parse_args()
    if options.limit_s is None:
        options.limit_s = math.inf if options.only or options.tiny else LIMIT_S
    options.commit = commit() or options.commit or "unknown, for lack of .git and --commit"
    options.out = options.out.absolute()
    return options


def run(check: Check, left_s: float, options: argparse.Namespace) -> dict[str, Any]:
    if left_s < check.seconds:
        why = f"it takes about {check.seconds} s, and {max(0, left_s):.0f} s are left"
        return skipped(f"{why} - python -m distTest.gpu_check --only {check.name}")
    log, result = options.out / f"{check.name}.log", options.out / f"{check.name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "distTest.gpu_check.check_process", check.name, str(result)]
    more = {"GPU_CHECK_TINY": "1" if options.tiny else "", "GPU_CHECK_RESULT": str(result)}
    started, timeout_s = time.monotonic(), min(left_s, 60 + 3 * check.seconds)
    # A session of its own, so that `end_all_of` finds the processes that the check starts.
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=offline(**more),
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            ending = f"ended with {process.wait(timeout=timeout_s)}"
        except subprocess.TimeoutExpired:
            ending = f"did not end within {timeout_s:.0f} s, and takes about {check.seconds} - "
            ending += f"python -m distTest.gpu_check --only {check.name}"
        finally:
            end_all_of(process)
    outcome = {"verdict": "failed", "summary": f"{ending}: {last_line(log)}", "figures": {}}
    if result.is_file():
        outcome = json.loads(result.read_text(encoding="utf-8"))
    return outcome | {"seconds": time.monotonic() - started}


def end_all_of(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def table(rows: list[dict[str, Any]]) -> str:
    head = ["| check | verdict | seconds | |", "|---|---|---|---|"]
    return "\n".join(
        head
        + [
            f"| {row['check']} | {MARKS[row['verdict']]} | {row['seconds']:.0f} | "
            f"{row['summary'].replace('|', '/')} |"
            for row in rows
        ]
    )


def write_results(options: argparse.Namespace, rows: list[dict[str, Any]], seconds: float) -> None:
    """Write results and card after each check: a machine may be taken away."""
    about = {
        "command": shlex.join(["python", "-m", "distTest.gpu_check", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
        "tiny": options.tiny,
        "commit": options.commit,
    }
    text = json.dumps(about | {"checks": rows}, indent=1)
    written = options.out / "results.json.new"
    written.write_text(text + "\n", encoding="utf-8")
    written.replace(options.out / "results.json")
    (options.out / "results.md").write_text(table(rows) + "\n", encoding="utf-8")
    card = json.dumps(make_card(rows, about), indent=1)
    (options.out / "card.json").write_text(card + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    main()
