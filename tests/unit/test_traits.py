"""What a model is made of is decided in one file."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from helpers.commands import REPOSITORY

from shardtune.model.traits import EXPERTS, FACTORS, TOP_K, Heads, heads, number

NAMES = {*EXPERTS, *TOP_K, *FACTORS, "layer_types", "num_key_value_heads"}
NAMES |= {"qk_nope_head_dim", "v_head_dim"}


def test_no_other_file_decides_by_which_name_a_setting_goes():
    """But for the file which narrows these settings."""
    found = set()
    for path in REPOSITORY.glob("shardtune/**/*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        if any(isinstance(node, ast.Constant) and node.value in NAMES for node in nodes):
            found.add(path.name)
    assert found == {"traits.py", "small_copy.py"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_attention_heads": 4, "hidden_size": 32}, Heads(4, 4, 8, 8)),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
            Heads(4, 2, 12, 12),
        ),
        (
            {"num_attention_heads": 4, "head_dim": 4, "v_head_dim": 10}
            | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4},
            Heads(4, 4, 16, 10),
        ),
        ({"hidden_size": 32}, Heads(0, 0, 32, 32)),
    ],
)
def test_heads_have_the_widths_of_their_keys_and_values(settings, expected):
    assert heads(SimpleNamespace(**settings)) == expected


def test_a_setting_is_a_number_where_all_layers_have_it():
    values = {"same": [3, 3], "other": [3, 4], "none": [], "lists": [[1], [1]], "text": "4"}
    settings = SimpleNamespace(**values)
    assert {name: number(settings, name) for name in values} == dict.fromkeys(values, 0) | {
        "same": 3
    }
