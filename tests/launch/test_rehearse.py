"""The rehearsal: both of its modes with real launches, its refusals and failures, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, needs_namespaces
from helpers.documented import QUOTES, is_in
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distTest.rehearse import __main__ as rehearse
from distTest.rehearse import node_processes as terminals
from distTest.rehearse import tiny_model as tiny

CHECKS = [
    *("rendezvous", "baseline", "steps", "checkpoint", "sharding", "a node lost"),
    *("resume", "steps", "repeated steps", "final model"),
]


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """The environment of a rehearsal, whose every file is under `tmp_path`."""
    return os.environ | {
        "TMPDIR": str(tmp_path),
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": str(REPOSITORY),
    }


def run(
    *command: str, cwd: Path, env: dict[str, str], timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def rehearsal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distTest.rehearse", *arguments]


def passed(output: str) -> list[str]:
    return re.findall(r"^PASSED ([^:]+): ", output, re.MULTILINE)


def marked_processes(pid: int) -> list[int]:
    return [
        process
        for node in range(3)
        for process in terminals._processes_with(f"SHARDTUNE_REHEARSED_NODE={pid}.{node}")
    ]


def test_over_loopback(tmp_path: Path, here: dict[str, str]) -> None:
    """As `make rehearse`; a value of the user's reaches the scripts, and settings of the real cluster do not."""
    options = "--loopback --procs-per-node 1 -- optimizer.lr=2e-3 data.max_length=99"
    there = here | {"MASTER_ADDR": "192.0.2.1", "NNODES": "7"}
    done = run(
        "make",
        "--no-print-directory",
        "rehearse",
        f"REHEARSE_ARGS={options}",
        cwd=REPOSITORY,
        env=there,
    )
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert passed(output) == CHECKS
    assert (
        "All nodes are this host, over loopback: --loopback\nSet for them: MASTER_ADDR=127.0.0.1 "
        in output
    )
    assert "Not used, the rehearsal has its own: MASTER_ADDR, NNODES\n" in output
    assert re.search(
        r"^Model: glm4_moe, 3 layers, \d+ random parameters, as zai-org/GLM-4.5-Air$",
        output,
        re.MULTILINE,
    )
    assert "  data.max_length=64 (was 99)\n" in output
    assert re.search(r"^\[node 0\] Step 1/\d .* LR: 2\.00e-03 ", output, re.MULTILINE)
    assert re.search(r"^\[node 1\] Launching WORKER NODE \(Node 1\)$", output, re.MULTILINE)
    assert re.search(r"^Rehearsed in \d+ s: every check passed\.", output.splitlines()[-1])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    assert not list(tmp_path.glob("shardtune-rehearsal-*"))
    assert all(is_in(quote, output) for quote in QUOTES["check"])


