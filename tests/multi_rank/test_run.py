"""One run as its user sees it: its lines, its files and its end."""

import math
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, completed, finish, launch, read_metrics
from helpers.ranks import train
from helpers.small_runs import MEASURED, checkpoint, with_dropout
from safetensors import safe_open

from shardtune.config_io import load_config, to_dict

CONFIG = """
model: {{path: {model}, compute_dtype: float32}}
data: {{train: train.jsonl, eval: eval.jsonl, max_length: 128}}
train: {{epochs: 2, gradient_accumulation_steps: 2}}
optimizer: {{lr: 1e-3}}
checkpoint: {{every_steps: 3, mode: sync}}
eval: {{every_steps: 5}}
"""
NUMBER = r"(\d+\.\d{4}|inf)"
KINDS = {
    "effective": r"Effective batch size: 1 \(micro-batch\) x 2 \(accumulation\) x 2 \(ranks\) = 4",
    "plan": r"Steps per epoch: (\d+) \| Total steps: (\d+) \| Records: (\d+) \| "
    r"Trained tokens: (\d+)",
    "baseline": rf"Baseline Perplexity: {NUMBER} \| Loss: {NUMBER} \| Tokens: (\d+)",
    "step": rf"Step (\d+)/(\d+) \| Loss: {NUMBER} \| Grad Norm: (\d+\.\d{{3}}) \| "
    r"LR: (\d\.\d\de[-+]\d\d) \| "
    r"(?:0\.0*[1-9]\d\d|\d\.\d\d|\d\d\.\d|\d{3,}) it/s \| \d+ tok/s \| "
    r"MFU \d+\.\d% \| \d+\.\d GB \| "
    r"ETA (?:\d+h\d\dm|\d+m\d\ds) \| \d\d:\d\d:\d\d",
    "eval": rf"Eval Perplexity: {NUMBER} \| Loss: {NUMBER} \| Tokens: (\d+) \| Step: (\d+)",
    "saved": r"Saved checkpoint_(\d{7})",
    "resumed": r"Resumed from checkpoint_(\d{7})",
}
Completed = subprocess.CompletedProcess[str]


def contract_lines(output: str) -> list[tuple[str, re.Match[str]]]:
    """Return the lines of the shapes above, in their order."""
    return [
        (kind, match)
        for line in output.splitlines()
        for kind, shape in KINDS.items()
        if (match := re.fullmatch(shape, line))
    ]


