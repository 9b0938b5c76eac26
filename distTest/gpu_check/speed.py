"""Time two models in full rows, and compare the peak of their memory with the plan.

Both have random weights, which the device draws in seconds. A step behind the timed ones is
profiled.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distTest.gpu_check.checks import Failed, Outcome, Skipped, is_tiny, require, result_path
from distTest.gpu_check.training import Run, save_model, train, work_folder, write_rows
from distTest.workloads.shapes import slice_of
from shardtune.config_io import load_config
from shardtune.distributed.compiling import can_compile
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.run_plan import as_prediction

# As in config.yaml, where one of several ranks holds less of each parameter.
SETTINGS = (
    "model.master_dtype=bfloat16",
    "model.activation_checkpointing=full",
    "optimizer.name=adamw8bit",
)
_BYTES_PER_PARAMETER, _SHARE = 9, 0.7  # of these settings, and of the GPU's memory
_STEPS, _TIMED = 7, slice(2, 5)  # the first steps compile
_PROFILED = 6  # the step's number, and one follows: the profile is written before it
_LOSS_LIMIT = 1e-2  # relative, of bfloat16 losses: tokens near a tie change experts
_MEMORY_LIMIT = 0.05
_SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_SMALL |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def glm() -> Outcome:
    """Measure the shipped settings on the layers of GLM-4.5-Air that the GPU has room for."""
    most = _SHARE * torch.cuda.mem_get_info()[1] / _BYTES_PER_PARAMETER
    return _measure("GLM-4.5-Air", most, *SETTINGS)


def llama_lora() -> Outcome:
    """Measure adapters on the whole of Llama 3 8B."""
    settings = ["lora.rank=16", "model.activation_checkpointing=full", "train.micro_batch_size=2"]
    return _measure("Llama 3 8B", math.inf, *settings)


def _measure(shape: str, most_parameters: float, *settings: str) -> Outcome:
    """Measure speed, losses and memory, eager and compiled."""
    length, layers, small = (256, 2, _SMALL) if is_tiny() else (4096, None, None)
    part = slice_of(shape, length, most_parameters, layers, small)
    assignments = [
        f"model.path={save_model('model', part.model_type, part.settings)}",
        "model.init=random",
        "model.compute_dtype=bfloat16",
        f"data.train={write_rows(16, length)}",
        f"data.max_length={length}",
        "data.overflow=truncate",
        "train.epochs=99",
        "train.gradient_accumulation_steps=2",
        f"train.max_steps={_STEPS}",
        "optimizer.lr=1e-4",
        f"logging.profile_steps=[{_PROFILED},{_PROFILED}]",
        *settings,
    ]
    plan, planned = _plan([*assignments, "model.compile=false"]), work_folder() / "plan.json"
    planned.write_text(json.dumps(as_prediction(plan)), encoding="utf-8")
    sides = {"eager": "false"}
    if can_compile(torch.device("cuda")):
        sides["compiled"] = "true"
    figures: dict[str, Any] = {
        "model": f"{shape}, {part}",
        "parameters": plan.parameters,
        "row_tokens": length,
        "command": " ".join(["train_fsdp.py", *assignments]).replace(f"{work_folder()}/", ""),
    }
    problems, texts = list[str](), [f"{part}, rows of {length} tokens"]
    for side, compiled in sides.items():
        ways = ["drawn_on_device", f"planned={planned}"]
        run = train(side, *assignments, f"model.compile={compiled}", ways=ways)
        _keep_profile(side, run)
        figures[side] = _figures(run)
        texts.append(_speed(side, figures[side]))
        pairs = zip(figures[side]["losses"], figures["eager"]["losses"], strict=True)
        if not (apart := max(abs(a / b - 1) for a, b in pairs)) <= _LOSS_LIMIT:
            problems.append(f"{side}: losses are {apart:.1e} from the eager ones")
    if "compiled" not in sides:
        texts.append("compiled: skipped, since nothing is compiled here")
    # A plan does not count on what compiled layers save.
    problem, text, figures["memory"] = _compare(plan, figures["eager"])
    return require([*problems, *problem], "; ".join([*texts, text]), figures)


def _plan(assignments: Sequence[str]) -> Plan:
    """Plan a run on this GPU.

    Raises:
        Failed: the plan is a bound only.
        Skipped: the run does not fit.
    """
    total = torch.cuda.mem_get_info()[1]
    config = load_config(Path(os.devnull), assignments, {})
    model_config = read_model_config(config.model)
    # The rates are made up: memory alone is compared.
    plan = make_plan(config, model_config, Machine(1, 1, total, 1e9, 1e9, 1e15))
    if not plan.is_simulated:
        raise Failed(f"the plan is a bound only: {plan.reason}")
    if not plan.fits:
        needs, has = (f"{n / 1e9:.0f} GB" for n in (plan.peak_bytes, total))
        raise Skipped(f"the run takes {needs}, and the GPU has {has}")
    return plan


def _compare(plan: Plan, measured: dict[str, Any]) -> tuple[list[str], str, dict[str, Any]]:
    phase, peak = max(plan.peaks.items(), key=lambda item: item[1].n_bytes)
    reached, reserved = measured["peak_bytes"], measured["reserved_bytes"]
    figures = {
        "planned_bytes": peak.n_bytes,
        "planned_pools_bytes": plan.pools_bytes,
        "planned_by_cause": {str(cause): size for cause, size in peak.by_cause.items()},
        "measured_bytes": reached,
        "reserved_bytes": reserved,
    }
    apart = peak.n_bytes / reached - 1
    text = (
        f"{reached / 1e9:.2f} GB allocated at most, {reserved / 1e9:.2f} GB reserved; the plan "
        f"says {peak.n_bytes / 1e9:.2f} GB in {phase} ({apart:+.1%}), and "
        f"{plan.pools_bytes / 1e9:.2f} GB in the streams' pools"
    )
    is_near = abs(apart) <= _MEMORY_LIMIT
    return [] if is_near else [f"the plan is {apart:+.1%} from the peak"], text, figures


def _keep_profile(side: str, run: Run) -> None:
    """Keep the trace of the profiled step beside the results, and print its table."""
    folder = run.directory / "profile"
    (trace,), (table,) = folder.glob("*.json.gz"), folder.glob("*.txt")
    shutil.copy(trace, result_path().with_suffix(f".{side}.trace.json.gz"))
    print(f"{side}, step {_PROFILED}\n{table.read_text(encoding='utf-8')}")


def _figures(run: Run) -> dict[str, Any]:
    steps = run.steps
    mfu = [step["mfu"] for step in steps[_TIMED]]
    return {
        "losses": [step["loss"] for step in steps],
        "tokens_per_second": _spread([step["tokens_per_second"] for step in steps[_TIMED]], 0),
        "mfu": None if None in mfu else _spread(mfu, 4),
        "peak_bytes": steps[-1]["memory_bytes"],
        "reserved_bytes": steps[-1]["reserved_memory_bytes"],
    }


def _spread(values: list[float], digits: int) -> dict[str, float]:
    spread = {"least": min(values), "median": median(values), "most": max(values)}
    return {name: round(value, digits) for name, value in spread.items()}


def _speed(side: str, figures: dict[str, Any]) -> str:
    low, middle, high = (f"{value:.0f}" for value in figures["tokens_per_second"].values())
    mfu = "unknown" if figures["mfu"] is None else f"{figures['mfu']['median']:.1%}"
    return f"{side} {middle} tokens/s ({low} to {high}), MFU {mfu}"
