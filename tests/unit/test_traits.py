"""What a model is made of is decided in one file."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from helpers.commands import REPOSITORY

from shardtune.model.traits import EXPERTS, FACTORS, TOP_K, Heads, heads, number

NAMES = {*EXPERTS, *TOP_K, *FACTORS, "layer_types", "num_key_value_heads"}
NAMES |= {"qk_nope_head_dim", "v_head_dim"}
ALLOWED = {
    "model/traits.py",
    "model/source/small_copy.py",  # which narrows these settings
    "planner/simulation/tracker.py",  # operands of a product of groups
    "optimizers/rounding.py",  # scales of blocks, one behind the other
}
COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


def decisions(source: str) -> Iterator[str]:
    """Yield what decides by a setting's name, or tells stacks from matrices by dimensions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield str(node.value)
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith((".dim()", ".ndim")):
            number, compare = node.comparators[0], COMPARE.get(type(node.ops[0]))
            if compare and isinstance(number, ast.Constant) and number.value != 2:
                if compare(3, number.value) != compare(2, number.value):
                    yield ast.unparse(node)
            elif isinstance(node.ops[0], ast.Gt | ast.LtE):
                yield ast.unparse(node)


def test_no_other_file_decides_what_is_a_stack_or_by_which_name_a_setting_goes():
    package = REPOSITORY / "shardtune"
    files = {str(path.relative_to(package)): path for path in package.glob("**/*.py")}
    found = {name: [*decisions(path.read_text("utf-8"))] for name, path in files.items()}
    assert {name for name, each in found.items() if each} == ALLOWED


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
