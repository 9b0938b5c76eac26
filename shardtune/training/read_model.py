"""Read the files of a model beside its weights, and refuse a model that cannot be trained."""

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
from shardtune.data.chat_encoder import ChatEncoder
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


def read_model_files(run: Run) -> tuple[PretrainedConfig, ModelFacts]:
    """Read the model's configuration and facts, and fetch its weights.

    Refuses a model that cannot be trained, missing data, and two revisions of a model.
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
    return model_config, facts


def read_assets(run: Run, model_config: PretrainedConfig, encoder: ChatEncoder) -> dict[str, bytes]:
    """Read the files beside the weights, and return them as exported models have them, by name.

    Refuses a model that cannot be exported, and frozen weights that differ between nodes.
    """
    config, world, folder = run.config, run.world, _folder_of(run.config.model.path)
    templates = encoder.tokenizer.chat_template
    one = templates if isinstance(templates, str) else None  # several have files of their own
    # Of node 0 for all: the digests of a checkpoint are of one copy.
    stops, template = world.on_rank0(lambda: (encoder.stop_token_ids, one))
    assets = world.run_on_all_ranks(lambda: _with_ends(folder, stops, template, config, encoder))
    notes = [describe_type(folder, model_config), describe_quantised(folder)]
    for note in filter(None, [*read_new_tokens(config.model).notes, *notes]):
        logger.info(note)
    if isinstance(templates, dict) and (folder / _NAMED_TEMPLATES).is_dir():
        names = ", ".join(sorted(templates.keys() - {"default"}))
        logger.warning(
            f"{_NAMED_TEMPLATES}/ of the model is not copied into exported models: they lack the "
            f"chat templates {names}"
        )
    for link in links_out_of(folder):
        logger.warning(
            f"{link} leads out of its folder, to {link.resolve()}, and is not copied into exported "
            "models - put the file itself there if it belongs to the model"
        )
    if config.model.init == "pretrained":
        # Nodes may have disks of their own, whose copies of the model must be equal.
        source = world.on_rank0(lambda: list_source(config.model.path))
        if world.layout.is_lora:
            source["weights"] = _identify_frozen(run)
        assets[SOURCE] = json.dumps(source).encode()
        world.on_rank0(lambda: require_exportable(assets, folder))
    if config.model.new_tokens:
        assets = with_new_tokens(assets, model_config.get_text_config())
    return assets


def _with_ends(
    folder: Path, stops: list[int], template: str | None, config: Config, encoder: ChatEncoder
) -> dict[str, bytes]:
    """Return a model's files with the stops, the new tokens and the chat template of training."""
    source = model_assets(folder)
    assets = with_stops(source, stops)
    if assets != source:
        logger.info(
            f"Stop tokens: generation_config.json of exported models names {stops}, with which "
            "training ends texts; by that of the source generate() would go on behind some"
        )
    if config.model.new_tokens:
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
