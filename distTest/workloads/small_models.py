"""Small models, tokenizers that need no network, and chats of one row each."""

import random
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from distTest.workloads.chats import write_jsonl
from distTest.workloads.shapes import shape_of
from distTest.workloads.tiny import tiny_like
from shardtune.errors import first_line
from shardtune.model.traits import EXPERTS

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The second one ends a turn, and the third one pads.
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
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
_SHIPPED = "zai-org/GLM-4.5-Air"  # its architecture needs no hub


def make_tokenizer(
    texts: Iterable[str] = (), vocabulary: int = 0, special: Sequence[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte.

    Merges of `texts` become tokens as long as there are fewer than `vocabulary`.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    names = dict(zip(("eos_token", "pad_token"), special[1:], strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **names)


def token_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"bos_token_id": None, **ids, "vocab_size": len(tokenizer)}


def save_untrained(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> Path:
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(model_type: str, settings: Mapping[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def write_model(family: str, folder: Path) -> int:
    tokenizer = make_tokenizer()
    model_type, shape = FAMILIES[family]
    torch.manual_seed(0)
    row = {"max_position_embeddings": 2 * ROW_TOKENS}
    model = build(model_type, shape | row | token_settings(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def write_rows(path: Path, count: int, seed: int = 0, has_system: bool = True) -> Path:
    """Write chats that fill a row each, or nearly so without a system message."""
    source = random.Random(seed)
    answer = ROW_TOKENS - _TEMPLATE_TOKENS - sum(map(len, _ASKED.values()))
    records = []
    for _ in range(count):
        text = "".join(source.choices(string.ascii_lowercase, k=answer))
        messages = [{"role": role, "content": text} for role, text in _ASKED.items()]
        messages.append({"role": "assistant", "content": text})
        records.append({"messages": messages if has_system else messages[1:]})
    return write_jsonl(path, records)


def make_model(path: str, ranks: int, out: Path) -> str:
    """Write configuration and tokenizer of a tiny model of `path`'s architecture to `out`.

    `path` is a directory or a hub id. Return a line that describes the model, and why another
    architecture stands in for one that cannot be read or made small.
    """
    is_shipped = path == _SHIPPED
    tokenizer = make_tokenizer()
    try:
        source = (
            AutoConfig.for_model("glm4_moe") if is_shipped else AutoConfig.from_pretrained(path)
        )
        tiny = tiny_like(source).to_dict()
        # A multiple of the ranks, so that each rank has an expert.
        experts = {key: ranks * -(-4 // ranks) for key in EXPERTS if tiny.get(key) is not None}
        config = type(source).from_dict(tiny | experts | token_settings(tokenizer))
        layers = config.num_hidden_layers
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each configuration class reads its own fields
        if is_shipped:
            raise
        why = f"{path} cannot be had here, {type(error).__name__}: {first_line(error)}"
        return f"{make_model(_SHIPPED, ranks, out)}, because {why}"
    save_untrained(out, config, tokenizer)
    size = f"{layers} layers, {model.num_parameters()} random parameters"
    return f"{config.model_type}, {size}, as {path}"
