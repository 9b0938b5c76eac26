"""The meshes of a machine, as values of the keys of a run, and as arguments of a command."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import gcd
from typing import Any

from shardtune.config import KEYS, LORA_LR, Config
from shardtune.distributed.layout import Layout
from shardtune.optimizers.rules import find_rule, smaller_rules, updates
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import Shapes
from shardtune.planner.plan import Estimate

_LONGEST_CUT = 8000  # tokens of a row
# The keys of a mesh, in the order of their values in `every_mesh`.
MESH = (
    "parallel.stages",
    "parallel.replicate",
    "parallel.expert",
    "parallel.context",
    "parallel.tensor",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
)


def every_mesh(layout: Layout, shapes: Shapes, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield every division of the ranks that keeps the effective batch, as values of MESH."""
    ranks, rows = layout.ranks, layout.rows_per_step
    nodes = [rank // machine.ranks_per_node for rank in range(ranks)]
    for stages in divisors(ranks):
        stage_ranks = ranks // stages
        if (
            stages > shapes.n_layers
            or stage_ranks % layout.context
            or replace(layout, stages=stages).split_by_nodes(nodes)
        ):
            continue
        for replicate in divisors(stage_ranks):
            shards = stage_ranks // replicate
            for expert in divisors(shards):
                if expert > 1 and not shapes.may_spread(expert, shards // expert):
                    continue
                for context, tensor in _sharings(layout, shards, shapes, machine):
                    rows_of_rank, rest = divmod(rows * context * tensor, stage_ranks)
                    if rest or shards % tensor:
                        continue
                    for size in divisors(rows_of_rank):
                        micro_batches = rows_of_rank // size
                        if micro_batches >= stages:
                            degrees = stages, replicate, expert, context, tensor
                            mesh = *degrees, size, micro_batches
                            yield dict(zip(MESH, mesh, strict=True))


def _sharings(
    layout: Layout, shards: int, shapes: Shapes, machine: Machine
) -> Iterator[tuple[int, int]]:
    """Yield the degrees of parallel.context and parallel.tensor that are worth a look."""
    # Longer rows are faster with parallel.context, which moves a tenth of the bytes, and models
    # with experts with parallel.expert, which leaves whole experts where they are.
    if layout.tensor > 1 and layout.max_length > _LONGEST_CUT and shapes.may_share(layout.tensor):
        yield layout.tensor, 1
        return
    yield layout.context, layout.tensor
    has_experts = shapes.by_stage(1)[0].layers.experts > 0
    if has_experts or layout.context > 1 or layout.max_length > _LONGEST_CUT:
        return
    has_blocks = find_rule(layout.optimizer, layout.master_dtype).has_blocks
    for tensor in divisors(gcd(shards, machine.ranks_per_node)):
        if tensor != layout.tensor and (tensor == 1 or shapes.may_cut(tensor, has_blocks)):
            yield 1, tensor


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


def launch_command(run: Estimate, given: Sequence[str]) -> str:
    """Return the command that launches a run: `given` arguments, then its own mesh and values."""
    named = mesh_arguments(run)
    keys = {argument.partition("=")[0] for argument in named}
    kept = [argument for argument in given if argument.partition("=")[0] not in keys]
    if run.machine.nodes == 1:
        processes = f"--processes={run.machine.ranks_per_node}"
        return shlex.join(["shardtune", "train", processes, *kept, *named])
    sizes = {"NNODES": (run.machine.nodes, 2), "GPUS_PER_NODE": (run.machine.ranks_per_node, 8)}
    environment = [f"{name}={n}" for name, (n, default) in sizes.items() if n != default]
    return shlex.join([*environment, "./launch_node0.sh", *kept, *named])


def mesh_arguments(run: Estimate) -> list[str]:
    """Return as arguments the keys of a run's mesh that are not defaults, then its values."""
    mesh = {key: value_of(run.config, key) for key in MESH}
    named = {k: n for k, n in mesh.items() if k in run.values or n != KEYS[k].default}
    return [*as_arguments({**named, **run.values})]


def as_arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values of keys as arguments of a run, in YAML's words."""
    words = {True: "true", False: "false", None: "null"}
    for key, value in values.items():
        is_word = value is None or isinstance(value, bool)
        yield f"{key}={words[value] if is_word else value}"


_SHORTEST_DIVIDED = 1025  # tokens: shorter rows are neither halved nor shared
ADAPTERS: dict[str, Any] = {"lora.rank": 16, "optimizer.lr": LORA_LR}
Setting = tuple[dict[str, Any], str]  # values of keys, and their price


def settings(same: list[list[Setting]], less: list[Setting]) -> Iterator[list[Setting]]:
    """Yield groups of settings: none, then ever more of `same`, and then also some of `less`."""
    for n_less, n_same in product(range(len(less) + 1), range(len(same) + 1)):
        yield [
            together([*others, *chosen])
            for others in combinations(less, n_less)
            for kinds in combinations(same, n_same)
            for chosen in product(*kinds)
        ]


def together(settings: Iterable[Setting]) -> Setting:
    """Join settings, and their prices, to one setting."""
    joined = [setting for setting in settings if setting[0]]
    values = {key: n for values, _ in joined for key, n in values.items()}
    return values, "; ".join(price for _, price in joined)


def same_training(layout: Layout, shapes: Shapes, machine: Machine) -> Iterator[list[Setting]]:
    """Yield groups of settings that train all of the data; a run takes at most one of a group."""
    is_gpu, trains_all = layout.is_gpu, not layout.is_lora
    if not layout.keeps_inputs_alone:
        price = "about a third more arithmetic"
        yield [({"model.activation_checkpointing": "full"}, price)]
    elif is_gpu and layout.checkpointing == "full":
        price = "layers' inputs travel to host memory and back"
        yield [({"model.activation_checkpointing": "offload"}, price)]
    elif is_gpu:  # host memory may be the scarce one
        yield [({"model.activation_checkpointing": "full"}, "layers' inputs take the GPU's memory")]
    if layout.offloads:
        yield [({"optimizer.offload": False}, "masters and moments take the GPU's memory")]
    elif trains_all and is_gpu:
        yield [({"optimizer.offload": True}, "states travel to host memory and back")]
    if trains_all and layout.master_dtype != "bfloat16" and updates(layout.optimizer, "bfloat16"):
        price = "weights rounded at random to bfloat16"
        yield [({"model.master_dtype": "bfloat16"}, price)]
    for rule in smaller_rules(layout.optimizer, layout.master_dtype) if trains_all else ():
        yield [({"optimizer.name": rule.name}, rule.price)]
    if trains_all and layout.reduce_dtype != "bfloat16":
        price = "gradients summed with 8 bits of precision"
        yield [({"model.reduce_dtype": "bfloat16"}, price)]
    now, steps = layout.context, layout.micro_batches
    degrees = [n for n in divisors(machine.ranks_per_node) if n % now == 0 and n > now]
    degrees = [n for n in degrees if shapes.may_share(n)]
    if degrees and layout.tensor == 1 and layout.max_length >= _SHORTEST_DIVIDED:
        price = "heads travel between the ranks that share a row"
        # A step trains the same rows: accumulation grows by the factor by which data ranks shrink.
        accumulation = "train.gradient_accumulation_steps"
        yield [
            ({"parallel.context": degree, accumulation: steps * degree // now}, price)
            for degree in degrees
        ]


def less_training(layout: Layout) -> list[Setting]:
    """Return settings that train fewer weights or fewer tokens."""
    less: list[Setting] = []
    if not layout.is_lora:
        less.append((ADAPTERS, "trains adapters alone"))
    if layout.max_length >= _SHORTEST_DIVIDED:
        rows = {"data.max_length": layout.max_length // 2}
        less.append((rows, "longer records lose turns"))
    return less
