"""The benchmarks run, and give no figure to a side that did not do the reference's work."""

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import needs_namespaces
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import cable, one, sides
from benchmarks.__main__ import main
from benchmarks.sides import FAILED, Side, in_turns, refusals, still_loss, unequal_work
from distTest.gone import GONE
from distTest.workloads.chats import MIXES, TEMPLATE_TOKENS, TOKENS_PER_WORD, write_chats
from distTest.workloads.shapes import SHAPES, slice_of

PEER = Side(
    losses=[3.0, 2.5],
    seconds=[1.0],
    memory_bytes=10**9,
    tokens=100,
    trained_tokens=30,
    cpu_seconds=[2.0],
)
ROUNDED = replace(PEER, losses=[3.0002, 2.5], cpu_seconds=[1.0])


def test_equal_work_passes_however_it_was_batched():
    assert not unequal_work(ROUNDED, PEER, 1e-4)


@pytest.mark.parametrize(
    ("side", "text"),
    [
        (replace(PEER, losses=[3.0, 2.501]), "the loss of step 2 is 2.501000 and 2.500000"),
        (replace(PEER, losses=[3.0, float("nan")]), "the loss of step 2 is nan"),
        (replace(PEER, losses=[3.0]), "1 and 2 steps have a loss"),
        (replace(PEER, trained_tokens=31), "trained_tokens of a step are 31 and 30"),
        (replace(PEER, tokens=99), "tokens of a step are 99 and 100"),
    ],
)
def test_unequal_work_is_refused(side, text):
    refused = refusals({"peer": [PEER], "ours": [ROUNDED, side]}, "peer", 1e-4)
    assert list(refused) == ["ours"], "one run that differs takes the figures of all"
    assert refused["ours"].startswith(text)


def test_no_figure_counts_without_the_losses_of_the_reference():
    refused = refusals({"peer": [], "ours": [ROUNDED]}, "peer", 1e-4)
    assert refused == dict.fromkeys(("peer", "ours"), "peer did not run to its end")


def test_equal_losses_that_do_not_move_say_nothing():
    assert not still_loss(PEER, 1e-2)
    still = replace(PEER, losses=[3.0, 2.99])
    assert "from 3.0000 to 2.9900 only" in still_loss(still, 1e-3)
    refused = refusals({"peer": [PEER, still], "ours": [still]}, "peer", 1e-3)
    assert set(refused) == {"peer", "ours"}


def test_benchmark_sides_take_turns():
    assert list(in_turns(["a", "b", "c"], 2)) == [
        (0, "a"),
        (0, "b"),
        (0, "c"),
        (1, "b"),
        (1, "c"),
        (1, "a"),
    ]


def test_a_ratio_is_of_medians_of_cpu_seconds():
    slow = replace(PEER, cpu_seconds=[4.0])
    figures = {"hf_trainer": [PEER, slow, slow], "ours": [ROUNDED]}
    options = Namespace(model=Path("SmolLM2"), rounds=3, steps=2)
    text = "\n".join(one.lines(options, figures, "float32", "short"))
    assert "the furthest is 0.0067% away" in text
    assert "| HF Trainer (batches of 1, no padding) | 4 (2 to 4) | 30 (30 to 30) | " in text
    assert text.count("| 4.00 x |") == text.count("| shardtune | 1 (1 to 1) | ") == 1


@pytest.fixture
def run_benchmark(tmp_path: Path) -> Callable[..., str]:
    """Runs a section in this process, which starts those that measure; returns what it wrote."""

    def run(section: str, *arguments: Any) -> str:
        file = tmp_path / "RESULTS.md"
        places = ["--peers", sys.executable, "--results", file, "--work", tmp_path / "work"]
        FAILED.clear()
        main(list(map(str, [section, *places, *arguments])))
        return file.read_text(encoding="utf-8") if file.exists() else ""

    return run


