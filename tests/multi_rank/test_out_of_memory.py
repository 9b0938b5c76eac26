"""A rank without memory ends the run with a line that names the keys that shrink it."""

from __future__ import annotations

import os
import re
import resource
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.chats import write_jsonl
from helpers.plain_training import settings, uneven_chats
from helpers.ranks import on_ranks, run_script
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardtune.model import build
from shardtune.training import pipeline
from shardtune.training.states import reshard


def limit_memory(more_bytes: int) -> None:
    """Let this process take so many bytes more than it holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes,) * 2)


def run_in_little_memory(since: str, arguments: list[str]) -> None:
    """On a rank: rank 1 has 40 MB more than it holds just before the model is tried, or at its
    second micro-batch."""
    owner, name, wanted = {
        "trial": (reshard, "choose_reshard_policy", 1),
        "step": (pipeline.Stage, "forward", 2),
    }[since]
    original, called = getattr(owner, name), count(1)

    def limit_and_go_on(*given: Any, **options: Any) -> Any:
        if next(called) == wanted and os.environ["RANK"] == "1":
            limit_memory(40_000_000)
        return original(*given, **options)

    setattr(owner, name, limit_and_go_on)
    run_script(arguments)


@pytest.mark.parametrize(
    ("since", "place"),
    [("trial", "loading the model"), ("step", r"step 2 \(forward and backward\)")],
)
def test_a_run_out_of_memory_names_the_keys_that_shrink_it(since, place, models, tmp_path):
    """Scores of four heads over 2048 tokens take 67 MB."""
    data = write_jsonl(tmp_path / "train.jsonl", 20 * uneven_chats())
    more = [
        "model.attention=eager",
        "data.max_length=512",
        "train.micro_batch_size=4",
        "train.max_steps=2",
    ]
    given = ["--config", "config.yaml", *settings(models["llama"], data, tmp_path / "run", *more)]
    (tmp_path / "config.yaml").touch()
    failed = on_ranks(2, run_in_little_memory, since, given, cwd=tmp_path, grace_s=20)
    assert failed.returncode == 1, failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("ERROR: rank 1 ")]
    assert re.fullmatch(
        r"ERROR: rank 1 on \S+: a micro-batch of 4 \(train\.micro_batch_size\) x 512 "
        r"\(data\.max_length\) tokens does not fit the memory "
        rf"\(.+can't allocate memory.+\), in {place} - set model\.activation_checkpointing=full, "
        r"set parallel\.expert if the model has experts, lower train\.micro_batch_size .*, "
        r"use more GPUs, or start anew .* a lower data\.max_length or "
        r"model\.master_dtype=bfloat16 or .+",
        line,
    ), failed.stderr


def run_in_less_than_the_weights(arguments: list[str]) -> None:
    """On a rank: the file with the weights is larger than the memory that is left."""
    build_model = build.build_model

    def limit_and_build(*given: Any) -> Any:
        limit_memory(60_000_000)
        return build_model(*given)

    vars(build)["build_model"] = limit_and_build
    run_script(arguments)


@pytest.mark.full
def test_weights_that_do_not_fit_the_memory_are_not_told_to_try_again(models, tmp_path):
    """A file of more than 100 MB."""
    wide = AutoConfig.from_pretrained(
        models["llama"], intermediate_size=1 << 16, num_hidden_layers=4
    )
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(models["llama"]).save_pretrained(tmp_path / "wide")
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    (tmp_path / "config.yaml").touch()
    given = ["--config", "config.yaml", *settings(tmp_path / "wide", data, tmp_path / "run")]
    failed = on_ranks(1, run_in_less_than_the_weights, given, cwd=tmp_path)
    assert failed.returncode == 1, failed.stderr
    assert re.match(
        r"ERROR: rank 0 on \S+: the model with its gradients and its optimizer's state does not "
        r"fit the memory \(.+\), in loading the model - share it among more GPUs or nodes, "
        r"use some with more memory, or start anew with another run.dir and "
        r"model\.master_dtype=bfloat16 or optimizer\.name=adamw8bit or .+ or a smaller model$",
        failed.stderr.splitlines()[-1],
    ), failed.stderr
