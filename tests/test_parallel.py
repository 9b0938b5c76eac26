"""However a step is spread and its memory spent, its numbers are those of plain PyTorch: replicas, whole gradients or
a reduction in each micro-batch, layers computed again, compiled layers."""

from __future__ import annotations

import json
import os
import re
import resource
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import launch, read_metrics, write_jsonl
from helpers.documented import require_documented
from helpers.plain_training import (
    Trained,
    assert_same_weights,
    encode,
    finish,
    plain_training,
    settings,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import config_for, on_ranks, run_script, train
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from shardtune.checkpoint import export
from shardtune.errors import OutOfMemory
from shardtune.model import build as model
from shardtune.training import reshard
from shardtune.training.memory import free_host_bytes, memory_suffices, weights_fit

RATES = (3e-3,) * 4


@pytest.fixture(scope="module")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(models[name], root / name, sharpen) for name in ("llama", "glm")}


@pytest.fixture(scope="module")
def expected(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> dict[str, Trained]:
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return {name: plain_training(path, records, list(RATES)) for name, path in sharp.items()}


def run_without_room(arguments: list[str]) -> None:
    """On a rank: as if no memory were free."""
    reshard._SHARE = 0.0
    run_script(arguments)


def run_in_little_memory(since: str, arguments: list[str]) -> None:
    """On a rank: rank 1 has 40 MB more than it holds just before the model is tried, or at its second micro-batch."""
    owner, name, wanted = {
        "trial": (reshard, "choose_reshard_policy", 1),
        "step": (reshard.ReshardPolicy, "before_forward", 2),
    }[since]
    original, called = getattr(owner, name), count(1)

    def limit_and_go_on(*given: Any, **options: Any) -> Any:
        if next(called) == wanted and os.environ["RANK"] == "1":
            held = (
                int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
                * resource.getpagesize()
            )
            resource.setrlimit(resource.RLIMIT_AS, (held + 40_000_000,) * 2)
        return original(*given, **options)

    setattr(owner, name, limit_and_go_on)
    run_script(arguments)


def test_what_does_not_fit_the_memory_is_said_with_the_keys_that_shrink_it(
    sharp: dict[str, Path], tmp_path: Path
) -> None:
    """Scores of four heads over 2048 tokens take 67 MB. Once a checkpoint is saved, it is resumed with what may change,
    which comes first."""
    data = write_jsonl(tmp_path / "train.jsonl", 20 * uneven_chats())
    more = [
        "model.attention=eager",
        "data.max_length=512",
        "train.micro_batch_size=4",
        "train.max_steps=2",
    ]
    more += ["checkpoint.every_steps=1", "checkpoint.mode=sync"]
    given = ["--config", "config.yaml", *settings(sharp["llama"], data, tmp_path / "run", *more)]
    (tmp_path / "config.yaml").touch()

    def remedy(since: str, place: str) -> str:
        failed = on_ranks(2, run_in_little_memory, since, given, cwd=tmp_path, grace_s=20)
        assert failed.returncode == 1
        (said,) = [line for line in failed.stderr.splitlines() if line.startswith("ERROR: ")]
        what, _, remedy = said.rpartition(" - ")
        assert re.fullmatch(
            r"ERROR: rank 1 on \S+: 4 \(train\.micro_batch_size\) rows of up to 512 \(data\.max_length\) tokens do not "
            rf"fit the memory \(.+can't allocate memory.+\), in {place}",
            what,
        ), failed.stderr
        return remedy

    assert remedy("trial", "loading the model") == (
        "lower one of the two, or set model.activation_checkpointing=full"
    )
    at_resume = (
        "set model.activation_checkpointing=full, or start anew with another run.dir and a lower "
        "data.max_length"
    )
    assert remedy("step", r"step 2 \(forward and backward\)") == at_resume
    assert remedy("trial", "loading the model") == at_resume


@pytest.mark.parametrize(
    ("more", "is_saved", "remedy"),
    [
        ([], False, "lower data.max_length"),
        (
            [],
            True,
            "use more GPUs or nodes, or start anew with another run.dir and a lower data.max_length",
        ),
        (
            ["parallel.replicate=2"],
            True,
            "lower parallel.replicate, or start anew with another run.dir and a lower data.max_length",
        ),
    ],
)
def test_memory_that_python_lacks_is_said_too(
    more: list[str], is_saved: bool, remedy: str, models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_for(models["llama"], tmp_path, "model.activation_checkpointing=full", *more)
    said = r"^1 \(train\.micro_batch_size\) row of up to \d+ \(data\.max_length\) tokens does not fit the memory "
    said += rf"\(Unable to allocate .+\) - {re.escape(remedy)}$"
    with pytest.raises(OutOfMemory, match=said), memory_suffices(config, lambda: is_saved):
        np.empty(1 << 60, np.uint8)


def test_an_optimizer_without_memory_is_not_told_to_shorten_rows(
    models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_for(models["llama"], tmp_path)
    said = r"^the model with its gradients and its optimizer's state does not fit the memory \((?!the|\d+ \().+\) - "
    with (
        pytest.raises(OutOfMemory, match=said),
        memory_suffices(config, lambda: False),
        weights_fit(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def run_in_less_than_the_weights(arguments: list[str]) -> None:
    """On a rank: the file with the weights is larger than the memory that is left."""
    build_model = model.build_model

    def limit_and_build(*given: Any) -> Any:
        held = (
            int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
            * resource.getpagesize()
        )
        resource.setrlimit(resource.RLIMIT_AS, (held + 60_000_000,) * 2)
        return build_model(*given)

    vars(model)["build_model"] = limit_and_build
    run_script(arguments)


def test_weights_that_do_not_fit_the_memory_are_not_told_to_try_again(
    models: dict[str, Path], tmp_path: Path
) -> None:
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
    assert failed.returncode == 1
    assert re.match(
        r"ERROR: rank 0 on \S+: the model with its gradients and its optimizer's state does not fit the memory \(.+\) "
        r"- share it among more GPUs or nodes, use some with more memory, or a smaller model$",
        failed.stderr.splitlines()[-1],
    ), failed.stderr


GROUPS = {
    "version 2": ("0::/job/step", "", "memory.max", "memory.current", "inactive_file"),
    "version 1": (
        "4:cpu,memory:/job/step",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize(("line", "root", "limit", "used", "cached"), GROUPS.values(), ids=GROUPS)
def test_free_memory_is_that_of_the_container_or_job(
    line: str, root: str, limit: str, used: str, cached: str, tmp_path: Path
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"9:pids:/other\n{line}\n", encoding="utf-8")
    groups = {"": "max", "job": "50000000", "job/step": "9223372036854771712"}
    for name, bound in groups.items():
        folder = tmp_path / "groups" / root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{bound}\n", encoding="utf-8")
        (folder / used).write_text("30000000\n", encoding="utf-8")
        (folder / "memory.stat").write_text(f"cache 8000000\n{cached} 5000000\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) == 25_000_000
    (tmp_path / "groups" / root / "job" / limit).write_text("20000000\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) == 0
    own.write_text("0::/elsewhere\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) > 50_000_000


def run(model: Path, folder: Path, ranks: int, *more: str, room: bool = True) -> tuple[str, Path]:
    """Four steps over all the data; what was said, and the run's folder."""
    data, run_dir = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run"
    given = settings(
        model,
        data,
        run_dir,
        "train.epochs=4",
        f"train.gradient_accumulation_steps={8 // ranks}",
        *more,
    )
    if room:
        return finish(train(ranks, *given, cwd=folder)), run_dir
    (folder / "config.yaml").touch()
    return finish(
        on_ranks(ranks, run_without_room, ["--config", "config.yaml", *given], cwd=folder)
    ), run_dir


def test_a_resumed_run_decides_anew_where_it_must(sharp: dict[str, Path], tmp_path: Path) -> None:
    """With one micro-batch a step there was nothing to decide about gradients."""
    said, _ = run(
        sharp["llama"], tmp_path, 2, "train.gradient_accumulation_steps=1", "train.max_steps=1"
    )
    assert "Gradients:" not in said
    more = ("train.gradient_accumulation_steps=2", "train.max_steps=2", "run.resume=auto")
    assert "Gradients: reduced once a step" in run(sharp["llama"], tmp_path, 2, *more)[0]


def test_a_decision_is_said_with_what_it_was_made_on(
    sharp: dict[str, Path], tmp_path: Path
) -> None:
    """Whole gradients stay whole after a resume, where there is no room left for anything."""
    first, _ = run(sharp["llama"], tmp_path, 2, "train.max_steps=1")
    assert re.search(
        r"^Gradients: .+ \(0\.00 GB unsharded, room for \d+\.\d\d GB\)$",
        first,
        re.MULTILINE,
    )
    resumed, _ = run(
        sharp["llama"], tmp_path, 2, "train.max_steps=2", "run.resume=auto", room=False
    )
    assert "Resumed from checkpoint_0000001" in resumed
    assert re.search(
        r"^Parameters: gathered in each forward and each backward "
        r"\(0\.00 GB unsharded, room for 0\.00 GB\)$",
        resumed,
        re.MULTILINE,
    )
    assert (
        "Gradients: reduced once a step, after its last micro-batch "
        "(0.00 GB unsharded, as before the resume)\n"
    ) in resumed


def check(run_dir: Path, expected: Trained) -> None:
    steps = read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)


@pytest.mark.parametrize(
    ("family", "replicate", "room"),
    [
        ("glm", 2, True),
        ("llama", 2, False),
        ("llama", 4, True),
        pytest.param("glm", 2, False, marks=pytest.mark.full),
        pytest.param("glm", 4, True, marks=pytest.mark.full),
        pytest.param("glm", 1, True, marks=pytest.mark.full),
        pytest.param("glm", 1, False, marks=pytest.mark.full),
        pytest.param("llama", 2, True, marks=pytest.mark.full),
    ],
)
def test_replicas_and_reductions_equal_plain_pytorch(
    family: str,
    replicate: int,
    room: bool,
    sharp: dict[str, Path],
    expected: dict[str, Trained],
    tmp_path: Path,
) -> None:
    said, run_dir = run(sharp[family], tmp_path, 4, f"parallel.replicate={replicate}", room=room)
    if replicate == 2:
        assert "Mesh: 2 (replicas) x 2 (shards) = 4 ranks, each within one node" in said
    if replicate == 4:
        assert re.search(
            r"^Parameters: whole on each rank \(\d\.\d\d GB\) \| Gradients: reduced once a step, "
            r"after its last micro-batch \(\d\.\d\d GB unsharded\)$",
            said,
            re.MULTILINE,
        )
    else:
        when = "once a step, after its last micro-batch" if room else "in each micro-batch"
        assert f"Gradients: reduced {when} (" in said
        assert (
            f"Parameters: gathered {'once a step' if room else 'in each forward and each backward'} ("
            in said
        )
    check(run_dir, expected[family])


def test_a_checkpoint_resumes_on_another_number_of_replicas(
    sharp: dict[str, Path], expected: dict[str, Trained], tmp_path: Path
) -> None:
    """Down to one rank's disk: 4 = 2 x 2, then 4 = 1 x 4, then 2 = 2 x 1, then one."""
    for steps, ranks, replicate in ((1, 4, 2), (2, 4, 1), (3, 2, 2), (4, 1, 1)):
        more = [f"train.max_steps={steps}", f"parallel.replicate={replicate}", "checkpoint.keep=9"]
        said, run_dir = run(sharp["glm"], tmp_path, ranks, *more)
        assert steps == 1 or f"Resumed from checkpoint_{steps - 1:07d}" in said
    manifest = json.loads(
        (run_dir / "checkpoints/checkpoint_0000001/manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["world"]["mesh"] == {"replicate": 2, "shard": 2}
    check(run_dir, expected["glm"])


def test_replicas_that_do_not_divide_the_ranks_are_refused(
    sharp: dict[str, Path], tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    given = settings(
        sharp["llama"], tmp_path / "train.jsonl", tmp_path / "run", "parallel.replicate=3"
    )
    refused = train(2, *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        "parallel.replicate=3 does not divide the world size, 2 - "
        in refused.stderr.splitlines()[-1]
    )
    require_documented("running", refused.stderr.splitlines()[-1])


@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_computed_again_change_no_number(
    how: str, sharp: dict[str, Path], expected: dict[str, Trained], tmp_path: Path
) -> None:
    _, run_dir = run(sharp["glm"], tmp_path, 2, f"model.activation_checkpointing={how}")
    check(run_dir, expected["glm"])


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "glm"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_layers_are_compiled_and_change_no_number(
    family: str,
    checkpointing: str,
    sharp: dict[str, Path],
    expected: dict[str, Trained],
    tmp_path: Path,
) -> None:
    more = ["model.compile=true", f"model.activation_checkpointing={checkpointing}"]
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    (tmp_path / "config.yaml").touch()
    given = settings(
        sharp[family], data, run_dir, "train.epochs=4", "train.gradient_accumulation_steps=4", *more
    )
    done = on_ranks(
        2,
        train_and_count_operations,
        ["--config", "config.yaml", *given],
        cwd=tmp_path,
        timeout_s=900,
    )
    finish(done)
    assert int(re.findall("^Compiled operations: (.+)", done.stdout, re.MULTILINE)[-1]) > 50
    assert ("compute their matrix products again" in done.stdout) == (checkpointing == "selective")
    check(run_dir, expected[family])


def train_and_count_operations(arguments: list[str]) -> None:
    is_exported = export.is_exported

    def counting(*asked: Any) -> bool:
        print(
            "Compiled operations:",
            torch._dynamo.utils.counters["stats"]["calls_captured"],
            flush=True,
        )
        return is_exported(*asked)

    vars(export)["is_exported"] = counting
    run_script(arguments)


@pytest.mark.full
def test_a_compile_that_fails_names_the_layer(sharp: dict[str, Path], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    given = settings(sharp["llama"], data, tmp_path / "run", "model.compile=true")
    (tmp_path / "config.yaml").touch()
    failed = launch(0, "--config", "config.yaml", *given, cwd=tmp_path, env={"CXX": "/nowhere/c++"})
    last = failed.stderr.splitlines()[-1]
    assert failed.returncode == 1
    assert re.match(
        r"ERROR: model\.compile=true: LlamaDecoderLayer cannot be compiled here \(.+\) - ", last
    ), last
