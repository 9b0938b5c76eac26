"""Stages of layers: the numbers are those of plain PyTorch, in any mesh, before and after a resume
on another one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.chats import write_jsonl
from helpers.commands import finish, read_metrics
from helpers.plain_training import (
    Trained,
    assert_same_steps,
    assert_same_weights,
    encode,
    plain_training,
    settings,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import on_ranks, run_script, train, train_on_nodes
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from shardtune.training.observers.metrics import Metrics
from shardtune.training.pipeline import Stage
from shardtune.training.states import reshard

RATES = (3e-3,) * 4


@pytest.fixture(scope="module")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(path, root / name, sharpen) for name, path in models.items()}


@pytest.fixture(scope="module")
def expected(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> dict[str, Trained]:
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return {name: plain_training(path, records, list(RATES)) for name, path in sharp.items()}


def run(model: Path, folder: Path, ranks: int, stages: int, *more: str) -> tuple[str, Path]:
    """Four steps over all the data; what was said, and the run's folder."""
    data, run_dir = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run"
    given = settings(
        model,
        data,
        run_dir,
        "train.epochs=4",
        f"train.gradient_accumulation_steps={8 * stages // ranks}",
        f"parallel.stages={stages}",
        *more,
    )
    return finish(train(ranks, *given, cwd=folder)), run_dir


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "ranks", "stages", "more"),
    [
        # The embedding of the first stage is the head of the last one.
        ("llama", 4, 2, ["model.activation_checkpointing=full"]),
        pytest.param("glm", 4, 2, ["parallel.expert=2"], marks=FULL),
        pytest.param("qwen3", 2, 2, [], marks=FULL),
        pytest.param("llama", 2, 2, ["model.activation_checkpointing=selective"], marks=FULL),
        pytest.param("glm", 3, 3, [], marks=FULL),
        pytest.param("glm", 8, 2, ["parallel.expert=2", "parallel.replicate=2"], marks=FULL),
        pytest.param("qwen3", 4, 2, ["data.packing=false", "train.micro_batch_size=2"], marks=FULL),
    ],
)
def test_stages_equal_plain_pytorch(family, ranks, stages, more, sharp, expected, tmp_path):
    said, run_dir = run(sharp[family], tmp_path, ranks, stages, *more)
    assert f" x {ranks // stages} (data ranks) = " in said
    # Rank 0 speaks for all stages.
    size = AutoModelForCausalLM.from_pretrained(sharp[family]).num_parameters()
    assert f"\nParameters: {size:,} | " in said and "left unread" not in said
    idle = f"({stages} - 1) / ({8 * stages // ranks} + {stages} - 1)"
    assert re.search(
        rf"^Stages: {stages}, of layers 0-.* \| Idle: {re.escape(idle)} = ", said, re.M
    )
    assert_same_steps(run_dir, expected[family])
    assert_same_weights(run_dir, expected[family])


def run_and_note(arguments: list[str]) -> None:
    """On a rank without room to keep parameters: write its passes and gathers of the last step."""
    gather, write = _fsdp_param_group.foreach_all_gather, Metrics.write
    noted: list[str] = []
    ahead: list[int] = []  # what an evaluation has sent and not waited for

    def noting(what: str, original: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            noted.append(what)
            return original(*given, **named)

        return call

    def write_noted(metrics: Metrics, *entries: Any) -> None:
        if entries[0]["kind"] == "step":
            Path(f"noted{os.environ['RANK']}").write_text("".join(noted), encoding="utf-8")
            noted.clear()
        write(metrics, *entries)

    def gather_noted(parameters: list[Any], *more: Any) -> Any:
        is_layer = isinstance(parameters[0]._module_info.module, nn.Linear)
        noted.append("L" if is_layer else "")
        return gather(parameters, *more)

    vars(_fsdp_param_group)["foreach_all_gather"] = gather_noted
    vars(dist)["irecv"] = noting("r", dist.irecv)
    Stage.forward, Stage.backward = noting("f", Stage.forward), noting("b", Stage.backward)
    Metrics.write = write_noted
    send = Stage._send

    def send_noted(stage: Stage, *given: Any) -> None:
        send(stage, *given)
        if not torch.is_grad_enabled():
            ahead.append(len(stage._sent))
            Path(f"ahead{os.environ['RANK']}").write_text(str(max(ahead)), encoding="utf-8")

    Stage._send = send_noted
    vars(reshard)["_free_bytes"] = lambda world: 0.0
    run_script(arguments)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "stages"), [(4, 2), (8, 4)])
