"""Attention, experts and the loss head on the GPU, against float64."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

from distTest.gpu_check.checks import Outcome, is_tiny, require
from shardtune.data.batch import Batch
from shardtune.model import documents
from shardtune.model.documents.attention import document_attention
from shardtune.model.loss import LossHead
from shardtune.model.moe.grouped_experts import expert_outputs

# Root mean square errors, relative to that of the float64 result. Bfloat16 rounds by 1.7e-3.
_LIMIT = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


def error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to that of `expected`."""
    difference = computed.double() - expected.double()
    return (difference.norm() / expected.double().norm().clamp(min=1e-300)).item()


def attention() -> Outcome:
    """Check attention by documents, forward and backward, in bfloat16 and in float32.

    In bfloat16 it must be the varlen kernel, and its backward must repeat to the bit.
    """
    lengths = [7, 1, 20, 36] if is_tiny() else [700, 1, 1300, 2095]
    # heads, key heads, width, window: of Llama, GLM-4.5-Air, and GPT-OSS (with sinks)
    shapes = [(4, 2, 16, 0), (4, 2, 16, 6)]
    if not is_tiny():
        shapes = [(32, 8, 128, 0), (96, 8, 128, 0), (64, 8, 64, 128)]
    problems, figures = list[str](), dict[str, Any]()
    for heads, key_heads, width, window in shapes:
        for dtype in _LIMIT:
            name = f"{heads} heads of {width} in {str(dtype).removeprefix('torch.')}"
            inputs = _projections(sum(lengths), heads, key_heads, width, dtype)
            if window:
                name += f", windows of {window} and sinks"
                inputs.append(torch.randn(heads).to("cuda", dtype).requires_grad_())
            errors, way = _attention_errors(inputs, lengths, window)
            figures[name] = {"errors": errors, "way": way}
            if not max(errors.values()) <= _LIMIT[dtype]:
                problems.append(f"{name}: {errors}")
            if dtype == torch.bfloat16:
                if way != "varlen attention":
                    problems.append(f"{name}: {way} instead of varlen attention")
                once, again = (_attend(inputs, lengths, window)[0] for _ in range(2))
                same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
                figures[name]["repeats_to_the_bit"] = same
                if not same:
                    problems.append(f"{name}: the backward does not repeat to the bit")
    worst = {
        dtype: max(max(f["errors"].values()) for name, f in figures.items() if dtype in name)
        for dtype in ("bfloat16", "float32")
    }
    text = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in worst.items())
    return require(problems, f"largest error against float64, gradients included: {text}", figures)


def _projections(
    tokens: int, heads: int, key_heads: int, width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, n, tokens, width).to("cuda", dtype).requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]