@needs_namespaces
def test_in_namespaces(tmp_path: Path, here: dict[str, str]) -> None:
    done = run(*rehearsal("--procs-per-node", "2"), cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == CHECKS
    assert "which no packet leaves, with enp26s0np0: 10.11.7.50, 10.11.7.51\n" in done.stdout
    assert (
        "PASSED rendezvous: 2 nodes met at 10.11.7.50:29600 and are one world of 4 ranks\n"
        in done.stdout
    )
    assert "[node 1]   Hostname: node1\n" in done.stdout


@pytest.mark.full
def test_the_production_shape(tmp_path: Path, here: dict[str, str]) -> None:
    """2 nodes of 8 processes."""
    done = run(*rehearsal(), cwd=tmp_path, env=here, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == CHECKS
    assert (
        "one world of 16 ranks\n" in done.stdout
        and "PASSED sharding: 16 ranks saved a part each" in done.stdout
    )


@pytest.mark.full
def test_three_nodes_with_a_configuration_of_ones_own(
    tmp_path: Path, here: dict[str, str], models: dict[str, Path]
) -> None:
    """A dense model, evaluation data out of the training data, a line every fifth step, no final model, and no resume
    but this one."""
    config = {
        "run": {"resume": "never"},
        "model": {"path": str(models["llama"])},
        "data": {"train": "nowhere.jsonl", "eval_fraction": 0.3},
        "train": {"epochs": 1},
        "logging": {"every_steps": 5},
        "export": {"final": False},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config), encoding="utf-8")
    arguments = ("--loopback", "--nodes", "3", "--procs-per-node", "1", "--config", "mine.yaml")
    done = run(*rehearsal(*arguments), cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) == [check for check in CHECKS if check != "final model"]
    assert f"as {models['llama']}\n" in done.stdout
    assert "[node 2] Launching WORKER NODE (Node 2)\n" in done.stdout
    assert "nodes 0 to 1 ended " in done.stdout


def test_a_launch_that_fails(tmp_path: Path, here: dict[str, str]) -> None:
    """Its logs are kept and named."""
    there = here | {"VIRTUAL_ENV": str(tmp_path / "nothing")}
    done = run(*rehearsal("--loopback", "--procs-per-node", "1"), cwd=tmp_path, env=there)
    assert done.returncode == 1 and not passed(done.stdout)
    last = done.stderr.splitlines()[-1]
    failed = re.fullmatch(
        r"ERROR: Training Configuration: on every node did not come: .+ - see (\S+) (\S+)", last
    )
    assert failed, last
    assert [Path(log).name for log in failed.groups()] == ["node0.log", "node1.log"]
    assert "Launching MASTER NODE (Node 0)" in Path(failed[1]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [["--loopback"], pytest.param([], marks=needs_namespaces)],
    ids=["loopback", "spaces"],
)
def test_ctrl_c_ends_all_that_it_started(
    options: list[str], tmp_path: Path, here: dict[str, str]
) -> None:
    process = subprocess.Popen(
        rehearsal("--procs-per-node", "1", *options),
        cwd=tmp_path,
        env=here,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[node 1] Launching WORKER"):
            break
    time.sleep(1)
    assert marked_processes(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "ERROR: ended by SIGINT with all that it had started - "
    )
    assert not marked_processes(process.pid) and not list(tmp_path.glob("shardtune-rehearsal-*"))
    if not options:
        assert (
            f"shardtune-{process.pid}-"
            not in run("ip", "netns", "list", cwd=tmp_path, env=here).stdout
        )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "1"], "--nodes 1 --procs-per-node 8: "),
        (["--procs-per-node", "0"], "--nodes 2 --procs-per-node 0: "),
        (["train.epochs=1"], "unrecognized arguments: train.epochs=1 - "),
        (["--loopback", "--", "train.epoch=1"], "train.epoch (command line) is not known - "),
    ],
)
def test_what_cannot_be_rehearsed(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        assert rehearse.run(arguments) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err.startswith(f"ERROR: {problem}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "glm"])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_a_tiny_model(
    architecture: str, ranks: int, tmp_path: Path, models: dict[str, Path]
) -> None:
    said = tiny.make_model(str(models[architecture]), ranks, tmp_path)
    config, source = (
        AutoConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(models[architecture]),
    )
    assert config.model_type == source.model_type
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert said.endswith(f"as {models[architecture]}")
    if architecture == "glm":
        assert (
            config.n_routed_experts % ranks == 0
            and config.first_k_dense_replace < config.num_hidden_layers
        )
    assert AutoModelForCausalLM.from_config(config).num_parameters() < 1_000_000
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("heads", "shared", "small"), [(9, 3, 2), (24, 8, 2), (3, 3, 4), (12, 12, 4), (8, 1, 1)]
)
def test_a_tiny_model_shares_keys_as_the_real_one(
    heads: int, shared: int, small: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": shared}
    AutoConfig.for_model("llama", **sizes).save_pretrained(tmp_path / "large")
    tiny.make_model(str(tmp_path / "large"), 2, tmp_path / "small")
    config = AutoConfig.from_pretrained(tmp_path / "small")
    assert (config.model_type, config.num_attention_heads, config.num_key_value_heads) == (
        "llama",
        4,
        small,
    )
    logits = AutoModelForCausalLM.from_config(config)(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()


def test_an_architecture_that_cannot_be_had(tmp_path: Path) -> None:
    """No directory, and a directory of a model that transformers does not know."""
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "unheard-of"}', encoding="utf-8")
    for path in (tmp_path / "nothing", strange):
        said = tiny.make_model(str(path), 2, tmp_path / "out")
        assert said.startswith("glm4_moe, 3 layers, ")
        assert f" as zai-org/GLM-4.5-Air, because that of {path} cannot be had here (" in said
        assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "glm4_moe"


def test_one_layer_of_each_kind_is_kept(tmp_path: Path) -> None:
    large = AutoConfig.for_model("gemma3_text")
    large.save_pretrained(tmp_path / "large")
    tiny.make_model(str(tmp_path / "large"), 2, tmp_path / "small")
    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert set(small.layer_types) == set(large.layer_types) and small.num_hidden_layers == 3


def test_the_template_marks_what_the_model_writes(tmp_path: Path) -> None:
    tiny.make_model("zai-org/GLM-4.5-Air", 2, tmp_path)
    tiny.write_chats(tmp_path / "chats.jsonl", 20, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for line in (tmp_path / "chats.jsonl").read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        said = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = said["input_ids"]
        assert tiny.ROW_TOKENS // 2 < len(ids) <= tiny.ROW_TOKENS
        marked = [token for token, mark in zip(ids, said["assistant_masks"], strict=True) if mark]
        assert tokenizer.decode(marked) == messages[1]["content"] + "<|im_end|>"
