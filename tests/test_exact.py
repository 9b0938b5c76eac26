"""The numbers of real runs against plain PyTorch in one process, which shares no code with the product."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import chats, launch, read_metrics, sentence, write_jsonl
from ranks import train
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
)

from shardtune.packing import Cost, deal, plan_rows

FAMILIES = ("llama", "qwen3", "glm")
Encoded = tuple[list[int], list[bool]]

# Trained tokens as uneven as they get, in records of about one length: whatever averages over records, rows,
# micro-batches or ranks before it sums is wrong by a percent, 500 times the tolerance, or more.
ANSWER_WORDS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 10, 40, 80)
ROWS_PACKED = 8
MAX_LENGTH = 260


def uneven_chats() -> list[dict[str, Any]]:
    source = random.Random(5)
    return [
        {
            "messages": [
                {"role": "user", "content": sentence(source, source.randint(60, 100) - words // 2)},
                {
                    "role": "assistant",
                    "content": sentence(source, words) if words < 40 else " ".join(["rank"] * 2 * words),
                },
            ]
        }
        for words in random.Random(1).sample(ANSWER_WORDS, len(ANSWER_WORDS))
    ]


def encode(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> Encoded:
    """The ids of a conversation in ChatML, and which of them the assistant says: its contents, each with its end."""
    text, spans = "", []
    for message in record["messages"]:
        text += f"<|im_start|>{message['role']}\n"
        begin = len(text)
        text += f"{message['content']}<|im_end|>"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
        text += "\n"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(a <= start < b for a, b in spans) for start, _ in encoded["offset_mapping"]]


def summed_nll(model: Any, ids: list[int], trained: list[bool]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    nll = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return nll[torch.tensor(trained[1:])].double().sum()


@dataclass
class Trained:
    """What the plain loop saw and left."""

    losses: list[float]
    norms: list[float]
    record_sums: list[float]  # of each record, before the first update
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def plain_training(
    path: Path,
    records: list[Encoded],
    rates: list[float],
    max_norm: float = math.inf,
    weight_decay: float = 0.0,
) -> Trained:
    """AdamW over the loss per trained token of all records, one record at a time, a step for each rate."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    tokens = sum(sum(trained[1:]) for _, trained in records)
    losses, norms, first_sums = [], [], []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums = []
        for ids, trained in records:
            nll = summed_nll(model, ids, trained)
            (nll / tokens).backward()
            sums.append(nll.item())
        first_sums = first_sums or sums
        losses.append(sum(sums) / tokens)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, first_sums, initial, dict(model.state_dict()))


@torch.no_grad()
def plain_perplexity(path: Path, records: list[Encoded]) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return math.exp(
        sum(summed_nll(model, *record).item() for record in records) / sum(sum(trained[1:]) for _, trained in records)
    )


