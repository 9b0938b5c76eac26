"""The benchmarks run, and have no figure for a side that did not do the reference's work."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(Path(REPOSITORY, "benchmarks")))

import bench
from measure import Side, Unequal, gated, require_equal_work, require_moving_loss

PEER = Side(
    losses=[3.0, 2.5],
    seconds=[1.0],
    memory_bytes=10**9,
    tokens=100,
    trained_tokens=30,
    computed_tokens=130,
    head_rows=130,
)
ROUNDED = replace(PEER, losses=[3.0002, 2.5], computed_tokens=100, head_rows=30)


def test_equal_work_passes_however_it_was_batched() -> None:
    require_equal_work(ROUNDED, PEER, 1e-4)


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (replace(PEER, losses=[3.0, 2.501]), "the loss of step 2 is 2.501000 and 2.500000"),
        (replace(PEER, losses=[3.0, float("nan")]), "the loss of step 2 is nan"),
        (replace(PEER, losses=[3.0]), "1 and 2 steps have a loss"),
        (replace(PEER, trained_tokens=31), "trained_tokens of a step are 31 and 30"),
        (replace(PEER, tokens=99), "tokens of a step are 99 and 100"),
    ],
)
def test_unequal_work_is_refused(side: Side, said: str) -> None:
    with pytest.raises(Unequal, match=said):
        require_equal_work(side, PEER, 1e-4)
    equal, refused = gated({"peer": [PEER], "ours": [ROUNDED, side]}, "peer", 1e-4)
    assert list(equal) == ["peer"], "one run that differs takes the figures of all"
    assert said.split(" and ")[0] in refused["ours"]


def test_without_a_reference_nothing_counts() -> None:
    equal, refused = gated({"peer": [], "ours": [ROUNDED]}, "peer", 1e-4)
    assert not equal
    assert refused == dict.fromkeys(("peer", "ours"), "peer did not run to its end")


def test_equal_losses_that_do_not_move_say_nothing() -> None:
    require_moving_loss(PEER, 1e-2)
    with pytest.raises(Unequal, match=r"from 3\.0000 to 2\.9900 only"):
        require_moving_loss(replace(PEER, losses=[3.0, 2.99]), 1e-3)


def test_ranks_with_another_loss_fail_their_section(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_run(name: str, *_: Any, ranks: int) -> Side:
        return replace(PEER, losses=[3.0, 2.5 + 0.01 * (ranks == 4)], mfu=[0.5], data_share=0.001)

    monkeypatch.setattr(bench, "run_ours", a_run)
    monkeypatch.setattr(bench, "FAILED", [])
    monkeypatch.setattr(bench, "run_pinned", lambda *_: pytest.fail("there is nothing to plot"))
    arguments = ["--model", str(models["llama"]), "--peers", sys.executable, "--sections", "scaling"]
    arguments += ["--results", str(tmp_path / "RESULTS.md"), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    said = "scaling: on 4 and 1 ranks the loss of step 2 is 2.510000 and 2.500000"
    with pytest.raises(SystemExit, match=f"ERROR: {said} - see the logs"):
        bench.main()
    found = json.loads((tmp_path / "RESULTS.json").read_text(encoding="utf-8"))
    assert found["failed"] == [said] and "scaling" not in found
    assert f"- {said}" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


def run_benchmark(script: str, folder: Path, *arguments: Any) -> str:
    """What it wrote; nothing of it may have failed."""
    results = folder / "RESULTS.md"
    places = ["--peers", sys.executable, "--results", results, "--work", folder / "work"]
    command = [sys.executable, REPOSITORY / "benchmarks" / script, *places, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return results.read_text(encoding="utf-8")


def test_the_memory_of_head_and_loss_is_measured(tmp_path: Path, models: dict[str, Path]) -> None:
    more = ["--sections", "head", "--head-tokens", 64]
    said = run_benchmark("bench.py", tmp_path, "--model", models["llama"], *more)
    assert "Losses of a token: " in said and "Ours takes " in said


def test_a_shape_is_measured(tmp_path: Path, models: dict[str, Path]) -> None:
    more = ["--tiny", "--sides", "ours", "--shapes", "qwen3-1.7b"]
    said = run_benchmark("gpu.py", tmp_path, "--tokenizer", models["llama"], *more)
    *_, line = said.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["qwen3-1.7b", "256", "2", "shardtune"] and cells[8].startswith("within each document"), said
    first, last = map(float, cells[7].split())
    assert last < 0.95 * first


@pytest.mark.full
def test_traffic_scaling_and_many_records_are_measured(tmp_path: Path, models: dict[str, Path]) -> None:
    more = ["--short", "--sections", "traffic", "records", "scaling"]
    results = tmp_path / "RESULTS.md"
    command = [sys.executable, REPOSITORY / "benchmarks/bench.py", "--peers", sys.executable, "--results", results]
    command += ["--work", tmp_path / "work", "--model", models["llama"], *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, "no matplotlib in this environment"
    found = json.loads(results.with_suffix(".json").read_text(encoding="utf-8"))
    assert [failed.partition(" ended")[0] for failed in found["failed"]] == ["plot"], done.stdout + done.stderr
    assert (
        set(found["scaling"]) == {"1", "2"} and found["traffic"]["head"]["rows"] and set(found["records"]) == {"1000"}
    )
    assert all(0 <= row["data_share"] < 0.5 for row in found["scaling"].values())
    said = results.read_text(encoding="utf-8")
    assert "waited for data" in said and "- plot ended with 1" in said
