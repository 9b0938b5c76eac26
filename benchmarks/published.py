"""Plans of runs that others measured on GPUs and published; writes docs/published.md.

benchmarks/published.yaml has the runs, benchmarks/published.json what their plans count. With the
ids of some runs, only these are planned anew; the page has the stored figures of the others.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median, stdev
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import yaml
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.plans import CONFIGS
from distTest.workloads.script import REPOSITORY
from shardtune.cards import card_named
from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model import recomputation
from shardtune.model.source.files import read_model_config
from shardtune.planner import make_plan
from shardtune.planner.arithmetic.figures import Kernel, Kind
from shardtune.planner.arithmetic.machine import Gpu, Machine, seconds, with_gathers
from shardtune.planner.arithmetic.machine import gpu_of as rates_of
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.training import pipeline
from shardtune.training.states.reshard import ReshardPolicy

PAGE = REPOSITORY / "docs/published.md"
RUNS = REPOSITORY / "benchmarks/published.yaml"
FIGURES = REPOSITORY / "benchmarks/published.json"
# Beyond these bounds of planned / measured the page says why a pair differs.
BOUNDS = (0.9, 1.1), (0.7, 1.3)  # of memory, of seconds
_LAYERS = {
    "eager": "dense, eager",
    "compiled": "dense, compiled or fused",
    "mixture": "mixtures of experts",
}
_HEAD = """# Published runs

Others measured these runs on GPUs and published them; no GPU has run shardtune. Each plan makes the
choices of the program that ran: its logits, its checkpointing, what it keeps gathered.
`python -m benchmarks published` plans the runs and writes this page; `benchmarks/published.yaml`
has all settings, sources and causes, and says which runs are the best.
"""
_UNITS = """
Rows×tokens are of a micro-batch; bfloat16: masters and moments, too. GB: all that PyTorch
reserved, else tensors; * adjusted by arithmetic. Seconds: kernels of eager layers and gathers of
mixtures, without the network.
"""
_COLUMNS = ("run", "model", "GPUs", "rows", "checkpointing", "layers")
_COLUMNS += ("GB", "planned", "ratio", "s", "planned", "ratio")
_PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines"
_ALLOWANCE = f"""
## Memory beside PyTorch's

These reports are behind the memory that a plan allows for it:

