"""Build and simulate models as a run and its plan do, from facts that are read on the way."""

from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.model import build
from shardtune.planner.simulation import simulate as simulation
from shardtune.planner.simulation.simulate import Measured, Step


def build_model(config: Config, model_config: PreTrainedConfig, world: World) -> PreTrainedModel:
    facts = build.read_facts(config, model_config, world.layout)
    return build.build_model(config, model_config, facts, world)


def build_on_meta(config: Config, model_config: PreTrainedConfig, world: World) -> PreTrainedModel:
    facts = build.read_facts(config, model_config, world.layout)
    return build.build_on_meta(config, model_config, facts, world)


def simulate(step: Step, model_config: PreTrainedConfig) -> Measured:
    facts = build.read_facts(step.config, model_config, step.world.layout)
    return simulation.simulate(step, model_config, facts)
