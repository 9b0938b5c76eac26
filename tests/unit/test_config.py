"""Reading a configuration: the values that are accepted, and the message of each refusal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.configs import DEFAULTS, MINIMAL, load, value

from shardtune.config import KEYS
from shardtune.config_io import load_config, read_run_arguments, remarks, to_dict
from shardtune.errors import UserError
from shardtune.other_names import KEY_OF


def problems(
    folder: Path, *assignments: str, text: str = MINIMAL, environ: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(UserError) as refused:
        load(folder, *assignments, text=text, environ=environ)
    file = str(folder / "small.yaml")
    lines = [problem.replace(file, "FILE") for problem in refused.value.problems]
    assert all(re.fullmatch(".+ - .+", line) for line in lines), "<what> - <what to do>, on a line"
    return lines


def test_every_key_has_its_default(tmp_path):
    config = load(tmp_path)
    assert to_dict(config) == DEFAULTS
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.origins == {
        key: "file" if key in ("model.path", "data.train") else "default" for key in KEYS
    }


def test_values_come_from_file_then_environment_then_command_line(tmp_path):
    distributed = "distributed: {join_timeout_s: 7, step_timeout_s: 8}\n"
    text = f"{MINIMAL}{distributed}train: {{epochs: 4, max_steps: 9}}\n"
    config = load(tmp_path, "train.epochs=5", text=text)
    assert (config.train.epochs, config.origins["train.epochs"]) == (5, "command line")
    assert (config.train.max_steps, config.origins["train.max_steps"]) == (9, "file")

    key = "distributed.join_timeout_s"
    for assignments, environ, expected in [
        ([], {}, (7, "file")),
        ([], {"JOIN_TIMEOUT": ""}, (7, "file")),
        ([], {"JOIN_TIMEOUT": "30"}, (30, "environment")),
        ([f"{key}=2"], {"JOIN_TIMEOUT": "soon"}, (2, "command line")),
    ]:
        config = load(tmp_path, *assignments, text=text, environ=environ)
        assert (config.distributed.join_timeout_s, config.origins[key]) == expected
    overridden = load(tmp_path, "lora.rank=null", text=MINIMAL + "lora: {rank: 8}\n")
    assert overridden.lora.rank is None


ACCEPTED = [
    ("optimizer.lr", "1e-5", 1e-5),
    ("optimizer.lr", ".5e-3", 5e-4),
    ("optimizer.lr", "0", 0.0),
    ("train.max_steps", "1e3", 1000),
    ("train.max_steps", "5.0", 5),
    ("train.max_steps", "010", 10),
    ("train.max_steps", "null", None),
    ("data.eval", "", None),
    ("run.seed", str(2**63 - 1), 2**63 - 1),
    ("run.dir", '"1e5"', "1e5"),
    ("run.dir", "1:30", "1:30"),
    ("run.dir", "no", "no"),
    ("run.dir", "a=b", "a=b"),
    ("data.train", "org/name:config:train[:10%]", "org/name:config:train[:10%]"),
    ("data.packing", "False", False),
    (
        "data.train",
        "[{path: a/x.jsonl, weight: 1, max_records: 1e3, loss_on: all}]",
        [
            {"path": "a/x.jsonl", "weight": 1.0, "name": None, "loss_on": "all"}
            | {"max_records": 1000, "template_options": {}}
        ],
    ),
    ("data.eval", "{held-out: a, q.a_2: b}", {"held-out": "a", "q.a_2": "b"}),
    ("optimizer.betas", "[0, 0.5]", [0.0, 0.5]),
    ("lora.targets", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
    ("lora.targets", "q_proj", "q_proj"),
]


@pytest.mark.parametrize(("key", "text", "expected"), ACCEPTED)
def test_an_allowed_value_is_accepted_from_the_file_and_the_command_line(
    tmp_path, key, text, expected
):
    section, _, name = key.partition(".")
    sections = yaml.safe_load(MINIMAL)
    sections.setdefault(section, {})[name] = "HERE"
    in_file = yaml.safe_dump(sections).replace("HERE", text)
    for config, origin in [
        (load(tmp_path, f"{key}={text}"), "command line"),
        (load(tmp_path, text=in_file), "file"),
    ]:
        read = value(config, key)
        assert (read, type(read)) == (expected, type(expected))
        assert config.origins[key] == origin


TEXT = "text that is not empty (in quotes where YAML would read a number)"
# A key of each kind; the values that every key allows are in docs/configuration.md.
NOT_ALLOWED = {
    "train.epochs": ("an integer of at least 1", "0 -1 1.5 true three 1_000 .inf 1e999 [1]"),
    "train.max_steps": ("an integer of at least 1 or null", "0 2.5 false none"),
    "run.seed": (f"an integer of at least 0 and below {2**63}", f"-1 1.5 {2**63} null"),
    "optimizer.lr": ("a number of at least 0", "-1e-9 .nan .inf 1e999 true fast null"),
    "optimizer.eps": ("a number above 0", "0 -1 null"),
    "scheduler.warmup_ratio": ("a number of at least 0 and at most 1", "-0.1 1.1 null"),
    "optimizer.betas": (
        "a list of two values, each a number of at least 0 and below 1",
        "0.9 [0.9] [0.9,1] [0.9,0.9,0.9] [a,b] [[0],[0]] null",
    ),
    "data.template_options": ("a mapping", "3 [a] null"),
    "data.roles": ("a mapping", "3 [a] null {a: b}"),
    "data.columns": ("a mapping or null", "3 [a] text"),
    "data.packing": ("true or false", "yes off 1 null"),
    "lora.targets": (
        f"all-linear or attention or experts or {TEXT} or a list of values, each {TEXT}",
        "[] [1] [''] null",
    ),
    "data.train": (
        f"{TEXT} or a list of values, each a mapping with path, weight, name, loss_on, "
        "max_records, template_options",
        "null 123 1e5 true '' [] {a:}",
    ),
    "data.eval": (
        f"{TEXT} or a mapping of names (letters, digits, _ . and -, not Step) to such texts "
        "or null",
        "123 '' {} [a] {a:1} {a/b:c} {Step1:c}",
    ),
    "scheduler.name": ("cosine or linear or constant", "step true null"),
    "model.compile": ("true or false or auto", "1 full null"),
    "data.on_broken": (
        "error or drop or a mapping of drop to a number above 0 and at most 1",
        "true skip null {} {drop:0} {drop:1.5} {keep:0.1} {drop:yes}",
    ),
}


@pytest.mark.parametrize(
    ("key", "text"), [(key, text) for key in NOT_ALLOWED for text in NOT_ALLOWED[key][1].split()]
)
def test_a_value_that_is_not_allowed_is_refused_with_those_that_are(tmp_path, key, text):
    (problem,) = problems(tmp_path, f"{key}={text}")
    assert problem.startswith(f"{key} = ")
    assert problem.endswith(f" (command line) is not allowed - use {NOT_ALLOWED[key][0]}")


def test_every_problem_of_a_list_of_sources_is_named(tmp_path):
    sources = (
        "[{path: x/a.jsonl, weight: -1}, {path: a.json}, b.jsonl, {name: d}, "
        "{path: c, wieght: 2, max_records: 0, loss_on: some, name: '', 1: 2}]"
    )
    known = "path, weight, name, loss_on, max_records, template_options"
    assert [
        line.replace(" (command line)", "") for line in problems(tmp_path, f"data.train={sources}")
    ] == [
        "data.train[0].weight = -1 is not allowed - it should be greater than or equal to 0",
        f'data.train[2] = "b.jsonl" is not allowed - use a mapping with {known}',
        "data.train[3].path is required - give this source one",
        'data.train[4].name = "" is not allowed - String should have at least 1 character',
        'data.train[4].loss_on = "some" is not allowed - '
        "it should be 'assistant', 'last' or 'all'",
        "data.train[4].max_records = 0 is not allowed - it should be greater than or equal to 1",
        "data.train[4].wieght is not known - the nearest known one is weight",
        "data.train[4][1] = 1 is not allowed - Keys should be strings",
        "data.train has several sources named a - give each its own name",
    ]
    (problem,) = problems(tmp_path, "data.train=[{path: a, weight: 0}, {path: b, weight: 0}]")
    assert problem == "data.train (command line) has no weight above 0 - give a source one"


def test_columns_have_our_names(tmp_path):
    assert problems(tmp_path, "data.columns={message: chat, text: 3}") == [
        "data.columns.message (command line) is not known - the nearest known one is messages",
        "data.columns.text = 3 (command line) is not allowed - it should be a valid string",
    ]
    assert problems(tmp_path, "data.columns={prompt: body, tools: null, text: body}") == [
        "data.columns (command line) reads body as prompt and text - keep one of them"
    ]


@pytest.mark.parametrize("key", ["run.dir", "run.resume", "model.path", "data.train", "data.eval"])
def test_a_path_may_begin_with_a_home(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert value(load(tmp_path, f"{key}=~/x"), key) == f"{tmp_path}/x"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train.lr", "optimizer.lr"),
        ("OPTIMIZER.LR", "optimizer.lr"),
        ("--run.dir", "run.dir"),
        ("train.epoch", "train.epochs"),
        ("batch_size", "train.micro_batch_size"),
        ("checkpoints.every_steps", "checkpoint.every_steps"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path, name, nearest):
    assert problems(tmp_path, f"{name}=1") == [
        f"{name} (command line) is not known - the nearest known one is {nearest}"
    ]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *((f"train.{name}", f" - here it is named {key}: ") for name, key in KEY_OF.items()),
        ("Base_Model", " - here it is named model.path: Hub id"),
        ("train.min_lr", "min_lr_ratio: The last learning rate as a fraction of `optimizer.lr`"),
        ("train.nothing_like_it", " - docs/configuration.md has all keys"),
    ],
)
def test_names_of_other_tools_are_those_of_keys(tmp_path, name, remedy):
    (problem,) = problems(tmp_path, f"{name}=1")
    assert " is not known - " in problem and remedy in problem
    assert {*KEY_OF.values()} <= {*KEYS}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr: 3", "lr (file) is not known - the nearest known one is optimizer.lr"),
        ("eval: 5", "eval (file) is a section - give values to its keys"),
        (
            "train: {epochs: '3'}",
            'train.epochs = "3" (file) is not allowed - use an integer of at least 1',
        ),
    ],
)
def test_a_problem_of_the_configuration_file_is_named(tmp_path, text, problem):
    assert problems(tmp_path, text=f"{MINIMAL}{text}\nlogging:\n") == [problem]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {seed: 1, seed: 2}", 'seed is given twice - keep one of them in "FILE", line 3'),
        ("data:\n  eval: e", 'data is given twice - keep one of them in "FILE", line 3'),
        ("train: {epochs: 1", "expected ',' or '}', but got '<stream end>'"),
        ("a: b: c", 'mapping values are not allowed here in "FILE", line 3'),
        ("run: {seed: &s !!python/name:os.system }", "could not determine a constructor"),
        ("text", "it is not a mapping"),
        ("é".encode("latin-1"), "can't decode byte"),
        (None, "No such file"),
    ],
)
def test_a_configuration_file_that_cannot_be_read_is_refused(tmp_path, text, reason):
    file = tmp_path / "small.yaml"
    if isinstance(text, str):
        file.write_text(MINIMAL + text if "line 3" in reason else text, encoding="utf-8")
    elif text:
        file.write_bytes(text)
    with pytest.raises(UserError) as refused:
        load_config(file, [], {})
    (problem,) = refused.value.problems
    assert problem.startswith(f"the configuration file {file} cannot be read (")
    assert reason in problem.replace(f'"{file}"', '"FILE"') and "\n" not in problem


def test_a_required_key_that_is_missing_is_named(tmp_path):
    required = [
        f"{key} is required - set it in the file, or write {key}=..."
        for key in ("model.path", "data.train")
    ]
    assert problems(tmp_path, text="# nothing\n") == required
    assert load(tmp_path, "model.path=m", "data.train=d", text="").model.path == "m"


def test_assignments_must_be_of_the_form_key_equals_value(tmp_path):
    assert problems(tmp_path, "other.yaml", "train.epochs", "3", "train.warmup_ratio", "lr=1") == [
        "other.yaml is not an assignment - write section.key=value",
        "train.epochs is not an assignment - write train.epochs=value",
        "3 is not an assignment - write section.key=value",
        "train.warmup_ratio is not an assignment - write scheduler.warmup_ratio=value",
        "lr (command line) is not known - the nearest known one is optimizer.lr",
    ]
    assert problems(tmp_path, "run.seed=-1") == [
        "run.seed = -1 (command line) is not allowed - use an integer of at least 0 and below "
        "9223372036854775808",
    ]
    assert load(tmp_path, "run.dir=@here").run.dir == "@here"  # which YAML rejects


def test_every_problem_is_reported_at_once(tmp_path):
    text = "model: {pat: m}\ntrain: {epochs: 0}\n"
    assignments = ["lr=1", "export.dtype=fp8", "logging.profile_steps=[0, 2]"]
    lines = problems(tmp_path, *assignments, text=text, environ={"JOIN_TIMEOUT": "soon"})
    starts = [
        "model.pat ",
        "lr ",
        "model.path is required",
        "data.train is required",
        "train.epochs = 0",
        'export.dtype = "fp8"',
        "logging.profile_steps = [0, 2] (command line) is not allowed",
        'distributed.join_timeout_s = "soon" (environment) is not allowed',
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


NO_LORA = "lora.rank is null, so every weight is trained"
REMARKS = [
    ("data.eval=e data.eval_fraction=0.1", "data.eval_fraction = 0.1", "data.eval is given"),
    ("lora.alpha=8", "lora.alpha = 8.0", NO_LORA),
    ("export.merge=false", "export.merge = false", NO_LORA),
    (
        "scheduler.name=constant scheduler.min_lr_ratio=0.2",
        "scheduler.min_lr_ratio = 0.2",
        "scheduler.name is constant",
    ),
    ("eval.every_steps=5", "eval.every_steps = 5", "no evaluation data is given"),
    ("eval.samples=2", "eval.samples = 2", "no evaluation data is given"),
    ("data.eval=e eval.sample_tokens=5", "eval.sample_tokens = 5", "eval.samples is 0"),
]


@pytest.mark.parametrize(("assignments", "setting", "reason"), REMARKS)
def test_a_value_that_another_setting_switches_off_is_remarked(
    tmp_path, assignments, setting, reason
):
    expected = f"{setting} (command line) has no effect: {reason}"
    assert remarks(load(tmp_path, *assignments.split())) == [expected]


def test_a_value_that_is_used_or_is_the_default_is_not_remarked(tmp_path):
    used = ("data.eval_fraction=0.1", "eval.every_steps=5", "scheduler.min_lr_ratio=0")
    assert remarks(load(tmp_path, *used, "lora.alpha=null", "lora.targets=all-linear")) == []


def test_the_default_rate_is_remarked_where_adapters_are_trained(tmp_path):
    (remark,) = remarks(load(tmp_path, "lora.rank=8"))
    assert "optimizer.lr=0.0001" in remark
    assert remarks(load(tmp_path, "lora.rank=8", "optimizer.lr=1e-5")) == []


def test_an_option_may_stand_between_assignments(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(MINIMAL, encoding="utf-8")
    arguments = ["train.epochs=1", "--config", str(file), "train.max_steps=2"]
    config = read_run_arguments(arguments, Path("config.yaml"))
    assert (config.train.epochs, config.train.max_steps) == (1, 2)


def test_a_configuration_is_read_without_torch():
    code = "import shardtune.config_io, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
