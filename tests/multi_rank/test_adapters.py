"""LoRA on any number of ranks is a plain training loop around peft's layers."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import finish, read_metrics
from helpers.documented import error_line, refused, require_error_line
from helpers.exact import COMPILED, FULL, SELECTIVE, STEPS, TWO_ROWS, Mesh
from helpers.plain_lora import (
    TARGETS,
    initial_factors,
    loss_of,
    peft_model,
    plain_lora_training,
)
from helpers.plain_training import encode, on_uneven_chats, step_losses, uneven_chats
from helpers.ranks import run_script, train, train_on_nodes
from helpers.small_runs import checkpoint, digests, flip_bit, run_in_graphs
from helpers.tiny_models import cut_into_files
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from shardtune.__main__ import run as run_command
from shardtune.checkpoint import Saver
from shardtune.config import LoraConfig
from shardtune.distributed.tensors import to_local
from shardtune.model.parts import ROWS, is_factor

RATES = [3e-3] * 4
LORA = ("lora.rank=3", "lora.alpha=12", "train.max_grad_norm=9")
FAMILY = {"llama": "llama", "glm": "glm", "experts": "glm"}  # by what is adapted


@pytest.fixture(scope="module")
def expected(
    sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], tuple[Any, ...]]:
    """Return what trains the peft model of a kind once: it, the records, its losses and norms."""
    records = [encode(tokenizer, record) for record in uneven_chats()]

    @cache
    def trained(kind: str) -> tuple[Any, ...]:
        path = sharp[FAMILY[kind]]
        targets = "experts" if kind == "experts" else "all-linear"
        factors = initial_factors(path, LoraConfig(rank=3, alpha=12, targets=targets))
        model = peft_model(path, factors, 3, 12, **TARGETS[kind])
        return model, records, *plain_lora_training(model, records, RATES, max_norm=9)

    return trained


def given(model: Path, folder: Path, mesh: Mesh, *more: str) -> list[str]:
    """Return the assignments of four steps over all the data."""
    more = (f"train.epochs={STEPS}", *LORA, *mesh.assignments(*more))
    return on_uneven_chats(model, folder, *more)


def run(model: Path, folder: Path, mesh: Mesh, *more: str) -> str:
    """Return the output of such a run."""
    done = train(mesh.ranks, *given(model, folder, mesh, *more), cwd=folder, work=run_in_graphs)
    assert "MISSING" not in done.stderr  # as transformers reports tensors that no file has
    return finish(done)


def assert_steps(run_dir: Path, expected: Any) -> None:
    _, _, losses, norms = expected
    steps = read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-6)


def assert_exported(run_dir: Path, base: Path, expected: Any) -> None:
    """Expect that adapter/ and model/ are the trained model."""
    model, records, *_ = expected
    loss = loss_of(model, records)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, run_dir / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    assert loss_of(adapted, records) == pytest.approx(loss, rel=1e-6)
    assert loss_of(merged, records) == pytest.approx(loss, rel=1e-6)
    trained = get_peft_model_state_dict(model)
    for name, factor in get_peft_model_state_dict(adapted).items():
        torch.testing.assert_close(factor, trained.pop(name), rtol=1e-4, atol=1e-5)
    assert not trained


@pytest.mark.parametrize(
    ("kind", "mesh", "more"),
    [
        ("glm", Mesh(2, 2), [FULL]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("glm", Mesh(4, 2, 2, context=2), [TWO_ROWS, SELECTIVE]),
                ("glm", Mesh(8), []),  # more ranks than experts
                ("llama", Mesh(1), [COMPILED]),
                ("experts", Mesh(2, 2), ["lora.targets=experts", FULL]),
            )
        ),
    ],
)
def test_steps_equal_a_plain_loop_around_peft(kind, mesh, more, sharp, expected, tmp_path):
    model = sharp[FAMILY[kind]]
    output = run(model, tmp_path, mesh, *more)
    among = "no experts among" if kind == "llama" else "experts among"
    assert re.search(rf"^LoRA: rank 3, alpha 12, {among} its modules: ", output, re.MULTILINE)
    assert_steps(tmp_path / "run", expected(kind))
    assert_exported(tmp_path / "run", model, expected(kind))


def run_as_accelerate_does(arguments: list[str]) -> None:
    os.environ |= dict.fromkeys(["ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"], "true")
    run_script(arguments)


def test_every_rank_loads_its_weights_under_accelerates_variables(models, tmp_path):
    more = given(models["llama"], tmp_path, Mesh(2), "train.max_steps=1", "export.final=false")
    finish(train(2, *more, cwd=tmp_path, work=run_as_accelerate_does))


@contextmanager
def changed_byte(file: Path) -> Iterator[None]:
    """Change the last byte of a file meanwhile."""
    flip_bit(file)
    yield
    flip_bit(file)


def test_checkpoints_hold_the_factors_alone_and_go_on_with_the_source(
    sharp, expected, tmp_path, capsys
):
    """Attention, dense MLP, shared and routed experts, over a resume on another number of ranks.

    The source is then in another folder and in other files.
    """
    run(sharp["glm"], tmp_path, Mesh(2, 2), "train.max_steps=2", "export.final=false")
    run_dir = tmp_path / "run"
    source = cut_into_files(sharp["glm"], tmp_path / "source")
    with changed_byte(source / "model-00002-of-00002.safetensors"):
        last = refused(train(2, *given(source, tmp_path, Mesh(2)), cwd=tmp_path))
    assert "the digest of the frozen weights in model.path is " in last
    output = run(source, tmp_path, Mesh(1), "run.resume=auto")
    assert "Resumed from checkpoint_0000002" in output and "does not say" not in output
    assert_steps(run_dir, expected("glm"))
    assert_exported(run_dir, source, expected("glm"))

    last = checkpoint(run_dir, 4)
    stored = {name for file in last.glob("rank_*") for name in load_file(file)}
    assert all(is_factor(name) or name.startswith("random.") for name in stored)
    assert run_command(["verify", *map(str, (last, run_dir / "adapter"))]) == 0
    out, without = tmp_path / "out", tmp_path / "without"
    with changed_byte(source / "model-00001-of-00002.safetensors"):
        assert run_command(["export", str(last), str(out)]) == 2
    refusal = error_line(capsys.readouterr().err)
    assert f"the digest of the weights in {source} is " in refusal
    shutil.rmtree(source)
    shutil.copytree(sharp["glm"], source)  # as one file again
    assert run_command(["export", "--dtype", "float32", str(last), str(out)]) == 0
    assert run_command(["verify", str(out), str(out / "adapter")]) == 0
    for folder, made in (("adapter", out / "adapter"), ("model", out)):
        assert digests(run_dir / folder).items() <= digests(made).items() | {
            ("export.json", digests(run_dir / folder)["export.json"])
        }
    source.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert run_command(["export", str(last), str(without)]) == 0
    assert f"Merged model left out: the files of {source} are not there now" in (
        capsys.readouterr().out
    )
    assert digests(without / "adapter") == digests(out / "adapter")
    assert [path.name for path in without.iterdir()] == ["adapter"]


def run_and_count_bytes(arguments: list[str]) -> None:
    """On a rank: print the bytes of parameters and states when a checkpoint begins."""
    start, save = Saver.__init__, Saver.save
    held: list[Any] = []

    def keep(saver: Any, *given: Any) -> None:
        held.extend(given)
        start(saver, *given)

    def count(saver: Any, *given: Any) -> None:
        model = next(each for each in held if isinstance(each, torch.nn.Module))
        optimizer = next(each for each in held if isinstance(each, torch.optim.Optimizer))
        for name, p in model.named_parameters():
            local, state = to_local(p.data), optimizer.state.get(p, {})
            dtypes = {to_local(t).dtype for t in state.values() if t.numel() > 1}
            moments = sum(to_local(t).nbytes for t in state.values() if t.dim())
            is_right = (
                local.dtype == torch.float32
                and dtypes <= {torch.float32}
                and moments == 8 * local.numel()
                if is_factor(name) or name.endswith(ROWS)
                else local.dtype == torch.bfloat16 and not state
            )
            print("State:", is_right, name, flush=True)
        for name, buffer in model.named_buffers():
            print("State:", buffer.dtype in (torch.float32, torch.int64), name, flush=True)
        save(saver, *given)

    Saver.__init__, Saver.save = keep, count
    run_script(arguments)


@pytest.mark.full
def test_frozen_weights_take_the_compute_dtype_and_factors_float32(models, tmp_path):
    """The adapters have rank 3; bfloat16 grouped products need a multiple of 8. The row of a new
    token is as exact as a factor."""
    lower = ("model.master_dtype=bfloat16", "optimizer.name=adamw8bit")
    more = ("model.compute_dtype=bfloat16", "train.max_steps=1", *lower)
    token = ("model.new_tokens=[<call>]", "optimizer.lr=0")
    more = given(models["glm"], tmp_path, Mesh(2), *more, *token, "export.dtype=source")
    output = finish(train(2, *more, cwd=tmp_path, work=run_and_count_bytes))
    assert "State: False" not in output and output.count("State: True") > 50
    for key in ("model.master_dtype", "optimizer.name"):
        assert re.search(rf"^{key} = .+ has no effect: lora\.rank is given", output, re.MULTILINE)
    # 6 experts x 3 x (32 + 32 + 16 + 32) in 2 layers, and so on, and 2 rows of 32.
    assert re.search("^LoRA: 7,840 .* float32.* 58,656 .*bfloat16", output, re.MULTILINE)
    pieces = AutoTokenizer.from_pretrained(models["glm"])("<call>")["input_ids"]
    source = AutoModelForCausalLM.from_pretrained(models["glm"], dtype=torch.float32)
    trained = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    for end in ("model.embed_tokens", "lm_head"):
        rows = trained[f"base_model.model.{end}.token_adapter.trainable_tokens_delta"]
        mean = source.get_parameter(f"{end}.weight")[pieces].mean(0, keepdim=True)
        torch.testing.assert_close(rows, mean, rtol=1e-6, atol=0)


def test_targets_that_mean_nothing_or_a_router_are_refused(models, tmp_path):
    targets = "lora.targets=[q_proj, q_prj, gate, lm_head, other]"
    done = train(2, *given(models["glm"], tmp_path, Mesh(2), targets), cwd=tmp_path)
    problems = done.stderr.splitlines()[-4:]
    assert done.returncode == 2 and "Parameters:" not in done.stdout, done.stderr
    for line, expected in zip(
        problems,
        (
            "lora.targets: q_prj means no layer of glm4_moe - use q_proj",
            "lora.targets: gate means the router of the experts (model.layers.1.mlp.gate)",
            "lora.targets: lm_head means no layer of glm4_moe - use ",
            "lora.targets: other means no layer of glm4_moe - use ",
        ),
        strict=True,
    ):
        assert line.startswith(f"ERROR: {expected}"), line
        require_error_line(line)


@pytest.mark.full
def test_adapters_with_dropout_resume_to_the_bit_on_the_same_ranks(sharp, tmp_path):
    dropout = ("lora.dropout=0.3", "checkpoint.every_steps=2", "export.final=false")
    run(sharp["glm"], tmp_path, Mesh(2), *dropout)
    whole, losses = tmp_path / "run", step_losses(tmp_path / "run")
    files = digests(checkpoint(whole, 4), "rank_*")
    shutil.rmtree(checkpoint(whole, 4))
    run(sharp["glm"], tmp_path, Mesh(2), *dropout)
    assert step_losses(whole) == losses and digests(checkpoint(whole, 4), "rank_*") == files
    run(sharp["glm"], tmp_path, Mesh(2), *dropout, "lora.dropout=0", "run.resume=never")
    assert step_losses(whole) != losses


@pytest.mark.full
def test_nodes_with_disks_of_their_own_merge_on_the_first(sharp, expected, tmp_path):
    nodes = [(tmp_path / name, 1) for name in ("a", "b")]
    for folder, _ in nodes:
        folder.mkdir()
    finish(train_on_nodes(nodes, *given(sharp["glm"], tmp_path, Mesh(2), "run.dir=run")))
    assert_steps(tmp_path / "a/run", expected("glm"))
    assert_exported(tmp_path / "a/run", sharp["glm"], expected("glm"))


@pytest.mark.full
def test_the_best_adapter_is_kept_and_nothing_merged_where_nobody_asks(sharp, tmp_path):
    data = f"data.eval={write_jsonl(tmp_path / 'eval.jsonl', uneven_chats()[:4])}"
    more = ("eval.keep_best=true", "export.merge=false", "eval.every_steps=1")
    run(sharp["glm"], tmp_path, Mesh(2), data, *more)
    run_dir = tmp_path / "run"
    best = read_metrics(run_dir, "best")[-1]["step"]
    assert best == 4 and not (run_dir / "model").exists()
    assert run_command(["verify", str(run_dir / "best")]) == 0
    name = "adapter_model.safetensors"
    assert digests(run_dir / "best")[name] == digests(run_dir / "adapter")[name]


@pytest.mark.full
def test_random_weights_are_not_merged(models, tmp_path):
    output = run(models["glm"], tmp_path, Mesh(2), "model.init=random", "train.max_steps=1")
    assert "Merged model left out: " in output
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert not (tmp_path / "run/model").exists()
