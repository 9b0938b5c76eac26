"""Adapters of every layout compute what peft computes, in training and from both exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers import moe_families
from helpers.moe_families import FAMILIES, SMALL
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.checkpoint.assets import SOURCE, model_assets
from shardtune.checkpoint.export.adapter import Adapter, MergedModel, why_not_merged
from shardtune.checkpoint.train_state import model_state
from shardtune.config import LoraConfig
from shardtune.errors import UserError
from shardtune.model.lora import (
    LoraExperts,
    add_adapters,
    choose_targets,
    describe_adapters,
    draw_factors,
)
from shardtune.model.weight_files import list_tensors

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
    ],
)
def test_adapters_equal_pefts_and_merge(
    family: str, targets: str | tuple[str, ...], tmp_path: Path
) -> None:
    lora = LoraConfig(rank=3, alpha=12, targets=targets)
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
    ids = torch.arange(40).view(2, 20)
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    squared_norm = sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad)

    listed = json.dumps({"path": str(source), "tensors": list_tensors(source)})
    assets = model_assets(source) | {SOURCE: listed.encode()}
    kinds = {name: (p.dtype, list(p.shape)) for name, p in factors.items()}
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    assert why_not_merged(assets) == ""
    for export, folder in (
        (Adapter(kinds, lora, assets), out),
        (MergedModel(lora, "source", assets, source), merged),
    ):
        folder.mkdir()
        taken = iter(export.stored)

        def read(name: str, taken: Any = taken) -> torch.Tensor:
            assert name == next(taken)
            return factors[name].detach()

        export.write_rest(folder, export.write_files(folder, read), {})
        assert not list(taken)

    base = AutoModelForCausalLM.from_pretrained(source)
    adapted = peft.PeftModel.from_pretrained(base, out, is_trainable=True)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(f.numel() for f in factors.values())
    output = adapted(input_ids=ids, labels=ids)
    output.loss.backward()
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(p.grad.square().sum() for p in trained), squared_norm)
    whole = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids)
    torch.testing.assert_close(whole.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_ranks_that_grouped_products_do_not_take_are_padded() -> None:
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


def test_all_linear_takes_neither_router_nor_head() -> None:
    model = build("qwen2_moe")
    lora = LoraConfig(rank=2)
    add_adapters(model, lora)
    draw_factors(model, seed=1)
    modules, trained = describe_adapters(model, lora)
    names = [item.split(" x ")[1] for item in modules.partition("modules: ")[2].split(", ")]
    assert sorted(names) == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        *(f"mlp.shared_expert.{name}_proj" for name in ("down", "gate", "up")),
        *(f"self_attn.{name}_proj" for name in "koqv"),
    ]
    assert "experts among its modules" in modules and "no experts" not in modules
    assert trained.startswith(f"LoRA: {sum(p.numel() for p in model_state(model).values()):,} ")


def test_experts_of_another_layout_or_none_are_refused() -> None:
    with pytest.raises(UserError, match="experts means no layer of llama - use "):
        choose_targets(build("llama"), LoraConfig(rank=2, targets="experts"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama4_text", **SMALL, num_local_experts=2)
        )
    with pytest.raises(UserError, match=r"all-linear means the experts .*Llama4TextExperts"):
        choose_targets(model, LoraConfig(rank=2))
    assert choose_targets(model, LoraConfig(rank=2, targets="attention"))
