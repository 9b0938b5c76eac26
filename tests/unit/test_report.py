"""`shardtune report` and `watch`: runs that are whole, unfinished, broken and several."""

import html
import json
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import write

import shardtune
from shardtune.__main__ import run
from shardtune.report.charts import make_charts
from shardtune.report.read_run import read_run
from shardtune.report.summary import NO_MFU, NOT_WRITTEN, card, figures, network_share

SAME = {"lr": 1e-5, "seconds": 2.0, "tokens_per_second": 500.0, "mfu": 0.3, "data_seconds": 0.01}
CONFIG = "model:\n  path: {}\ntrain:\n  epochs: 3\n"


def write_run(
    folder: Path, steps: int = 60, model: str = "a/model", seed: int = 0, **more: Any
) -> Path:
    """Write what a run of a mixture of experts with two evaluation sets leaves."""
    draw = random.Random(seed)
    entries: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "total_steps": 2 * steps, "world_size": 16, "changes": []}
    ]
    for step in range(steps + 1):
        if step:
            drawn = {"loss": 3 * math.exp(-step / steps) + draw.gauss(0, 0.05)}
            drawn |= {"grad_norm": None if step == 7 else draw.lognormvariate(0, 0.3)}
            memory = {"memory_bytes": 61.2e9 if step > 1 else 9e9, "tokens": 1000 + step % 7}
            entries.append({"kind": "step", "step": step} | SAME | drawn | memory)
        if step % 10 == 0:
            perplexity = 9 - 3 * step / steps + 2.5 * (step / steps) ** 2
            entries += [
                {"kind": "eval", "step": step, "loss": 2, "perplexity": perplexity} | of
                for of in ({}, {"set": "chats"}, {"set": "code"})
            ]
            numbers = {"tokens": [9, 0], "entropy": 0.9, "without_tokens": 1, "rank_imbalance": 1.2}
            layers = [{"layer": f"layers.{number}", **numbers} for number in range(3)]
            seconds = {"data": 0.01, "forward_backward": 1.0, "optimizer": 0.1, "waiting": 0.89}
            slow = {"slowest_rank": 3, "host": "node0", "ratio": 1.1, "phase": "data"}
            entries += [
                {"kind": "experts", "step": step, "layers": layers},
                {"kind": "ranks", "step": step, "seconds": seconds} | slow,
                {"kind": "save", "step": step, "seconds": 9.0, "stall_seconds": 0.5},
            ]
    change = {"key": "train.epochs", "old": 3, "new": 4}
    entries.append(
        {"kind": "start", "step": steps, "total_steps": 2 * steps, "changes": [change]} | more
    )
    time = {"time": "2026-11-23T12:00:00.000+00:00"}
    write(folder / "metrics.jsonl", [entry | time for entry in entries])
    (folder / "config.yaml").write_text(CONFIG.format(model), encoding="utf-8")
    (folder / "origins.json").write_text('{"train.epochs": "default"}', encoding="utf-8")
    return folder


def report(*arguments: object) -> int:
    return run(["report", *map(str, arguments)])


def test_the_page_needs_no_network_and_names_every_figure(tmp_path, capsys):
    lines = ["data.train: records longer than data.max_length=64, truncated: 12"]
    folder = write_run(tmp_path / "run", data=lines)
    assert report(folder) == 0
    assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"
    page = (folder / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith("#") or (folder / link).is_file() for link in links)
    assert "<script" not in page and len(page.encode()) < 3e6
    figures = re.findall(r'<figure id="([\w-]+)"', page)
    assert figures == [link[1:] for link in links if link[1:] in figures], "the index, in order"
    for said in (*lines, "60 of 120", "train.epochs: 3 to 4", "3 on node0", "3 (default)"):
        assert said in page, said


