"""Refuse a run by the numbers of config.json alone, before torch is imported for seconds.

The checks of the built model use the same messages.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache
from packaging.version import Version

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, divisors_text, missing_directory
from shardtune.model import traits

# The ways of quantising that are read.
METHODS = {"fp8": "block FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
QUANTIZATION = "quantization_config"  # the key in config.json
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt writes the same, at times there alone
# Architectures that would need code of their own, and architectures to use instead.
_INSTEAD = dict.fromkeys(("rwkv", "xlstm"), "mamba2 or qwen3_next")
_INSTEAD |= dict.fromkeys(("gpt_neo", "mpt", "xlnet"), "llama or gpt_neox")
_INSTEAD |= dict.fromkeys(("zamba", "zamba2"), "bamba or falcon_h1")
_INSTEAD |= dict.fromkeys(("dbrx", "doge"), "qwen3_moe or mixtral")
_INSTEAD |= dict.fromkeys(
    ("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text"), "gpt_oss or glm4_moe"
)
# Models whose files are not read, and copies of them in bfloat16.
_BFLOAT16_COPIES = {"Kimi-K2-Thinking": "unsloth/Kimi-K2-Thinking-BF16"}


def require_possible(config: Config, nodes: int, ranks_per_node: int) -> None:
    """Compare a run's mesh and rows with its machine and with config.json, if it is here.

    Raises:
        UserError: with every problem.
    """
    ranks = nodes * ranks_per_node
    layout = Layout.divided(ranks, dict(config.parallel))
    problems = layout.problems([rank // ranks_per_node for rank in range(ranks)])
    if problems := [*problems, *problems_of_model(config, layout)]:
        raise UserError(*problems)


def problems_of_model(config: Config, layout: Layout) -> list[str]:
    """Return why a run of a model cannot be, by its config.json where that is here."""
    try:
        return [*_problems(config, *_read(config.model.path), layout)]
    except UserError as refusal:
        return refusal.problems


def _read(path: str) -> tuple[dict[str, Any], Path]:
    """Return the config.json of a directory or of the hub's cache, or an empty one, and its folder.

    Raises:
        UserError: the directory does not exist, or its config.json does not describe a model.
    """
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


def _problems(
    config: Config, values: Mapping[str, Any], folder: Path, layout: Layout
) -> Iterator[str]:
    path = config.model.path
    inner = values.get("text_config")
    text = {**values, **inner} if isinstance(inner, dict) else values
    kind, settings = str(values.get("model_type")), SimpleNamespace(**text)
    positions = traits.number(settings, "max_position_embeddings")
    experts = traits.number(settings, *traits.EXPERTS)
    layers = traits.number(settings, "num_hidden_layers")
    yield from filter(
        None,
        [
            not_trained(kind),
            unread_quantisation(quantisation_of(values, folder), text.get("expert_dtype"), path),
            beyond_positions(config.data.max_length, positions, path),
            undivided_heads(layout.context, traits.heads(settings).queries, kind),
            too_old_transformers(layout.expert),
            too_old_transformers(layout.tensor, "parallel.tensor", "cut matrices"),
            undivided_experts(layout.expert, experts, kind),
            too_few_layers(layout.stages, layers, layout.ranks, kind),
        ],
    )


def not_trained(kind: str) -> str:
    """Return why an architecture is refused by its name alone, or an empty text."""
    instead = _INSTEAD.get(kind)
    return f"{kind} is not trained here - use a model of type {instead}" if instead else ""


def beyond_positions(max_length: int, positions: int, path: str) -> str:
    """Return why rows are too long for a model, or an empty text. 0 `positions`: no limit."""
    if not 0 < positions < max_length:
        return ""
    return (
        f"data.max_length={max_length} is beyond the {positions} positions of {path} - "
        f"use data.max_length={positions} or less"
    )


def undivided_heads(degree: int, heads: int, kind: str) -> str:
    """Return why `degree` ranks cannot share a row of a model with these heads, or ""."""
    if heads % degree == 0:
        return ""
    return (
        f"parallel.context={degree} does not divide the {heads} heads of {kind} - use one of "
        f"{divisors_text(heads)} that divides world size / parallel.stages too"
    )


def too_old_transformers(
    degree: int, key: str = "parallel.expert", work: str = "spread experts"
) -> str:
    """Return why the installed transformers cannot do the work of a key, or an empty text."""
    version = importlib.metadata.version("transformers")
    if degree == 1 or Version(version).release >= (5, 23):
        return ""
    return (
        f"{key}={degree}: transformers {version} cannot {work} - "
        f"install transformers 5.23 or newer, or use {key}=1"
    )


def undivided_experts(degree: int, experts: int, kind: str) -> str:
    """Return why experts cannot be spread over `degree` ranks, or ""."""
    if experts % degree == 0:
        return ""
    return (
        f"parallel.expert={degree} does not divide the {experts} experts of {kind} - "
        f"use one of {divisors_text(experts)} that divides world size / parallel.replicate too"
    )


def too_few_layers(stages: int, layers: int, ranks: int, kind: str) -> str:
    """Return why a model of `layers` cannot be cut into `stages`, or ""."""
    if not 0 < layers < stages:
        return ""
    fewer = [n for n in range(1, layers + 1) if ranks % n == 0]
    return f"parallel.stages={stages}: {kind} has {layers} layers - use parallel.stages={fewer[-1]}"


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
