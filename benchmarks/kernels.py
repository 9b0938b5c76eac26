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

import numpy as np
from transformers import PreTrainedConfig

from distTest.workloads.script import REPOSITORY
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model.build import whole_on_meta
from shardtune.model.files import read_model_config
from shardtune.model.flops import count_flops
from shardtune.model.stages import layers_of_stages
from shardtune.planner.extrapolate import cuts, layer_kinds, with_layers
from shardtune.planner.kernels import Kernel, Kind
from shardtune.planner.roofline import GPUS, launched, moved_bytes, seconds
from shardtune.planner.simulate import fake_world
from shardtune.training.stage import idle_share
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

    def __add__(self, other: Part) -> Part:
        return self.plus(other, 1)

    def plus(self, other: Part, times: float) -> Part:
        keys = self.kernels.keys() | other.kernels.keys()
        kernels = {k: self.kernels.get(k, 0) + times * other.kernels.get(k, 0) for k in keys}
        return Part(kernels, self.waits + times * other.waits)

    def times(self, factor: float) -> Part:
        return Part({}, 0).plus(self, factor)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="default: three shapes, as in docs/kernels.md")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")


def main(options: Namespace) -> None:
    quiet_libraries(is_main=False)
    if options.config:
        shapes = [("", options.config, options.nodes, options.assignments)]
    else:
        shapes = [
            (name, REPOSITORY / file, nodes, [f"model.path={CONFIGS / model}", *more])
            for name, (file, model, nodes, more) in SHAPES.items()
        ]
    for name, file, nodes, assignments in shapes:
        if name:
            print(f"{name}: {file.relative_to(REPOSITORY)} {' '.join(assignments[1:])}")
        step = measure(file, nodes, options.gpus_per_node, assignments)
        print(*step.lines(), "", sep="\n", flush=True)


@dataclass
class StepCount:
    """The parts of one rank's step, and what the whole model computes in it."""

    parts: dict[str, Part]
    flops_of_rank: float  # that MFU counts
    bubble: float

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


def measure(file: Path, nodes: int, ranks_per_node: int, assignments: list[str]) -> StepCount:
    """Count the step of one rank of this configuration."""
    given = ["model.init=random", "data.train=unread", "model.compute_dtype=bfloat16"]
    config = load_config(file, [*given, *assignments], {})
    model_config = read_model_config(config.model, config.data.max_length)
    stages, micro_batches = config.parallel.stages, config.train.gradient_accumulation_steps
    with fake_world(nodes, ranks_per_node, config, stages - 1) as world:
        whole = whole_on_meta(config, model_config, world)
        own = layers_of_stages(whole, stages)[-1]
        kinds = layer_kinds(whole)[own.start : own.stop]
        rows = config.train.micro_batch_size * micro_batches * world.data_ranks
    lengths = cuts(kinds)
    assert lengths, "the model has too few layers to take the difference of two depths"
    short, long = (
        _count(file, model_config, config, nodes, ranks_per_node, given + assignments, own, n)
        for n in lengths
    )
    period = lengths[1] - lengths[0]
    further = {part: long[part].plus(short[part], -1).times(1 / period) for part in long}
    left = len(kinds) - lengths[1]
    extrapolated = {part: long[part].plus(further[part], left) for part in long}
    step = Part({}, 0)
    for part in extrapolated.values():
        step += part
    parts = {
        "layer forward": further["forward"].times(1 / micro_batches),
        "layer backward": further["backward"].times(1 / micro_batches),
        "head": long["head"].times(1 / micro_batches),
        "update": extrapolated["update"],
        "norm and clip": extrapolated["norm and clip"],
        "step": step,
    }
    length = config.data.max_length
    flops = count_flops(whole).per_step(np.full(rows, length), rows * (length - 1))
    return StepCount(parts, flops / (nodes * ranks_per_node), idle_share(stages, micro_batches))


def _count(
    file: Path,
    model_config: PreTrainedConfig,
    config: Config,
    nodes: int,
    ranks_per_node: int,
    assignments: list[str],
    own: range,
    layers: int,
) -> dict[str, Part]:
    assignments = [each for each in assignments if not each.startswith("model.path=")]
    with tempfile.TemporaryDirectory() as folder:
        with_layers(model_config, own.start + layers).save_pretrained(folder)
        kernels, waits = counted(
            file,
            Path(folder),
            nodes,
            ranks_per_node,
            *assignments,
            stage=config.parallel.stages - 1,
        )
    return {part: Part(kernels[part], waits[part]) for part in kernels}


if __name__ == "__main__":
    parser = ArgumentParser()
    add_options(parser)
    main(parser.parse_args())
