"""Compare documents in a packed row with each alone, by transformers' own attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from distTest.gpu_check.checks import Outcome, is_tiny, require
from distTest.gpu_check.exactness import error
from distTest.workloads.batch import batch_of
from shardtune.model import documents
from shardtune.model.documents.attention import DOCUMENT_ATTENTION
from shardtune.model.loss import summed_loss, use_loss_head

SMALL: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024}
SMALL |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "pad_token_id": 2, "initializer_range": 0.1}
SMALL |= {"max_position_embeddings": 4096, "use_cache": False}
EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4}
EXPERTS |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
FAMILIES = {"llama": SMALL, "glm4_moe": SMALL | EXPERTS}
# Errors of the loss and of all gradients together, from another order of sums, or from bfloat16,
# which also sends some tokens to other experts. If a document saw another one, the gradients would
# change by about their own size.
_LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-3, 0.15)}


def packing() -> Outcome:
    """Check loss and gradients of a packed row, for a dense model and one with experts."""
    problems, figures = list[str](), dict[str, Any]()
    for family in FAMILIES:
        for dtype, limits in _LIMITS.items():
            name = f"{family} in {str(dtype).removeprefix('torch.')}"
            tried = documents.Tried()
            errors = _errors(family, dtype, tried)
            figures[name] = {"loss": errors[0], "gradients": errors[1]}
            figures[name]["ways"] = sorted(tried.ways)
            if not all(e <= limit for e, limit in zip(errors, limits, strict=True)):
                problems.append(f"{name}: {errors[0]:.1e} of the loss, {errors[1]:.1e}")
    text = ", ".join(f"{f['gradients']:.1e} ({name})" for name, f in figures.items())
    return require(problems, f"gradients packed and alone differ by {text}", figures)


def _errors(family: str, dtype: torch.dtype, tried: documents.Tried) -> tuple[float, float]:
    torch.manual_seed(0)
    settings = FAMILIES[family] | (TINY if is_tiny() else {})
    config = AutoConfig.for_model(family, **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda()
    lengths = [9, 1, 30] if is_tiny() else [300, 1, 47, 676]
    ids = [torch.randint(3, 4096, (n,)) for n in lengths]
    alone = torch.zeros((), dtype=torch.float64, device="cuda")
    for document in ids:
        row = document.cuda()
        logits = model(input_ids=row.view(1, -1)).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), row[1:], reduction="sum")
        loss.backward()
        alone += loss.detach()
    expected = _take_gradients(model)
    model.set_attn_implementation(DOCUMENT_ATTENTION)
    batch = batch_of(ids).to(torch.device("cuda"))
    use_loss_head(model, torch.device("cuda"))
    with documents.of(batch, tried=tried):
        loss = summed_loss(model, batch)
        loss.backward()
    difference = abs(loss.item() / alone.item() - 1)
    return difference, error(_take_gradients(model), expected)


def _take_gradients(model: Any) -> torch.Tensor:
    """Return all gradients in one vector on the CPU, and drop them."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat([gradient.float().flatten().cpu() for gradient in gradients])
