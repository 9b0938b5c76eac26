"""Tiny models of real architectures with random weights, and a real tokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from distTest.workloads.small_models import build, make_tokenizer
from helpers.chats import sentence

# No number of ranks above one divides it, so a tied weight that lost its twin shows.
VOCABULARY = 331
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


_GLM = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 8, "tie_word_embeddings": False}),
    "glm": ("glm4_moe", _GLM),
}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a ChatML template on the words of `chats`."""
    source = random.Random(0)
    return make_tokenizer([sentence(source, 30) for _ in range(200)], VOCABULARY)


def save_models(root: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Save `llama` (tied), `qwen3` (untied) and `glm` (mixture of experts), each in its folder."""
    torch.manual_seed(0)
    for name, (model_type, settings) in _FAMILIES.items():
        model = build(model_type, _SMALL | settings)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in _FAMILIES}


def small_opt(**settings: Any) -> OPTForCausalLM:
    """Build OPT; its positions count along the whole row, so packed documents would mix."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    }
    return OPTForCausalLM(OPTConfig(**small | settings))


def cut_into_files(source: Path, target: Path) -> Path:
    """Write a copy of a model whose weights lie in two files, other than its one; return it."""
    tensors = load_file(source / "model.safetensors")
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("*.safetensors", "cut"), dirs_exist_ok=True
    )
    names = [sorted(tensors)[number::2] for number in range(2)]
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, part in zip(files, names, strict=True):
        save_file({name: tensors[name] for name in part}, target / file, {"format": "pt"})
    places = {name: file for file, part in zip(files, names, strict=True) for name in part}
    index = json.dumps({"metadata": {}, "weight_map": places})
    (target / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return target
