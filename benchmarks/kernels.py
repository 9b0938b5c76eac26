"""Count the kernels, bytes and waits of one rank's step without a GPU, and compute its time.

A rank of the real shape takes a step on a pretended GPU without contents (needs g++). A layer is
the difference of two depths in one micro-batch, and has experts if the model has them. With stages
the rank is the first of the last stage, where the head is. Bytes are of tensors that kernels read
and write. shardtune/planner/arithmetic/roofline.py computes milliseconds and MFU, without the
network between nodes and without a measurement on a GPU.
"""

from __future__ import annotations

import datetime
import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig

from distTest.workloads.machine import commit, versions
from distTest.workloads.script import REPOSITORY
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.log import quiet_libraries
from shardtune.model.build import whole_on_meta
from shardtune.model.source.files import read_model_config
from shardtune.model.stages import layers_of_stages
from shardtune.planner.arithmetic.figures import Kernel, Kind
from shardtune.planner.arithmetic.roofline import H100, H200, Gpu, launched, moved_bytes, seconds
from shardtune.planner.command.options import add_arguments
from shardtune.planner.command.plan_command import machine_of
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.simulation.extrapolate import cuts, layer_kinds, with_layers
from shardtune.planner.simulation.simulate import fake_world
from shardtune.training.states.reshard import ReshardPolicy
from tests.pretend_gpu.count import counted

PAGE = REPOSITORY / "benchmarks/KERNELS.md"
_MARKER = "<!-- kernels: written by python -m benchmarks kernels -->"
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

    def counts(self) -> list[str]:
        return [
            f"{round(launched(self.kernels)):,} kernels",
            f"{self.gb()} GB",
            f"{round(self.waits):,} waits",
        ]

    def gb(self, *kinds: Kind) -> str:
        return f"{moved_bytes(self.kernels, *kinds) / 1e9:.1f}"

    def ms(self, gpu: Gpu) -> str:
        return f"{1e3 * seconds(self.kernels, gpu):.1f}"

    def plus(self, other: Part, times: float) -> Part:
        keys = self.kernels.keys() | other.kernels.keys()
        kernels = {k: self.kernels.get(k, 0) + times * other.kernels.get(k, 0) for k in keys}
        return Part(kernels, self.waits + times * other.waits)

    def times(self, factor: float) -> Part:
        return Part({}, 0).plus(self, factor)


def add_options(parser: ArgumentParser) -> None:
    add_arguments(parser)


def main(options: Namespace) -> None:
    quiet_libraries(is_main=False)
    if options.config:
        print(*measure(options).lines(), sep="\n")
        return
    versions_ = ", ".join(f"{name} {version}" for name, version in versions().items())
    day = datetime.date.today().isoformat()
    sections = [f"Counted on {day} by `{options.command}`, shardtune {commit()}, {versions_}.\n"]
    for name, (file, model, nodes, settings) in SHAPES.items():
        options.config, options.nodes = REPOSITORY / file, nodes
        options.assignments = [f"model.path={CONFIGS / model}", *settings]
        step = measure(options)
        print(name, *step.lines(), "", sep="\n", flush=True)
        changed = f" with `{' '.join(settings)}`" if settings else ""
        where = f"`{file}`{changed}, {nodes} x {options.gpus_per_node} GPUs of 80 GB."
        sections.append("\n".join([f"## {name}\n", f"{where}\n", *step.table()]))
    text = PAGE.read_text(encoding="utf-8")
    before, _, _ = text.partition(_MARKER)
    PAGE.write_text(before + _MARKER + "\n\n" + "\n".join(sections), encoding="utf-8")


