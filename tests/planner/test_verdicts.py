"""The table of verdicts in docs/planner.md is what the code computes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plans import CONFIGS, PAGE, VERDICTS, verdict_row

# The others are written by `python -m benchmarks plans` alone.
CHECKED = {
    5: "states in host memory",
    9: "a dense model",
}
ROWS = (VERDICTS.search(PAGE.read_text(encoding="utf-8")) or [""] * 3)[2].splitlines()
NUMEL = {
    "glm-4.5-air": 106_852_245_504,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3-8b": 8_030_261_248,
}


def test_the_table_has_rows_of_each_model():
    assert len(ROWS) >= 12
    assert {line.split("|")[1].strip() for line in ROWS} == set(NUMEL)


@pytest.mark.parametrize("model", NUMEL)
def test_the_models_of_the_table_have_the_parameters_of_the_real_ones(model):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / model))
    assert sum(parameter.numel() for parameter in built.parameters()) == NUMEL[model]


@pytest.mark.full
@pytest.mark.parametrize("number", CHECKED)
def test_a_row_is_what_the_code_computes(number):
    assert verdict_row(ROWS[number]) == f"{ROWS[number]}\n"
