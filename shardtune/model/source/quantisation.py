"""How a config.json says that weights are quantised. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The ways of quantising that are read.
METHODS = {"fp8": "block FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
QUANTIZATION = "quantization_config"  # the key in config.json
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt writes the same, at times there alone
# Models whose files are not read, and copies of them in bfloat16.
_BFLOAT16_COPIES = {"Kimi-K2-Thinking": "unsloth/Kimi-K2-Thinking-BF16"}


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