- One process, 1.3 GB: [prime-rl]({_PRIME}/benchmark-1xh100-Qwen--Qwen3-0.6B-sft-full-1gpu-\
Recompute-flash_attention_3-65536-cp1-ep1.json) had 44.69 GiB in use, 43.38 allocated, 0.10 cached.
- In a group, 2.5 GB: [prime-rl]({_PRIME}), Qwen3-235B on 8 B200: 171.05, 168.36 and 0.41 GiB.
- All-to-alls, 3.3 GB: 1.06 GB before the first and 4.34 GB after it
  ([NCCL issue 1685](https://github.com/NVIDIA/nccl/issues/1685)).
- Fragmentation, 5% of PyTorch's memory: what runs above reserved beyond their plans."""
_MISSES = """## Why pairs differ

Memory beyond 10% and seconds beyond 30%:
"""
Row = dict[str, Any]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the id of a run; else all")


def main(options: Namespace) -> None:
    groups, counted = read()
    runs = {row["id"]: row for row in (*groups["best"], *groups["others"])}
    if unknown := set(options.names) - set(runs):
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such run - take {', '.join(runs)}")
    chosen = [runs[name] for name in options.names or runs]
    for name in sorted(set(map(_plan_id, chosen))):
        counted[name] = count(runs[name])
    for row in chosen:
        (measured_gb, planned_gb), (measured_s, step_s) = compare(row, counted)
        print(f"{row['id']}: {planned_gb:.1f} GB planned, {measured_gb:.1f} measured", end="; ")
        print(f"{step_s:.2f} s a step planned, {measured_s:.2f} measured")
    lines = (f"{json.dumps(name)}: {json.dumps(counted[name])}" for name in sorted(counted))
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE.write_text(page(groups, counted), encoding="utf-8")


def read() -> tuple[dict[str, list[Row]], dict[str, Row]]:
    """Return the runs, best and others, and what their plans count, by id."""
    groups = yaml.safe_load(RUNS.read_text("utf-8"))
    return groups, json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}


@contextmanager
def as_theirs(
    reshard: bool = False,
    keep_gradients: bool = False,
    plain_loss: str = "",
    titan_sac: bool = False,
) -> Iterator[None]:
    """Let simulated steps choose as another program does.

    `reshard`: no group stays gathered, and each micro-batch reduces its gradients unless
    `keep_gradients`. `plain_loss`: logits of all tokens at once, in "bf16" or "float"; "keep_float"
    keeps them through the backward. `titan_sac`: selective checkpointing keeps every second
    product.
    """
    with ExitStack() as stack:
        if reshard:
            choice = ReshardPolicy(0, keep_gradients), 0.0, 0.0
            stack.enter_context(patch.object(make_plan, "decide", lambda *_: choice))
        if plain_loss:
            loss = partial(_plain_loss, plain_loss)
            stack.enter_context(patch.object(pipeline, "summed_loss", loss))
        if titan_sac:
            contexts = "create_selective_checkpoint_contexts"
            stack.enter_context(patch.object(recomputation, contexts, _every_second_product))
        yield


def _plain_loss(kind: str, model: Any, batch: Any) -> torch.Tensor:
    logits = model(**batch.inputs()).logits.flatten(0, 1)
    if kind != "bf16":
        logits = logits.float()
    targets = batch.targets.new_zeros(len(logits))
    loss: Any = F.cross_entropy(logits, targets, reduction="sum")
    if kind == "keep_float":
        loss.logits = logits
    return loss


def _every_second_product(kept: list[Any]) -> Any:
    """Return the contexts of a layer's forward and its repetition, as torchtitan makes them."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operator in kept
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Simulations(Simulations):
    """Simulations that keep the last measures."""

    def measure(self, *arguments: Any) -> Any:
        self.last = super().measure(*arguments)
        return self.last


def count(row: Row) -> Row:
    """Plan a published run and return what the plan counts, which no rate of a GPU changes."""
    planned = row["planned"]
    quiet_libraries(is_main=False)
    keys = [f"model.path={CONFIGS / planned['model']}", "run.dir=none", "data.train=unread"]
    config = load_config({}, [*keys, *planned["keys"].split()], {})
    without_weights = config.model.model_copy(update={"init": "random"})
    model_config = read_model_config(without_weights)
    # No step is cut into tiles where memory has no end.
    machine = Machine(planned["nodes"], planned["gpus_per_node"], math.inf, 1.0, 1.0, 1.0)
    simulations = _Simulations(model_config, imbalance=1.0)  # published routing is balanced
    with as_theirs(**planned.get("as_theirs", {})):
        plan = make_plan.make_plan(config, model_config, machine, simulations)
    states, layout = plan.states, plan.layout
    weights = states.gradients if layout.is_lora else states.parameters
    inside = Counter(plan.received[1])
    return {
        "allocated_gb": round(plan.allocated_bytes / 1e9, 3),
        "pools_gb": round(plan.pools_bytes / 1e9, 3),
        "update_bytes": 2 * (weights + states.optimizer + states.gradients),
        "gathered_bytes": round(inside["all-gather"] + inside["reduce-scatter"]),
        "kernels": _grouped(simulations.last.step_kernels(layout.micro_batches)),
    }


def _grouped(kernels: Counter[Kernel]) -> list[list[Any]]:
    """Return [kind, operator, number, mean bytes, mean FLOPs] of kernels alike in FLOPs a byte."""
    groups: dict[tuple[Kind, str, int], list[int]] = {}
    for (kind, operator, n_bytes, flops), n in kernels.items():
        intensity = round(2 * math.log2(flops / n_bytes)) if flops else 0
        name = operator if kind == Kind.COLLECTIVE else ""
        total = groups.setdefault((kind, name, intensity), [0, 0, 0])
        total[:] = total[0] + n, total[1] + n * n_bytes, total[2] + n * flops
    return [
        [kind, operator, n, n_bytes // n, flops // n]
        for (kind, operator, _), (n, n_bytes, flops) in sorted(groups.items())
    ]


def gpu_of(row: Row) -> Gpu:
    """Return the rates of the run's GPU."""
    card = card_named(row["gpu"])
    gpu = rates_of(
        replace(card, bytes_per_s=1e12 * row.get("memory_tb_s", card.bytes_per_s / 1e12))
    )
    if row.get("flash_attention") == 3:
        return Gpu(gpu.card, gpu.products, attention=550e12, attention_backward=400e12)
    return gpu


def planned_s(row: Row, figures: Row) -> float:
    """Return the seconds of a step's kernels at the rates of the run's GPU."""
    gpu = gpu_of(row)
    kernels = {
        Kernel(Kind(kind), operator, n_bytes, flops): n
        for kind, operator, n, n_bytes, flops in figures["kernels"]
    }
    kernels_s = seconds(kernels, gpu) + figures["update_bytes"] / gpu.bytes_per_s
    is_spread = any("alltoall" in kernel.operator for kernel in kernels)
    is_hidden = row["layers"] != "mixture" or is_spread
    return with_gathers(kernels_s, figures["gathered_bytes"], gpu, is_hidden)


def _plan_id(row: Row) -> str:
    """Return the id of the run with this run's plan: another run's, or its own."""
    return row["planned"] if isinstance(row["planned"], str) else row["id"]


def compare(row: Row, counted: dict[str, Row]) -> list[tuple[float, float]]:
    """Return measured and planned GB, then measured and planned seconds; NaN if not measured."""
    figures, measured = counted[_plan_id(row)], row["measured"]
    part = "pools_gb" if measured.get("memory_kind") == "reserved" else "allocated_gb"
    planned_gb = figures[part] + row.get("known_difference_gb", 0.0)
    memory = measured.get("memory_gb", math.nan), planned_gb
    return [memory, (measured["step_s"], planned_s(row, figures))]


def page(groups: dict[str, list[Row]], counted: dict[str, Row]) -> str:
    """Return docs/published.md."""
    best, rows = groups["best"], [*groups["best"], *groups["others"]]
    found = {row["id"]: compare(row, counted) for row in rows}
    lines = [
        _HEAD,
        *_head("planned / measured", "runs", "median", "least", "most", "standard deviation"),
    ]
    parts = [("memory, best runs", 0, best), ("memory", 0, rows), ("seconds, best runs", 1, best)]
    for layers, words in _LAYERS.items():
        parts.append((f"seconds, {words}", 1, [row for row in rows if row["layers"] == layers]))
    for title, place, chosen in parts:
        of = [_ratio(found[row["id"]][place]) for row in chosen]
        of = [ratio for ratio in of if not math.isnan(ratio)]
        figures = (f"{n:.2f}" for n in (median(of), min(of), max(of), stdev(of)))
        lines.append(_line(title, len(of), *figures))
    lines.append(_UNITS.rstrip())
    for title, group in zip(("Best runs", "Other runs"), groups.values(), strict=True):
        lines += ["", f"## {title}", "", *_head(*_COLUMNS)]
        lines += [_run(row, *found[row["id"]]) for row in group]
    lines += ["", _MISSES]
    causes: dict[str, list[str]] = {}
    for row in rows:
        pairs = zip(map(_ratio, found[row["id"]]), BOUNDS, strict=True)
        if any(ratio < least or ratio > most for ratio, (least, most) in pairs):
            causes.setdefault(row["differs"], []).append(f"`{row['id']}`")
    lines += [f"- {', '.join(ids)}: {cause}." for cause, ids in causes.items()]
    return "\n".join([*lines, _ALLOWANCE]) + "\n"


def _ratio(pair: tuple[float, float]) -> float:
    measured, planned = pair
    return planned / measured


def _run(row: Row, memory: tuple[float, float], times: tuple[float, float]) -> str:
    marks = "*" * ("known_difference_gb" in row)
    gigabytes = [f"{memory[0]:.1f}", f"{memory[1]:.1f}{marks}", f"{_ratio(memory):.2f}"]
    if math.isnan(memory[0]):
        gigabytes = [""] * 3
    figures = [*gigabytes, *(f"{n:.2f}" for n in (*times, _ratio(times)))]
    return _line(f"[{row['id']}]({row['link']})", *row["title"].split(", "), *figures)


def _head(*cells: str) -> list[str]:
    return [_line(*cells), _line(*("---" for _ in cells))]


def _line(*cells: Any) -> str:
    return f"|{'|'.join(map(str, cells))}|"
