"""Note what tests may not touch: what commands leave in the checkout, and files that they write in
it. It runs in each process and at each open, so it imports no pathlib."""

import os
import sys
from typing import Any

_CHECKOUT = os.path.abspath(__file__).removesuffix("tests/pinned/guard.py")  # noqa: PTH100
_MAY_NOT_READ = (
    "runs/",
    "site/",
    "models/",
    "build/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".import_linter_cache/",
)
_MAY_READ = "models/SmolLM2-135M-Instruct/"
# Pytest writes the first two, and `build` of the pretended GPUs the other, once.
_MAY_WRITE = (".pytest_cache/", "pytest-cache-files-", ".venv/pretend_gpu/")
_READING = ("open", "os.listdir", "os.scandir")
# Where an event has the paths that it reads or changes.
_PATHS = {event: slice(1) for event in (*_READING, "os.mkdir", "os.remove", "os.rmdir", "os.chmod")}
_PATHS |= {"os.rename": slice(2), "os.link": slice(1, 2), "os.symlink": slice(1, 2)}
_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watch() -> None:
    """Add a line to the file of TESTS_GUARD for each thing that is wrong, from here on."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: Any) -> None:
    if event not in _PATHS:
        return
    for path in arguments[_PATHS[event]]:
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if not isinstance(path, str):  # a descriptor
            continue
        if path[:1] != "/":
            if event not in _READING and arguments[-1] != -1:
                continue  # relative to a descriptor, as shutil.rmtree has it
            path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118
        if path.startswith(_CHECKOUT):
            is_read = event in _READING and not (event == "open" and arguments[2] & _WRITE)
            _judge(event, os.path.normpath(path).removeprefix(_CHECKOUT), is_read)


def _judge(event: str, inside: str, is_read: bool) -> None:
    folder = inside + "/"
    if is_read:
        is_right = not folder.startswith(_MAY_NOT_READ) or folder.startswith(_MAY_READ)
    else:
        is_right = folder.startswith(("/", *_MAY_WRITE)) or "__pycache__/" in folder
    if is_right or not (notes := os.environ.get("TESTS_GUARD")):
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "outside of tests")
    line = f"{test}: {event} {inside} by {' '.join(sys.orig_argv[:4])!r}\n"
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(file, line.encode())
    os.close(file)