def test_passes_receive_early_and_gather_each_layer_once(ranks, stages, models, tmp_path):
    """No layer is gathered for a pass and freed by another before its own has used it."""
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    AutoConfig.from_pretrained(models["qwen3"], **layers).save_pretrained(tmp_path / "deep")
    AutoTokenizer.from_pretrained(models["qwen3"]).save_pretrained(tmp_path / "deep")
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    more = ["model.init=random", "train.gradient_accumulation_steps=4", "train.max_steps=2"]
    more += [f"parallel.stages={stages}", "export.final=false", f"data.eval={data}"]
    (tmp_path / "config.yaml").touch()
    given = ["--config", "config.yaml", *settings(tmp_path / "deep", data, tmp_path / "run", *more)]
    said = finish(on_ranks(ranks, run_and_note, given, cwd=tmp_path))
    (line,) = re.findall(r"^Stages: .*, of layers (.*) \|", said, re.M)
    for stage, part in enumerate(line.split(" and ")):
        first, last = map(int, part.split("-"))
        noted = (tmp_path / f"noted{stage * ranks // stages}").read_text(encoding="utf-8")
        # In the forward and in the backward of each of the four micro-batches.
        assert noted.count("L") == 2 * 4 * (last - first + 1), noted
        passes = noted.replace("L", "")
        if stage == 0:
            assert (tmp_path / "ahead0").read_text(encoding="utf-8") == "2"
            assert passes == {2: "ffrbfrbfrbrb", 4: "ffffrbrbrbrb"}[stages]
        if stage == stages - 1:
            assert passes == "rfbrfbrfbrfb"


def test_any_mesh_resumes_stages_and_stages_resume_any_mesh(sharp, expected, tmp_path):
    more = ["parallel.expert=2", "checkpoint.keep=9", "eval.every_steps=1"]
    evaluated = write_jsonl(tmp_path / "eval.jsonl", uneven_chats()[:5])
    for steps, ranks, stages in ((1, 2, 1), (2, 4, 2), (4, 4, 1)):
        given = [*more, f"train.max_steps={steps}", f"data.eval={evaluated}"]
        said, run_dir = run(sharp["glm"], tmp_path, ranks, stages, *given)
        assert steps == 1 or f"Resumed from checkpoint_{steps // 2:07d}" in said
    assert_same_steps(run_dir, expected["glm"])
    assert_same_weights(run_dir, expected["glm"])
    manifests = [
        json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        for folder in sorted((run_dir / "checkpoints").iterdir())
        if folder.name.startswith("checkpoint_")
    ]
    kinds = [
        {name: (entry["dtype"], entry["shape"]) for name, entry in each["tensors"].items()}
        for each in manifests
    ]
    for each in kinds:
        assert {name for name in each if not name.startswith("random.")} == {
            name for name in kinds[0] if not name.startswith("random.")
        }


@pytest.mark.full
def test_the_best_model_and_the_balance_of_experts_are_of_all_stages(sharp, tmp_path):
    results = {}
    for stages in (1, 2):
        (tmp_path / f"{stages}").mkdir()
        evaluated = write_jsonl(tmp_path / "eval.jsonl", uneven_chats()[:5])
        more = [f"data.eval={evaluated}", "eval.every_steps=2", "eval.keep_best=true"]
        _, run_dir = run(sharp["glm"], tmp_path / f"{stages}", 2 * stages, stages, *more)
        files = sorted(path.name for path in (run_dir / "best").iterdir())
        evaluations = [entry["loss"] for entry in read_metrics(run_dir, "eval")]
        layers = [entry["layers"] for entry in read_metrics(run_dir, "experts")]
        counts = [[(each["layer"], each["tokens"]) for each in step] for step in layers]
        results[stages] = (files, counts, evaluations)
    (*whole, losses), (*staged, staged_losses) = results[1], results[2]
    assert staged == whole
    assert staged_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "stages", "more", "problem"),
    [
        ([2], 3, [], "parallel.stages=3 does not divide the world size, 2"),
        ([4], 4, [], "has 2 layers - use parallel.stages=2"),
        ([2], 2, ["train.gradient_accumulation_steps=1"], "steps=1 gives a step fewer micro"),
        ([1], 2, [], "parallel.stages=2 does not divide the world size, 1 - use parallel.stages=1"),
        ([1, 3], 2, [], "across part of two nodes - use parallel.stages=1"),
    ],
)
def test_impossible_stages_are_refused_by_name(ranks, stages, more, problem, sharp, tmp_path):
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    more = ["train.gradient_accumulation_steps=4", *more, f"parallel.stages={stages}"]
    given = settings(sharp["llama"], data, tmp_path / "run", *more)
    nodes = [(tmp_path / f"node{node}", n) for node, n in enumerate(ranks)]
    for folder, _ in nodes:
        folder.mkdir()
    done = train_on_nodes(nodes, *given)
    assert done.returncode == 2, done.stderr[-2000:]
    assert problem in done.stderr
