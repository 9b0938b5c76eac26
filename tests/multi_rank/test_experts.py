"""Stacked experts, few or many for the ranks, train as plain PyTorch trains them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import finish
from helpers.plain_training import (
    assert_same_steps,
    assert_same_weights,
    encode,
    plain_training,
    save_new_model,
    settings,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import train
from helpers.small_runs import steps_of
from helpers.tiny_models import VOCABULARY
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
)


def gpt_oss() -> GptOssForCausalLM:
    """Files hold its six experts stacked; their width, 36, divides neither 5 nor 8."""
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=36,
            num_hidden_layers=2,
            intermediate_size=36,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=6,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            layer_types=["full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            pad_token_id=0,
        )
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "ranks", "replicate", "checkpointing"),
    [
        ("glm", 5, 1, "none"),
        ("gpt_oss", 8, 1, "selective"),
        ("gpt_oss", 8, 2, "none"),
        ("glm", 10, 2, "selective"),
    ],
)
def test_ranks_without_experts_train_save_and_resume(
    family, ranks, replicate, checkpointing, models, tokenizer, tmp_path
):
    """Six experts in slices of two, or of one, leave some ranks without; a resume repeats every
    bit."""
    if family == "glm":
        model = with_weights(models["glm"], tmp_path / "model", sharpen)
    else:
        model = save_new_model(gpt_oss, tokenizer, tmp_path / "model", sharpen)
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    given = settings(
        model,
        data,
        run_dir,
        "train.epochs=4",
        "data.packing=false",
        f"train.gradient_accumulation_steps={-(-16 // ranks)}",
        f"parallel.replicate={replicate}",
        f"model.activation_checkpointing={checkpointing}",
        "checkpoint.every_steps=2",
    )
    finish(train(ranks, *given, cwd=tmp_path))
    records = [encode(tokenizer, record) for record in uneven_chats()]
    expected = plain_training(model, records, [3e-3] * 4)
    assert_same_steps(run_dir, expected)
    assert_same_weights(run_dir, expected)

    first = steps_of(run_dir)
    shutil.rmtree(run_dir / "checkpoints/checkpoint_0000004")
    assert "Resumed from checkpoint_0000002" in finish(train(ranks, *given, cwd=tmp_path))
    assert steps_of(run_dir) == first


def longcat() -> LongcatFlashForCausalLM:
    return LongcatFlashForCausalLM(
        LongcatFlashConfig(
            num_attention_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            head_dim=8,
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=1,
            ffn_hidden_size=64,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
            expert_ffn_hidden_size=16,
            max_position_embeddings=512,
        )
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_rank_that_reaches_no_expert_reduces_with_those_that_do(
    checkpointing, tokenizer, tmp_path
):
    records = uneven_chats()[:2]
    encoded = [encode(tokenizer, record) for record in records]

    def part(model: Any) -> None:
        """Bias the router so that tokens of the first record alone reach an expert."""
        sharpen(model)
        router, seen = model.model.layers[0].mlp.router, []
        router.register_forward_hook(
            lambda module, inputs, output: seen.append(output[0].softmax(-1))
        )
        for ids, _ in encoded:
            model(input_ids=torch.tensor([ids]))
        margins = [(scores[:, :4].amax(-1) - scores[:, 4:].amin(-1)).amax() for scores in seen]
        assert abs(margins[0] - margins[1]) > 1e-3
        router.e_score_correction_bias[:4] -= sum(margins) / 2

    model = save_new_model(longcat, tokenizer, tmp_path / "model", part)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    given = [
        "data.packing=false",
        "train.epochs=2",
        f"model.activation_checkpointing={checkpointing}",
    ]
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    assert_same_steps(tmp_path / "run", plain_training(model, encoded, [3e-3] * 2))
