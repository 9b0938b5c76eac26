"""A small GLM with experts and a small Llama, of random weights, and chats that fill their rows."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distTest.rehearse.tiny_model import make_tokenizer
from distTest.workloads.shapes import shape_of

ROW_TOKENS = 64
# The two messages that are not trained. A token is a byte.
_ASKED = {"system": "a", "user": "b c d e "}
_TEMPLATE_TOKENS = 31  # marks, the names of three roles, and ends of lines
_GLM = {"num_key_value_heads": 4, "head_dim": 64, "n_routed_experts": 16, "n_shared_experts": 1}
_GLM |= {"moe_intermediate_size": 256, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_GLM |= {"n_group": 1, "topk_group": 1, "tie_word_embeddings": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm4_moe", shape_of(256, 128, 5, 4, _GLM)),
    "llama": ("llama", shape_of(512, 1376, 5, 8, {"tie_word_embeddings": False})),
    "tied llama": ("llama", shape_of(512, 1376, 5, 8, {"tie_word_embeddings": True})),
}


def write_model(family: str, folder: Path) -> int:
    """Write configuration, weights and tokenizer; return the number of weights."""
    tokenizer = make_tokenizer()
    model_type, shape = FAMILIES[family]
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2 * ROW_TOKENS}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tokens["pad_token_id"] = tokenizer.pad_token_id
    config = AutoConfig.for_model(model_type, **shape | sizes | tokens)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def write_rows(path: Path, count: int) -> Path:
    """Write chats of one row each."""
    source = random.Random(0)
    answer = ROW_TOKENS - _TEMPLATE_TOKENS - sum(map(len, _ASKED.values()))
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = "".join(source.choices(string.ascii_lowercase, k=answer))
            messages = [{"role": role, "content": text} for role, text in _ASKED.items()]
            messages.append({"role": "assistant", "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
