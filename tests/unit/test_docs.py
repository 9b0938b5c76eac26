"""The pages of README.md and docs/: links, paths, examples, descriptions; the site; the demo."""

import csv
import json
import logging
import re
import tomllib

import pytest
from helpers.commands import REPOSITORY
from helpers.configs import DEFAULTS
from mkdocs.commands.build import build
from mkdocs.config import load_config

from shardtune import metrics_schema
from shardtune.__main__ import run
from shardtune.cluster import environment
from shardtune.metrics_schema import KINDS, markdown
from shardtune.report.read_run import read_entry

PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += [*sorted(REPOSITORY.glob("docs/*.md"))]
ARCHITECTURE = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "shardtune|distTest|tests|docs|examples|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w/.*]+)`", text)
    missing = [name for name in named if not list(REPOSITORY.glob(name))]
    missing += [
        name
        for name in re.findall(r"`(test_\w+\.py)`", text)
        if not list((REPOSITORY / "tests").rglob(name))
    ]
    assert missing == []
    assert not re.search(r"^(<<<<<<<|=======|>>>>>>>)( |$)", text, re.MULTILINE), "a merge's marks"


def test_each_test_that_a_page_names_exists():
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    named = [
        (page, file, test)
        for page, text in texts.items()
        for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    ]
    assert len([page for page, _, _ in named if page == "elsewhere.md"]) >= 18
    missing = [
        f"{page}: {file}::{test}"
        for page, file, test in named
        if not (path := REPOSITORY / file).exists()
        or not re.search(rf"^(async )?def {test}\(", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_the_commands_and_links_of_agents_exist():
    text = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([a-z-]+)", text)
    assert targets and set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    paths = [*re.findall(r"\]\(([^)#]+)", text), *re.findall(r"\btests/\S+", text)]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_readme_has_the_table_of_the_planner_and_the_number_of_architectures():
    """Its rows end before their settings do."""
    readme, planner = (
        (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "docs/planner.md")
    )
    shown = re.findall(r"^  \d .+", readme, re.MULTILINE)
    rows = re.findall(r"^  \d .+", planner, re.MULTILINE)
    assert len(shown) == len(rows) == 8
    for short, row in zip(shown, rows, strict=True):
        assert row.startswith(short.removesuffix(" ..."))
    with (REPOSITORY / "docs/models.csv").open(encoding="utf-8", newline="") as table:
        trained = [row for row in csv.DictReader(table) if row["one rank"]]
    assert f"It trains {len(trained)} architectures" in readme


def test_the_page_of_the_architecture_has_the_layers_that_imports_are_held_to():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    (picture,) = re.findall(r"```text\n(train_fsdp\.py .*?)```", ARCHITECTURE, re.DOTALL)
    rooms = [line.split() for line in picture.splitlines()]
    assert rooms == [["train_fsdp.py", "distTest"], *(line.split(" : ") for line in layers)]


def test_the_page_of_the_architecture_has_every_room_of_the_tree():
    table = ARCHITECTURE.partition("| room |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w/]+(?:/|\.py))`", "".join(re.findall(r"^\| .+? \|", table, re.M)))
    rooms = {f"shardtune/{path.name}" for path in (REPOSITORY / "shardtune").glob("*.py")}
    for pattern in ("*/__init__.py", "shardtune/*/__init__.py"):
        rooms |= {f"{path.parent.relative_to(REPOSITORY)}/" for path in REPOSITORY.glob(pattern)}
    assert set(named) == rooms - {"shardtune/", "shardtune/__init__.py"}
    assert len(named) == len(set(named))


def test_the_site_is_built_strictly_and_loads_nothing_from_a_network(tmp_path, caplog):
    config = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(config)
    assert "<td>qwen3_moe</td>" in (tmp_path / "models.html").read_text(encoding="utf-8")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert re.findall(r'(?:src|<link[^>]* href)="https?:[^"]*"', html) == [], page.name


CHATS = REPOSITORY / "examples/chats"
# What a question with a name in it asks for.
DEFAULT = re.compile(
    r"What is (\S+)(?: in the launch scripts)?, unless I set it\?|What is the default of (\S+)\?"
    r"|Which number does (\S+) have if I set none\?"
)


def questions(name: str) -> list[tuple[str, str]]:
    """Return each question of a file with its answer."""
    chats = [json.loads(line)["messages"] for line in (CHATS / name).read_text().splitlines()]
    turns = [[message for message in chat if message["role"] != "system"] for chat in chats]
    return [
        (asked["content"], answer["content"])
        for chat in turns
        for asked, answer in zip(chat[::2], chat[1::2], strict=True)
    ]


SHORT = questions("short_eval.jsonl")


def test_no_question_is_asked_twice():
    files = ("train.jsonl", "eval.jsonl", "short_train.jsonl", "short_eval.jsonl")
    asked = {name: {question.casefold() for question, _ in questions(name)} for name in files}
    for held_out in ("eval.jsonl", "short_eval.jsonl"):
        others = set().union(*(asked[name] for name in files if name != held_out))
        assert asked[held_out].isdisjoint(others)
    assert len(asked["short_eval.jsonl"]) == len(SHORT)


def test_answers_that_name_a_default_are_the_default():
    asked = 0
    for question, answer in [*SHORT, *questions("short_train.jsonl")]:
        if match := DEFAULT.fullmatch(question):
            key = next(filter(None, match.groups()))
            section, _, name = key.partition(".")
            default = DEFAULTS[section][name] if name else environment.DEFAULTS[key]
            assert float(answer) == float(default), question
            asked += 1
    assert asked >= 2 * 14


SCHEMA = REPOSITORY / "docs/config.schema.json"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [([], "docs/config.schema.json"), (["--markdown"], "docs/configuration.md")],
)
def test_the_committed_description_is_current(arguments, file, capsys):
    assert run(["config-schema", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed == (REPOSITORY / file).read_text(encoding="utf-8"), "run `make docs`"


def test_every_key_has_a_description():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(DEFAULTS)
    for section, defaults in DEFAULTS.items():
        model = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert model["properties"].keys() == defaults.keys() and not model["additionalProperties"]
        assert all(key["description"].endswith((".", "`")) for key in model["properties"].values())


def test_the_committed_page_is_current():
    page = REPOSITORY / "docs/metrics.md"
    assert markdown() == page.read_text(encoding="utf-8"), "run `make docs`"


def test_every_kind_of_object_is_read_and_has_a_table():
    """A class that is left out of the union is written, and neither checked nor explained."""
    written = {
        name
        for name, value in vars(metrics_schema).items()
        if name.endswith("Entry") and "kind" in getattr(value, "__annotations__", ())
    }
    assert written - {"_Entry"} == {entry.__name__ for entry in KINDS.values()}


@pytest.mark.parametrize(
    ("entry", "is_read"),
    [
        ({"kind": "step", "step": 3}, True),  # of an older run
        ({"kind": "step", "step": 3, "loss": None, "heat": [9]}, True),  # of a newer one
        ({"kind": "weather", "step": 3, "loss": "low"}, True),
        ({"kind": "step", "step": "3"}, False),
        ({"kind": "step"}, False),
    ],
)
def test_a_line_is_read_by_the_fields_that_it_has(entry, is_read):
    assert read_entry(json.dumps(entry)) == (entry if is_read else None)
