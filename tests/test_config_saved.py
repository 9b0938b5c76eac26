"""Configurations in files: one that is written and read again, one that an earlier run left, and the shipped one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from test_config import DEFAULTS, KEYS, load, value

from shardtune import config as config_module
from shardtune.config_io import changed_keys, load_config, remarks, to_dict, write_config

SHIPPED = REPOSITORY / "config.yaml"


def quoted(text: str) -> str:
    return str(yaml.safe_dump(text, default_style='"')).strip()


def test_written_configuration_loads_again_and_tells_its_origins(tmp_path: Path) -> None:
    texts = "1e-5", "#x: [y]", 'quo"te\\', "é\u2028\x7f😀", "null", " a ", "long " * 60
    for text in texts:
        config = load(
            tmp_path,
            f"data.eval={quoted(text)}",
            "lora.targets=[1e5x, '2']",
            "optimizer.lr=3e-5",
            environ={"JOIN_TIMEOUT": "30"},
        )
        written = tmp_path / "new" / "config.yaml"
        write_config(config, written)
        assert config.data.eval == text
        assert load_config(written, [], {}) == config
        assert [file.name for file in written.parent.iterdir()] == ["config.yaml"]
    origins, section = {}, ""
    for line in written.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            origins[f"{section}.{line.split(':')[0].strip()}"] = line.rpartition("  # ")[2]
        else:
            section = line.rstrip(":")
    assert origins == config.origins
    assert {
        origins[key]
        for key in ("optimizer.lr", "model.path", "run.seed", "distributed.join_timeout_s")
    } == {
        "command line",
        "file",
        "default",
        "environment",
    }


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    write_config(load(tmp_path, "train.epochs=1"), written)
    with written.open(encoding="utf-8") as reader:
        write_config(load(tmp_path, "train.epochs=2"), written)
        assert "epochs: 1 " in reader.read()
    assert "epochs: 2 " in written.read_text(encoding="utf-8")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run" / "config.yaml"
    target.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_config(load(tmp_path), target)
    assert [file.name for file in target.parent.iterdir()] == ["config.yaml"]


OTHER_VALUES = {
    "run.dir": "x",
    "run.seed": "1",
    "run.resume": "never",
    "run.ignore_plan": "true",
    "model.path": "x",
    "model.init": "random",
    "model.compute_dtype": "float32",
    "model.reduce_dtype": "bfloat16",
    "model.activation_checkpointing": "full",
    "model.attention": "eager",
    "data.train": "x",
    "data.eval": "x",
    "data.eval_fraction": "0.5",
    "data.max_length": "8",
    "data.overflow": "drop",
    "data.loss_on": "all",
    "data.packing": "false",
    "train.epochs": "1",
    "train.max_steps": "1",
    "train.micro_batch_size": "2",
    "train.gradient_accumulation_steps": "2",
    "train.max_grad_norm": "2",
    "optimizer.lr": "1",
    "optimizer.betas": "[0, 0]",
    "optimizer.eps": "1",
    "optimizer.weight_decay": "1",
    "lora.alpha": "1",
    "lora.targets": "[q]",
    "scheduler.name": "linear",
    "scheduler.warmup_ratio": "0",
    "scheduler.min_lr_ratio": "0",
    "eval.baseline": "false",
    "eval.every_steps": "1",
    "checkpoint.every_steps": "1",
    "checkpoint.keep": "1",
    "checkpoint.mode": "sync",
    "export.final": "false",
    "export.dtype": "float32",
    "logging.every_steps": "2",
    "distributed.backend": "gloo",
    "distributed.join_timeout_s": "1",
    "distributed.step_timeout_s": "1",
    "distributed.save_timeout_s": "1",
}
MAY_CHANGE = {"run.dir", "run.resume", "run.ignore_plan"} | {
    key
    for key in KEYS
    if key.split(".")[0]
    in ("parallel", "train", "eval", "checkpoint", "export", "logging", "distributed")
} - {"train.max_grad_norm"}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_what_may_change_on_a_resume(tmp_path: Path, key: str) -> None:
    saved = json.loads(json.dumps(to_dict(load(tmp_path))))
    current = load(tmp_path, f"{key}={OTHER_VALUES[key]}")
    change = [(key, DEFAULTS[key.split(".")[0]][key.split(".")[1]], value(current, key))]
    assert changed_keys(saved, current) == ((change, []) if key in MAY_CHANGE else ([], change))


def test_every_key_that_can_change_was_changed() -> None:
    fixed_so_far = {
        "parallel.replicate",
        "parallel.expert",
        "optimizer.name",
        "lora.rank",
        "model.compile",
        "model.master_dtype",
    }
    assert set(OTHER_VALUES) == KEYS - fixed_so_far


def test_configuration_saved_by_another_version(tmp_path: Path) -> None:
    current = load(tmp_path, "train.epochs=5")
    saved = to_dict(load(tmp_path))
    assert changed_keys(saved, load(tmp_path)) == ([], [])
    del saved["optimizer"]["betas"], saved["train"]["epochs"], saved["logging"]
    saved["model"]["gone"] = 1
    assert changed_keys(saved, current) == ([("train.epochs", 3, 5)], [("model.gone", 1, None)])


def test_shipped_configuration_holds_every_key_and_says_nothing(tmp_path: Path) -> None:
    config = load_config(SHIPPED, [], {})
    assert set(config.origins) == KEYS and set(config.origins.values()) == {"file"}
    assert remarks(config) == []
    assert (config.model.path, config.run.dir) == ("zai-org/GLM-4.5-Air", "runs/config")
    train = config.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps, train.epochs) == (1, 2, 3)
    assert max(map(len, SHIPPED.read_text(encoding="utf-8").splitlines())) <= 120


def test_shipped_comments_tell_what_is_not_built_yet() -> None:
    comment, section, told = "", "", set()
    for line in SHIPPED.read_text(encoding="utf-8").splitlines():
        if line.startswith("  # "):
            comment += line[3:]
        elif line.startswith("  "):
            assert comment, f"{line} has no comment"
            told |= (
                {f"{section}.{line.split(':')[0].strip()}"} if "not built yet" in comment else set()
            )
            comment = ""
        else:
            section = line.rstrip(":")
    assert told == set(config_module._BUILT)