def test_names_are_linked_as_they_are_and_no_other_file_is_overwritten(tmp_path):
    a = write_run(tmp_path / "_a $x$ <b> #1")
    b = write_run(tmp_path / "other" / a.name, steps=30)
    out = tmp_path / "page #2.html"
    assert report(a, b, "--out", out) == 0
    page = out.read_text(encoding="utf-8")
    assert f"{html.escape(str(a))} against {html.escape(str(b))}" in page
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert report(a, "--out", tmp_path / "notes.txt") == 2


def test_the_card_sums_up_a_run(tmp_path):
    start = {"world_size": 2, "device": "cpu", "data_ranks": 2}
    start |= {"micro_batch_size": 3, "gradient_accumulation_steps": 4}
    run = read_run(write_run(tmp_path / "run", **start))
    first, last = (entry["loss"] for entry in run.of_kind("step")[:: 60 - 1])
    text = card(run)
    for line in (
        "model: a/model, all weights",
        f"loss: {first:.4f} at first, {last:.4f} at last",
        "perplexity: 9.0000 before training, 8.5000 at step 60, lowest 8.1111 at step 40; chats 9",
        "time: 2 min of training",
        "speed: 501 tokens/s, 60,178 tokens, MFU 30.0%",
        "waiting: 44.5% of a step in collectives: bound by communication",
        "memory: 61.2 GB of a rank at most",
        "batch: 24 rows of ",
    ):
        assert f"\n{line}" in text, text


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ("start", {"loss": "(no step has ended yet)", "model": "(config.yaml is missing)"}),
        ("step", {"speed": f"5 tokens/s, 10 tokens, {NO_MFU}", "memory": NOT_WRITTEN}),
        ("step refused later", {"loss": "not finite at first, 1.0000 at last"}),
        ("start lock", {"loss": "(the run ended before its first step)"}),
        ("start step lock", {"steps": f"1 of 9, stopped, last written {NOT_WRITTEN}"}),
        ("eval", {"perplexity": "(not finite); a not finite"}),
    ],
)
def test_a_figure_that_is_missing_has_its_reason(entries, expected, tmp_path):
    batch = dict.fromkeys(("data_ranks", "micro_batch_size", "gradient_accumulation_steps"), 1)
    lines = {
        "start": {"kind": "start", "step": 0, "total_steps": 9, "world_size": 1} | batch,
        "step": {"kind": "step", "step": 1, "loss": None, "tokens": 10, "seconds": 2.0},
        "later": {"kind": "step", "step": 2, "loss": 1.0, "tokens": 10, "seconds": 2.0},
        "refused": {"kind": "refused", "step": 2, "loss": None, "grad_norm": None},
        "eval": {"kind": "eval", "step": 0, "perplexity": None, "set": "a"},
    }
    kinds = entries.split()
    write(tmp_path / "metrics.jsonl", [lines[kind] for kind in kinds if kind in lines])
    if "lock" in kinds:
        (tmp_path / ".lock").touch()
    said = figures(read_run(tmp_path))
    assert {name: said[name] for name in expected} == expected
    assert "" not in said.values()


