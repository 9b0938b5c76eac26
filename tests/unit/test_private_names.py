"""The private names of torch and transformers that CONTRIBUTING.md lists: each is there in the
pinned versions, and the code uses no others.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.commands import REPOSITORY
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from transformers import PreTrainedModel

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Private names")[2]
FILES = [
    REPOSITORY / "train_fsdp.py",
    *(
        path
        for folder in ("shardtune", "benchmarks", "distTest")
        for path in sorted(REPOSITORY.glob(f"{folder}/**/*.py"))
    ),
]
# Names of their classes stay theirs where a class of ours overrides them.
OF_AN_OLDER_TORCH = {"_fsdp_param_group"}  # which distributed/older_torch.py adapts
OVERRIDDEN = {*dir(PreTrainedModel), *dir(LocalElasticAgent)}


class Row(NamedTuple):
    name: str
    files: list[str]


ROWS = [
    Row(name.strip("`"), re.findall(r"`([\w/.]+\.py)`", files))
    for name, files in re.findall(r"^\| (`\S+`) \| (.+?) \|", PAGE, re.MULTILINE)
]


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_each_listed_private_name_exists_in_the_pinned_versions(name):
    importlib.import_module("torch.nn.attention.varlen")  # it defines operators
    module, parts = imported(name)
    owner: Any = module
    for part in parts[:-1]:
        owner = getattr(owner, part)
    last = parts[-1]
    assert hasattr(owner, last) or is_given_to_instances(owner, last), f"{owner} has no {last}"


def imported(name: str) -> tuple[Any, list[str]]:
    """Import the longest beginning of a name that is a module; return it and the rest."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            return importlib.import_module(".".join(parts[:length])), parts[length:]
        except ModuleNotFoundError:
            pass
    raise ModuleNotFoundError(name)


def is_given_to_instances(owner: Any, name: str) -> bool:
    """Return whether a class sets this attribute of its instances, or it or a function reads it."""
    return re.search(rf"\bself\.{name}\b|\"{name}\"", inspect.getsource(owner)) is not None


def test_every_private_name_that_the_code_uses_is_listed_with_its_file():
    own = {name for path in FILES for name in defined(path)}
    missing = []
    for path in FILES:
        file = short(path)
        listed = {part for row in ROWS if file in row.files for part in row.name.split(".")}
        missing += [
            f"{file}: {name}" for name in sorted({*used(path, own)} - listed - OF_AN_OLDER_TORCH)
        ]
    assert missing == [], "add a row to the private names of CONTRIBUTING.md"


def test_every_listed_private_name_is_used_in_its_files():
    texts = {short(path): path.read_text(encoding="utf-8") for path in FILES}
    unused = [
        f"{file}: {row.name}"
        for row in ROWS
        for file in row.files or ["no file"]
        if not re.search(rf"\b{row.name.split('.')[-1]}\b", texts.get(file, ""))
    ]
    assert unused == [], "take it from the private names of CONTRIBUTING.md, or correct its file"


def short(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix().removeprefix("shardtune/")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(path: Path) -> Iterator[str]:
    """Yield the private names that a file of ours defines or gives to its own instances."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def used(path: Path, own: set[str]) -> Iterator[str]:
    """Yield the private names of torch and transformers that a file uses or overrides."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module)) if not module.startswith("shardtune"):
                names = [*module.split("."), *(alias.name for alias in node.names)]
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.Attribute(value=ast.Name(id="os")):  # os._exit is documented
                pass
            case ast.Attribute(attr=name) if name not in own or name in OVERRIDDEN:
                names = [name]
            case ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names = [name] if name in OVERRIDDEN else []
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names = [name]
        yield from filter(is_private, names)