def write_inputs(folder: Path, model: Path) -> Path:
    write_jsonl(folder / "train.jsonl", chats(37))
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    (folder / "config.yaml").write_text(CONFIG.format(model=model), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_inputs(folder, with_dropout(models["llama"], folder / "model", 0.2))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Completed:
    """A run of two ranks, from its beginning to its end; it leaves `runs/config`."""
    started = time.monotonic()
    done = launch(2, "--config", "config.yaml", "logging.every_steps=1", cwd=inputs)
    assert done.returncode == 0, done.stderr
    steps = read_metrics(inputs / "runs/config", "step")
    assert 0 < sum(step["seconds"] for step in steps) < time.monotonic() - started
    return done


def test_every_line_has_its_shape_and_its_place(inputs, whole):
    lines = contract_lines(whole.stdout)
    total = int(dict(lines)["plan"][2])
    assert total == 2 * int(dict(lines)["plan"][1])
    expected = ["effective", "plan", "baseline"]
    for step in range(1, total + 1):
        expected.append("step")
        expected += ["eval"] * (step % 5 == 0 or step == total)
        expected += ["saved"] * (step % 3 == 0 or step == total)
    assert [kind for kind, _ in lines] == expected
    assert [int(match[1]) for kind, match in lines if kind == "step"] == list(range(1, total + 1))
    evaluated = [int(match[4]) for kind, match in lines if kind == "eval"]
    assert evaluated == [*range(5, total, 5), total]

    every_line = (whole.stdout + whole.stderr).splitlines()
    assert sum(re.search("Step.*Loss", line) is not None for line in every_line) == total
    assert sum("baseline perplexity" in line.lower() for line in every_line) == 1
    assert whole.stdout.count("Training Configuration:") == 1
    assert not re.search("\r", whole.stdout + whole.stderr)


def test_a_small_run_is_planned_by_its_shapes_alone(inputs, whole):
    assert whole.stdout.count("\nPlan: The run fits, ") == 1
    before, after = read_metrics(inputs / "runs/config", "plan")
    assert before["source"] == "bound from shapes"
    assert before | after == after
    assert 0 < after["peak_bytes"] < after["predicted_peak_bytes"] < after["memory_bytes"]
    assert 0 < after["predicted_step_seconds"] < after["step_seconds"]
    assert whole.stdout.count("\nPredicted peak memory: at most ") == 1


def test_the_lines_say_what_the_metrics_say(inputs, whole):
    lines, run_dir = contract_lines(whole.stdout), inputs / "runs/config"
    steps, evals = read_metrics(run_dir, "step"), read_metrics(run_dir, "eval")
    assert [match.groups()[2:] for kind, match in lines if kind == "step"] == [
        (f"{step['loss']:.4f}", f"{step['grad_norm']:.3f}", f"{step['lr']:.2e}") for step in steps
    ]
    assert [match.groups()[:3] for kind, match in lines if kind in ("baseline", "eval")] == [
        (f"{entry['perplexity']:.4f}", f"{entry['loss']:.4f}", str(entry["tokens"]))
        for entry in evals
    ]
    _, total, records, trained_tokens = map(int, dict(lines)["plan"].groups())
    assert records == 37
    assert [step["step"] for step in steps] == list(range(1, total + 1))
    assert [step["epoch"] for step in steps] == [0] * (total // 2) + [1] * (total // 2)
    assert sum(step["trained_tokens"] for step in steps) == 2 * trained_tokens
    assert [entry["step"] for entry in evals] == [0, *range(5, total, 5), total]
    (start,), saves = read_metrics(run_dir, "start"), read_metrics(run_dir, "save")
    assert (start["step"], start["world_size"], start["total_steps"]) == (0, 2, total)
    assert start["changes"] == [] and "data.train: 37 records in" in start["data"][0]
    logged = [line for line in whole.stdout.splitlines() if line.startswith("data.")]
    assert len(logged) > 1 and start["data"][: len(logged)] == logged
    assert [save["step"] for save in saves] == sorted({*range(3, total + 1, 3), total})
    assert all(save["seconds"] == save["stall_seconds"] > 0 for save in saves), "mode sync"
    fields = {"kind", "step", "epoch", "loss", "grad_norm", "lr", "tokens", "trained_tokens"}
    fields |= MEASURED - {"time"}  # which read_metrics checks
    assert all(set(step) == fields for step in steps)
    assert all(entry["perplexity"] == math.exp(entry["loss"]) for entry in evals)
    assert all(step["loss"] != round(step["loss"], 7) for step in steps), "a float has 17 digits"
    assert all(0 < step["trained_tokens"] < step["tokens"] <= 4 * 128 for step in steps)
    assert all(step["seconds"] > 0 for step in steps)
    assert all(step["tokens_per_second"] == step["tokens"] / step["seconds"] for step in steps)
    assert all(0 < step["mfu"] < 1 and step["memory_bytes"] > 1e8 for step in steps)


def test_the_written_configuration_is_the_one_that_ran(inputs, whole):
    written = inputs / "runs/config/config.yaml"
    given = load_config(inputs / "config.yaml", ["logging.every_steps=1"], {})
    assert to_dict(load_config(written, [], {})) == to_dict(given)
    text = written.read_text(encoding="utf-8")
    origins = dict(re.findall(r"^  (\w+): .*  # (.+)$", text, re.MULTILINE))
    assert (origins["lr"], origins["seed"]) == ("file", "default")
    assert text.count("  # command line\n") == 1


def losses(run_dir: Path) -> list[float]:
    return [entry["loss"] for kind in ("step", "eval") for entry in read_metrics(run_dir, kind)]


@pytest.mark.full
def test_every_launcher_gives_the_same_run(tmp_path, models):
    write_inputs(tmp_path, models["llama"])
    assert train(2, "run.dir=runs/torchrun", "train.max_steps=2", cwd=tmp_path).returncode == 0

    # With --cpu it starts one process, however many it is asked for.
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--multi_gpu", "--num_processes=2", "--num_machines=1"]
    accelerate += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    script = [str(REPOSITORY / "train_fsdp.py"), "--config", "config.yaml", "train.max_steps=2"]
    by_accelerate = completed([*accelerate, *script, "run.dir=runs/accelerate"], cwd=tmp_path)
    assert by_accelerate.returncode == 0, by_accelerate.stderr
    assert "x 2 (ranks) = 4" in by_accelerate.stdout

    # And by no launcher, on a terminal.
    terminal, stream = pty.openpty()
    alone = subprocess.Popen(
        [sys.executable, *script, "run.dir=runs/alone", "train.gradient_accumulation_steps=4"],
        cwd=tmp_path,
        stdin=stream,
        stdout=stream,
        stderr=stream,
    )
    os.close(stream)
    screen = b""
    while True:
        try:
            screen += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    assert alone.wait(timeout=500) == 0, screen.decode()
    assert b"x 1 (ranks) = 4" in screen and b"Saved the final model" in screen

    expected = losses(tmp_path / "runs/torchrun")
    for name in ("accelerate", "alone"):
        assert losses(tmp_path / "runs" / name) == pytest.approx(expected, abs=1e-5), name


@pytest.mark.full
def test_a_large_seed_and_a_name_that_the_terminal_cannot_show(tmp_path, models):
    write_jsonl(tmp_path / "train.jsonl", [record | {"źródło": "x"} for record in chats(12)])
    settings = ["data.train=train.jsonl", "data.max_length=128", "train.max_steps=1"]
    settings += [f"model.path={models['llama']}", f"run.seed={2**63 - 1}"]
    (tmp_path / "config.yaml").touch()
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    said = finish(launch(0, "--config", "config.yaml", *settings, cwd=tmp_path, env=ascii_only))
    assert r"\u017ar\xf3d\u0142o" in said


def test_options_that_others_switch_off_are_said(tmp_path, models):
    write_inputs(tmp_path, models["llama"])
    settings = ["data.eval=null", "eval.every_steps=2", "export.final=false"]
    settings += ["train.max_steps=5", "logging.every_steps=2", "checkpoint.every_steps=0"]
    said = finish(train(1, *settings, "optimizer.offload=true", cwd=tmp_path))
    lines = contract_lines(said)
    assert [match[1] for kind, match in lines if kind == "step"] == ["2", "4", "5"]
    assert [match[1] for kind, match in lines if kind == "saved"] == ["0000005"]
    assert not {"baseline", "eval"} & set(dict(lines))
    assert said.count("Evaluation is skipped") == 1 and "eval.every_steps = 2" in said
    assert "optimizer.offload=true moves nothing" in said
    written = (tmp_path / "runs/config/config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(written)["optimizer"]["offload"] is True
    assert not (tmp_path / "runs/config/model").exists()
    rank_file = checkpoint(tmp_path / "runs/config", 5) / "rank_00000.safetensors"
    with safe_open(rank_file, "pt") as file:
        assert file.metadata()["format"] == "pt"
