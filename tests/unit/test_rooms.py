"""Who imports whom, and what one place decides: what a run is, and what a model is made of."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from types import SimpleNamespace

import pytest
from helpers.commands import REPOSITORY
from helpers.configs import configured
from hypothesis import given
from hypothesis import strategies as st

from shardtune.distributed.layout import Layout
from shardtune.model.parts import FACTORS
from shardtune.model.traits import EXPERTS, TOP_K, Heads, heads, number

LIBRARY = REPOSITORY / "shardtune"
MOST_ARROWS = {"data": 45, "model": 40, "training": 30, "planner": 35}


def arrows(room: str) -> set[tuple[str, str]]:
    """Return the imports between the parts of a room: its sub-folders, and the files beside them.

    `from package import module` counts as an import of the module.
    """
    between = set()
    for file in (LIBRARY / room).rglob("*.py"):
        part = file.relative_to(LIBRARY / room).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported = [name.split(".") for name in names]
            # Attributes of these packages would be imports that nobody counts.
            assert ["shardtune"] not in imported and ["shardtune", room] not in imported, file
            between |= {
                (part, path[2]) for path in imported if path[:2] == ["shardtune", room] and path[2:]
            }
    return {(part, other) for part, other in between if part != other}


@pytest.mark.parametrize("room", MOST_ARROWS)
def test_imports_between_the_parts_of_a_room_are_few_and_go_one_way(room):
    imports: dict[str, set[str]] = {}
    for part, other in arrows(room):
        imports.setdefault(part, set()).add(other)
    assert sum(map(len, imports.values())) <= MOST_ARROWS[room]
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_the_modules_of_the_library_have_names_of_their_own():
    counts = Counter(file.name for file in LIBRARY.rglob("*.py"))
    twice = {name for name, n in counts.items() if n > 1}
    assert twice <= {"__init__.py", "__main__.py"}


OFFLOAD = "optimizer.offload=true"
BF16, F32 = "model.master_dtype=bfloat16", "float32 float32 float32 float32"
# Keys that say what a run is. The configuration itself and its layout read them.
DECIDED = {
    *("parallel", "offload", "compute_dtype", "master_dtype", "reduce_dtype"),
    *("activation_checkpointing", "micro_batch_size", "gradient_accumulation_steps"),
}
READERS = {"config.py", "config_io.py", "config_schema.py", "distributed/layout.py"}
SAID = {  # what a user asked for, in words
    ("training/start_log.py", "config.optimizer.offload"),
    ("training/data_and_schedule.py", "config.model.compute_dtype"),
    ("planner/command/team_table.py", "config.model.activation_checkpointing"),
}
# A run, a machine that is planned for, a trial before there is one.
MAKERS = {"distributed/join.py", "planner/arithmetic/machine.py", "planner/command/plan_command.py"}
MAKERS |= {"model/facts/of_config.py"}
MAKERS |= {"distTest/rehearse/__main__.py"}


def test_no_other_file_asks_the_configuration_what_a_run_is():
    asked, makers = set(), set()
    folders = ("shardtune", "distTest", "benchmarks")
    files = (file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    for file in [REPOSITORY / "train_fsdp.py", *files]:
        name = file.relative_to(REPOSITORY).as_posix().removeprefix("shardtune/")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in DECIDED and name not in READERS:
                text = ast.unparse(node)
                if not text.rpartition(".")[0].endswith(("layout", "policy")):
                    asked.add((name, text))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "Layout.of":
                makers.add(name)
    assert asked == SAID and makers == MAKERS


@given(st.data())
def test_what_the_degrees_leave_fits_together(data):
    draw = st.integers(1, 4)
    stages, replicate, shards = (data.draw(draw) for _ in range(3))
    ranks = stages * replicate * shards
    expert = data.draw(st.sampled_from([n for n in range(1, 5) if shards % n == 0]))
    context = data.draw(st.sampled_from([n for n in range(1, 5) if replicate * shards % n == 0]))
    degrees = {"stages": stages, "replicate": replicate, "expert": expert, "context": context}
    layout = Layout.divided(ranks, degrees)
    assert layout.problems() == []
    assert layout.expert_shards * layout.expert == layout.shards == shards
    assert layout.data_ranks * layout.row_ranks * layout.stages == layout.ranks


@pytest.mark.parametrize(
    ("given_", "is_gpu", "dtypes", "offloads"),
    # Of computing, of masters, of weights on the device and of gradients.
    [
        ("", True, "bfloat16 float32 float32 float32", False),
        (OFFLOAD, False, F32, False),
        (OFFLOAD, True, "bfloat16 float32 bfloat16 float32", True),
        (f"{OFFLOAD} model.compute_dtype=float32", True, F32, True),
        (f"{BF16} model.reduce_dtype=bfloat16", True, F32.replace("float32", "bfloat16"), False),
        (BF16, True, "bfloat16 bfloat16 bfloat16 float32", False),
        (
            f"lora.rank=4 {BF16} optimizer.offload=true",
            True,
            "bfloat16 float32 bfloat16 float32",
            0,
        ),
    ],
)
def test_dtypes_and_places_follow_from_the_keys_and_the_device(given_, is_gpu, dtypes, offloads):
    config = configured(*given_.split())
    assert Layout.of(config, 1, is_gpu, "float32").compute_dtype == "float32"
    layout = Layout.of(config, is_gpu=is_gpu)
    found = layout.compute_dtype, layout.master_dtype, layout.device_dtype, layout.gradient_dtype
    assert (" ".join(found), layout.offloads) == (dtypes, offloads)


NAMES = {*EXPERTS, *TOP_K, *FACTORS, "layer_types", "num_key_value_heads"}
NAMES |= {"qk_nope_head_dim", "v_head_dim"}


FIELDS = {"conversations", "instruction", "history", "system_prompt", "kto_tag"}


def files_with(names: set[str], folder: str) -> set[str]:
    """Return the files that have one of these texts."""
    files = (LIBRARY / folder).rglob("*.py")
    trees = ((path, ast.walk(ast.parse(path.read_text("utf-8")))) for path in files)
    texts = ((path, {n.value for n in tree if isinstance(n, ast.Constant)}) for path, tree in trees)
    return {path.relative_to(LIBRARY).as_posix() for path, found in texts if found & names}


def test_no_other_file_decides_by_which_name_a_setting_or_a_field_goes():
    """But for the file which narrows these settings."""
    deciding = {"model/traits.py", "model/parts.py", "model/source/small_copy.py"}
    assert files_with(NAMES, ".") == deciding
    assert all(name.startswith("data/forms/") for name in files_with(FIELDS, "data"))


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
