"""Read the facts of a model from config.json alone, before torch is imported for seconds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, missing_directory
from shardtune.model import traits
from shardtune.model.facts.facts import Facts
from shardtune.model.facts.problems import problems
from shardtune.model.source.quantisation import quantisation_of, unread_quantisation


def require_possible(config: Config, nodes: int, ranks_per_node: int) -> None:
    """Compare a run's mesh and rows with its machine and with config.json, if it is here.

    Raises:
        UserError: with every problem.
    """
    ranks = nodes * ranks_per_node
    layout = Layout.of(config, ranks)
    found = layout.problems([rank // ranks_per_node for rank in range(ranks)])
    if found := [*found, *problems_of_model(config, ranks)]:
        raise UserError(*found)


def problems_of_model(config: Config, ranks: int) -> list[str]:
    """Return why a run of a model cannot be, by its config.json where that is here."""
    try:
        return [*problems(facts_of_config(config.model.path), Layout.of(config, ranks))]
    except UserError as refusal:
        return refusal.problems


def facts_of_config(path: str) -> Facts:
    """Read the facts of a model in a directory, or in the hub's cache.

    Raises:
        UserError: the directory does not exist, or its config.json does not describe a model.
    """
    values, folder = _read(path)
    inner = values.get("text_config")
    text = {**values, **inner} if isinstance(inner, dict) else values
    settings = SimpleNamespace(**text)
    heads = traits.heads(settings).queries
    experts = traits.number(settings, *traits.EXPERTS)
    unread = unread_quantisation(quantisation_of(values, folder), text.get("expert_dtype"), path)
    return Facts(
        kind=str(values.get("model_type")),
        path=path,
        positions=traits.number(settings, "max_position_embeddings"),
        n_layers=traits.number(settings, "num_hidden_layers"),
        numbers_of_heads=(heads,) if heads else (),
        numbers_of_experts=(experts,) if experts else (),
        refusals=(unread,) if unread else (),
    )


def _read(path: str) -> tuple[dict[str, Any], Path]:
    """Return the config.json of a directory or of the hub's cache, if any, and its folder."""
    folder, remedy = Path(path), "name a hub id or a directory with a config.json"
    if (folder.is_absolute() or path.startswith((".", "~"))) and not folder.exists():
        raise UserError(f"model.path={path} does not exist{missing_directory(path)} - {remedy}")
    try:
        if folder.is_dir():
            file: Any = folder / "config.json"
        else:
            file = try_to_load_from_cache(path, "config.json")
        is_here = isinstance(file, (str, Path))
        values = json.loads(Path(file).read_text(encoding="utf-8")) if is_here else {}
    except (OSError, ValueError) as error:
        if not folder.is_dir():  # such as a name that the hub cannot have
            return {}, folder
        raise UserError(
            f"model.path={path}: its config.json cannot be read ({error}) - {remedy}"
        ) from error
    if is_here and not (isinstance(values, dict) and "model_type" in values):
        raise UserError(f"model.path={path}: its config.json has no model_type - {remedy}")
    return values, Path(file).parent if is_here else folder
