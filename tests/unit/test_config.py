"""Reading a configuration: the values that are accepted, and the message of each refusal."""

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


# A key of each kind; the values that every key allows are in docs/configuration.md.
NOT_ALLOWED = {
    "train.epochs": "0 -1 1.5 true three 1_000 .inf 1e999 [1]",
    "train.max_steps": "0 2.5 false none",
    "run.seed": f"-1 1.5 {2**63} null",
    "optimizer.lr": "-1e-9 .nan .inf 1e999 true fast null",
    "optimizer.eps": "0 -1 null",
    "scheduler.warmup_ratio": "-0.1 1.1 null",
    "optimizer.betas": "0.9 [0.9] [0.9,1] [0.9,0.9,0.9] [a,b] [[0],[0]] null",
    "data.template_options": "3 [a] null",
    "data.roles": "3 [a] null {a: b}",
    "data.columns": "3 [a] text",
    "data.packing": "yes off 1 null",
    "lora.targets": "[] [1] [''] null",
    "data.train": "null 123 1e5 true '' [] {a:}",
    "data.eval": "123 '' {} [a] {a:1} {a/b:c} {Step1:c}",
    "scheduler.name": "step true null",
    "model.compile": "1 full null",
    "data.on_broken": "true skip null {} {drop:0} {drop:1.5} {keep:0.1} {drop:yes}",
}


@pytest.mark.parametrize(
    ("key", "text"), [(key, text) for key in NOT_ALLOWED for text in NOT_ALLOWED[key].split()]
)
def test_a_value_that_is_not_allowed_is_refused(tmp_path, key, text):
    (problem,) = problems(tmp_path, f"{key}={text}")
    assert problem.startswith(f"{key} = ") and " is not allowed - use " in problem


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [
        ("optimizer.betas=1", "a list of two values, each a number of at least 0 and below 1"),
        ("scheduler.name=step", "cosine or linear or constant"),
        ("train.max_steps=0", "an integer of at least 1 or null"),
        ("model.compile=1", "true or false or auto"),
    ],
)
def test_the_allowed_values_are_named(tmp_path, assignment, allowed):
    (problem,) = problems(tmp_path, assignment)
    assert problem.endswith(f" - use {allowed}")


def keys_of(lines: list[str]) -> list[str]:
    """Return what each line is about."""
    return [line.partition(" ")[0] for line in lines]


def test_every_problem_of_a_list_of_sources_is_named(tmp_path):
    sources = (
        "[{path: x/a.jsonl, weight: -1}, {path: a.json}, b.jsonl, {name: d}, "
        "{path: c, wieght: 2, max_records: 0, loss_on: some, name: '', 1: 2}]"
    )
    keys = ("[0].weight", "[2]", "[3].path", "[4].name", "[4].loss_on", "[4].max_records")
    lines = problems(tmp_path, f"data.train={sources}")
    assert keys_of(lines) == [f"data.train{key}" for key in (*keys, "[4].wieght", "[4][1]", "")]
    assert lines[6].endswith("the nearest known one is weight") and " named a - " in lines[8]
    (problem,) = problems(tmp_path, "data.train=[{path: a, weight: 0}, {path: b, weight: 0}]")
    assert problem.startswith("data.train ")


def test_columns_have_our_names(tmp_path):
    lines = problems(tmp_path, "data.columns={message: chat, text: 3}")
    assert keys_of(lines) == ["data.columns.message", "data.columns.text"]
    assert lines[0].endswith("the nearest known one is messages")
    (line,) = problems(tmp_path, "data.columns={prompt: body, tools: null, text: body}")
    assert keys_of([line]) == ["data.columns"] and "body as prompt and text" in line


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
        ("eval: 5", "eval (file) is a section"),
        ("train: {epochs: '3'}", 'train.epochs = "3" (file) is not allowed'),
    ],
)
def test_a_problem_of_the_configuration_file_is_named(tmp_path, text, problem):
    (line,) = problems(tmp_path, text=f"{MINIMAL}{text}\nlogging:\n")
    assert line.startswith(problem)


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
    assert keys_of(problems(tmp_path, text="# nothing\n")) == ["model.path", "data.train"]
    assert load(tmp_path, "model.path=m", "data.train=d", text="").model.path == "m"


def test_assignments_must_be_of_the_form_key_equals_value(tmp_path):
    given = ("other.yaml", "train.epochs", "3", "train.warmup_ratio")
    remedies = ("section.key", "train.epochs", "section.key", "scheduler.warmup_ratio")
    assert problems(tmp_path, *given) == [
        f"{each} is not an assignment - write {remedy}=value"
        for each, remedy in zip(given, remedies, strict=True)
    ]
    assert load(tmp_path, "run.dir=@here").run.dir == "@here"  # which YAML rejects


def test_every_problem_is_reported_at_once(tmp_path):
    text = "model: {pat: m}\ntrain: {epochs: 0}\n"
    assignments = ["lr=1", "export.dtype=fp8", "logging.profile_steps=[0, 2]"]
    lines = problems(tmp_path, *assignments, text=text, environ={"JOIN_TIMEOUT": "soon"})
    keys = ("model.pat", "lr", "model.path", "data.train", "train.epochs", "export.dtype")
    keys += ("logging.profile_steps", "distributed.join_timeout_s")
    assert tuple(keys_of(lines)) == keys and "(environment)" in lines[-1]


@pytest.mark.parametrize(
    ("assignments", "reason"),
    [
        ("data.eval=e data.eval_fraction=0.1", "data.eval"),
        ("lora.alpha=8", "lora.rank"),
        ("export.merge=false", "lora.rank"),
        ("scheduler.name=constant scheduler.min_lr_ratio=0.2", "scheduler.name"),
        ("eval.every_steps=5", "no evaluation data"),
        ("eval.samples=2", "no evaluation data"),
        ("data.eval=e eval.sample_tokens=5", "eval.samples"),
    ],
)
def test_a_value_that_another_setting_switches_off_is_remarked(tmp_path, assignments, reason):
    (remark,) = remarks(load(tmp_path, *assignments.split()))
    key = assignments.split()[-1].partition("=")[0]
    assert remark.startswith(f"{key} = ") and f" has no effect: {reason} " in remark


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