def test_a_section_that_fails_says_so_and_the_others_are_kept(run_benchmark, tmp_path, monkeypatch):
    def fails(*_: Any) -> dict[str, Any]:
        FAILED.append("no figure for TRL: why")
        return {}

    monkeypatch.setattr(cable, "variants", lambda _: [("glm",)])
    monkeypatch.setattr(cable, "measure", fails)
    page = "# Benchmarks\n\n<!-- one -->\n1\n<!-- end of one -->\n"
    earlier = page + "\n<!-- cable -->\n2\n<!-- end of cable -->\n"
    (tmp_path / "RESULTS.md").write_text(earlier, encoding="utf-8")
    with pytest.raises(SystemExit, match="ERROR: no figure for TRL: why - see the logs in"):
        run_benchmark("cable", "--steps", 1)
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert text.startswith(page) and text.endswith("\n<!-- end of cable -->\n")
    measured = text.removeprefix(page)
    assert measured.startswith("\n<!-- cable -->\n\nMeasured with date: 2")
    assert measured.count("<!-- cable -->") == 1 and "\n2\n" not in measured
    assert "; command: python -m benchmarks cable " in measured and " --steps 1\n" in measured
    assert "Failed: no figure for TRL: why.\n" in measured


def test_a_cable_that_cannot_be_made_is_left_out_by_name(run_benchmark, monkeypatch, capsys):
    monkeypatch.setattr(cable, "obstacle", lambda *_: "no network namespaces here (why)")
    text = run_benchmark("cable")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cable: skipped, ") and line.endswith("no network namespaces here (why)")
    assert text == ""


@needs_namespaces
@pytest.mark.full
def test_a_mesh_is_measured_over_a_cable(run_benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(cable, "_REFERENCE", "stages=2")
    monkeypatch.setattr(cable, "_MESHES", {"stages=2": {"parallel.stages": 2}})
    monkeypatch.setattr(cable, "_EXPERT", {"glm": {"parallel.expert": 2}})
    text = run_benchmark("cable", "--steps", 1)
    assert text.count("## Two nodes") == 1 and "Failed" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| shardtune, `parallel.")]
    name, seconds, received, planned, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert name.endswith("stages=2`") and re.fullmatch(r"\S+ \(\S+ to \S+\)", seconds)
    assert planned.startswith("0.52 MB, ")  # 524,288 bytes
    assert 0.52 <= float(received) < 1.5 * 0.52


@pytest.mark.parametrize("word", GONE["benchmarks"])
def test_a_section_or_an_option_that_is_gone_is_refused_by_what_to_do(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([word] if word[0] != "-" else ["one", f"{word}=1"])
    assert re.fullmatch(f"ERROR: {word}(=1)? is gone - .+\n", capsys.readouterr().err)


@pytest.mark.full
def test_a_wrapped_run_is_measured_and_leaves_no_checkpoint(tmp_path, models):
    FAILED.clear()
    chats = write_chats(tmp_path / "chats.jsonl", 300, 100)
    job = sides.Job(models["llama"], chats, 512, 3, "float32", lr=1e-2)
    done = job.run("ours", tmp_path / "run", sys.executable, ways="cpu_seconds,unsaved")
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert done and not FAILED, log
    assert len(done.cpu_seconds) == len(done.seconds) == 2 and min(done.cpu_seconds) > 0
    assert done.tokens > done.trained_tokens > 0
    assert "Finished: nothing is saved" in log and "Saved checkpoint" not in log


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slice_has_the_most_layers_that_fit_but_never_fewer_than_one_with_experts(shape):
    whole = slice_of(shape, 4096, math.inf)
    fewest = slice_of(shape, 4096, 0)
    assert whole.layers == whole.whole and fewest.layers == 1 + (whole.dense or 0)
    some = slice_of(shape, 4096, math.inf, layers=5)
    assert some.layers == 5
    assert slice_of(shape, 4096, some.parameters) == some
    assert slice_of(shape, 4096, some.parameters - 1).layers == 4
    config = AutoConfig.for_model(some.model_type, **some.settings)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == some.parameters


@pytest.mark.parametrize("mix", MIXES)
def test_chats_have_about_the_tokens_that_are_asked_for_and_fit_a_row(mix, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", 20_000, 1024, mix)
    chats = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    words = [[len(message["content"].split()) for message in chat] for chat in chats]
    tokens = [TOKENS_PER_WORD * sum(counts) + TEMPLATE_TOKENS for counts in words]
    assert max(tokens) < 1024 and abs(sum(tokens) / 20_000 - 1) < 0.15
    answers = [sum(counts[1::2]) for counts in words]
    low, high = MIXES[mix].answers
    assert low - 0.05 < TOKENS_PER_WORD * sum(answers) / sum(tokens) < high + 0.05
    fewest, most = MIXES[mix].turns
    assert all(2 * fewest <= len(counts) <= 2 * most for counts in words)
