"""What Triton compiles for a GPU adds up in one order, and needs no memory beside the registers.

The project's own functions and a layer with experts go through Inductor and Triton to machine code,
which no GPU runs here.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import finish
from helpers.pretended import needs_compiler
from helpers.ranks import on_ranks
from pretend_gpu.triton_source import compile_for_gpus
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.distributed import compiling
from shardtune.model import loss
from shardtune.model.moe import grouped_experts
from shardtune.model.moe.grouped_experts import gather_both_ways
from shardtune.optimizers.rules import AdamW, AdamW8bit
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

pytestmark = needs_compiler

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 4096, 1024, 512, 16, 4
GLM = {
    "hidden_size": WIDTH,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def glm() -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **GLM))
    gather_both_ways(model)
    return model.train().model.layers[0].to(torch.bfloat16).to("cuda")


def use_loss() -> None:
    head: Any = loss.LossHead(8, 151_552, bias=False)
    head.batch, head.is_last = None, True
    model: Any = nn.Module()
    model.get_output_embeddings = lambda: head
    loss.compile_loss(model, torch.bfloat16, torch.device("cuda"), evaluates=True)


def use_experts() -> None:
    activate = glm().mlp.experts._apply_gate
    rows = torch.empty(TOKENS * TOP_K, 2 * INNER, dtype=torch.bfloat16, device="cuda")
    weights = torch.empty(len(rows), 1, device="cuda")
    grouped_experts._weighted_kernel(activate, rows, weights)
    grouped_experts._weighted_backward(activate, rows, weights, rows[:, :INNER].contiguous())
    places = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device="cuda")
    grouped_experts._sum_rows(rows, places)


def use_update() -> None:
    for rule in (AdamW8bit, AdamW):
        weights = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096, 1024), (1024,))]
        named = [(str(i), nn.Parameter(weight.to("cuda"))) for i, weight in enumerate(weights)]
        options: Any = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "seed": 1}
        ShardedOptimizer([{"params": named}], rule, **options).compile_update()


def use_layer() -> None:
    layer = glm()

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    hidden = torch.zeros(1, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    compiling.compile_for_all_lengths(run)(hidden).backward(torch.ones_like(hidden))


PARTS: dict[str, Callable[[], None]] = {
    "loss": use_loss,
    "experts": use_experts,
    "update": use_update,
    "layer": use_layer,
}


def compile_part(part: str, out: Path) -> None:
    kernels = compile_for_gpus()
    compiling.can_compile = lambda _: True
    PARTS[part]()
    out.write_text(json.dumps([kernel._asdict() for kernel in kernels.values()]), encoding="utf-8")


@pytest.mark.parametrize("part", PARTS)
def test_kernels_add_up_in_one_order_and_spill_nothing(part, tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    finish(on_ranks(1, compile_part, part, tmp_path / "kernels", cwd=tmp_path))
    kernels = json.loads((tmp_path / "kernels").read_text(encoding="utf-8"))
    assert kernels
    for kernel in kernels:
        # A router's gradient has an addition for each chosen expert, all to places of their own.
        if not re.search("gather|scatter", kernel["name"]) or "bf16" in kernel["types"]:
            assert "tl.atomic_add" not in kernel["source"]
        assert kernel["configurations"] == 1 or not kernel["reduces"], kernel["name"]
        assert not kernel["spilled"], kernel["name"]
