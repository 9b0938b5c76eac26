"""A model, a tokenizer and data in the shape of the real ones, small enough for two cores."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from shardtune.errors import first_line

# The shipped configuration's model needs no hub.
_KNOWN = {"zai-org/GLM-4.5-Air": "glm4_moe"}
_FALLBACK = "zai-org/GLM-4.5-Air"

ROW_TOKENS = 64
_LAYERS = 3
# The largest value of each; an architecture has some of them.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_MOST_PARAMETERS = 5_000_000

# The generation marks enclose the text that the model must write.
_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_WORDS = (
    "rank",
    "node",
    "shard",
    "mesh",
    "step",
    "token",
    "loss",
    "norm",
    "gloo",
    "store",
    "port",
    "epoch",
    "batch",
)


def make_model(path: str, ranks: int, out: Path) -> str:
    """Write configuration and tokenizer of a tiny model of `path`'s architecture to `out`.

    `path` is a directory or a hub id. Returns a line that describes the model. Where the
    architecture cannot be read or made small, the line says why, and which one stands in for it.
    """
    tokenizer = _tokenizer()
    try:
        source = (
            AutoConfig.for_model(_KNOWN[path])
            if path in _KNOWN
            else AutoConfig.from_pretrained(path)
        )
        model, origin = _scale_down(source, ranks, tokenizer), path
    except Exception as error:  # each configuration class reads its own fields
        why = f"{type(error).__name__}: {first_line(error)}"
        model = _scale_down(AutoConfig.for_model(_KNOWN[_FALLBACK]), ranks, tokenizer)
        origin = f"{_FALLBACK}, because that of {path} cannot be had here ({why})"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = f"{model.num_hidden_layers} layers, {_count_parameters(model)} random parameters"
    return f"{model.model_type}, {size}, as {origin}"


def _scale_down(
    source: PreTrainedConfig, ranks: int, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    """Keep the architecture with a few narrow layers, at least one of each of its kinds.

    Raises:
        ValueError: it is not small after that.
    """
    values = source.to_dict()
    layers = _some_layers(values)
    small = {"num_hidden_layers": len(layers)}
    small |= {
        key: min(values[key], most) for key, most in _SMALL.items() if values.get(key) is not None
    }
    if values.get(_HEADS):
        small[_HEADS] = 4
    if heads := values.get(_KV_HEADS):  # shared by some queries, by all or by one, as before
        small[_KV_HEADS] = 4 if heads == values[_HEADS] else min(heads, 2)
    # A multiple of the ranks, so that none is without an expert.
    small |= {key: ranks * -(-4 // ranks) for key in _EXPERTS if values.get(key) is not None}
    for key, value in values.items():
        if _is_per_layer(value, values["num_hidden_layers"]):
            values[key] = [value[layer] for layer in layers]
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    scaled = type(source).from_dict(values | small | ids | {"vocab_size": len(tokenizer)})
    if (parameters := _count_parameters(scaled)) > _MOST_PARAMETERS:
        raise ValueError(f"it keeps {parameters} parameters when its known sizes are reduced")
    return scaled


def _some_layers(values: dict[str, Any]) -> list[int]:
    """Choose the first layer of each kind in the lists, and more up to `_LAYERS`."""
    depth = values["num_hidden_layers"]
    lists = [value for value in values.values() if _is_per_layer(value, depth)]
    kinds = [json.dumps([kind[layer] for kind in lists]) for layer in range(depth)]
    firsts = sorted({kinds.index(kind) for kind in kinds})
    others = [layer for layer in range(depth) if layer not in firsts]
    return sorted(firsts + others[: max(0, _LAYERS - len(firsts))])


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == depth


def _count_parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the words of the data."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(_WORDS)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_SPECIAL[1], pad_token=_SPECIAL[2]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def write_chats(path: Path, count: int, seed: int) -> None:
    """Write `count` chats of one question and one answer; each fills more than half a row."""
    source = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question, answer = (" ".join(source.choices(_WORDS, k=words)) for words in (6, 10))
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
