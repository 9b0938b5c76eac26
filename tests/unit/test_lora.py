"""Adapters of every layout compute what peft computes, in training and from both exports."""

import json
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from helpers import moe_families
from helpers.moe_families import FAMILIES, SMALL
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from shardtune.checkpoint.assets import SOURCE, model_assets
from shardtune.checkpoint.export.adapter import (
    Adapter,
    MergedModel,
    why_not_merged,
    why_other_weights,
)
from shardtune.checkpoint.train_state import model_state
from shardtune.config import LoraConfig
from shardtune.errors import UserError
from shardtune.model.lora import (
    EmbeddingRows,
    LoraExperts,
    add_adapters,
    choose_targets,
    describe_adapters,
    draw_factors,
    runs_of,
)
from shardtune.model.source.weight_files import list_tensors
from shardtune.training.start_log import router_remarks

ALL_FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in FAMILIES},
    "llama": {},
    "qwen2": {},  # biases
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def build(family: str) -> Any:
    torch.manual_seed(0)
    model = moe_families.build(family, **ALL_FAMILIES[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in ALL_FAMILIES),
        ("glm4_moe", ("down_proj", "o_proj")),
        ("gpt_oss", "experts"),
        ("glm4_moe", "rslora"),
    ],
)
def test_adapters_equal_pefts_and_merge(family, targets, tmp_path):
    is_rslora = targets == "rslora"
    targets = "all-linear" if is_rslora else targets
    lora = LoraConfig(rank=3, alpha=12, rslora=is_rslora, targets=targets)
    model, source = build(family), tmp_path / "source"
    model.save_pretrained(source)
    add_adapters(model, lora)
    draw_factors(model, seed=1)
    factors = model_state(model)
    with torch.no_grad():
        for name, factor in factors.items():
            assert torch.count_nonzero(factor) == (0 if name.endswith("B") else factor.numel())
            if name.endswith("B"):
                factor.copy_(torch.randn_like(factor) * 0.1)
    assert len({factor.flatten()[0].item() for factor in factors.values()}) == len(factors)
    ids = torch.arange(40).view(2, 20)
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    squared_norm = sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad)

    listed = json.dumps({"path": str(source), "tensors": list_tensors(source)})
    assets = model_assets(source) | {SOURCE: listed.encode()}
    kinds = {name: (p.dtype, list(p.shape)) for name, p in factors.items()}
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    assert why_not_merged(assets) == why_other_weights(assets) == ""  # as of older versions
    for export, folder in (
        (Adapter(kinds, lora, assets), out),
        (MergedModel(lora, "source", assets, source), merged),
    ):
        folder.mkdir()
        taken = iter(export.stored)

        def read(name: str, taken: Any = taken) -> torch.Tensor:
            assert name == next(taken)
            return factors[name].detach()

        export.write_rest(folder, export.write_files(folder, read), {"step": 1}, lambda *_: "")
        assert not list(taken)

    base = AutoModelForCausalLM.from_pretrained(source)
    adapted = peft.PeftModel.from_pretrained(base, out, is_trainable=True)
    untrained = AutoModelForCausalLM.from_pretrained(source)
    fresh = peft.get_peft_model(untrained, peft.PeftConfig.from_pretrained(out))
    for name, drawn in adapted.named_parameters():
        if "lora_A" in name:  # uniform, with peft's width
            expected_std = fresh.get_parameter(name).std()
            torch.testing.assert_close(drawn.std(), expected_std, rtol=0.3, atol=0)
            assert drawn.abs().max() < 3**0.5 * 1.2 * expected_std
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(f.numel() for f in factors.values())
    output = adapted(input_ids=ids, labels=ids)
    output.loss.backward()
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(p.grad.square().sum() for p in trained), squared_norm)
    whole = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids)
    torch.testing.assert_close(whole.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_rows_that_train_stand_for_those_of_a_scaled_embedding():
    """Among them the row of the padding, which trains as any other."""
    torch.manual_seed(0)
    embedding = Gemma3TextScaledWordEmbedding(40, 8, padding_idx=2, embed_scale=3.0)
    rows, ids = torch.randn(3, 8, requires_grad=True), torch.tensor([[1, 2, 7, 39, 2]])
    weight = embedding.weight.detach().index_copy(0, torch.tensor([2, 38, 39]), rows)
    expected = 3 * F.embedding(ids, weight)
    embedding.weight.requires_grad_(False)
    adapted: Any = embedding
    adapted.token_rows, adapted.runs = nn.Parameter(rows.detach().clone()), runs_of([2, 38, 39])
    adapted.__class__ = type("WithRows", (EmbeddingRows, type(embedding)), {})
    found = adapted(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.randn_like(found)
    mine = torch.autograd.grad((found * weights).sum(), adapted.token_rows)
    torch.testing.assert_close(mine, torch.autograd.grad((expected * weights).sum(), rows))
    assert adapted.padding_idx == 2


def test_ranks_that_grouped_products_do_not_take_are_padded():
    """In bfloat16, where rows of 3 numbers are no multiple of 16 bytes."""
    model = build("glm4_moe")
    add_adapters(model, LoraConfig(rank=3, targets="experts"))
    draw_factors(model, seed=1)
    experts = next(module for module in model.modules() if isinstance(module, LoraExperts))
    inputs = (torch.randn(9, 32), torch.randint(6, (9, 2)), torch.rand(9, 2))
    with torch.no_grad():
        for name, factor in experts.named_parameters():
            if name.endswith("B"):
                factor.normal_()
        expected = experts(*inputs)
        experts.to(torch.bfloat16)
        rounded = experts(inputs[0].bfloat16(), inputs[1], inputs[2].bfloat16())
    assert (rounded.float() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("targets", ["attention", "experts"])
def test_dropout_reaches_adapters_in_training_and_not_in_evaluation(targets):
    ids, outputs = torch.arange(20).view(1, 20), {}
    for dropout in (0.0, 0.5):
        model = build("qwen3_moe")
        add_adapters(model, LoraConfig(rank=3, targets=targets, dropout=dropout))
        draw_factors(model, seed=1)
        with torch.no_grad():
            for name, factor in model_state(model).items():
                if name.endswith("B"):
                    factor.fill_(0.1)
            for is_training in (False, True):
                outputs[dropout, is_training] = model.train(is_training)(input_ids=ids).logits
    assert torch.equal(outputs[0.5, False], outputs[0.0, False])
    assert not torch.equal(outputs[0.5, True], outputs[0.0, True])


def test_all_linear_takes_neither_router_nor_head():
    model, lora = build("qwen2_moe"), LoraConfig(rank=2)
    targets = choose_targets(model, lora)
    add_adapters(model, lora)
    modules, trained = describe_adapters(model, lora)
    assert sorted({target.in_layer for target in targets}) == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        *(f"mlp.shared_expert.{name}_proj" for name in ("down", "gate", "up")),
        *(f"self_attn.{name}_proj" for name in "koqv"),
    ]
    assert "experts among its modules" in modules
    assert trained.startswith(f"LoRA: {sum(p.numel() for p in model_state(model).values()):,} ")


def on_meta(family: str, **settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


@pytest.mark.parametrize(
    ("family", "settings", "kind"),
    [
        ("llama4_text", SMALL | {"num_local_experts": 2}, "Llama4TextExperts"),
        ("jetmoe", SMALL | {"kv_channels": 8}, "JetMoeParallelExperts"),
        ("longcat_flash", {"num_layers": 1}, "LongcatFlashExperts"),
    ],
)
def test_experts_of_another_layout_are_refused_and_attention_is_not(family, settings, kind):
    model = on_meta(family, **settings)
    for targets in ("all-linear", "experts"):
        refusal = f"{targets} means the experts of {family}, and .* layers \\({kind}\\) - use att"
        with pytest.raises(UserError, match=refusal):
            choose_targets(model, LoraConfig(rank=2, targets=targets))
    add_adapters(model, LoraConfig(rank=2, targets="attention"))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapted and not any("expert" in name or "router" in name for name in adapted)


def test_linear_layers_that_compute_otherwise_are_refused_by_name():
    """One of DeepSeek V4's attention multiplies blocks of its input by blocks of its weight."""
    model = on_meta("deepseek_v4", num_hidden_layers=2)
    with pytest.raises(UserError, match=r"self_attn.o_a_proj of deepseek_v4, .* - use .*q_a_proj"):
        choose_targets(model, LoraConfig(rank=2))
    with pytest.raises(UserError, match=r"o_a_prj means no layer .* - use ") as nearest:
        choose_targets(model, LoraConfig(rank=2, targets=("o_a_prj",)))
    assert "o_a_proj" not in str(nearest.value)
    chosen = choose_targets(model, LoraConfig(rank=2, targets=("q_b_proj", "experts")))
    assert {target.group for target in chosen} == {"attention", "experts"}


def test_a_tower_of_images_gets_no_adapters():
    text = SMALL | {"head_dim": 8, "num_key_value_heads": 2}
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = on_meta("gemma3", text_config=text, vision_config=vision)
    add_adapters(model, LoraConfig(rank=2))
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("self_attn.q_proj" in name for name in adapted)
    assert all("language_model" in name for name in adapted)


def test_a_decoder_that_is_a_head_has_the_layers_of_the_whole_model():
    model = on_meta("modernbert-decoder", num_hidden_layers=1)
    assert {t.in_layer for t in choose_targets(model, LoraConfig(rank=2))} >= {"attn.q_proj"}


@pytest.mark.parametrize(
    ("family", "settings", "has_noise"),
    [
        # By default only near ties are drawn, which 40 tokens do not have.
        ("phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.5}, True),
        ("mixtral", {"num_local_experts": 4}, False),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, True),
        ("llama", {}, False),
    ],
)
def test_routers_that_choose_with_noise_in_training_are_named(family, settings, has_noise):
    torch.manual_seed(0)
    model, ids = moe_families.build(family, **settings).train(), torch.arange(40).view(1, 40)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for _ in range(2)]
    assert torch.equal(*logits) is not has_noise
    assert [*router_remarks(moe_families.build("phimoe", num_local_experts=4))]
    said = [*router_remarks(model)]
    expected = f"Routers: {family} chooses experts with noise"
    assert [line.startswith(expected) for line in said] == [True] * has_noise


def test_a_balancing_loss_that_is_asked_for_and_not_added_is_named():
    for asks, lines in ((True, 1), (False, 0)):
        given = {"output_router_logits": asks, "router_aux_loss_coef": 0.5}
        said = [*router_remarks(moe_families.build("qwen3_moe", **given))]
        assert len(said) == lines and all("router_aux_loss_coef=0.5" in line for line in said)