def with_weights(source: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a model's directory, in float32, whose weights or configuration `change` has changed."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def sharpen(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)


@pytest.fixture(scope="session")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models with matrices eight times as large: losses that differ from token to token, as after pretraining."""
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(path, root / name, sharpen) for name, path in models.items()}


def settings(model: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    """Assignments of a run in float32; a later one overrides."""
    given = [
        f"model.path={model}",
        f"data.train={data}",
        f"run.dir={run_dir}",
        "model.compute_dtype=float32",
        "optimizer.lr=3e-3",
        "optimizer.eps=1e-4",
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
        "train.max_grad_norm=null",
        f"data.max_length={MAX_LENGTH}",
        "checkpoint.every_steps=0",
        "export.dtype=float32",
        *more,
    ]
    return [f"{key}={value}" for key, value in dict(line.split("=", 1) for line in given).items()]


def finish(finished: Any) -> str:
    assert finished.returncode == 0, finished.stderr[-3000:]
    return str(finished.stdout)


def step_losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(run_dir, "step")]


def assert_same_weights(run_dir: Path, expected: Trained) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    final = model.state_dict()
    assert final.keys() == expected.final.keys()
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in final.items():
        update = (expected.final[name] - expected.initial[name]).norm()
        difference = (tensor - expected.final[name]).norm()
        assert difference <= 1e-5 * expected.final[name].norm(), name
        assert difference <= 1e-3 * update or not update, name
        assert bool(update > 1e-4 * expected.initial[name].norm()) == (name in trained), name


def mean_of_means_errors(records: list[Encoded], sums: list[float], ranks: int, packed: bool) -> list[float]:
    """How wrong the loss of the first step would be if averaged over micro-batches, and if averaged over ranks."""
    counts = [sum(trained[1:]) for _, trained in records]
    lengths = torch.tensor([len(ids) for ids, _ in records]).numpy()
    rows = plan_rows(lengths, MAX_LENGTH, packed, 1234, 0)
    cost = Cost(per_token=6 * 16, per_pair=1)
    dealt = [deal(rows, lengths[rows.members], cost, rank, ranks, 1 if packed else 2) for rank in range(ranks)]

    def mean(group: list[int]) -> float:
        return sum(sums[i] for i in group) / sum(counts[i] for i in group)

    exact = mean(list(range(len(records))))
    by_micro_batch = [mean(group) for groups in dealt for group in groups]
    by_rank = [mean([i for group in groups for i in group]) for groups in dealt]
    return [abs(sum(means) / len(means) / exact - 1) for means in (by_micro_batch, by_rank)]


@pytest.fixture(scope="session")
def plain(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> Callable[..., Trained]:
    """The plain loop over `uneven_chats`, once for each family and setting."""
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return cache(lambda family, *arguments: plain_training(sharp[family], records, list(arguments[0]), *arguments[1:]))


def check_equality(
    family: str,
    ranks: int,
    accumulation: int,
    packed: bool,
    sharp: dict[str, Path],
    plain: Callable[..., Trained],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    """One optimizer step an epoch, so that the plain loop need not know the order of the data."""
    data, run_dir, rows = write_jsonl(folder / "train.jsonl", uneven_chats()), folder / "run", 1 if packed else 2
    said = finish(
        train(
            ranks,
            *settings(
                sharp[family],
                data,
                run_dir,
                f"data.packing={str(packed).lower()}",
                "train.epochs=4",
                f"train.micro_batch_size={rows}",
                f"train.gradient_accumulation_steps={accumulation}",
            ),
            cwd=folder,
        )
    )
    assert f"Rows per epoch: {ROWS_PACKED * rows} of" in said
    assert "Steps per epoch: 1 | Total steps: 4" in said
    expected, steps = plain(family, (3e-3,) * 4), read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)
    records = [encode(tokenizer, record) for record in uneven_chats()]
    by_micro_batch, by_rank = mean_of_means_errors(records, expected.record_sums, ranks, packed)
    assert by_micro_batch > 0.005
    assert by_rank > 0.005 or ranks == 1


@pytest.mark.parametrize(
    ("family", "ranks", "accumulation", "packed"),
    [("llama", 1, 8, True), ("qwen3", 2, 4, False), ("glm", 4, 2, True), ("llama", 8, 1, False)],
)
def test_losses_norms_and_weights_equal_plain_pytorch(
    family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path
):
    check_equality(family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_world_and_shape_equals_plain_pytorch(
    family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path
):
    check_equality(family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path)


def test_clipping_schedule_and_weight_decay_equal_plain_pytorch(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    finish(
        train(
            2,
            *settings(
                sharp["qwen3"],
                data,
                run_dir,
                "train.epochs=5",
                "train.gradient_accumulation_steps=4",
                "train.max_grad_norm=0.5",
                "optimizer.weight_decay=0.1",
                "scheduler.name=cosine",
                "scheduler.warmup_ratio=0.2",
            ),
            cwd=tmp_path,
        )
    )
    steps = read_metrics(run_dir, "step")
    rates = tuple(step["lr"] for step in steps)
    assert len(set(rates)) == 5
    expected = plain("qwen3", rates, 0.5, 0.1)
    assert min(expected.norms) > 0.5
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)


def test_steps_are_the_same_on_any_ranks_and_the_last_of_an_epoch_is_smaller(sharp, tokenizer, tmp_path):
    records = chats(10, seed=3)
    data, encoded, seen = write_jsonl(tmp_path / "train.jsonl", records), [encode(tokenizer, r) for r in records], {}
    for ranks, accumulation in (1, 4), (2, 2), (4, 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said = finish(
            train(
                ranks,
                *settings(
                    sharp["llama"],
                    data,
                    folder,
                    "data.packing=false",
                    "train.epochs=2",
                    "export.final=false",
                    f"train.gradient_accumulation_steps={accumulation}",
                ),
                cwd=folder,
            )
        )
        assert "Steps per epoch: 3 | Total steps: 6 | Records: 10" in said
        seen[ranks] = read_metrics(folder, "step")
    for steps in seen.values():
        for key in "loss", "grad_norm":
            assert [step[key] for step in steps] == pytest.approx([step[key] for step in seen[1]], rel=1e-5)
        assert [step["epoch"] for step in steps] == [0, 0, 0, 1, 1, 1]
        for epoch in steps[:3], steps[3:]:
            assert sum(step["trained_tokens"] for step in epoch) == sum(sum(trained) for _, trained in encoded)
            assert sum(step["tokens"] for step in epoch) == sum(len(ids) for ids, _ in encoded)


@torch.no_grad()
def test_an_epoch_holds_every_piece_once_where_long_records_are_split(sharp, tokenizer, tmp_path):
    records, length = [*chats(9, seed=4), *uneven_chats()[:2]], 60
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", records), tmp_path / "run"
    finish(
        train(
            3,
            *settings(
                sharp["llama"],
                data,
                run_dir,
                f"data.max_length={length}",
                "data.overflow=split",
                "train.epochs=1",
                "optimizer.lr=0",
                "export.final=false",
                "train.micro_batch_size=2",
            ),
            cwd=tmp_path,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(sharp["llama"], dtype=torch.float32)
    encoded = [encode(tokenizer, record) for record in records]
    pieces = [
        (ids[i : i + length], trained[i : i + length])
        for ids, trained in encoded
        for i in range(0, len(ids) - 1, length - 1)
    ]
    assert any(not any(trained[1:]) for _, trained in pieces)
    steps = read_metrics(run_dir, "step")
    assert len(steps) > 1
    assert sum(step["trained_tokens"] for step in steps) == sum(sum(trained) for _, trained in encoded)
    assert sum(step["loss"] * step["trained_tokens"] for step in steps) == pytest.approx(
        sum(summed_nll(model, *piece).item() for piece in pieces), rel=1e-6
    )


def check_perplexity(
    ranks: int,
    count: int,
    sharp: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    held_out = chats(count, seed=count)
    finish(
        train(
            ranks,
            *settings(
                sharp["qwen3"],
                write_jsonl(folder / "train.jsonl", chats(12)),
                folder / "run",
                "train.max_steps=1",
                f"data.eval={write_jsonl(folder / 'eval.jsonl', held_out)}",
                f"data.packing={str(count != 7).lower()}",
                "data.max_length=200",
                "data.overflow=error",
                "train.micro_batch_size=2",
                "export.final=false",
                "optimizer.lr=0",
            ),
            cwd=folder,
        )
    )
    baseline, last = read_metrics(folder / "run", "eval")
    encoded = [encode(tokenizer, record) for record in held_out]
    assert (baseline["step"], last["step"]) == (0, 1)
    assert baseline["tokens"] == last["tokens"] == sum(sum(trained) for _, trained in encoded)
    expected = plain_perplexity(sharp["qwen3"], encoded)
    assert baseline["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert baseline["loss"] == pytest.approx(math.log(expected), rel=1e-6)
    assert last["perplexity"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 7), (4, 101)])
def test_perplexity_equals_one_record_at_a_time(ranks, count, sharp, tokenizer, tmp_path):
    check_perplexity(ranks, count, sharp, tokenizer, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 7, 101])
def test_perplexity_on_any_ranks_and_records(ranks, count, sharp, tokenizer, tmp_path):
    check_perplexity(ranks, count, sharp, tokenizer, tmp_path)


def test_a_loss_that_is_not_finite_stops_torchrun_before_the_update(sharp, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    (tmp_path / "config.yaml").touch()
    stopped = launch(
        2,
        "--config",
        tmp_path / "config.yaml",
        *settings(sharp["qwen3"], data, run_dir, "optimizer.lr=1e30", "checkpoint.every_steps=1"),
        cwd=tmp_path,
    )
    assert stopped.returncode == 1
    (error,) = [line for line in stopped.stderr.splitlines() if line.startswith("ERROR: ")]
    assert "step 2 was not taken" in error
    assert "in the gradient of model." in error or "in the gradient of lm_head." in error
    assert [step["step"] for step in read_metrics(run_dir, "step")] == [1]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["checkpoint_0000001"]
    assert (run_dir / "checkpoints" / "checkpoint_0000001" / "COMPLETE").is_file()
    assert not (run_dir / "model").exists()


def plant_infinity(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] = math.inf


def hide_huge_head(model: Any) -> None:
    """Logits and losses as before, and a gradient of the last norm whose square is beyond float32."""
    model.model.norm.weight[0] = 0
    model.lm_head.weight[:, 0] = 1e25
    model.lm_head.weight[::2, 0] = -1e25


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (plant_infinity, "the weight model.layers.1.mlp.up_proj.weight is not finite"),
        (hide_huge_head, "its gradient norm inf, in no single tensor"),
    ],
)
def test_weights_that_give_no_finite_loss_or_norm_stop_the_first_step(change, found, sharp, tmp_path):
    model, run_dir = with_weights(sharp["qwen3"], tmp_path / "model", change), tmp_path / "run"
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    stopped = train(2, *settings(model, data, run_dir, "checkpoint.every_steps=1"), cwd=tmp_path)
    assert stopped.returncode == 1, stopped.stderr
    error = stopped.stderr.splitlines()[-1]
    assert error.startswith("ERROR: step 1 was not taken: ")
    assert found in error
    assert read_metrics(run_dir, "step") == []
    assert not (run_dir / "checkpoints").exists()
    assert not (run_dir / "model").exists()


SMALL = {"vocab_size": 331, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 1, "pad_token_id": 2}


def saved(
    build: Callable[[], Any],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    change: Callable[[Any], None] = lambda model: None,
) -> Path:
    """The directory of a model with the weights that `build` draws, changed by `change`."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "leaking",
    [
        lambda: MambaForCausalLM(MambaConfig(**SMALL, state_size=4)),
        lambda: OPTForCausalLM(
            OPTConfig(**SMALL, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0)
        ),
    ],
    ids=["mamba", "opt"],
)
def test_a_model_whose_documents_would_mix_trains_unpacked_alone(leaking, tokenizer, tmp_path):
    model = saved(leaking, tokenizer, tmp_path / "model")
    records = uneven_chats()[:8]
    given = settings(
        model,
        write_jsonl(tmp_path / "train.jsonl", records),
        tmp_path / "run",
        "train.gradient_accumulation_steps=4",
        "train.epochs=2",
    )
    refused = train(2, *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("ERROR: ")
    assert refused.stderr.splitlines()[-1].endswith(" - use data.packing=false")
    finish(train(2, *given, "data.packing=false", cwd=tmp_path))
    expected = plain_training(model, [encode(tokenizer, record) for record in records], [3e-3] * 2)
    assert step_losses(tmp_path / "run") == pytest.approx(expected.losses, rel=1e-5)


def longrope() -> Phi3ForCausalLM:
    """Records of up to 60 tokens take the short factors, and longer ones factors that are far from those."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    return Phi3ForCausalLM(
        Phi3Config(
            **SMALL,
            intermediate_size=64,
            num_attention_heads=4,
            max_position_embeddings=512,
            original_max_position_embeddings=60,
            rope_parameters=rope,
        )
    )


def test_a_rope_chosen_for_a_whole_forward_has_each_record_to_itself(tokenizer, tmp_path):
    model = saved(longrope, tokenizer, tmp_path / "model", sharpen)
    records = [*chats(6, seed=4, longest_answer=8), *uneven_chats()[:4]]
    encoded = [encode(tokenizer, record) for record in records]
    assert 2 < sum(len(ids) > 60 for ids, _ in encoded) < 8
    data = write_jsonl(tmp_path / "train.jsonl", records)
    given = [f"data.eval={data}", "train.gradient_accumulation_steps=5", "train.epochs=2", "data.packing=false"]

    for wrong in "data.packing=true", "train.micro_batch_size=2":
        refused = train(2, *settings(model, data, tmp_path / "refused", *given, wrong), cwd=tmp_path)
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1] == (
            "ERROR: phi3 turns to other rope factors for a whole forward once one of its records is longer than 60 "
            "tokens - use data.max_length=60 or less, or data.packing=false with train.micro_batch_size=1"
        )
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    expected, steps = plain_training(model, encoded, [3e-3] * 2), read_metrics(tmp_path / "run", "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    baseline = read_metrics(tmp_path / "run", "eval")[0]["perplexity"]
    assert baseline == pytest.approx(plain_perplexity(model, encoded), rel=1e-6)

    short = ["data.packing=true", "data.max_length=60", "data.overflow=drop", "train.max_steps=1"]
    finish(train(2, *settings(model, data, tmp_path / "short", *given, *short), cwd=tmp_path))
    baseline = read_metrics(tmp_path / "short", "eval")[0]["perplexity"]
    kept = [(ids, trained) for ids, trained in encoded if len(ids) <= 60]
    assert baseline == pytest.approx(plain_perplexity(model, kept), rel=1e-6)


def test_a_rank_without_rows_disturbs_no_gradient(tokenizer, tmp_path):
    """In gemma3n the gradient at a row of padding alone, whose embedding is zero, is not finite."""
    config = Gemma3nTextConfig(
        **SMALL | {"pad_token_id": 0},
        vocab_size_per_layer_input=331,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        num_kv_shared_layers=0,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
    )
    model = saved(lambda: Gemma3nForCausalLM(config), tokenizer, tmp_path / "model")
    texts = ["rank node shard", "mesh step " * 20, "token loss norm " * 10]
    given = ["data.packing=false", "train.gradient_accumulation_steps=2", "train.epochs=2"]
    data = write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert not any(config.pad_token_id in of_text for of_text in ids)
    expected = plain_training(model, [(of_text, [True] * len(of_text)) for of_text in ids], [3e-3] * 2)
    steps = read_metrics(tmp_path / "run", "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)


def longcat() -> LongcatFlashForCausalLM:
    return LongcatFlashForCausalLM(
        LongcatFlashConfig(
            vocab_size=331,
            hidden_size=32,
            num_layers=1,
            ffn_hidden_size=64,
            num_attention_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            head_dim=8,
            v_head_dim=8,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
            expert_ffn_hidden_size=16,
            max_position_embeddings=512,
        )
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_rank_that_reaches_no_expert_reduces_with_those_that_do(checkpointing, tokenizer, tmp_path):
    records = uneven_chats()[:2]
    encoded = [encode(tokenizer, record) for record in records]

    def part(model: Any) -> None:
        """Leave to the experts only what the first record prefers to send them beyond anything in the second."""
        sharpen(model)
        router, seen = model.model.layers[0].mlp.router, []
        router.register_forward_hook(lambda module, inputs, output: seen.append(output[0].softmax(-1)))
        for ids, _ in encoded:
            model(input_ids=torch.tensor([ids]))
        margins = [(scores[:, :4].amax(-1) - scores[:, 4:].amin(-1)).amax() for scores in seen]
        assert abs(margins[0] - margins[1]) > 1e-3
        router.e_score_correction_bias[:4] -= sum(margins) / 2

    model = saved(longcat, tokenizer, tmp_path / "model", part)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    given = ["data.packing=false", "train.epochs=2", f"model.activation_checkpointing={checkpointing}"]
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    expected, steps = plain_training(model, encoded, [3e-3] * 2), read_metrics(tmp_path / "run", "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)


def test_what_no_rank_uses_is_left_as_it_is(tokenizer, tmp_path):
    """An indexer only chooses what attention sees, so it has no gradient, in a layer of experts neither."""
    config = DeepseekV32Config(
        **SMALL,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=512,
        max_position_embeddings=512,
    )
    model = saved(lambda: DeepseekV32ForCausalLM(config), tokenizer, tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats()[:4])
    given = ["data.packing=false", "train.epochs=1", "optimizer.weight_decay=0.5"]
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "model"))
    unused = {name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")}
    assert len(unused) == 11
    assert {name for name in before if torch.equal(before[name], after[name])} == unused


def test_bfloat16_compute_keeps_float32_masters(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    said = finish(
        train(
            2,
            *settings(
                sharp["llama"],
                data,
                run_dir,
                "model.compute_dtype=bfloat16",
                "train.epochs=4",
                "train.gradient_accumulation_steps=4",
            ),
            cwd=tmp_path,
        )
    )
    assert "forward and backward in bfloat16" in said
    expected = plain("llama", (3e-3,) * 4).losses
    assert step_losses(run_dir) == pytest.approx(expected, rel=1e-2)
    assert step_losses(run_dir) != pytest.approx(expected, rel=1e-5)
    weights = load_file(run_dir / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def test_activation_checkpointing_changes_no_number(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    finish(
        train(
            2,
            *settings(
                sharp["glm"],
                data,
                run_dir,
                "model.activation_checkpointing=full",
                "train.epochs=4",
                "train.micro_batch_size=2",
                "train.gradient_accumulation_steps=2",
            ),
            cwd=tmp_path,
        )
    )
    expected, steps = plain("glm", (3e-3,) * 4), read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)


def add_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.5


def test_dropout_follows_the_seed_and_the_rank_and_spares_evaluation(sharp, tokenizer, tmp_path):
    model = with_weights(sharp["llama"], tmp_path / "model", add_dropout)
    record = uneven_chats()[4]
    once = write_jsonl(tmp_path / "once.jsonl", [record])
    twice = write_jsonl(tmp_path / "twice.jsonl", [record, record])
    losses = {}
    for name, ranks, data, seed in (
        ("a", 1, once, 7),
        ("same", 1, once, 7),
        ("other", 1, once, 8),
        ("two", 2, twice, 7),
    ):
        folder = tmp_path / name
        folder.mkdir()
        finish(
            train(
                ranks,
                *settings(
                    model,
                    data,
                    folder,
                    f"run.seed={seed}",
                    f"data.eval={once}",
                    "train.epochs=3",
                    "optimizer.lr=0",
                    "data.packing=false",
                    "export.final=false",
                ),
                cwd=folder,
            )
        )
        losses[name] = step_losses(folder)
        undisturbed = math.log(plain_perplexity(model, [encode(tokenizer, record)]))
        assert [entry["loss"] for entry in read_metrics(folder, "eval")] == pytest.approx([undisturbed] * 2, rel=1e-6)
    every = [*losses["a"], undisturbed, losses["other"][0], losses["two"][0]]
    assert losses["a"] == losses["same"]
    assert all(abs(one / other - 1) > 1e-4 for i, one in enumerate(every) for other in every[:i])