def test_two_runs_share_their_axes(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", steps=30, model="b/model", seed=1)
    out = tmp_path / "both.html"
    assert report(a, b, "--out", out) == 0
    said = capsys.readouterr().out
    assert "a: a/model; b: b/model" in said
    page = out.read_text(encoding="utf-8")
    assert "a against b" in page
    overview, _, settings = page.partition('<section id="configuration">')
    assert re.findall('class="differs"><td>(.+?)<', overview) == ["model"]
    assert re.search("<tr.*><td>(.+?)<", settings)[0] == '<tr class="differs"><td>model.path<'
    (loss, *_) = make_charts([read_run(a), read_run(b)])
    assert [curve.label for curve in loss.curves] == ["a", "b"]
    assert loss.curves[1].x.tolist() == [*range(1, 31)] and loss.last_step == 60


def test_broken_and_foreign_lines_are_counted_and_the_rest_is_shown(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"kind": 3, "step": 1}\n{"kind": "step"}\n{"kind": "ste')
        file.write(b"\n" + b"[" * 5000 + b"\n")
    (folder / "config.yaml").unlink()
    (folder / "origins.json").write_text("[]", encoding="utf-8")
    assert report(folder) == 0
    assert "left out 6 lines of metrics.jsonl that cannot be read" in capsys.readouterr().out
    assert shardtune.read_run(folder).unread == 6


@pytest.mark.parametrize("text", [None, "", "not a run\n"])
def test_a_folder_without_a_run_is_refused(text, tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (tmp_path / "none").mkdir()
    if text is not None:
        (tmp_path / "none/metrics.jsonl").write_text(text, encoding="utf-8")
    assert report(folder, tmp_path / "none", tmp_path / "nowhere") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and f"ERROR: {tmp_path / 'none'}" in errors[0]
    assert run(["watch", str(tmp_path / "none")]) == 2


def test_shares_are_drawn_in_percent_and_memory_in_gigabytes(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "plan", "step": 0, "predicted_peak_bytes": 70e9}\n')
    charts = {chart.name: chart for chart in make_charts([read_run(folder)])}
    shown = {"mfu": 30.0, "memory": 61.2}
    for name, value in shown.items():
        assert charts[name].curves[0].y[1:] == pytest.approx(value), name
    phases = {curve.label: curve.y for curve in charts["phases"].curves}
    assert phases["waiting in collectives"] == pytest.approx(100 * 0.89 / 2)
    assert sum(phases.values()) == pytest.approx(100)
    assert charts["memory"].levels == {"the plan": 70.0}
    assert network_share(read_run(folder)) == pytest.approx(0.89 / 2)


def test_samples_and_scores_are_shown(tmp_path, capsys):
    asked = {"prompt": "<b>which rank ?</b>", "answer": "node 1", "reference": "node 0"}
    bad, score = '" onmouseover="alert(1)', {"kind": "score", "model": "m", "seconds": 1.0}
    entries: list[Any] = [{"kind": "sample", "step": step, **asked} for step in (10, 20)]
    entries += [score | {"step": n, "scores": {"exact match": n, bad: 1}} for n in (10, 20)]
    folder = write_run(tmp_path)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
    assert run(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("&lt;b&gt;which rank ?&lt;/b&gt;") == 1, "those of the last step"
    assert "Score: exact match" in page and f'label="Score: {bad}' not in page


def append(folder: Path, entry: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def test_the_view_shows_a_run(tmp_path, capsys):
    assert run(["watch", str(write_run(tmp_path / "run"))]) == 0
    said = capsys.readouterr().out
    for part in ("60 of 120, ", "8.5000 at step 60", "MFU 30.0%", "rank 3 ", "checkpoint_0000060"):
        assert part in " ".join(said.split()), said


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_that_begins_behind_a_step_says_which_are_missing(command, tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=3)
    assert run([command, str(folder)]) == 0
    assert "missing" not in capsys.readouterr().out
    resumed = [{"kind": "start", "step": 4, "total_steps": 9}, {"kind": "step", "step": 5}]
    write(folder / "metrics.jsonl", resumed)
    assert run([command, str(folder)]) == 0
    assert "steps before 5 are missing: " in " ".join(capsys.readouterr().out.split())


def test_a_terminal_waits_for_a_run_and_shows_new_steps_until_ctrl_c(tmp_path):
    folder = tmp_path / "run"
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "shardtune", "watch", str(folder)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.set_blocking(master, False)
    said, deadline, is_written = "", time.monotonic() + 60, False
    while "4 of 6" not in said and time.monotonic() < deadline:
        try:
            said += os.read(master, 1 << 16).decode()
        except BlockingIOError:
            time.sleep(0.05)
        if "Waiting for a run there." in said and not folder.exists():
            write_run(folder, steps=3)
        if "3 of 6" in said and not is_written:
            is_written = True
            append(folder, {"kind": "step", "step": 4, "loss": 1.0, "seconds": 1.0})
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    os.close(master)
    assert "4 of 6" in said and "Traceback" not in said, said