@dataclass
class StepCount:
    """The parts of one rank's step, its FLOPs, and the order of its kernels."""

    parts: dict[str, Part]
    flops_of_rank: float  # as MFU counts them
    bubble: float
    trace: list[str]

    def lines(self) -> Iterator[str]:
        for name, part in self.parts.items():
            beside = f"{part.gb(Kind.OTHER)} GB beside products, attention and FSDP's copies"
            times = ", ".join(f"{part.ms(gpu)} ms on {gpu.card.name}" for gpu in (H100, H200))
            yield f"{name}: {', '.join([*part.counts(), beside, f'computed: {times}'])}"
            yield f"    most bytes: {', '.join(most(part.kernels))}"
        yield from self._rates()
        yield f"Order of a micro-batch of a few layers ({LETTERS}):"
        yield from (f"    {line}" for line in self.trace)

    def _rates(self) -> Iterator[str]:
        for gpu in (H100, H200):
            rates = []
            for attention in (gpu, gpu.with_flash_attention_3()):
                time = seconds(self.parts["step"].kernels, attention) / (1 - self.bubble)
                mfu = self.flops_of_rank / time / gpu.card.flops_per_s
                rates.append(f"{time:.2f} s a step, {mfu:.1%} MFU")
            bubble = f" (a bubble of {self.bubble:.0%} in it)" if self.bubble else ""
            yield f"Computed for {gpu.card.name}: {rates[0]}{bubble}; FlashAttention 3: {rates[1]}"

    def table(self) -> Iterator[str]:
        """Yield the lines of a table in Markdown, then step times and the order of kernels."""
        yield "| part | kernels | GB | waits | products, attention, copies, all else: GB | ms |"
        yield "|---|---|---|---|---|---|"
        for name, part in self.parts.items():
            counts = (field.split()[0] for field in part.counts())
            attention = Kind.ATTENTION, Kind.ATTENTION_BACKWARD
            kinds = ((Kind.PRODUCT,), attention, (Kind.COPY,), (Kind.OTHER,))
            sizes = ", ".join(part.gb(*kind) for kind in kinds)
            times = ", ".join(f"{part.ms(gpu)}" for gpu in (H100, H200))
            yield f"| {' | '.join([name, *counts, sizes, times])} |"
        yield ""
        for line in self._rates():
            yield f"- {line}"
        yield f"\n```text\n{chr(10).join(self.trace)}\n```\n"


LETTERS = (
    "A gathers, R reduces, e experts, x X exchange sizes and rows, S the host waits, "
    "f b attention forward and backward, g grouped products"
)


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
    plan = make_plan(config, model_config, machine)
    stages, micro_batches = plan.layout.stages, plan.layout.micro_batches
    with fake_world(plan.layout, machine.ranks_per_node) as world:
        whole = whole_on_meta(config, model_config, world)
    layers = layers_of_stages(whole, stages)[-1]
    kinds = layer_kinds(whole)[layers.start : layers.stop]
    if not (lengths := cuts(kinds)):
        raise UserError(
            f"a stage of {len(kinds)} layers is too short to take the difference of two depths "
            "- give a deeper model"
        )
    settings = [key for key in options.assignments if not key.startswith("model.path=")]
    (short, _), (long, trace) = (
        _count(
            options.config,
            with_layers(model_config, layers.start + n),
            plan,
            _policy(plan, kinds, n),
            range(layers.start, layers.start + n),
            given + settings,
        )
        for n in lengths
    )
    # The two depths differ by whole layers alone; head and update are in both.
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
    return StepCount(parts, (plan.step_flops or 0) / machine.ranks, plan.layout.bubble, trace[:2])


def _policy(plan: Plan, kinds: Sequence[Hashable], layers: int) -> ReshardPolicy:
    """Return the last stage's policy for a model of `layers` layers, which keeps all or none."""
    experts = sum("experts" in repr(kind) for kind in kinds) * (plan.layout.expert > 1)
    kept = plan.kept_groups[-1]
    if kept > len(kinds):  # the groups are the root, then the layers, and last the experts
        kept = 1 + layers + (layers if kept == 1 + len(kinds) + experts else 0)
    else:
        kept = 0
    return replace(plan.policies[-1], kept_groups=kept)


def _count(
    file: Path,
    model_config: PreTrainedConfig,
    plan: Plan,
    policy: ReshardPolicy,
    layers: range,
    assignments: list[str],
) -> tuple[dict[str, Part], list[str]]:
    """Count a step of the last stage with these layers, and trace it."""
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        count = counted(
            file,
            Path(folder),
            plan.machine,
            policy,
            layers,
            *assignments,
            stage=plan.layout.stages - 1,
        )
    parts = {part: Part(kernels, count.waits[part]) for part, kernels in count.kernels.items()}
    return parts, count.trace
