"""The oracle of adapters: a plain training loop around peft's own layers."""

import math
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.plain_training import Encoded, summed_nll, take_steps
from shardtune.config import LoraConfig
from shardtune.model.lora import add_adapters, draw_factors

Factors = dict[str, torch.Tensor]

# peft changes the targets of models with stacked experts, unless they are given as parameters.
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, dict[str, list[str]]] = {
    "llama": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]},
    "glm": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": [
            *(f"{mlp}.{name}.weight" for mlp in ("mlp", "shared_experts") for name in MLP),
            "experts.gate_up_proj",
            "experts.down_proj",
        ],
    },
    # Layers without a trained weight come before those with one.
    "experts": {
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}


def initial_factors(model: Path, config: LoraConfig, seed: int = 1234) -> Factors:
    """Return the factors with which a run starts, by our names."""
    with torch.device("meta"):
        adapted = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    add_adapters(adapted, config)
    adapted.to_empty(device="cpu")
    draw_factors(adapted, seed)
    return {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}


def peft_name(name: str) -> str:
    """Return peft's name of a factor. The stack that comes first is the inner one of two."""
    module, _, factor = name.rpartition(".")
    stack, _, factor = factor.rpartition("lora_")
    inner = ".base_layer" if stack == "gate_up_proj_" else ""
    return f"base_model.model.{module}{inner}.lora_{factor}.default.weight"


def peft_layout(factor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a factor in peft's layout: of stacked experts A is (E r, in), and B (out, r E)."""
    if factor.dim() == 2:
        return factor
    if name.endswith("A"):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1)


def peft_model(path: Path, factors: Factors, rank: int, alpha: float, **targets: Any) -> Any:
    """Return a model with peft's layers and these factors, of which peft trains others, too."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=alpha, **targets))
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" in name} == set(map(peft_name, factors))
    with torch.no_grad():
        for name, factor in factors.items():
            trained[peft_name(name)].copy_(peft_layout(factor, name))
    return adapted


def plain_lora_training(
    model: Any, records: list[Encoded], rates: list[float], max_norm: float = math.inf
) -> tuple[list[float], list[float]]:
    """Train with AdamW, one record at a time; return loss and gradient norm of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses, norms, _ = take_steps(model, optimizer, records, rates, max_norm)
    return losses, norms


@torch.no_grad()
def loss_of(model: Any, records: list[Encoded]) -> float:
    """Return the loss per trained token."""
    tokens = sum(sum(trained[1:]) for _, trained in records)
    return sum(summed_nll(model, *record).item() for record in records) / tokens
