"""`make gpu-check` ends whatever a check or an environment does, and passes on a pretended GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from helpers.pretended import needs_compiler

from distTest.gpu_check import __main__ as gpu_check
from distTest.gpu_check import child
from distTest.gpu_check.checks import CHECKS, Check, Skipped


def test_a_crash_is_a_failure_by_name_and_the_other_checks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("gone", "nowhere.at_all", 9), CHECKS[0], Check("long", "nowhere.at_all", 999)]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="ERROR: gone failed - see the logs in "):
        gpu_check.main()
    gone, device, late = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))[
        "checks"
    ]
    assert gone["verdict"] == "failed" and gone["summary"] == "ended with 1: StopIteration"
    assert device["verdict"] == "skipped" and device["summary"].endswith(" sees no GPU")
    assert late["verdict"] == "skipped" and late["summary"].startswith("it takes about 999 s, and")
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| gone | FAILED | " in table and table.strip() in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "CHECKS", checks[1:2])
    with pytest.raises(SystemExit, match="ERROR: no check could be made - "):
        gpu_check.main()


def test_an_environment_that_is_too_old_or_lacks_a_package_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"torch": "2.5.1+cu124", "transformers": "4.57.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions[name])
    with pytest.raises(Skipped) as skipped:
        child.require_project()
    old = "needs torch 2.11, and this is 2.5.1+cu124, needs transformers 5.0, and this is 4.57.1"
    assert str(skipped.value) == old
    versions |= {"torch": "2.13.0", "transformers": "5.23.0"}
    monkeypatch.setitem(sys.modules, "train_fsdp", None)
    with pytest.raises(Skipped, match=r"lacks a package: .*train_fsdp"):
        child.require_project()


@pytest.mark.full
@pytest.mark.timeout(1800)
@needs_compiler
def test_every_check_passes_on_a_pretended_gpu_but_for_what_it_lacks(tmp_path: Path) -> None:
    """No triton is in the CPU build, and TRL has an environment of its own."""
    out = tmp_path / "out"
    pretended = [sys.executable, "-m", "tests.pretend_gpu", "--gpus", "1"]
    speed = "speed-glm-4.5-air"  # the other shapes are as this one
    names = [c.name for c in CHECKS if not c.name.startswith("speed-") or c.name == speed]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # of `make test`
    done = subprocess.run(
        [
            *pretended,
            *(sys.executable, "-m", "distTest.gpu_check"),
            *("--tiny", "--out", str(out), "--only", *names),
        ],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {row["check"]: row for row in results["checks"]}
    assert list(rows) == names
    skipped = {name: row["summary"] for name, row in rows.items() if row["verdict"] != "ok"}
    assert skipped == {"compile": "needs the package triton"}
    assert "skipped, since " in rows[speed]["summary"]
    assert rows["memory-glm"]["figures"]["reserved_bytes"] > 0
    assert not list(out.glob("*/")), "models and checkpoints are removed"
