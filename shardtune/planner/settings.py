"""Settings that could make a run fit, or faster, each with its price in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

from shardtune.config import LORA_LR
from shardtune.distributed.layout import Layout
from shardtune.optimizers.rules import smaller_rules, updates
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import Shapes
from shardtune.planner.mesh import divisors

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
