"""Read the facts of a model from config.json alone, before torch is imported for seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

# The ways of quantising that are read.
METHODS = {"fp8": "block FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
QUANTIZATION = "quantization_config"  # the key in config.json
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt writes the same, at times there alone
# Models whose files are not read, and copies of them in bfloat16.
_BFLOAT16_COPIES = {"Kimi-K2-Thinking": "unsloth/Kimi-K2-Thinking-BF16"}


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


def quantisation_of(values: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return how a config.json, else ModelOpt's file beside it, says that weights are quantised."""
    for part in (values, values.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get(QUANTIZATION) or None, Mapping):
            return part[QUANTIZATION]
    try:
        beside: Mapping[str, Any] = json.loads((folder / MODELOPT).read_bytes())["quantization"]
        # Without this key, engines quantise keys and values, and weights are as they are.
        return beside if beside.get("quant_algo") else {}
    except OSError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {"quant_algo": f"an unreadable {MODELOPT}"}


def method_of(quantisation: Mapping[str, Any]) -> str:
    """Return the name of the quantisation method, for ModelOpt the name of its algorithm."""
    return str(quantisation.get("quant_algo") or quantisation.get("quant_method") or "")


def unread_quantisation(
    quantisation: Mapping[str, Any], expert_dtype: str | None, path: str
) -> str:
    """Return why weights that are quantised like that are not read, or an empty text."""
    method = method_of(quantisation)
    has_fp4 = "fp4" in (quantisation.get("expert_dtype"), expert_dtype)
    if not quantisation or (method in METHODS and not has_fp4):
        return ""
    named = method or f"a method with {', '.join(quantisation)}"
    details = [quantisation.get("format"), "FP4 experts" if has_fp4 else ""]
    detail = ", ".join(filter(None, details))
    remedy = f"use {_BFLOAT16_COPIES.get(Path(path).name) or 'a copy of the model in bfloat16'}"
    return (
        f"model.path={path}: its weights are quantised by {named}"
        f"{f' ({detail})' if detail else ''}, and block FP8, MXFP8 and MXFP4 are read - {remedy}"
    )
