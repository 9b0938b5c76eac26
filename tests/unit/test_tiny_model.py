"""The tiny model of the rehearsal has the architecture of the real one."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distTest.rehearse import tiny_model as tiny


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "glm"])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_a_tiny_model_has_the_architecture_of_its_source(architecture, ranks, tmp_path, models):
    line = tiny.make_model(str(models[architecture]), ranks, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    source = AutoConfig.from_pretrained(models[architecture])
    assert config.model_type == source.model_type
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert line.endswith(f"as {models[architecture]}")
    if architecture == "glm":
        assert config.n_routed_experts % ranks == 0
        assert config.first_k_dense_replace < config.num_hidden_layers
    assert AutoModelForCausalLM.from_config(config).num_parameters() < 1_000_000
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


def test_glm_stands_in_for_an_architecture_that_cannot_be_read(tmp_path):
    """There is no such directory, or transformers does not know the model in it."""
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "unheard-of"}', encoding="utf-8")
    for path in (tmp_path / "nothing", strange):
        line = tiny.make_model(str(path), 2, tmp_path / "out")
        assert line.startswith("glm4_moe, 3 layers, ")
        assert f" as zai-org/GLM-4.5-Air, because {path} cannot be had here, " in line
        assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "glm4_moe"


def test_one_layer_of_each_kind_is_kept(tmp_path):
    large = AutoConfig.for_model("gemma3_text")
    large.save_pretrained(tmp_path / "large")
    tiny.make_model(str(tmp_path / "large"), 2, tmp_path / "small")
    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert set(small.layer_types) == set(large.layer_types) and small.num_hidden_layers == 6
