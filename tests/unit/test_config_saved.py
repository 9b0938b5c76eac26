"""Configurations in files: written and read again, compared with an earlier one, as shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helpers.commands import REPOSITORY
from helpers.configs import DEFAULTS, NOT_BUILT, load, value

from shardtune.config import KEYS, resume_may_change
from shardtune.config_io import changed_keys, load_config, remarks, to_dict, write_config

SHIPPED = REPOSITORY / "config.yaml"


@pytest.mark.parametrize(
    "text", ["1e-5", "#x: [y]", 'quo"te\\', "é😀", "null", " a ", "long " * 60]
)
def test_written_configuration_loads_again(tmp_path: Path, text: str) -> None:
    quoted = yaml.safe_dump(text, default_style='"').strip()
    config = load(tmp_path, f"data.eval={quoted}", "lora.targets=[1e5x, '2']")
    written = tmp_path / "config.yaml"
    write_config(config, written)
    assert config.data.eval == text
    assert to_dict(load_config(written, [], {})) == to_dict(config)


def test_written_configuration_names_the_origin_of_every_value(tmp_path: Path) -> None:
    config = load(tmp_path, "optimizer.lr=3e-5", environ={"JOIN_TIMEOUT": "30"})
    write_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^  \w+: .*  # (.+)$", text, re.MULTILINE) == list(config.origins.values())
    assert "  lr: 3e-05  # command line\n" in text and '  path: "m"  # file\n' in text
    assert "  join_timeout_s: 30.0  # environment\n" in text and "  seed: 1234  # default\n" in text


MAY_CHANGE = """
run.dir=x run.resume=never run.ignore_plan=true
model.activation_checkpointing=full model.attention=eager model.compile=true
parallel.replicate=2
train.epochs=1 train.max_steps=1 train.micro_batch_size=2 train.gradient_accumulation_steps=2
train.max_grad_norm=2
optimizer.lr=1 scheduler.name=linear scheduler.warmup_ratio=0 scheduler.min_lr_ratio=0
eval.baseline=false eval.every_steps=1
checkpoint.every_steps=1 checkpoint.keep=1 checkpoint.mode=sync
export.final=false export.dtype=float32 export.merge=false logging.every_steps=2
distributed.backend=gloo distributed.join_timeout_s=1 distributed.step_timeout_s=1
distributed.save_timeout_s=1
"""
MUST_NOT_CHANGE = """
run.seed=1
model.path=x model.init=random model.compute_dtype=float32 model.reduce_dtype=bfloat16
data.train=x data.eval=x data.eval_fraction=0.5 data.max_length=8 data.overflow=drop
data.loss_on=all data.packing=false
optimizer.betas=[0,0] optimizer.eps=1 optimizer.weight_decay=1
lora.alpha=1 lora.dropout=0.5 lora.targets=[q]
"""


@pytest.mark.parametrize("assignment", (MAY_CHANGE + MUST_NOT_CHANGE).split())
def test_a_resume_may_change_some_keys(tmp_path: Path, assignment: str) -> None:
    key = assignment.partition("=")[0]
    current = load(tmp_path, assignment)
    section, name = key.split(".")
    change = (key, DEFAULTS[section][name], value(current, key))
    assert changed_keys(to_dict(load(tmp_path)), current) == [change]
    assert resume_may_change(key) == (assignment in MAY_CHANGE.split())


def test_every_key_with_two_values_was_changed() -> None:
    changed = {
        assignment.partition("=")[0] for assignment in (MAY_CHANGE + MUST_NOT_CHANGE).split()
    }
    assert changed | set(NOT_BUILT) == set(KEYS)


def test_configuration_saved_by_another_version(tmp_path: Path) -> None:
    current = load(tmp_path, "train.epochs=5")
    saved = to_dict(load(tmp_path))
    assert changed_keys(saved, load(tmp_path)) == []
    del saved["optimizer"]["betas"], saved["train"]["epochs"], saved["logging"]
    saved["model"]["gone"] = 1
    changes = [("train.epochs", 3, 5), ("model.gone", 1, None)]
    assert changed_keys(saved, current) == changes and not resume_may_change("model.gone")


def test_shipped_configuration_holds_every_key_and_has_no_remarks() -> None:
    config = load_config(SHIPPED, [], {})
    assert set(config.origins) == set(KEYS) and set(config.origins.values()) == {"file"}
    assert remarks(config) == []
    assert (config.model.path, config.run.dir) == ("zai-org/GLM-4.5-Air", "runs/config")
    train = config.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps, train.epochs) == (1, 2, 3)


def test_shipped_comments_name_the_values_that_are_not_built_yet() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    unbuilt, section = set(), ""
    for name, comment, key in re.findall(r"^(\w+):$|^((?:  # .+\n)*)  (\w+):", text, re.MULTILINE):
        section = name or section
        assert name or comment, f"{section}.{key} has no comment"
        if "not built yet" in " ".join(comment.replace("#", "").split()):
            unbuilt.add(f"{section}.{key}")
    assert unbuilt == set(NOT_BUILT)
