"""Small configurations and a machine that plans are made of."""

import copy
from pathlib import Path

from transformers import Glm4MoeConfig, GptOssConfig, LlamaConfig

from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.planner.arithmetic.machine import Machine

CONFIG = Path(__file__).parents[2] / "examples/demo.yaml"
_WIDE = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
_WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2}
_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
GLM = Glm4MoeConfig(
    **_WIDE,
    moe_intermediate_size=128,
    num_hidden_layers=7,
    n_routed_experts=16,
    num_experts_per_tok=4,
    first_k_dense_replace=1,
)
GPT_OSS = GptOssConfig(
    **_NARROW,
    vocab_size=1000,
    intermediate_size=64,
    num_hidden_layers=2,
    head_dim=16,
    num_local_experts=4,
)
MACHINE = Machine(2, 4, 8e9, 1e9, 1e9, 1e12)
LLAMA = LlamaConfig(**_WIDE, num_hidden_layers=6, max_position_embeddings=8192)
TIED = copy.deepcopy(LLAMA)
TIED.tie_word_embeddings = True
# The end of its backward, the gradient of the embedding, takes the most in a shallow one, and the
# beginning in this.
DEEP = LlamaConfig(**_NARROW, vocab_size=8000, intermediate_size=128, num_hidden_layers=16)
STEPS = ["train.gradient_accumulation_steps=4", "model.activation_checkpointing=full"]


def configured(*assignments: str) -> Config:
    given = ["model.path=unread", "model.init=random", "model.compute_dtype=bfloat16"]
    return load_config(CONFIG, [*given, "data.max_length=256", *assignments], {})
