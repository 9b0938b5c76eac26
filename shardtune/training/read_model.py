"""Read the files of a model beside its weights, and refuse a model that cannot be trained."""

import datetime
import json
from pathlib import Path

from transformers import PretrainedConfig

from shardtune.checkpoint import resume_rules
from shardtune.checkpoint.assets import (
    SOURCE,
    links_out_of,
    list_source,
    model_assets,
    with_stops,
    with_template,
    with_tokens,
)
from shardtune.checkpoint.export.model_files import (
    require_exportable,
    require_index,
    with_new_tokens,
)
from shardtune.config import Config
from shardtune.data import dataset
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.errors import all_of
from shardtune.log import logger
from shardtune.model.build import read_facts, require_trainable
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.facts.trial import require_exact_copy
from shardtune.model.source.files import (
    fetch_weights,
    model_folder,
    read_model_config,
    require_weights,
)
from shardtune.model.source.quantised import describe_quantised
from shardtune.model.source.text_model import describe_type
from shardtune.model.source.weight_files import weights_digest
from shardtune.new_tokens import read_new_tokens
from shardtune.training.observers.sinks import require_trackers
from shardtune.training.out_of_memory import weights_fit
from shardtune.training.run import Run

_NAMED_TEMPLATES = "additional_chat_templates"


def read_model_files(run: Run) -> tuple[PretrainedConfig, ModelFacts, dict[str, bytes]]:
    """Read the model's configuration and facts, fetch its weights, and read the files beside them.

    Refuses a model that cannot be trained or exported, missing data, and two revisions of a model.
    """
    # All checks that need no weights come before the weights are fetched, which takes long.
    config, world = run.config, run.world
    world.progress.enter(Phase.PREPARING_DATA)
    with weights_fit(world.layout):
        (model_config, facts), *_ = world.run_on_all_ranks(
            lambda: all_of(
                lambda: _read_trainable(config, world),
                lambda: dataset.find_sources(config.data) if world.is_node_main else None,
                lambda: require_trackers(config.logging) if world.is_main else None,
            )
        )
        world.on_rank0(lambda: require_exact_copy(world.layout, model_config))
    revision = world.on_local_rank0(lambda: fetch_weights(config.model, require_index))
    what = f"the hub's revision of model.path={config.model.path}"
    world.require_same({what: revision}, "fetch one revision, or name a directory")
    stops, template = world.on_rank0(lambda: _read_ends_and_template(config))
    assets = world.run_on_all_ranks(lambda: _read_assets(config, stops, template))
    for note in read_new_tokens(config.model).notes:
        logger.info(note)
    folder = _folder_of(config.model.path)
    for note in filter(None, (describe_type(folder, model_config), describe_quantised(folder))):
        logger.info(note)
    for link in links_out_of(folder):
        logger.warning(
            f"{link} leads out of its folder, to {link.resolve()}, and is not copied into exported "
            "models - put the file itself there if it belongs to the model"
        )
    if config.model.init == "pretrained":
        # Nodes may have disks of their own, whose copies of the model must be equal.
        source = world.on_rank0(lambda: list_source(config.model.path))
        if run.world.layout.is_lora:
            source["weights"] = _identify_frozen(run)
        assets[SOURCE] = json.dumps(source).encode()
        world.on_rank0(lambda: require_exportable(assets, folder))
    if config.model.new_tokens:
        assets = with_new_tokens(assets, model_config.get_text_config())
    return model_config, facts, assets


def _read_ends_and_template(config: Config) -> tuple[list[int], str | None]:
    """Return the tokens with which training ends texts and turns, and its chat template.

    The template is None where there is none, or several by name.
    """
    encoder = dataset.build_encoder(config.model, config.data, datetime.date.today())
    template = encoder.tokenizer.chat_template
    if isinstance(template, dict) and (_folder_of(config.model.path) / _NAMED_TEMPLATES).is_dir():
        names = ", ".join(sorted(template.keys() - {"default"}))
        logger.warning(
            f"{_NAMED_TEMPLATES}/ of the model is not copied into exported models: they lack the "
            f"chat templates {names}"
        )
    return encoder.stop_token_ids, template if isinstance(template, str) else None


def _read_assets(config: Config, stops: list[int], template: str | None) -> dict[str, bytes]:
    source = model_assets(_folder_of(config.model.path))
    assets = with_stops(source, stops)
    if assets != source:
        logger.info(
            f"Stop tokens: generation_config.json of exported models names {stops}, with which "
            "training ends texts; by that of the source generate() would go on behind some"
        )
    if config.model.new_tokens:
        encoder = dataset.build_encoder(config.model, config.data, datetime.date.today())
        pieces = read_new_tokens(config.model).pieces
        new = [i for i, ids in pieces.items() if ids != [i]]
        assets = with_tokens(assets, encoder.tokenizer, new)
    return with_template(assets, template) if template else assets


def _read_trainable(config: Config, world: World) -> tuple[PretrainedConfig, ModelFacts]:
    model_config = read_model_config(config.model)
    facts = read_facts(config, model_config, world.layout)
    all_of(
        lambda: require_trainable(config, model_config, facts, world),
        lambda: require_weights(config.model),
    )
    return model_config, facts


def _folder_of(path: str) -> Path:
    folder = model_folder(path)
    assert folder, path  # its config.json was read
    return folder


def _identify_frozen(run: Run) -> str:
    """Return the digest of the frozen weights.

    Refuses weights that differ from another node's or from the checkpoint's.
    """
    world, path = run.world, run.config.model.path
    digest = world.on_local_rank0(lambda: weights_digest(_folder_of(path)))
    what = f"the digest of the weights in model.path={path}"
    world.require_same({what: digest}, "copy the same files to every node")
    if run.resumed:
        resume_rules.require_same_weights(run.resumed, digest)
    return digest
