"""Compare the peak of a GPU's allocated memory with the plan of the same run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distTest.gpu_check.checks import Failed, Outcome, Skipped, is_tiny, require
from distTest.gpu_check.runs import Run, save_model, train, work_folder, write_rows
from distTest.workloads.shapes import Slice, slice_of
from shardtune.config_io import load_config
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.run_plan import as_prediction

_LIMIT = 0.05
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SMALL |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Job:
    """A run of the first layers of a shape, in full rows of one document, and its plan."""

    part: Slice
    assignments: list[str]
    plan: Plan

    def run(self, name: str, *more: str, ways: Sequence[str] = ()) -> Run:
        """Run the job with its plan, and with random weights that the device draws in seconds."""
        planned = work_folder() / "plan.json"
        planned.write_text(json.dumps(as_prediction(self.plan)), encoding="utf-8")
        ways = ["drawn_on_device", f"planned={planned}", *ways]
        return train(name, *self.assignments, *more, ways=ways)


def slice_that_fits(
    shape: str, bytes_per_parameter: float, length: int = 4096, share: float = 0.5
) -> Slice:
    """Return the layers that take a share of the GPU's memory, for rows of `length` tokens."""
    length, layers, small = (256, 2, SMALL) if is_tiny() else (length, None, None)
    total = torch.cuda.mem_get_info()[1]
    return slice_of(shape, length, share * total / bytes_per_parameter, layers, small)


def plan_job(part: Slice, *more: str) -> Job:
    """Plan a run of these layers.

    Raises:
        Failed: the plan is a bound only.
        Skipped: the layers do not fit.
    """
    length, total = part.row_tokens, torch.cuda.mem_get_info()[1]
    assignments = [
        f"model.path={save_model('model', part.model_type, part.settings)}",
        "model.init=random",
        "model.compute_dtype=bfloat16",
        "model.compile=false",
        f"data.train={write_rows(16, length)}",
        f"data.max_length={length}",
        "data.overflow=truncate",
        "train.epochs=99",
        "train.gradient_accumulation_steps=2",
        *more,
    ]
    config = load_config(Path(os.devnull), assignments, {})
    model_config = read_model_config(config.model, config.data.max_length)
    # The rates are made up: memory alone is compared.
    plan = make_plan(config, model_config, Machine(1, 1, total, 1e9, 1e9, 1e15))
    if not plan.is_simulated:
        raise Failed(f"the plan is a bound only: {plan.reason}")
    if not plan.fits:
        needs, has = (f"{n / 1e9:.0f} GB" for n in (plan.peak_bytes, total))
        raise Skipped(f"{part.layers} layers, the fewest, take {needs}, and the GPU has {has}")
    return Job(part, assignments, plan)


def compare(job: Job, run: Run) -> tuple[list[str], str, dict[str, Any]]:
    """Return the problems, a summary and the figures of the peak that was planned and reached."""
    phase, peak = max(job.plan.peaks.items(), key=lambda item: item[1].n_bytes)
    last = run.steps[-1]
    measured, pools = last["memory_bytes"], job.plan.pools_bytes
    figures = {
        "planned_bytes": peak.n_bytes,
        "planned_pools_bytes": pools,
        "planned_by_cause": {str(cause): size for cause, size in peak.by_cause.items()},
        "measured_bytes": measured,
        "reserved_bytes": last["reserved_memory_bytes"],
    }
    apart = peak.n_bytes / measured - 1
    summary = (
        f"{measured / 1e9:.2f} GB allocated at most, {figures['reserved_bytes'] / 1e9:.2f} GB "
        f"reserved; the plan says {peak.n_bytes / 1e9:.2f} GB in {phase} ({apart:+.1%}), and "
        f"{pools / 1e9:.2f} GB in the streams' pools"
    )
    problems = [] if abs(apart) <= _LIMIT else [f"the plan is {apart:+.1%} from the peak"]
    return problems, summary, figures


def dense_8b() -> Outcome:
    """Check as many layers of Llama 3 8B as fit, in float32."""
    return _check("llama3-8b", 18)


def lora() -> Outcome:
    """Check adapters on Llama 3 8B."""
    more = ["lora.rank=16", "model.activation_checkpointing=selective"]
    return _check("llama3-8b", 2.5, *more)


def _check(shape: str, bytes_per_parameter: float, *more: str) -> Outcome:
    job = plan_job(slice_that_fits(shape, bytes_per_parameter), *more)
    problems, summary, figures = compare(job, job.run("run", "train.max_steps=3"))
    parameters = job.plan.parameters
    figures |= {"layers": job.part.layers, "parameters": parameters}
    return require(problems, f"{job.part}, {parameters / 1e9:.2f}e9 parameters: {summary}", figures)
