"""The kernels, bytes and waits of one rank's step, counted without a GPU, and its time by them.

A rank of the real shape takes a step on a pretended GPU without contents (needs g++). A layer is
the difference of two depths; it is one with experts where the model has them, in one micro-batch.
With stages the rank is the first of the last one, which has the head. Bytes are those of tensors
that kernels read and write. Milliseconds and MFU are computed by shardtune/planner/roofline.py, and
the network between nodes is left out: no GPU has run this.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from distTest.workloads.script import REPOSITORY
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.log import quiet_libraries
from shardtune.model.build import whole_on_meta
from shardtune.model.files import read_model_config
from shardtune.model.stages import layers_of_stages
from shardtune.planner.command import add_arguments, machine_of
from shardtune.planner.extrapolate import cuts, layer_kinds, with_layers
from shardtune.planner.kernels import Kernel, Kind
from shardtune.planner.plan import Plan, make_plan
from shardtune.planner.roofline import GPUS, launched, moved_bytes, seconds
from shardtune.planner.simulate import fake_world
from tests.pretend_gpu.count import counted

CONFIGS = REPOSITORY / "tests/data/configs"
# Config file, model, nodes, and settings beside the file's.
SHAPES = {
    "Llama 3 8B": ("examples/llama-3-8b.yaml", "llama-3-8b", 1, ()),
    "Qwen3-30B-A3B": ("examples/qwen3-30b-a3b.yaml", "qwen3-30b-a3b", 1, ("data.max_length=4096",)),
    "GLM-4.5-Air": (
        "config.yaml",
        "glm-4.5-air",
        2,
        ("parallel.stages=1", "train.gradient_accumulation_steps=2"),
    ),
    "GLM-4.5-Air, config.yaml": ("config.yaml", "glm-4.5-air", 2, ()),
}


@dataclass
class Part:
    """A part of a step: how often each kernel runs, and the host's waits."""

    kernels: Mapping[Kernel, float]
    waits: float

    def plus(self, other: Part, times: float) -> Part:
        keys = self.kernels.keys() | other.kernels.keys()
        kernels = {k: self.kernels.get(k, 0) + times * other.kernels.get(k, 0) for k in keys}
        return Part(kernels, self.waits + times * other.waits)

    def times(self, factor: float) -> Part:
        return Part({}, 0).plus(self, factor)


def add_options(parser: ArgumentParser) -> None:
    add_arguments(parser, needs_config=False)


def main(options: Namespace) -> None:
    quiet_libraries(is_main=False)
    if options.config:
        print(*measure(options).lines(), sep="\n")
        return
    for name, (file, model, nodes, settings) in SHAPES.items():
        print(f"{name}: {file} {' '.join(settings)}")
        options.config, options.nodes = REPOSITORY / file, nodes
        options.assignments = [f"model.path={CONFIGS / model}", *settings]
        print(*measure(options).lines(), "", sep="\n", flush=True)


@dataclass
class StepCount:
    """The parts of one rank's step, and what the whole model computes in it."""

    parts: dict[str, Part]
    flops_of_rank: float  # that MFU counts
    bubble: float
    trace: list[str]

    def lines(self) -> Iterator[str]:
        for name, part in self.parts.items():
            times = ", ".join(f"{gpu.name} {ms(seconds(part.kernels, gpu))}" for gpu in GPUS)
            fields = [
                f"{round(launched(part.kernels)):,} kernels",
                f"{moved_bytes(part.kernels) / 1e9:.1f} GB",
                f"{round(part.waits):,} waits",
                f"{moved_bytes(part.kernels, Kind.OTHER) / 1e9:.1f} GB beside products, attention "
                f"and {moved_bytes(part.kernels, Kind.COPY) / 1e9:.1f} GB of FSDP's copies",
                f"computed: {times}",
            ]
            yield f"{name}: {', '.join(fields)}"
            yield f"    most bytes: {', '.join(most(part.kernels))}"
        step = self.parts["step"].kernels
        for gpu in GPUS:
            time = seconds(step, gpu) / (1 - self.bubble)
            mfu = self.flops_of_rank / time / gpu.peak
            yield f"computed for {gpu.name}: {time:.2f} s a step, {mfu:.1%} MFU"
        yield f"Order of one micro-batch of a few layers ({LETTERS}):"
        yield from (f"    {line}" for line in self.trace)


