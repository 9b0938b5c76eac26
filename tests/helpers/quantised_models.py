"""Tiny models in the formats in which large ones are published, block FP8 and MXFP4, and boxes."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from helpers.packing_families import config_of

EVEN, RAGGED = (8, 4), (10, 7)  # blocks that divide all sizes, and none
_IN_FP8 = re.compile(r"layers\.\d+\.(self_attn|mlp)\.(?!gate\.).*_proj\w*\.weight$")
_IN_BFLOAT16 = "model.layers.0.self_attn.o_proj"


def save_deepseek_v3(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    block: tuple[int, int] = EVEN,
    with_mtp: bool = False,
    **settings: Any,
) -> Path:
    """Save DeepSeek V3 in block FP8 in two files, weights and scales apart; one module in bfloat16.

    `with_mtp`: and a layer of multi-token prediction, which transformers does not load.
    """
    _save("deepseek_v3", settings, folder, tokenizer)
    tensors = load_file(folder / "model.safetensors")
    if with_mtp:
        layer = {n.replace("layers.1.", "layers.2."): t for n, t in tensors.items()}
        tensors |= {n: t.clone() for n, t in layer.items() if "layers.2." in n}
        edit_config(folder, num_nextn_predict_layers=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return quantise_in_fp8(folder, _IN_FP8, block, _IN_BFLOAT16)


def quantise_in_fp8(
    folder: Path, names: re.Pattern[str], block: tuple[int, int], kept: str = "-"
) -> Path:
    """Quantise these tensors of a model in bfloat16, with their scales in a file of their own.

    `kept`: the beginning of the names of others, which stay in bfloat16.
    """
    tensors, scales = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if names.search(n) and not n.startswith(kept)]:
        tensors[name], scales[f"{name}_scale_inv"] = _to_fp8(tensors[name], block)
    assert scales
    _write_files(folder, [tensors, scales])
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": [kept],
        },
    )
    return folder


def save_gpt_oss(folder: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Path:
    """Save GPT-OSS with its experts in MXFP4."""
    _save("gpt_oss", settings, folder, tokenizer)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8)
    _write_files(folder, [tensors])
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    edit_config(folder, quantization_config=quantization)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values.pop("dtype")  # as the published ones
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def _save(
    kind: str, settings: dict[str, Any], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    config = config_of(kind, eos_token_id=1, pad_token_id=2, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _to_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.stack(
        [torch.stack([part.abs().max() for part in rows]) for rows in _blocks(weight, block)]
    ).float()
    scales /= 448
    values = weight.float() / spread(scales, weight.shape, block)
    return values.to(torch.float8_e4m3fn), scales


def _blocks(weight: torch.Tensor, block: tuple[int, int]) -> Iterator[tuple[torch.Tensor, ...]]:
    for rows in weight.split(block[0]):
        yield rows.split(block[1], dim=1)


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each value."""
    for dim, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim)
    return scales[: shape[0], : shape[1]]


def _write_files(folder: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    (folder / "model.safetensors").unlink()
    places = {}
    for number, part in enumerate(parts, start=1):
        file_name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file_name, {"format": "pt"})
        places |= dict.fromkeys(part, file_name)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(values), encoding="utf-8")


def require_boxes(stored: Any, expected: torch.Tensor) -> None:
    """Require of an open tensor the shape, the whole, and boxes at and between its edges."""
    assert stored.get_shape() == list(expected.shape)
    assert torch.equal(stored[...], expected)
    for count in range(expected.dim() + 1) if expected.numel() else ():
        for box in itertools.product(*map(_edges, expected.shape[:count])):
            assert torch.equal(stored[box], expected[box]), box


def _edges(size: int) -> list[slice]:
    return [slice(0, size), slice(1, size - 1), slice(size - 1, size), slice(1, 1)]
