"""The shapes of published models: the architecture and settings of each, for AutoConfig."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_GLM = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "attention_bias": True}
_GLM |= {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
_GLM |= {"moe_intermediate_size": 1408, "first_k_dense_replace": 1}
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256}


def shape_of(width: int, mlp_width: int, layers: int, heads: int, more: dict[str, Any]) -> Any:
    sizes = {"hidden_size": width, "intermediate_size": mlp_width}
    return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads} | more


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("llama", shape_of(4096, 14336, 32, 32, _LLAMA)),
    "GLM-4.5-Air": ("glm4_moe", shape_of(4096, 10944, 46, 96, _GLM)),
}


@dataclass(frozen=True)
class Slice:
    """The first layers of a shape.

    `parameters` count embedding and head, too. `whole`: the number of layers of the full shape.
    `dense`: the number of layers before the first with experts.
    """

    model_type: str
    settings: dict[str, Any]
    parameters: int
    whole: int
    dense: int | None

    @property
    def layers(self) -> int:
        return int(self.settings["num_hidden_layers"])

    def __str__(self) -> str:
        experts = f", {self.layers - self.dense} of them with experts" if self.dense else ""
        return f"{self.layers} of {self.whole} layers{experts}"


def slice_of(
    name: str,
    length: int,
    most: float,
    layers: int | None = None,
    small: Mapping[str, int] | None = None,
) -> Slice:
    """Return the first layers of a shape, up to `layers`, of at most `most` parameters.

    One layer stays, and one with experts if there are any, even with more parameters. `length`:
    tokens of a row. `small` replaces values of the shape.
    """
    model_type, shape = SHAPES[name]
    replaced = {key: value for key, value in (small or {}).items() if key in shape}
    shape = shape | {"max_position_embeddings": 2 * length} | replaced
    whole, dense = shape["num_hidden_layers"], shape.get("first_k_dense_replace")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    fewest = 1 + (dense or 0)
    count = max(fewest, min(layers or whole, whole))
    while count > fewest and model.num_parameters() - sum(sizes[count:]) > most:
        count -= 1
    parameters = model.num_parameters() - sum(sizes[count:])
    return Slice(model_type, shape | {"num_hidden_layers": count}, parameters, whole, dense)
