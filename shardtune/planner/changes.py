"""Which changes of the configuration would help a plan, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from shardtune.config import Config
from shardtune.config_io import to_dict
from shardtune.errors import UserError
from shardtune.planner.plan import Plan, make_plan


@dataclass(frozen=True)
class Change:
    """Some keys with other values, what they cost, and the plan with them."""

    values: dict[str, Any]
    price: str
    plan: Plan


def helpful_changes(plan: Plan, model_config: PreTrainedConfig) -> list[Change]:
    """Return what would help, the best first: what fits with the shortest step, then what is
    nearest to fitting.

    Each is tried alone; then all that save memory one after the other, until the run fits.
    """
    changes: list[Change] = []
    together: dict[str, Any] = {}
    for values, price in _candidates(plan):
        change = _try(values, price, plan, model_config)
        if change and _helps(change.plan, plan):
            changes.append(change)
    if not plan.fits and not any(change.plan.fits for change in changes):
        for change in sorted(changes, key=lambda each: each.plan.peak_bytes):
            together |= change.values
            combined = _try(together, "all of these", plan, model_config)
            if combined and combined.plan.fits:
                changes.append(combined)
                break
    return sorted(changes, key=_rank)


def _rank(change: Change) -> tuple[bool, float]:
    plan = change.plan
    return not plan.fits, max(plan.floors_s.values()) if plan.fits else plan.peak_bytes


def _helps(changed: Plan, plan: Plan) -> bool:
    """Whether it fits more nearly, or a step that fits is bound by a tenth less time."""
    if not plan.fits:
        return changed.peak_bytes < plan.peak_bytes
    return changed.fits and _seconds_per_token(changed) < 0.9 * _seconds_per_token(plan)


def _seconds_per_token(plan: Plan) -> float:
    return max(plan.floors_s.values()) / plan.step_tokens


def _candidates(plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield values other than the plan's, and the price of each."""
    model, machine = plan.config.model, plan.machine
    if model.activation_checkpointing != "full":
        yield {"model.activation_checkpointing": "full"}, "about a third more arithmetic"
    if plan.config.lora.rank is None:
        if model.master_dtype != "bfloat16":
            yield {"model.master_dtype": "bfloat16"}, "weights rounded at random to bfloat16"
        if plan.config.optimizer.name != "adamw8bit":
            yield {"optimizer.name": "adamw8bit"}, "moments of 8 bits"
    if model.reduce_dtype != "bfloat16":
        yield {"model.reduce_dtype": "bfloat16"}, "gradients summed with 8 bits of precision"
    if plan.config.parallel.expert == 1 and machine.ranks_per_node > 1:
        price = "memory follows the rank whose experts get the most tokens"
        yield {"parallel.expert": machine.ranks_per_node}, price
    if plan.config.parallel.replicate == 1 and machine.nodes > 1:
        yield {"parallel.replicate": machine.nodes}, "the states of a rank grow as much"
    if plan.config.lora.rank is None:
        yield {"lora.rank": 16}, "trains adapters alone"
    if plan.config.data.max_length > 1024:
        yield {"data.max_length": plan.config.data.max_length // 2}, "longer records lose turns"


def _try(
    values: dict[str, Any], price: str, plan: Plan, model_config: PreTrainedConfig
) -> Change | None:
    sections = to_dict(plan.config)
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    config = Config.model_validate({**sections, "origins": plan.config.origins})
    try:
        return Change(values, price, make_plan(config, model_config, plan.machine))
    except UserError:  # the model has no experts, or the mesh does not divide them
        return None
