"""Measure a deep model by two shallow ones.

Each part of a step grows by the same bytes with each further period of layers.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.model.build import read_facts
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.source.small_copy import with_layers
from shardtune.model.stages import divided
from shardtune.planner.arithmetic.figures import EXPERT_IMBALANCE, Peak
from shardtune.planner.simulation.at_once import at_once
from shardtune.planner.simulation.simulate import Measured, Step, simulate

# The fewest layers of a shallow model, so that its middle prefetches as a deep model's does.
_FEWEST_LAYERS = 4


class Simulations:
    """The measured steps of one model. Settings that make the same step are simulated once."""

    def __init__(self, model_config: PreTrainedConfig, imbalance: float = EXPERT_IMBALANCE) -> None:
        self.model_config, self._imbalance = model_config, imbalance
        self.measured: dict[Hashable, Measured] = {}
        self._facts: dict[str, ModelFacts] = {}  # by the adapters

    def facts(self, config: Config, layout: Layout) -> ModelFacts:
        """Read the facts of the model with its adapters, once."""
        adapters = config.lora.model_dump_json()
        if adapters not in self._facts:
            self._facts[adapters] = read_facts(config, self.model_config, layout)
        return self._facts[adapters]

    def measure(self, step: Step, facts: ModelFacts) -> Measured:
        """Return the measures of a step of this rank's stage, from those of two shorter ones."""
        layers = divided(facts.costs, step.world.layout.stages)[step.world.stage]
        kinds = facts.layers[layers.start : layers.stop]
        step = replace(step, imbalance=self._imbalance)
        parts = [range(layers.start, layers.start + n) for n in cuts(kinds) or [len(kinds)]]
        steps = {_key(cut): cut for cut in (replace(step, layers=part) for part in parts)}
        new = {key: cut for key, cut in steps.items() if key not in self.measured}
        results = at_once([partial(self._simulate, cut, facts) for cut in new.values()])
        self.measured.update(zip(new, results, strict=True))
        short, *_, long = (self.measured[key] for key in [*steps] * 2)  # one, if nothing was cut
        return short if short is long else extrapolate(short, long, len(kinds))

    def _simulate(self, step: Step, facts: ModelFacts) -> Measured:
        assert step.layers
        return simulate(step, with_layers(self.model_config, step.layers.stop), facts)


def _key(step: Step) -> Hashable:
    """Return a key that is equal for steps with equal measures."""
    config, world = step.config, step.world
    # The optimizer changes neither forward nor backward.
    layout = replace(world.layout, optimizer="")
    sections = config.model.model_dump_json(), config.lora.model_dump_json()
    place = world.local_size, world.stage
    return step.layers, layout, sections, step.policy, *place, step.tiles


def cuts(kinds: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return the layers of two shallow models that differ by one period of the kinds.

    Both begin and end as the whole model does, at the end of a period. Return None if the whole
    model is as shallow, or if its layers repeat no period.
    """
    n = len(kinds)
    for period in range(1, n // 2 + 1):
        # The last layers repeat with this period, from `start` on: go back while a layer is like
        # the one a period later. The last period has no later one.
        start = n
        while start > 0 and (start + period > n or kinds[start - 1] == kinds[start - 1 + period]):
            start -= 1
        # Whole periods are left out, so that a shallow model ends as the whole one does: with
        # d m m m m and a period of 1, `first` begins at 1 layer, d.
        first = n - (n - start) // period * period
        # A layer's place is its number from the front in the first half of the layers, and from the
        # end in the second half. One place must be one kind of layer in both models: `start`
        # layers fit into the first half, and one more that repeats stands before the second half,
        # since a layer's peak depends on the neighbour that prefetches it.
        while first < max(_FEWEST_LAYERS, 2 * start + 2 * (start > 0)):
            first += period
        # The layers must repeat three times: two alike may be chance.
        if (n - start) // period >= 3 and first + period < n:
            return first, first + period
    return None


def extrapolate(short: Measured, long: Measured, layers: int) -> Measured:
    """Return the measures of a model of `layers` layers.

    Every place of a step grows by the same bytes with each further period of layers. Places in the
    middle of the deep model have no more than those at its ends.
    """
    times = (layers - long.layers) // (long.layers - short.layers)

    def grow(small: Mapping[Any, int], large: Mapping[Any, int]) -> Counter[Any]:
        return Counter({key: n + times * (n - small.get(key, 0)) for key, n in large.items()})

    peaks = {}
    for key, peak in long.peaks.items():
        if key in short.peaks:
            by_cause = grow(short.peaks[key].by_cause, peak.by_cause)
            peaks[key] = Peak(by_cause.total(), by_cause)
    pools = {key: n for key, n in grow(short.pools, long.pools).items() if key in short.pools}
    traffic = [grow(*both) for both in zip(short.traffic, long.traffic, strict=True)]
    kernels = [grow(*both) for both in zip(short.kernels, long.kernels, strict=True)]
    return Measured(layers, peaks, pools, traffic, kernels, long.attention)
