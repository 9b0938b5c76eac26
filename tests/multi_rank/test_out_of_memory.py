"""A rank without memory ends the run with a line that names the keys that shrink it."""

import os
import re
import resource
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.documented import refused
from helpers.plain_training import on_uneven_chats, uneven_chats
from helpers.ranks import run_script, train
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
    given = ["model.attention=eager", "data.max_length=512", "train.max_steps=2"]
    given += ["train.micro_batch_size=4"]
    given = on_uneven_chats(models["llama"], tmp_path, *given, records=20 * uneven_chats())
    work = partial(run_in_little_memory, since)
    failed = train(2, *given, cwd=tmp_path, work=work, grace_s=20)
    assert failed.returncode == 1, failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("ERROR: rank 1 ")]
    size = r"4 \(train\.micro_batch_size\) x 512 \(data\.max_length\) tokens"
    assert re.match(rf"ERROR: rank 1 on \S+: .+ {size} .+, in {place} - set ", line), line
    remedies = re.split(f", in {place} - ", line)[1]
    for key in ("activation_checkpointing=full", "parallel.expert", "master_dtype=bfloat16"):
        assert key in remedies


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
    given = on_uneven_chats(tmp_path / "wide", tmp_path)
    last = refused(train(1, *given, cwd=tmp_path, work=run_in_less_than_the_weights), 1)
    assert re.match(r"ERROR: rank 0 on \S+: the model .+, in loading the model - ", last), last
    for key in ("run.dir", "master_dtype=bfloat16", "optimizer.name=adamw8bit"):
        assert key in last
