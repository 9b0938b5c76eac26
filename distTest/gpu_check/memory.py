"""The peak of a GPU's allocated memory against what the planner says of the same run."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from distTest.gpu_check.checks import Failed, Outcome, Skipped, is_tiny, require
from distTest.gpu_check.runs import save_model, train, write_text
from distTest.workloads.shapes import slice_of
from shardtune.config_io import load_config
from shardtune.model.files import read_model_config
from shardtune.planner.machine import Machine
from shardtune.planner.plan import make_plan

_LIMIT = 0.05
_TINY = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_TINY |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SHARE = 0.5  # of the GPU's memory that states may take; the rest is for activations


def dense_8b() -> Outcome:
    """As many layers of Llama 3 8B as fit, in float32."""
    return _compare("llama3-8b", 18)


def glm() -> Outcome:
    """As many layers of GLM-4.5-Air as fit, in bfloat16 with moments of 8 bits."""
    more = ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"]
    return _compare("glm-4.5-air, real width", 9, *more, "model.activation_checkpointing=full")


def lora() -> Outcome:
    """Adapters on Llama 3 8B."""
    more = ["lora.rank=16", "model.activation_checkpointing=selective"]
    return _compare("llama3-8b", 2.5, *more)


def _compare(name: str, bytes_per_parameter: float, *more: str) -> Outcome:
    """Plan a run of three steps of two full rows, make it, and compare the peaks."""
    length, layers, small = (256, 3, _TINY) if is_tiny() else (4096, None, None)
    total = torch.cuda.mem_get_info()[1]
    part = slice_of(name, length, _SHARE * total / bytes_per_parameter, layers, small)
    assignments = [
        f"model.path={save_model('model', part.model_type, part.settings)}",
        "model.init=random",
        "model.compute_dtype=bfloat16",
        f"data.train={write_text(16, length)}",
        f"data.max_length={length}",
        "data.overflow=split",
        "train.epochs=99",
        "train.max_steps=3",
        "train.gradient_accumulation_steps=2",
        *more,
    ]
    config = load_config(Path(os.devnull), assignments, {})
    model_config = read_model_config(config.model, config.data.max_length)
    machine = Machine(1, 1, total, 1e9, 1e9, 1e15)
    plan = make_plan(config, model_config, machine)
    phase, peak = max(plan.peaks.items(), key=lambda item: item[1].n_bytes)
    if plan.reason:
        raise Failed(f"the plan is a bound only: {plan.reason}")
    if not plan.fits:
        needs, has = (f"{n / 1e9:.0f} GB" for n in (plan.peak_bytes, total))
        raise Skipped(f"{part.layers} layers, the fewest, take {needs}, and the GPU has {has}")
    steps = train("run", *assignments, draws_on_device=True).steps
    measured = steps[-1]["memory_bytes"]
    figures = {
        "layers": part.layers,
        "parameters": plan.parameters,
        "planned_bytes": peak.n_bytes,
        "planned_pools_bytes": sum(plan.pools),
        "planned_by_cause": {str(cause): size for cause, size in peak.by_cause.items()},
        "measured_bytes": measured,
        "reserved_bytes": steps[-1]["reserved_memory_bytes"],
        "seconds": [step["seconds"] for step in steps],
    }
    apart = peak.n_bytes / measured - 1
    summary = (
        f"{part.layers} layers, {plan.parameters / 1e9:.2f}e9 parameters: {measured / 1e9:.2f} GB "
        f"allocated at most, {figures['reserved_bytes'] / 1e9:.2f} GB reserved; the plan says "
        f"{peak.n_bytes / 1e9:.2f} GB in {phase} ({apart:+.1%}), and "
        f"{sum(plan.pools) / 1e9:.2f} GB in the streams' pools"
    )
    return require([] if abs(apart) <= _LIMIT else [f"{apart:+.1%}"], summary, figures)
