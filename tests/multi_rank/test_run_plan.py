"""A run says whether it fits before it loads, refuses what does not, and checks its plan."""

import os
import re
from functools import partial
from pathlib import Path
from statistics import median

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.documented import refused
from helpers.exact import EIGHT_BITS, FULL
from helpers.ranks import run_script, train
from transformers import AutoConfig, AutoTokenizer

from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.measured import CPU, write_measured
from shardtune.planner import run_plan


def run_with_memory(n_bytes: int, arguments: list[str]) -> None:
    """On a rank: run as on a node with so many free bytes, and rank 0 as on one with plenty."""
    free = n_bytes if os.environ["RANK"] != "0" else 1 << 40
    vars(run_plan)["available_memory"] = lambda: free
    run_script(arguments)


def given(model: Path, folder: Path, *more: str) -> list[str]:
    """Assignments with which adapters alone are left to save memory."""
    data = f"data.train={write_jsonl(folder / 'train.jsonl', chats(30))}"
    dtypes = [f"model.{kind}_dtype=bfloat16" for kind in ("compute", "master", "reduce")]
    usual = ["data.max_length=128", "train.max_steps=3", "export.final=false", "run.dir=run"]
    return [f"model.path={model}", data, *dtypes, FULL, EIGHT_BITS, *usual, *more]


def test_a_run_that_does_not_fit_is_refused_with_what_would_help(models, tmp_path):
    """Planned at 64 MB a rank, and with adapters at 43 MB, and 100 MB for the process itself."""
    wide = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 4}
    config = AutoConfig.from_pretrained(models["llama"], **wide)
    config.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(models["llama"]).save_pretrained(tmp_path / "wide")
    arguments = given(tmp_path / "wide", tmp_path, "model.init=random")
    work = partial(run_with_memory, 2 * 152_000_000)
    last = refused(train(2, *arguments, cwd=tmp_path, work=work))
    help = r"use lora\.rank=16( \S+=\S+)* \(.+ GB\), .+; run\.ignore_plan=true .+"
    assert re.fullmatch(f"ERROR: The run does not fit, .+ - {help}", last), last
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.full
def test_a_plan_that_is_ignored_is_held_against_the_run(models, tmp_path):
    arguments = given(models["glm"], tmp_path, "run.ignore_plan=true")
    said = finish(train(2, *arguments, cwd=tmp_path, work=partial(run_with_memory, 10_000)))
    (line,) = re.findall(r"^Plan: .*", said, re.M)
    assert "The run does not fit" in line
    assert line.endswith(" (run.ignore_plan=true)")
    check(said, tmp_path / "run", "simulated step", steps=3)


def test_a_run_with_a_slow_mesh_names_the_fastest_once(models, tmp_path):
    """By the bandwidth that the preflight has left: 1 MB/s between the ranks."""
    figures = [{"between": 0, "inside": 1e6, "flops": [1e12, 1e12]}]
    write_measured(tmp_path / "run", [2], CPU, figures)
    small = ["train.gradient_accumulation_steps=2", "eval.baseline=false"]
    arguments = given(models["llama"], tmp_path, *small)
    said = finish(train(2, *arguments, cwd=tmp_path))
    (line,) = re.findall(r"^Mesh: .*", said, re.M)
    mesh = r"parallel\.stages=2 train\.gradient_accumulation_steps=4"
    command = rf"shardtune train --processes=2 --config config\.yaml .*{mesh} "
    assert re.match(rf"Mesh: .* (\S+) s, .* and (\S+) s with {command}", line), line
    check(said, tmp_path / "run", "bound from shapes", steps=3)
    write_measured(tmp_path / "other", [2], "NVIDIA L4", figures)
    said = finish(train(2, *arguments, "run.dir=other", cwd=tmp_path))
    assert "\nMesh: " not in said, "these ranks are no such GPUs"


@pytest.mark.full
def test_a_model_that_this_machine_does_not_hold_is_refused(models, tmp_path):
    """All weights take three times the free memory, with every setting more than all of it, and
    frozen ones with adapters half."""
    width = 4096
    layers = available_memory() // 5 // (4 * width * width)
    settings = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": int(layers)}
    settings |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 32)
    settings["vocab_size"] = AutoConfig.from_pretrained(models["llama"]).vocab_size
    config = AutoConfig.for_model("llama", **settings)
    config.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(models["llama"]).save_pretrained(tmp_path / "large")
    write_jsonl(tmp_path / "train.jsonl", chats(30))
    model = f"model.path={tmp_path / 'large'}"
    settings = ["model.init=random", "data.train=train.jsonl", "data.max_length=128"]
    line = refused(train(1, model, "model.compute_dtype=bfloat16", *settings, cwd=tmp_path))
    assert line.startswith("ERROR: The run does not fit, ")
    assert "lora.rank=16 optimizer.lr=0.0001 (" in line


def check(said: str, run_dir: Path, source: str, steps: int) -> None:
    """The last line that compares, and what metrics.jsonl has of it."""
    before, after = read_metrics(run_dir, "plan")
    measured = read_metrics(run_dir, "step")
    assert before | after == after
    assert (before["step"], after["step"]) == (0, steps)
    assert after["source"] == source
    assert after["peak_bytes"] >= measured[-1]["memory_bytes"]
    seconds = median(step["seconds"] for step in measured[1:])
    assert after["step_seconds"] == pytest.approx(seconds)
    (line,) = re.findall(r"^Predicted peak memory: .*", said, re.M)
    assert f"{after['predicted_peak_bytes'] / 1e9:.2f} GB (" in line
    process = " (the process, with mapped files and freed memory)"
    assert f"Measured: {after['peak_bytes'] / 1e9:.2f} GB{process} | " in line
    assert f"Predicted step time: at least {after['predicted_step_seconds']:.3g} s" in line
