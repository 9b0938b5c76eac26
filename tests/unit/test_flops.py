"""Model FLOPs equal PyTorch's own count of the operations that ran."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import packing_families
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from distTest.workloads.tiny import tiny_config
from shardtune.config import LoraConfig
from shardtune.model import flops
from shardtune.model.documents.one_by_one import recurrence_flops, state_mixers
from shardtune.model.flops import NotCounted, attended_pairs, count_flops, published_peak
from shardtune.model.lora import add_adapters, draw_factors
from shardtune.model.traits import top_k

WIDE = {"head_dim": 12}  # not hidden_size / num_attention_heads
LATENT = {"head_dim": 4, "v_head_dim": 10}
LATENT |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "qk_head_dim": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", WIDE | {"tie_word_embeddings": True}),
    "untied": ("qwen3", WIDE | {"tie_word_embeddings": False}),
    "biased": ("gpt2", {}),
    "experts": ("glm4_moe", WIDE | {"n_routed_experts": 6}),
    "experts, equal": ("mixtral", {"sliding_window": None}),
    "latent": ("deepseek_v3", LATENT),
    "sliding": ("mistral", {"sliding_window": 3}),
    "sliding by layer": ("gemma3_text", {"sliding_window": 3}),
}
LENGTHS = np.array([7, 1, 4], np.int32)


def build(kind: str, experts: str = "eager") -> PreTrainedModel:
    """On one device, in training mode, with an attention that the counter sees: plain products."""
    model_type, settings = KINDS[kind]
    model = packing_families.build(model_type, **settings)
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation(experts)
    return cast(PreTrainedModel, model.train())


def grouped(a: torch.Size, b: torch.Size, *_: Any, **options: Any) -> int:
    """The counter does not know PyTorch's product of grouped rows."""
    return 2 * a[0] * a[1] * b[-1]


def counted(run: Any) -> float:
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}
    ) as counter:
        run()
    return counter.get_total_flops()


# A cache of latents projects all of them again with every token.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "latent"])
def test_the_flops_of_a_forward_are_those_of_each_document_alone(kind):
    """Fed token by token, a document's tokens meet exactly the keys that causal attention gives
    them."""
    model = build(kind).eval()

    def decode() -> None:
        for length in LENGTHS.tolist():
            cache = None
            for token in range(length):
                done = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = done.past_key_values

    with torch.no_grad():
        assert 3 * counted(decode) == count_flops(model).per_step(LENGTHS, int(LENGTHS.sum()))


def require_flops_with_one_trained(model: Any) -> None:
    """Check a step of documents of one token, for which the square of a length is its pairs."""
    rows, trained = 5, [0]

    def step() -> None:
        ids = torch.arange(rows).view(-1, 1)
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        model.get_output_embeddings()(hidden[trained]).sum().backward()

    assert counted(step) == count_flops(model).per_step(np.ones(rows, np.int32), len(trained))


@pytest.mark.parametrize(
    ("kind", "experts"), [*((kind, "eager") for kind in KINDS), ("experts", "grouped_mm")]
)
def test_the_flops_of_a_step_have_the_head_on_trained_positions_alone(kind, experts):
    require_flops_with_one_trained(build(kind, experts))


@pytest.mark.parametrize("kind", ["tied", "experts", "latent"])
def test_the_flops_of_frozen_weights_leave_their_gradients_out(kind):
    model = build(kind, "grouped_mm")
    add_adapters(model, LoraConfig(rank=4))
    draw_factors(model, seed=1)
    model.enable_input_require_grads()  # as in all layers but the first
    require_flops_with_one_trained(model)


def test_the_flops_leave_recomputation_out():
    model = build("untied")
    before = count_flops(model).per_step(LENGTHS, 5)
    ids = torch.arange(6).view(1, -1)
    plain = counted(lambda: model(ids, use_cache=False).logits.sum().backward())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert counted(lambda: model(ids, use_cache=False).logits.sum().backward()) > 1.15 * plain
    assert count_flops(model).per_step(LENGTHS, 5) == before


