"""A small copy of an architecture, for a trial before the weights are there."""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.model.source.text_model import build_text_model

_WIDTH = 16  # the width of MLPs, experts and low-rank projections
_VOCABULARY = 512
_MANY_PARAMETERS = 5 * 10**7  # a trial of more takes seconds
_MOST_PARAMETERS = 25 * 10**7  # 1 GB
_FEWER_LAYERS = 12  # with each kind of layer among them, if all layers are too many
_INNER = re.compile(r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|_lora_rank)$")
_DELTA_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
_HIDDEN = re.compile(r"(hidden_size|hidden_dim|d_model|embed_dim|n_embd|embedding_size|proj_dim)$")


def small_copy(model_config: PreTrainedConfig, attention: str) -> PreTrainedModel | None:
    """Build the architecture with few and narrow heads, random weights and float32, on the CPU.

    The copy keeps all that tells documents apart: every layer (of large models the first dozen)
    with its type, windows, masks and flags, the width of a head, and the number of experts.

    Returns None if no copy can be built or it would not be small. Then the trial on the loaded
    weights decides alone.
    """
    implementation = None if attention == "auto" else attention
    # Building changes the configuration, and must not change the run's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            narrow = _narrow(model_config)
            # The last layers of Gemma 3n use keys of earlier ones: such a model keeps all layers.
            shares_keys = getattr(narrow.get_text_config(), "num_kv_shared_layers", None)
            if _parameters(narrow) > _MANY_PARAMETERS and not shares_keys:
                narrow = with_layers(narrow, _FEWER_LAYERS)
            if _parameters(narrow) > _MOST_PARAMETERS:
                return None
            model = build_text_model(
                narrow, attn_implementation=implementation, dtype=torch.float32
            )
        except Exception:  # each architecture checks its settings in its own way
            return None
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute without other threads, which would wait longer than they compute in a small copy."""
    # On two busy cores the trials of a small copy take a twentieth of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_layers(model_config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the configuration of the model's first layers alone."""
    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    whole = text.num_hidden_layers
    text.num_hidden_layers = layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:layers])
    return cut


def _parameters(model_config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        on_meta = build_text_model(copy.deepcopy(model_config))
    return int(on_meta.num_parameters())


def _narrow(model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration with smaller widths."""
    narrow = copy.deepcopy(model_config)
    text: Any = narrow.get_text_config()
    for section in _sections(narrow):
        for name, value in list(vars(section).items()):
            if _INNER.search(name):
                setattr(section, name, _at_most(_WIDTH, value))
            elif name.startswith("vocab_size"):
                setattr(section, name, _at_most(_VOCABULARY, value))
            elif name.endswith("_token_id"):
                setattr(section, name, _at_most(_VOCABULARY - 1, value))
        if section not in (narrow, text):  # a tower for images or sound, which no text reaches
            for name in {"num_hidden_layers", "depth"} & vars(section).keys():
                setattr(section, name, 1)
    heads, hidden = getattr(text, "num_attention_heads", None), text.hidden_size
    if not heads:  # as in Mamba, whose widths follow from the hidden size
        return narrow
    key_heads = getattr(text, "num_key_value_heads", None)
    fewer_key_heads = min(2, key_heads or heads)
    fewer = fewer_key_heads if key_heads in (None, heads) else 2 * fewer_key_heads
    for name, value in list(vars(text).items()):
        if value == hidden and _HIDDEN.search(name):
            setattr(text, name, hidden // heads * fewer)
    text.num_attention_heads = fewer
    if key_heads:
        text.num_key_value_heads = fewer_key_heads
    # The numbers of heads of delta rules divide one another, and still must.
    numbers = {name: getattr(text, name, None) for name in _DELTA_HEADS}
    delta_heads = {name: n for name, n in numbers.items() if type(n) is int}
    times = max(1, math.gcd(*delta_heads.values()) // 2)
    for name, number in delta_heads.items():
        setattr(text, name, number // times)
    return narrow


def _sections(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and all configurations within it, such as that of a tower."""
    yield config
    for name in config.sub_configs:
        if isinstance(section := getattr(config, name, None), PreTrainedConfig):
            yield from _sections(section)


def _at_most(limit: int, value: Any) -> Any:
    """Return a setting, a number or a list of one per layer, with no number above `limit`."""
    if isinstance(value, list):
        return [_at_most(limit, each) for each in value]
    return min(limit, value) if type(value) is int else value