LETTERS = (
    "A gathers, R reduces, e experts, x X exchange sizes and rows, S the host waits, "
    "f b attention forward and backward, g grouped products"
)


def ms(time: float) -> str:
    return f"{1e3 * time:.1f} ms"


def most(kernels: Mapping[Kernel, float], count: int = 8) -> Iterator[str]:
    """Yield the operators that move the most bytes, without products and collectives."""
    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for kernel, n in kernels.items():
        if kernel.kind in (Kind.OTHER, Kind.COPY):
            sizes[kernel.operator] += n * kernel.n_bytes
            numbers[kernel.operator] += n
    for operator, size in sizes.most_common(count):
        yield f"{operator} {size / 1e9:.2f} GB in {round(numbers[operator]):,}"


def measure(options: Namespace) -> StepCount:
    """Count the step of one rank of this configuration.

    Raises:
        UserError: the run would be refused, or the model has too few layers.
    """
    given = ["model.init=random", "data.train=unread", "model.compute_dtype=bfloat16"]
    config = load_config(options.config, [*given, *options.assignments], {})
    model_config = read_model_config(config.model, config.data.max_length)
    machine = machine_of(options, config)
    # What is kept gathered depends on the memory that is left, which cut models have more of.
    plan = make_plan(config, model_config, machine, reason="its policy alone is needed")
    stages, micro_batches = config.parallel.stages, config.train.gradient_accumulation_steps
    with fake_world(machine.nodes, machine.ranks_per_node, config) as world:
        whole = whole_on_meta(config, model_config, world)
    own = layers_of_stages(whole, stages)[-1]
    kinds = layer_kinds(whole)[own.start : own.stop]
    if not (lengths := cuts(kinds)):
        raise UserError(
            f"a stage of {len(kinds)} layers is too short to take the difference of two depths "
            "- give a deeper model"
        )
    settings = [each for each in options.assignments if not each.startswith("model.path=")]
    (short, _), (long, trace) = (
        _count(
            options.config, model_config, plan, range(own.start, own.start + n), given + settings
        )
        for n in lengths
    )
    period = lengths[1] - lengths[0]
    further = {part: long[part].plus(short[part], -1).times(1 / period) for part in long}
    left = len(kinds) - lengths[1]
    extrapolated = {part: long[part].plus(further[part], left) for part in long}
    step = Part({}, 0)
    for part in extrapolated.values():
        step = step.plus(part, 1)
    parts = {
        "layer forward": further["forward"].times(1 / micro_batches),
        "layer backward": further["backward"].times(1 / micro_batches),
        "head": long["head"].times(1 / micro_batches),
        "update": extrapolated["update"],
        "norm and clip": extrapolated["norm and clip"],
        "step": step,
    }
    return StepCount(parts, (plan.step_flops or 0) / machine.ranks, plan.bubble, trace[:2])


def _count(
    file: Path, model_config: PreTrainedConfig, plan: Plan, layers: range, assignments: list[str]
) -> tuple[dict[str, Part], list[str]]:
    """Count a step of the last stage with these layers, and trace it."""
    with tempfile.TemporaryDirectory() as folder:
        with_layers(model_config, layers.stop).save_pretrained(folder)
        count = counted(
            file,
            Path(folder),
            plan.machine,
            plan.policy,
            layers,
            *assignments,
            stage=plan.config.parallel.stages - 1,
        )
    parts = {part: Part(kernels, count.waits[part]) for part, kernels in count.kernels.items()}
    return parts, count.trace
