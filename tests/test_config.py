"""The configuration: what is accepted, and what is refused in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune import config as config_module
from shardtune.config import Config
from shardtune.config_io import load_config, remarks, to_dict
from shardtune.errors import UserError

MINIMAL = "model: {path: m}\ndata: {train: d.jsonl}\n"
DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"dir": "runs/small", "seed": 1234, "resume": "auto", "ignore_plan": False},
    "model": {
        "path": "m",
        "init": "pretrained",
        "master_dtype": "float32",
        "compute_dtype": "auto",
        "reduce_dtype": "float32",
        "activation_checkpointing": "none",
        "attention": "auto",
        "compile": False,
    },
    "data": {
        "train": "d.jsonl",
        "eval": None,
        "eval_fraction": 0.0,
        "max_length": 4096,
        "overflow": "truncate",
        "loss_on": "assistant",
        "packing": True,
    },
    "parallel": {"replicate": 1, "expert": 1},
    "train": {
        "epochs": 3,
        "max_steps": None,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
    },
    "optimizer": {
        "name": "adamw",
        "lr": 1e-5,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.0,
    },
    "lora": {"rank": None, "alpha": None, "targets": "all-linear"},
    "scheduler": {"name": "cosine", "warmup_ratio": 0.03, "min_lr_ratio": 0.1},
    "eval": {"baseline": True, "every_steps": 0},
    "checkpoint": {"every_steps": 500, "keep": 2, "mode": "async"},
    "export": {"final": True, "dtype": "source"},
    "logging": {"every_steps": 1},
    "distributed": {
        "backend": "auto",
        "join_timeout_s": 300,
        "step_timeout_s": 600,
        "save_timeout_s": 3600,
    },
}
KEYS = {f"{section}.{key}" for section, values in DEFAULTS.items() for key in values}


def load(
    folder: Path, *assignments: str, text: str = MINIMAL, environ: dict[str, str] | None = None
) -> Config:
    file = folder / "small.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, assignments, environ or {})


def problems(
    folder: Path, *assignments: str, text: str = MINIMAL, environ: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(UserError) as refused:
        load(folder, *assignments, text=text, environ=environ)
    found = [
        problem.replace(str(folder / "small.yaml"), "FILE") for problem in refused.value.problems
    ]
    for problem in found:
        assert re.fullmatch(r".+ - .+", problem), "each is one line of <what> - <what to do>"
    return found


def value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return to_dict(config)[section][name]


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert to_dict(config) == DEFAULTS
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.origins == {
        key: "file" if key in ("model.path", "data.train") else "default" for key in KEYS
    }


def test_values_come_from_file_then_environment_then_command_line(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "distributed: {join_timeout_s: 7, step_timeout_s: 8}\ntrain: {epochs: 4, max_steps: 9}\n"
    )
    key = "distributed.join_timeout_s"
    from_file = load(tmp_path, "train.epochs=5", text=text)
    assert (from_file.train.epochs, from_file.origins["train.epochs"]) == (5, "command line")
    assert (from_file.train.max_steps, from_file.origins["train.max_steps"]) == (9, "file")
    assert (from_file.distributed.join_timeout_s, from_file.origins[key]) == (7, "file")
    from_environment = load(tmp_path, text=text, environ={"JOIN_TIMEOUT": "30"})
    assert (from_environment.distributed.join_timeout_s, from_environment.origins[key]) == (
        30,
        "environment",
    )
    from_command_line = load(tmp_path, f"{key}=2", text=text, environ={"JOIN_TIMEOUT": "soon"})
    assert (from_command_line.distributed.join_timeout_s, from_command_line.origins[key]) == (
        2,
        "command line",
    )
    assert load(tmp_path, text=text, environ={"JOIN_TIMEOUT": ""}).origins[key] == "file"
    # What the command line overrides need not work any more.
    assert load(tmp_path, "lora.rank=null", text=MINIMAL + "lora: {rank: 8}\n").lora.rank is None


ACCEPTED = [
    ("optimizer.lr", "1e-5", 1e-5),
    ("optimizer.lr", "1E5", 1e5),
    ("optimizer.lr", "1e5", 1e5),
    ("optimizer.lr", ".5e-3", 5e-4),
    ("optimizer.lr", "2.", 2.0),
    ("optimizer.lr", "+3", 3.0),
    ("optimizer.lr", "0", 0.0),
    ("train.max_steps", "1e3", 1000),
    ("train.max_steps", "5.0", 5),
    ("train.max_steps", "010", 10),
    ("train.max_steps", "null", None),
    ("train.max_steps", "~", None),
    ("data.eval", "", None),
    ("train.max_grad_norm", "null", None),
    ("train.max_grad_norm", "2", 2.0),
    ("run.seed", "0", 0),
    ("run.seed", str(2**63 - 1), 2**63 - 1),
    ("run.resume", "never", "never"),
    ("run.resume", "runs/a/checkpoints/checkpoint_0000100", None),
    ("run.dir", "'123'", "123"),
    ("run.dir", '"1e5"', "1e5"),
    ("run.dir", "2026-01-01", "2026-01-01"),
    ("run.dir", "1:30", "1:30"),
    ("run.dir", "no", "no"),
    ("run.dir", "a=b", "a=b"),
    ("data.train", "org/name:config:train[:10%]", None),
    ("data.packing", "False", False),
    ("data.packing", "true", True),
    ("data.eval_fraction", "0", 0.0),
    ("data.max_length", "2", 2),
    ("optimizer.betas", "[0, 0.5]", [0.0, 0.5]),
    ("scheduler.warmup_ratio", "1", 1.0),
    ("checkpoint.every_steps", "0", 0),
    ("lora.targets", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
    ("lora.targets", "all-linear", "all-linear"),
    ("export.dtype", "float16", "float16"),
    ("model.activation_checkpointing", "none", "none"),
    ("distributed.step_timeout_s", "0.5", 0.5),
]


@pytest.mark.parametrize(("key", "text", "expected"), ACCEPTED)
@pytest.mark.parametrize("origin", ["file", "command line"])
def test_accepted(tmp_path: Path, key: str, text: str, expected: Any, origin: str) -> None:
    section, _, name = key.partition(".")
    if origin == "command line":
        config = load(tmp_path, f"{key}={text}")
    else:
        sections = yaml.safe_load(MINIMAL)
        others = "".join(
            f"{name}: {{{k}: {v}}}\n"
            for name, keys in sections.items()
            if name != section
            for k, v in keys.items()
        )
        siblings = "".join(
            f"  {k}: {v}\n" for k, v in sections.get(section, {}).items() if k != name
        )
        config = load(tmp_path, text=f"{others}{section}:\n{siblings}  {name}: {text}\n")
    found = value(config, key)
    expected = text if expected is None and text not in ("null", "~", "") else expected
    assert (found, type(found)) == (expected, type(expected))
    assert config.origins[key] == origin


NOT_ALLOWED = [
    (key, text, use)
    for use, texts, keys in [
        (
            "an integer of at least 1",
            "0 -1 1.5 true three 1_000 .inf 1e999 [1]",
            "train.epochs train.micro_batch_size train.gradient_accumulation_steps checkpoint.keep logging.every_steps "
            "parallel.replicate parallel.expert",
        ),
        ("an integer of at least 1 or null", "0 2.5 false none", "train.max_steps lora.rank"),
        ("an integer of at least 0", "-1 0.5 true null", "eval.every_steps checkpoint.every_steps"),
        ("an integer of at least 2", "1 null", "data.max_length"),
        ("an integer from 0 to 2**63 - 1", f"-1 1.5 {2**63} {'9' * 5000} null", "run.seed"),
        (
            "a number of at least 0",
            "-1e-9 .nan .inf 1e999 true fast null",
            "optimizer.lr optimizer.weight_decay",
        ),
        ("a number above 0", "0 -1 null", "optimizer.eps"),
        ("a number above 0 or null", "0 -1 true", "train.max_grad_norm lora.alpha"),
        ("a number from 0 to 1", "-0.1 1.1 null", "scheduler.warmup_ratio scheduler.min_lr_ratio"),
        ("a number from 0 to below 1", "-0.1 1 null", "data.eval_fraction"),
        (
            "a number of seconds, above 0 and at most 1e9",
            "0 -5 1e10 null [5]",
            "distributed.join_timeout_s distributed.step_timeout_s distributed.save_timeout_s",
        ),
        (
            "a list of two numbers from 0 to below 1",
            "0.9 [0.9] [0.9,1] [0.9,0.9,0.9] [a,b] [[0],[0]] null",
            "optimizer.betas",
        ),
        (
            "true or false",
            "yes off 1 null",
            "data.packing run.ignore_plan model.compile eval.baseline export.final",
        ),
        ("all-linear or a list of module names", "q_proj [] [1] ['']", "lora.targets"),
        (
            "text that is not empty",
            "null '' [a,b] {a:} !!int",
            "run.dir run.resume model.path data.train",
        ),
        ("pretrained or random", "scratch", "model.init"),
        ("float32 or bfloat16", "float16 auto null", "model.master_dtype model.reduce_dtype"),
        ("auto or float32 or bfloat16", "float16", "model.compute_dtype"),
        ("none or selective or full", "true", "model.activation_checkpointing"),
        ("auto or sdpa or eager", "flash", "model.attention"),
        ("truncate or split or drop or error", "cut", "data.overflow"),
        ("assistant or last or all", "user", "data.loss_on"),
        ("adamw or adamw8bit", "sgd", "optimizer.name"),
        ("cosine or linear or constant", "step", "scheduler.name"),
        ("async or sync", "never", "checkpoint.mode"),
        ("source or float32 or bfloat16 or float16", "fp8", "export.dtype"),
        ("auto or nccl or gloo", "mpi", "distributed.backend"),
    ]
    for key in keys.split()
    for text in texts.split()
] + [("train.epochs", "!mine 3", "an integer of at least 1")]


@pytest.mark.parametrize(("key", "text", "use"), NOT_ALLOWED)
def test_not_allowed(tmp_path: Path, key: str, text: str, use: str) -> None:
    assert problems(tmp_path, f"{key}={text}") == [
        f"{key} = {text} (command line) is not allowed - use {use}"
    ]


def test_a_path_may_begin_with_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("run.dir", "run.resume", "model.path", "data.train", "data.eval"):
        config = load(tmp_path, f"{key}=~/x")
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == f"{tmp_path}/x"
        assert problems(tmp_path, f"{key}=~nobody-of-this-name/x") == [
            f"{key} = ~nobody-of-this-name/x (command line) is in no known home - write it out"
        ]


def test_every_key_has_a_value_that_is_not_allowed() -> None:
    assert {key for key, _, _ in NOT_ALLOWED} == KEYS - {"data.eval"}


@pytest.mark.parametrize("text", ["123", "1e5", "true", "@here", "[half", "run #2", "#2"])
def test_text_that_yaml_takes_for_something_else_wants_quotes(tmp_path: Path, text: str) -> None:
    for key in ("run.dir", "data.eval"):
        advice = f"'{key}=\"{text}\"'"
        assert problems(tmp_path, f"{key}={text}") == [
            f"{key} = {text} (command line) is not text to YAML - quote it: {advice}"
        ]
        assert value(load(tmp_path, advice.strip("'")), key) == text
    if text in ("123", "1e5", "true"):
        found = problems(tmp_path, text=f"{MINIMAL}run:\n  dir: {text}  # here\n")
        assert found == [f'run.dir = {text} (FILE:4) is not text to YAML - quote it: dir: "{text}"']


def test_a_value_of_the_file_is_named_with_its_line_and_as_it_was_written(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "train:\n  # more\n  epochs: '3'\n  max_steps:\n  - 1\n  - 2\n  micro_batch_size:\n"
    )
    assert problems(tmp_path, text=text) == [
        "train.epochs = '3' (FILE:5) is not allowed - use an integer of at least 1",
        "train.max_steps = - 1 - 2 (FILE:6) is not allowed - use an integer of at least 1 or null",
        "train.micro_batch_size = null (FILE:9) is not allowed - use an integer of at least 1",
    ]


def test_environment_that_is_no_number_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, environ={"JOIN_TIMEOUT": "soon"}) == [
        "distributed.join_timeout_s = soon (environment JOIN_TIMEOUT) is not allowed - "
        "use a number of seconds, above 0 and at most 1e9"
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("OPTIMIZER.LR", "optimizer.lr"),
        ("--run.dir", "run.dir"),
        ("train.epoch", "train.epochs"),
        ("batch_size", "train.micro_batch_size"),
        ("max_steps", "train.max_steps"),
        ("eval.steps", "eval.every_steps"),
        ("checkpoints.every_steps", "checkpoint.every_steps"),
        ("scheduler.warmup", "scheduler.warmup_ratio"),
        ("train", "data.train"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, name: str, nearest: str) -> None:
    told = f"{name} (command line) is not known - the nearest known one is {nearest}"
    assert problems(tmp_path, f"{name}=1") == [told]


def test_unknown_names_in_the_file(tmp_path: Path) -> None:
    text = "optimiser:\n  lr: 1\n  betas: 2\nlr: 3\ntrain:\n  epoch: 1\n  frobnicate_it: 2\neval: 5\nlogging:\n"
    assert problems(tmp_path, text=MINIMAL + text) == [
        "optimiser (FILE:3) is not known - the nearest known one is optimizer",
        "lr (FILE:6) is not known - the nearest known one is optimizer.lr",
        "train.epoch (FILE:8) is not known - the nearest known one is train.epochs",
        f"train.frobnicate_it (FILE:9) is not known - the sections are {', '.join(DEFAULTS)}",
        "eval (FILE:10) is a section - write its keys below it",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "run: {seed: 1, seed: 2}\n",
            "run.seed is given twice (FILE:3 and FILE:3) - keep one of them",
        ),
        ("data:\n  eval: e\n", "data is given twice (FILE:2 and FILE:3) - keep one of them"),
        (
            "run:\n  seed: 1\nrun.seed: 2\n",
            "run.seed is given twice (FILE:4 and FILE:5) - keep one of them",
        ),
        (
            "train: {epochs: 1\n",
            "FILE:4 is not YAML: expected ',' or '}', but got '<stream end>' - correct it",
        ),
        ("a: b: c\n", "FILE:3 is not YAML: mapping values are not allowed here - correct it"),
        ("--- {}\n", "FILE:3 is not YAML: but found another document - correct it"),
        (
            "a: \x07\n",
            "FILE is not YAML: unacceptable character #x0007: special characters are not allowed - correct it",
        ),
        ("<<: {}\n", f"<< (FILE:3) is not known - the sections are {', '.join(DEFAULTS)}"),
    ],
)
def test_broken_file(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text=MINIMAL + text) == [problem]


@pytest.mark.parametrize("text", ["- a\n", "text\n", "3\n"])
def test_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    (problem,) = problems(tmp_path, text=text)
    assert problem.startswith("FILE is not a mapping - ")


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("run: {dir: é}".encode("latin-1"))
    for name, reason in {
        "none.yaml": "No such file or directory",
        ".": "Is a directory",
        "latin.yaml": "it is not UTF-8 text",
    }.items():
        with pytest.raises(UserError) as refused:
            load_config(tmp_path / name, ["lr=1"], {})
        assert refused.value.problems == [
            f"the configuration file {tmp_path / name} cannot be read: {reason} - name one with --config FILE",
            "lr (command line) is not known - the nearest known one is optimizer.lr",
        ]


def test_required_keys_come_with_an_example(tmp_path: Path) -> None:
    required = {
        "model.path": "model.path is required - for example model.path=zai-org/GLM-4.5-Air",
        "data.train": "data.train is required - for example data.train=data/train.jsonl",
    }
    assert problems(tmp_path, text="") == list(required.values())
    assert problems(tmp_path, "model.path=m", text="# nothing\n") == [required["data.train"]]
    assert load(tmp_path, "model.path=m", "data.train=d", text="").model.path == "m"


def test_assignments_that_are_none(tmp_path: Path) -> None:
    assert problems(tmp_path, "other.yaml", "train.epochs=1", "train.epochs=2") == [
        "other.yaml is not an assignment - write section.key=value",
        "train.epochs is assigned twice (1 and 2) - keep one of them",
    ]


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = "model: {pat: m}\ntrain: {epochs: 0}\nrun: {seed: 1, seed: 2}\n"
    found = problems(
        tmp_path, "lr=1", "export.dtype=fp8", "nonsense", text=text, environ={"JOIN_TIMEOUT": "x"}
    )
    starts = [
        "model.pat ",
        "run.seed is given twice",
        "lr ",
        "nonsense ",
        "model.path is required",
        "data.train is required",
        "train.epochs = 0",
        "export.dtype = fp8",
        "distributed.join_timeout_s = x",
    ]
    assert [
        problem
        for problem, start in zip(found, starts, strict=True)
        if not problem.startswith(start)
    ] == []


NOT_BUILT = {
    "parallel.expert": ("2", "1"),
    "optimizer.name": ("adamw8bit", "adamw"),
    "lora.rank": ("16", "null"),
    "model.master_dtype": ("bfloat16", "float32"),
}


@pytest.mark.parametrize("key", NOT_BUILT)
def test_what_is_not_built_yet_is_refused_by_name(tmp_path: Path, key: str) -> None:
    asked, instead = NOT_BUILT[key]
    assert problems(tmp_path, f"{key}={asked}") == [
        f"{key} = {asked} (command line) is not built yet - use {instead}"
    ]
    for built in instead.split(" or "):
        load(tmp_path, f"{key}={built}")


def test_alpha_is_twice_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(config_module._BUILT, "lora.rank", raising=False)
    assert load(tmp_path, "lora.rank=16").lora.alpha == 32
    assert load(tmp_path, "lora.rank=16", "lora.alpha=null").lora.alpha == 32
    assert load(tmp_path, "lora.rank=16", "lora.alpha=8").lora.alpha == 8


REMARKS = [
    (
        ["data.eval=e", "data.eval_fraction=0.1"],
        "data.eval_fraction = 0.1 (command line) has no effect: data.eval is given",
    ),
    (
        ["lora.alpha=8"],
        "lora.alpha = 8.0 (command line) has no effect: lora.rank is null, so every weight is trained",
    ),
    (
        ["lora.targets=[q]"],
        'lora.targets = ["q"] (command line) has no effect: lora.rank is null, so every weight is trained',
    ),
    (
        ["scheduler.name=constant", "scheduler.min_lr_ratio=0.1"],
        "scheduler.min_lr_ratio = 0.1 (command line) has no effect: scheduler.name is constant",
    ),
    (
        ["run.ignore_plan=true"],
        "run.ignore_plan = true (command line) has no effect: no plan refuses a run yet",
    ),
    (
        ["eval.every_steps=5"],
        "eval.every_steps = 5 (command line) has no effect: no evaluation data is given",
    ),
    (
        ["export.final=false", "export.dtype=float32"],
        'export.dtype = "float32" (command line) has no effect: export.final is false',
    ),
]


@pytest.mark.parametrize(("assignments", "remark"), REMARKS)
def test_what_another_setting_switches_off_is_remarked(
    tmp_path: Path, assignments: list[str], remark: str
) -> None:
    assert remarks(load(tmp_path, *assignments)) == [remark]


@pytest.mark.parametrize(
    "assignments",
    [
        [],
        ["scheduler.name=constant"],
        ["data.eval=e", "eval.every_steps=5"],
        ["data.eval_fraction=0.1", "eval.every_steps=5"],
        ["data.eval=e", "data.eval_fraction=0"],
        ["export.final=false"],
        ["lora.alpha=null", "lora.targets=all-linear"],
        ["scheduler.min_lr_ratio=0"],
        ["export.dtype=float32"],
    ],
)
def test_what_is_used_or_was_not_asked_for_is_not_remarked(
    tmp_path: Path, assignments: list[str]
) -> None:
    assert remarks(load(tmp_path, *assignments)) == []
