"""The meshes of a machine, as values of the keys of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import Shapes

# The keys of a mesh, in the order of their values in `every_mesh`.
MESH = (
    "parallel.stages",
    "parallel.replicate",
    "parallel.expert",
    "parallel.context",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
)


def every_mesh(layout: Layout, shapes: Shapes, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield every division of the ranks that keeps the effective batch, as values of MESH."""
    ranks, context, rows = layout.ranks, layout.context, layout.rows_per_step
    nodes = [rank // machine.ranks_per_node for rank in range(ranks)]
    for stages in divisors(ranks):
        stage_ranks = ranks // stages
        if (
            stages > shapes.n_layers
            or stage_ranks % context
            or replace(layout, stages=stages).split_stage(nodes)
        ):
            continue
        rows_of_rank, rest = divmod(rows * context, stage_ranks)
        if rest:
            continue
        for replicate in divisors(stage_ranks):
            for expert in divisors(stage_ranks // replicate):
                copies = stage_ranks // replicate // expert
                if expert > 1 and not shapes.may_spread(expert, copies):
                    continue
                for size in divisors(rows_of_rank):
                    micro_batches = rows_of_rank // size
                    if micro_batches >= stages:
                        mesh = stages, replicate, expert, context, size, micro_batches
                        yield dict(zip(MESH, mesh, strict=True))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Replace values of keys, `section.key`, without validation, which is 100 times faster."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {n: getattr(config, n).model_copy(update=v) for n, v in sections.items()}
    return config.model_copy(update=updated)


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key, `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
