"""Configurations in files, written, read again and shipped, and what a resume says of them."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers.commands import REPOSITORY
from helpers.configs import load, value
from helpers.data_run import write_dataset

from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.resume_rules import log_changes, require_allowed_settings
from shardtune.config import KEYS, resume_may_change
from shardtune.config_io import (
    changed_keys,
    load_config,
    read_written,
    remarks,
    to_dict,
    write_config,
)
from shardtune.data.schedule import Position, Schedule
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.training.data_and_schedule import changed_rate
from shardtune.training.run import saved_reshard_policy
from shardtune.training.states.reshard import ReshardPolicy

SHIPPED = REPOSITORY / "config.yaml"


@pytest.mark.parametrize(
    "text", ["1e-5", "#x: [y]", 'quo"te\\', "é😀", "null", " a ", "long " * 60]
)
def test_written_configuration_loads_again(tmp_path, text):
    quoted = yaml.safe_dump(text, default_style='"').strip()
    config = load(tmp_path, f"data.eval={quoted}", "lora.targets=[1e5x, '2']")
    written = tmp_path / "config.yaml"
    write_config(config, written)
    assert config.data.eval == text
    assert to_dict(load_config(written, [], {})) == to_dict(config)


def test_written_configuration_names_the_origin_of_every_value(tmp_path):
    config = load(tmp_path, "optimizer.lr=3e-5", environ={"JOIN_TIMEOUT": "30"})
    write_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^  \w+: .*  # (.+)$", text, re.MULTILINE) == list(config.origins.values())
    values = {key: (value(config, key), origin) for key, origin in config.origins.items()}
    assert read_written(tmp_path / "config.yaml") == values
    assert "  lr: 3e-05  # command line\n" in text and '  path: "m"  # file\n' in text
    assert "  join_timeout_s: 30.0  # environment\n" in text and "  seed: 1234  # default\n" in text


MAY_CHANGE = """
run.dir run.resume run.ignore_plan
model.activation_checkpointing model.attention model.compile
parallel.* train.* optimizer.lr optimizer.offload
scheduler.* eval.* checkpoint.* export.* logging.* distributed.*
"""


def test_a_resume_may_change_some_keys():
    allowed = {key for key in KEYS if {key, f"{key.partition('.')[0]}.*"} & set(MAY_CHANGE.split())}
    assert {key for key in KEYS if resume_may_change(key)} == allowed


def test_a_configuration_saved_by_another_version_is_compared_by_its_keys(tmp_path):
    current = load(tmp_path, "train.epochs=5", "lora.targets=[q]")
    saved = to_dict(load(tmp_path))
    assert changed_keys(saved, load(tmp_path)) == []
    del saved["optimizer"]["betas"], saved["train"]["epochs"], saved["logging"]
    saved["model"]["gone"] = 1
    sources = load(tmp_path, "data.train=[{path: a}]")
    older = to_dict(sources)
    del older["data"]["train"][0]["template_options"]
    assert changed_keys(older, sources) == []
    assert sorted(changed_keys(saved, current)) == [
        ("lora.targets", "all-linear", ["q"]),
        ("model.gone", 1, None),
        ("train.epochs", 3, 5),
    ]
    assert not resume_may_change("model.gone")


def test_keys_of_another_version_end_a_resume_where_their_section_must_not_change(tmp_path):
    config = load(tmp_path)
    saved = to_dict(config)
    manifest = {"state": {"config": saved}, "versions": {}}
    resumed = Checkpoint("checkpoint_0000002", manifest, "", [])
    saved["train"]["gone"] = 1
    require_allowed_settings(resumed, config)
    saved["data"]["gone"] = saved["gone"] = 2
    with pytest.raises(UserError) as refused:
        require_allowed_settings(resumed, config)
    assert [problem.split()[0] for problem in refused.value.problems] == ["data.gone", "gone"]


def test_a_checkpoint_without_the_newest_keys_keeps_its_choice_of_resharding(tmp_path):
    """A key that a checkpoint lacks had its default, so its ranks were arranged alike."""
    config = load(tmp_path, "parallel.expert=2")
    saved = to_dict(config)
    del saved["parallel"]["stages"], saved["parallel"]["context"], saved["optimizer"]["offload"]
    state = {"config": saved, "residency": [True, False]}
    resumed: Any = SimpleNamespace(state=state, world_size=4)
    for world_size, changed, policy in [
        (4, config, ReshardPolicy(True, False)),
        (4, load(tmp_path), None),
        (2, config, None),
    ]:
        run: Any = SimpleNamespace(
            config=changed, resumed=resumed, world=SimpleNamespace(size=world_size)
        )
        assert saved_reshard_policy(run) == policy


def test_shipped_configuration_holds_every_key_and_has_no_remarks():
    config = load_config(SHIPPED, [], {})
    assert set(config.origins) == set(KEYS) and set(config.origins.values()) == {"file"}
    assert remarks(config) == []
    assert (config.model.path, config.run.dir) == ("zai-org/GLM-4.5-Air", "runs/config")
    train, data_ranks = config.train, 16 // config.parallel.stages
    rows = train.micro_batch_size * train.gradient_accumulation_steps * data_ranks
    assert (rows, train.epochs) == (32, 3)


def test_every_shipped_key_has_a_comment():
    text, section = SHIPPED.read_text(encoding="utf-8"), ""
    for name, comment, key in re.findall(r"^(\w+):$|^((?:  # .+\n)*)  (\w+):", text, re.MULTILINE):
        section = name or section
        assert name or comment, f"{section}.{key} has no comment"


BATCH = "train.gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("before", "ranks_before", "now", "ranks", "rows", "keeps"),
    # Rows of a step before and now, and where these differ the value that keeps them, or none.
    [
        (f"{BATCH}=2", 16, f"{BATCH}=2", 8, (32, 16), f"{BATCH}=4 "),
        ("train.micro_batch_size=2", 16, "", 8, (32, 8), f"{BATCH}=4 "),
        ("", 8, "", 16, (8, 16), f"no {BATCH} "),
        (f"{BATCH}=2", 16, "", 6, (32, 6), f"no {BATCH} "),
        ("parallel.context=2", 8, "", 8, (4, 8), f"no {BATCH} "),
        ("", 2, f"parallel.stages=4 {BATCH}=4", 4, (2, 4), f"no {BATCH} "),
        (f"{BATCH}=2", 16, f"{BATCH}=4", 8, (32, 32), None),
        ("parallel.context=2", 16, "", 8, (8, 8), None),
        ("", 16, f"parallel.stages=2 {BATCH}=2", 16, (16, 16), None),
    ],
)
def test_a_resume_warns_of_another_effective_batch(
    before, ranks_before, now, ranks, rows, keeps, tmp_path, caplog
):
    config = load(tmp_path, *now.split())
    world: Any = SimpleNamespace(size=ranks, layout=Layout.of(config, ranks))
    state = {"config": to_dict(load(tmp_path, *before.split()))}
    state["config"]["parallel"]["of_another_version"] = 1
    resumed: Any = SimpleNamespace(name="step-7", state=state, world_size=ranks_before)
    with caplog.at_level(logging.WARNING, "shardtune"):
        log_changes(resumed, config, world)
    expected = [f"was {rows[0]} rows, is {rows[1]}: {keeps}keeps {rows[0]}"] if keeps else []
    assert [message.count(expected[0]) for message in caplog.messages] == [1] * len(expected)


@pytest.mark.parametrize(
    ("now", "rates"),
    [
        ([], None),
        (["train.epochs=3"], ("0.0001", "0.000625")),
        (["train.max_steps=4"], None),
        (["train.epochs=3", "optimizer.lr=0"], ("0.0001", "0")),
        (["scheduler.name=constant", "train.epochs=2"], ("0.0001", "0.001")),
    ],
)
def test_a_resume_says_how_the_learning_rate_leaps(now, rates, tmp_path):
    before = ["train.epochs=1", "optimizer.lr=1e-3", "scheduler.name=linear"]
    before += ["scheduler.warmup_ratio=0.0"]
    state = {"config": to_dict(load(tmp_path, *before))}
    resumed = SimpleNamespace(name="step-4", step=4, state=state, world_size=1)
    config = load(tmp_path, *before, *now)
    dataset = write_dataset(tmp_path, [([1, 2], [False, True])] * 4)
    schedule = Schedule(
        dataset, 8, False, 0, 1, config.train.epochs, config.train.max_steps, Position(4, 1, 0)
    )
    run: Any = SimpleNamespace(config=config, resumed=resumed)
    said = [re.findall(r"\d[\de.-]*", line) for line in changed_rate(run, schedule)]
    assert [tuple(each[:3]) for each in said] == ([(*rates, "5")] if rates else [])