@pytest.mark.parametrize(("span", "is_chunked"), [(0, False), (3, False), (3, True)])
def test_the_pairs_of_a_window_are_those_of_its_mask(span, is_chunked):
    def allowed(query: int, key: int) -> bool:
        near = query // span == key // span if is_chunked else query - key < (span or 99)
        return key <= query and near

    lengths = np.array([1, 2, 3, 4, 10], np.uint16)
    pairs = sum(
        allowed(query, key)
        for length in lengths
        for query in range(length)
        for key in range(length)
    )
    assert attended_pairs(lengths, span, is_chunked) == pairs


def test_the_flops_of_long_rows_do_not_overflow():
    assert attended_pairs(np.array([200_000], np.int32), 0, False) == 200_000 * 200_001 // 2


def test_an_architecture_that_attends_otherwise_has_no_flops():
    with pytest.raises(NotCounted, match="deepseek_v4 has layers of type"):
        count_flops(packing_families.build("deepseek_v4"))


def test_experts_whose_settings_nobody_knows_have_no_flops(monkeypatch):
    model = build("experts, equal")
    for layer in model.model.layers:
        layer.mlp.specialists = layer.mlp._modules.pop("experts")
    for names in ("TOP_K", "EXPERTS"):
        monkeypatch.setattr(flops, names, ("picks",))
    with pytest.raises(
        NotCounted, match=r"how often a token meets its model\.layers\.0\.mlp\.specialists"
    ):
        count_flops(model)


@pytest.mark.parametrize(
    ("family", "mixer", "pairs"),
    [
        # Projections of queries, keys, values and gates, of two gates a head, and back; convolution
        # over 4 tokens; three products of 4 states of 8 x 8.
        ("qwen3_next", 2 * (32 * 96 + 32 * 8 + 32 * 32 + 64 * 4) + 6 * 4 * 8 * 8, 1),
        # In, of steps, inputs and outputs, of steps by channel, out; convolution; 32 x 8 states.
        ("mamba", 2 * (32 * 64 + 32 * 24 + 8 * 32 + 32 * 32 + 32 * 4) + 4 * 32 * 8, 0),
    ],
)
def test_a_layer_with_a_state_costs_its_products_and_no_pairs(family, mixer, pairs):
    model = packing_families.build(family)
    flops = count_flops(model)
    modules = state_mixers(model)
    assert sum(flops.layers.values()) == pairs
    own = {id(p) for module in modules for p in module.parameters()}
    without = flops.per_token - len(modules) * mixer
    rest = sum(
        2 * p.numel() * (0.5 if p.dim() == 3 else 1)  # of four experts two
        for name, p in model.named_parameters()
        if id(p) not in own and p.dim() > 1 and "embed" not in name and "lm_head" not in name
    )
    assert without == rest


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("jetmoe", 0),  # whose stacks of experts are not named so
        ("recurrent_gemma", 2 * 32 * 4),  # a convolution; gates by blocks
        ("nemotron_h", 768 + 2 * 2 * 2 * 32 * 16),  # a convolution; of four experts two
    ],
)
def test_a_weight_counts_as_often_as_a_token_meets_it(kind, others):
    """`others`: FLOPs that are not in PyTorch's products of matrices."""
    model: Any = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    model.config.use_cache = False
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    products = ("mm", "addmm", "baddbmm")
    counted = counter.get_flop_counts()["Global"]
    of_weights = sum(counted.get(getattr(torch.ops.aten, name), 0) for name in products)
    flops = count_flops(model)
    own = flops.per_token - sum(map(recurrence_flops, state_mixers(model)))
    assert own + flops.per_trained_token == of_weights + others


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", torch.float16, 989),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
    ],
)
def test_the_peaks_of_gpus_are_the_published_ones(name, dtype, teraflops):
    assert published_peak(name, dtype) == (teraflops and pytest.approx(1e12 * teraflops))


def test_a_number_that_a_list_gives_each_layer_is_read():
    assert top_k(packing_families.build("hunyuan_v1_moe", moe_topk=[2, 4])) == 4
