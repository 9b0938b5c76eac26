"""Which changes of the configuration would help a plan, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from shardtune.config import Config
from shardtune.config_io import to_dict
from shardtune.errors import UserError
from shardtune.planner.extrapolate import Simulations
from shardtune.planner.plan import Plan, make_plan


@dataclass(frozen=True)
class Change:
    """Other values of some keys, their price in words, and the plan with them."""

    values: dict[str, Any]
    price: str
    plan: Plan

    def rank(self) -> tuple[bool, float]:
        """Return a key that sorts the best change first."""
        return not self.plan.fits, self.plan.floor_s if self.plan.fits else self.plan.peak_bytes


def helpful_changes(
    plan: Plan, model_config: PreTrainedConfig, simulations: Simulations
) -> list[Change]:
    """Return the changes that help: those that fit, the shortest step first, then the others, the
    lowest peak first.

    Each is tried alone. Where no change fits that trains all weights on the same rows, the changes
    that save the most are tried together.
    """
    simulations = simulations.without_evaluation()

    def attempt(values: Mapping[str, Any], price: str) -> Change | None:
        changed = with_values(plan.config, values)
        try:
            made = make_plan(changed, model_config, plan.machine, simulations, plan.reason)
        except UserError:  # the model has no experts, or the mesh does not divide them
            return None
        return Change(dict(values), price, made)

    tried = [attempt(*candidate) for candidate in _candidates(plan)]
    changes = [each for each in tried if each and _helps(each.plan, plan)]
    if not plan.fits and not any(change.plan.fits for change in changes):
        changes += _together(plan, changes, attempt)
    if not any(change.plan.fits for change in changes):
        last = [attempt(*candidate) for candidate in _last_resorts(plan)]
        changes += [each for each in last if each and _helps(each.plan, plan)]
    return sorted(changes, key=Change.rank)


def _together(plan: Plan, changes: list[Change], attempt: Any) -> Iterator[Change]:
    """Yield the fewest changes that fit together, those that save the most first."""
    missing = plan.peak_bytes - plan.machine.memory_bytes
    values: dict[str, Any] = {}
    for change in sorted(changes, key=lambda each: each.plan.peak_bytes):
        values |= change.values
        missing -= plan.peak_bytes - change.plan.peak_bytes
        # Each saves less beside others than alone: with more than these it may be enough.
        if missing > 0 or len(values) == 1:
            continue
        combined = attempt(values, "all of these")
        if combined and combined.plan.fits:
            yield combined
            return
    # Beside float32 weights it saves little.
    if plan.config.model.reduce_dtype != "bfloat16" and "model.reduce_dtype" not in values:
        combined = attempt(values | {"model.reduce_dtype": "bfloat16"}, "all of these")
        if combined and combined.plan.fits:
            yield combined


def _helps(changed: Plan, plan: Plan) -> bool:
    """Return whether it is nearer to fitting, or fits with a step shorter by a tenth."""
    if not plan.fits:
        return changed.peak_bytes < plan.peak_bytes
    return changed.fits and _seconds_per_token(changed) < 0.9 * _seconds_per_token(plan)


def _seconds_per_token(plan: Plan) -> float:
    return plan.floor_s / plan.step_tokens


def _candidates(plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings that do not change what is learnt, and the price of each."""
    config, machine = plan.config, plan.machine
    model, trains_all = config.model, config.lora.rank is None
    if not plan.fits:
        if model.activation_checkpointing != "full":
            yield {"model.activation_checkpointing": "full"}, "about a third more arithmetic"
        if trains_all and model.master_dtype != "bfloat16":
            yield {"model.master_dtype": "bfloat16"}, "weights rounded at random to bfloat16"
        if trains_all and config.optimizer.name != "adamw8bit":
            yield {"optimizer.name": "adamw8bit"}, "moments of 8 bits"
    has_small_gradients = plan.fits or model.master_dtype == "bfloat16"
    if trains_all and has_small_gradients and model.reduce_dtype != "bfloat16":
        yield {"model.reduce_dtype": "bfloat16"}, "gradients summed with 8 bits of precision"
    if not plan.fits and config.parallel.replicate > 1:
        yield {"parallel.replicate": 1}, "weights travel between all ranks"
    if config.parallel.expert == 1 and machine.ranks_per_node > 1:
        price = "memory follows the rank whose experts get the most tokens"
        yield {"parallel.expert": machine.ranks_per_node}, price
    rows, steps = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    if plan.fits and steps % 2 == 0:
        larger = {"micro_batch_size": 2 * rows, "gradient_accumulation_steps": steps // 2}
        price = "activations of twice the rows at once"
        yield {f"train.{key}": value for key, value in larger.items()}, price
    if plan.fits and config.parallel.replicate == 1 and machine.nodes > 1:
        yield {"parallel.replicate": machine.nodes}, "the weights of a rank grow as much"


def _last_resorts(plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings that train less, and the price of each."""
    if plan.fits:
        return
    if plan.config.lora.rank is None:
        yield {"lora.rank": 16}, "trains adapters alone"
    if plan.config.data.max_length > 1024:
        yield {"data.max_length": plan.config.data.max_length // 2}, "longer records lose turns"


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of some keys, `section.key`."""
    sections = to_dict(config)
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return Config.model_validate({**sections, "origins": config.origins})