def _attend(
    inputs: list[torch.Tensor], lengths: list[int], window: int
) -> tuple[list[torch.Tensor], str]:
    """Return output and gradients of `document_attention`, and the kernels that it chose."""
    tried = documents.Tried()
    query, key, value, *sinks = inputs
    special: dict[str, Any] = {"sliding_window": window, "s_aux": next(iter(sinks), None)}
    with documents.of(documents.row_of(lengths, "cuda"), tried=tried):
        output, _ = document_attention(nn.Identity(), query, key, value, None, **special)
    weights = _weights(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return [output.detach(), *gradients], " and ".join(tried.ways)


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Return a gradient of the output that is the same in each dtype."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    return weights.to(torch.bfloat16).to("cuda", output.dtype)


def _attention_errors(
    inputs: list[torch.Tensor], lengths: list[int], window: int
) -> tuple[dict[str, float], str]:
    computed, way = _attend(inputs, lengths, window)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    groups = exact[0].shape[1] // exact[1].shape[1]
    query, key, value = exact[0], *(x.repeat_interleave(groups, 1) for x in exact[1:3])
    outputs = []
    for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        seen = seen.triu(1 - window) if window else seen
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks := exact[3:]:
            scores = torch.cat([scores, sinks[0].view(1, -1, 1, 1).expand_as(scores[..., :1])], -1)
        outputs.append(scores.softmax(-1)[..., : k.shape[-2]] @ v)
    output = torch.cat(outputs, 2).transpose(1, 2)
    expected = [output, *torch.autograd.grad((output * _weights(output)).sum(), exact)]
    names = ("output", "query", "key", "value", "sinks")
    return {n: error(a, b) for n, a, b in zip(names, computed, expected, strict=False)}, way


def experts() -> Outcome:
    """Check experts with odd numbers of rows, one without rows, and their gradients."""
    sizes = [1, 7, 0, 13, 27] if is_tiny() else [1, 7, 0, 13, 4075]
    problems, figures = list[str](), dict[str, Any]()
    for dtype in _LIMIT:
        name = str(dtype).removeprefix("torch.")
        computed, expected = _expert_tensors(sizes, dtype)
        errors = {key: error(computed[key], expected[key]) for key in expected}
        figures[name] = errors
        if not max(errors.values()) <= _LIMIT[dtype]:
            problems.append(f"{name}: {errors}")
        if any(computed[stack][2].any() for stack in ("gate_up_proj", "down_proj")):
            problems.append(f"{name}: an expert without rows has a gradient")
    worst = ", ".join(f"{max(errors.values()):.1e} in {name}" for name, errors in figures.items())
    summary = f"largest error of {sizes} rows against float64, gradients included: {worst}"
    return require(problems, summary, figures)


def _expert_tensors(
    sizes: list[int], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    width, inner = (32, 16) if is_tiny() else (4096, 1408)  # GLM-4.5-Air's
    shape = {"hidden_size": width, "moe_intermediate_size": inner, "n_routed_experts": len(sizes)}
    module = Glm4MoeExperts(AutoConfig.for_model("glm4_moe", **shape))
    torch.manual_seed(0)
    inputs: dict[str, Any] = {
        "rows": torch.randn(sum(sizes), width),
        "weights": torch.rand(sum(sizes), 1),
        **{
            name: torch.randn(stack.shape) / stack.shape[-1] ** 0.5
            for name, stack in module.named_parameters()
        },
    }
    dtypes = {name: torch.float32 if name == "weights" else dtype for name in inputs}
    inputs = {n: x.to("cuda", dtypes[n]).requires_grad_() for n, x in inputs.items()}
    for name in ("gate_up_proj", "down_proj"):
        module.register_parameter(name, nn.Parameter(inputs[name].detach()))
    inputs |= dict(module.named_parameters())
    counts = torch.tensor(sizes, device="cuda")
    ids = torch.arange(len(sizes), device="cuda").repeat_interleave(counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    output = expert_outputs(module, inputs["rows"], inputs["weights"], ids, ends)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    outputs = []
    parts = zip(exact["rows"].split(sizes), exact["weights"].split(sizes), strict=True)
    for expert, (rows, weights) in enumerate(parts):
        gate, up = (rows @ exact["gate_up_proj"][expert].t()).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        outputs.append(hidden @ exact["down_proj"][expert].t() * weights)
    return _with_gradients(output, inputs), _with_gradients(torch.cat(outputs), exact)


def _with_gradients(
    output: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    gradients = torch.autograd.grad((output * _weights(output)).sum(), list(inputs.values()))
    return {"output": output.detach(), **dict(zip(inputs, gradients, strict=True))}


def loss_head() -> Outcome:
    """Check head and loss in chunks against float64, and their memory against plain logits."""
    tokens, width, vocabulary = (64, 32, 512) if is_tiny() else (4096, 4096, 151552)
    torch.manual_seed(0)
    hidden: Any = torch.randn(1, tokens, width).to("cuda", torch.bfloat16).requires_grad_()
    head: Any = nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (tokens,)).cuda()
    everything = torch.arange(tokens, device="cuda")
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    # As `use_loss_head` does to a model's head, here without a model.
    head.__class__, head.is_last, head.device_type = LossHead, True, "cuda"
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    head.batch = Batch(ids, None, None, everything, targets, [tokens], ends)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = head(hidden)
    (loss / tokens).backward()
    peak = torch.cuda.max_memory_allocated() - before
    nll, in_hidden, in_weight = _exact_head(hidden[0].detach(), head.weight.detach(), targets)
    figures = {
        "loss": abs(loss.item() / nll - 1),
        "hidden": error(hidden.grad[0], in_hidden),
        "weight": error(head.weight.grad, in_weight),
        "peak_bytes": peak,
        "plain_logits_bytes": 4 * tokens * vocabulary,
    }
    problems = [
        f"{name}: error {figures[name]:.1e} over {limit:.0e}"
        for name, limit in {"loss": 2e-4, "hidden": 1e-2, "weight": 1e-2}.items()
        if not figures[name] <= limit
    ]
    summary = (
        f"errors against float64: {figures['loss']:.1e} of the loss, {figures['hidden']:.1e} and "
        f"{figures['weight']:.1e} of the gradients; {peak / 1e9:.2f} GB, where one copy of the "
        f"logits in float32 takes {figures['plain_logits_bytes'] / 1e9:.2f}"
    )
    return require(problems, summary, figures)


def _exact_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the summed loss and the gradients of its mean, in float64, by rows."""
    nll, in_hidden = 0.0, []
    in_weight = torch.zeros_like(weight, dtype=torch.float64)
    wide = weight.double()
    for rows, wanted in zip(hidden.double().split(256), targets.split(256), strict=True):
        logits = rows @ wide.t()
        nll += nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        probabilities = logits.softmax(1)
        probabilities[torch.arange(len(wanted)), wanted] -= 1
        probabilities /= len(hidden)
        in_hidden.append(probabilities @ wide)
        in_weight += probabilities.t() @ rows
    return nll, torch.cat(in_hidden), in_weight
