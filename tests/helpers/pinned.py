"""Pin what a machine and a caller would decide, for this process and all that it starts; its
import does, before that of torch and others, which read variables then.

Fail tests that read what commands left in the checkout, or write there (tests/pinned/guard.py).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_PINNED = str(Path(__file__).resolve().parents[1] / "pinned")
_KEPT = ("PATH", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "ATEN_CPU_CAPABILITY")
_KEPT_PREFIXES = ("PYTEST_", "PIP_", "TESTS_", "SHARDTUNE_TRL_")
_is_first = "TESTS_FOLDER" not in os.environ  # the processes of pytest-xdist have its folder
_folder = Path(os.environ.get("TESTS_FOLDER") or tempfile.mkdtemp(prefix="shardtune-tests-"))
_notes = _folder / f"notes-{os.environ.get('PYTEST_XDIST_WORKER', '')}"
_kept = {n: v for n, v in os.environ.items() if n in _KEPT or n.startswith(_KEPT_PREFIXES)}
os.environ.clear()
os.environ |= _kept | {
    "TESTS_FOLDER": str(_folder),
    "TESTS_GUARD": str(_notes),
    "PYTHONPATH": _PINNED,
    "HOME": str(_folder / "home"),
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    # One for all: what one process compiled others take.
    "TORCHINDUCTOR_CACHE_DIR": str(_folder / "inductor"),
    "HYPOTHESIS_STORAGE_DIRECTORY": str(_folder / "hypothesis"),
    "SHARDTUNE_CACHE": str(_folder / f"cache-{_notes.name}"),
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name in ("home", "here"):
    (_folder / _name).mkdir(exist_ok=True)
if "pins" not in sys.modules:  # Python has not run its sitecustomize
    sys.path.insert(0, _PINNED)
    for _name in ("pins", "guard"):
        getattr(__import__(_name), {"pins": "pin", "guard": "watch"}[_name])()


def on_path(*folders: Path | str) -> dict[str, str]:
    """The setting with which Python imports modules of these folders, and runs a sitecustomize."""
    return {"PYTHONPATH": os.pathsep.join([_PINNED, *map(str, folders)])}


def leave_the_checkout() -> None:
    """Go where no command has left anything."""
    os.chdir(_folder / "here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    if _notes.exists():
        text = _notes.read_text(encoding="utf-8")
        _notes.unlink()
        pytest.fail(f"A test touched what it may not touch in the checkout:\n{text}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Name what processes did that outlived their test, when nothing runs any more."""
    late = [path.read_text(encoding="utf-8") for path in _folder.glob("notes-*") if _is_first]
    if late:
        print(f"\nTouched in the checkout after a test had ended:\n{''.join(late)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    if _is_first:
        os.chdir("/")
        shutil.rmtree(_folder, ignore_errors=True)
