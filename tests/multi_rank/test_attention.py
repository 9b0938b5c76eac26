"""Attention by documents and the loss head equal plain transformers, one document at a time.

A model that needs more than causal attention is logged with the reason and keeps its own.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.commands import finish
from helpers.packing_families import build
from helpers.ranks import config_for, on_ranks
from helpers.tiny_models import small_opt
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.models import one_by_one
from distTest.workloads.tiny import VOCABULARY
from shardtune.config import Config
from shardtune.data.batch import build_batch
from shardtune.distributed.join import join_world
from shardtune.distributed.layout import Layout
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.log import logger
from shardtune.model import documents
from shardtune.model.documents.attention_choice import choose_attention
from shardtune.model.loss import LossHead, summed_loss, use_loss_head
from shardtune.model.parts import decoder_layers
from shardtune.model.sharding import shard

LENGTHS = (5, 1, 23, 12, 40)  # tokens of documents; the windows of tiny models have 8
# Of each architecture: its settings, the reason why it does not attend by documents, and whether
# its head gives the loss itself.
FAMILIES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "llama": ({"tie_word_embeddings": True}, "", True),
    "qwen2": ({}, "", True),
    "qwen3_moe": ({}, "", True),
    "glm4_moe": ({}, "", True),
    "deepseek_v3": ({}, "", True),
    "qwen2_moe": ({}, "", True),
    "mistral": ({"sliding_window": max(LENGTHS)}, "", True),
    "mistral, narrow": ({"sliding_window": 8}, "", True),
    "gpt_neox": ({}, "", True),
    "phi": ({}, "", True),  # its head has a bias
    "starcoder2": ({"sliding_window": None}, "", True),
    "granite": ({"logits_scaling": 4.0}, "", False),
    "cohere": ({"logit_scale": 0.5}, "", False),
    "gemma2": ({"sliding_window": 8}, "capped scores", False),
    "gemma2, wide": ({"sliding_window": 64}, "capped scores", False),
    "gemma3_text": ({"sliding_window": 8}, "", True),
    "deepseek_v32": ({"index_topk": 64}, "", True),
    "deepseek_v32, sparse": (
        {"index_topk": 16, "index_n_heads": 16},  # with 2, keys often tie at 0
        "layers that read the mask",
        True,
    ),
}
CHECKPOINTED = ("llama", "glm4_moe", "granite", "gemma2")


def some_documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    row = [torch.randint(3, VOCABULARY - 20, (n,), generator=source) for n in LENGTHS]
    return row, [torch.rand(n, generator=source) < 0.4 for n in LENGTHS]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: getattr(grad, "full_tensor", lambda grad=grad: grad)().clone()
        for name, grad in found.items()
    }


def compare(config: Config, out: Path) -> None:
    """On a rank: loss and gradients of each family against the oracle, computed before it is
    sharded."""
    world, reports = join_world(config), {}
    for family, (settings, reason, is_last) in FAMILIES.items():
        for checkpointing in (False, True) if family in CHECKPOINTED else (False,):
            model, name = build(family.partition(",")[0], **settings), f"{family} {checkpointing}"
            lines, at_once, reports[name] = difference(model, config, world, checkpointing)
            line, *_ = lines
            is_by_layer = "one call of each attention layer" in line
            assert (reason in line and is_by_layer) if reason else "out a mask" in line, line
            assert not at_once if is_last else "changes them after its head" in at_once, name
            head = model.get_output_embeddings()
            assert isinstance(head, LossHead) and head.is_last is is_last, name
    (out / "reports.json").write_text(json.dumps(reports), encoding="utf-8")


def difference(
    model: PreTrainedModel, config: Config, world: World, checkpointing: bool
) -> tuple[list[str], str | None, list[float]]:
    """The choice that is logged, which logits exist at once, and how far loss and gradients are
    off."""
    row, trained = some_documents()
    dataset: Any = [(i.numpy(), f.numpy()) for i, f in zip(row, trained, strict=True)]
    batch = build_batch(dataset, [*range(len(row))], is_flat=True)
    model.set_attn_implementation("eager")
    expected = one_by_one(model, row, trained)
    expected.backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, decoder_layers(model), (), world, MixedPrecisionPolicy())
    lines: list[str] = []
    with patch.object(logger, "info", lines.append):
        assert choose_attention(model, max(LENGTHS), world)
    at_once = use_loss_head(model, world.device)
    with documents.of(batch):
        loss = summed_loss(model, batch)
        loss.backward()
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    norm = sum(grad.square().sum() for grad in expected_gradients.values()).sqrt()
    off = sum(
        (found[name] - grad).square().sum() for name, grad in expected_gradients.items()
    ).sqrt()
    return lines, at_once, [abs(loss.item() / expected.item() - 1), (off / norm).item()]


def test_loss_and_gradients_equal_one_document_at_a_time(models, tmp_path):
    config = config_for(models["llama"], tmp_path, "data.max_length=50")
    finish(on_ranks(1, compare, config, tmp_path, cwd=tmp_path))
    reports = json.loads((tmp_path / "reports.json").read_text(encoding="utf-8"))
    assert len(reports) == len(FAMILIES) + len(CHECKPOINTED)
    wrong = {
        name: values for name, values in reports.items() if values[0] > 2e-6 or values[1] > 2e-5
    }
    assert not wrong


def by_place(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    """As a model that counts from the beginning of the row, whatever positions it is given."""
    return output * (1 + (torch.arange(output.shape[1]) > 99)[:, None])


def by_table(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    """The same, with fewer positions than the longest row has."""
    return output * torch.linspace(1, 2, 128)[torch.arange(output.shape[1])][:, None]


def check_documents(models: dict[str, Path], config: Config, usual: Config) -> None:
    """On a rank: models that can be packed pass, also where their kernels round differently, and
    others do not."""
    world = join_world(config)
    as_usual = replace(world, layout=Layout.of(usual, world.size))

    def sharded(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model.config.use_cache = False
        shard(model, decoder_layers(model), (), world, MixedPrecisionPolicy(param_dtype=dtype))
        return model

    def loaded(path: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def check_refused(model: PreTrainedModel, how: World = world) -> None:
        refusal = (
            rf"{model.config.model_type} lets a packed document see .* use .*data\.packing=false"
        )
        with pytest.raises(RunFailed, match=refusal):
            choose_attention(model, how.layout.max_length, how)

    for dtype in torch.float32, torch.bfloat16:
        for path in models.values():
            for how, attention in (world, "documents"), (as_usual, "sdpa"):
                model = sharded(loaded(path), dtype)
                assert choose_attention(model, how.layout.max_length, how)
                assert model.training
                assert model.config._attn_implementation == attention
        check_refused(sharded(small_opt(), dtype), as_usual)

    for leak in by_place, by_table:
        leaking = sharded(loaded(models["llama"]))
        leaking.get_input_embeddings().register_forward_hook(leak)
        check_refused(leaking)

    deep_config = AutoConfig.from_pretrained(
        models["llama"], num_hidden_layers=8, initializer_range=0.3
    )
    deep = sharded(
        AutoModelForCausalLM.from_config(deep_config, dtype=torch.float32), torch.bfloat16
    )
    outputs = []

    def choose_kernel(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        """As on a GPU, where a row without a mask takes another kernel."""
        module.set_attn_implementation("eager" if options["input_ids"].shape[1] == 16 else "sdpa")

    deep.register_forward_pre_hook(choose_kernel, with_kwargs=True)
    deep.register_forward_hook(
        lambda module, arguments, output: outputs.append(output.logits[0, -16:].float())
    )
    assert choose_attention(deep, usual.data.max_length, as_usual)
    assert (outputs[0] - outputs[-1]).std() > 0.01 * outputs[0].std()


def test_documents_are_separate_or_packing_is_refused(models, tmp_path):
    configs = [
        config_for(models["llama"], tmp_path, *more) for more in ([], ["model.attention=sdpa"])
    ]
    checked = on_ranks(1, check_documents, models, *configs, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
