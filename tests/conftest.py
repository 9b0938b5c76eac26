"""Fixtures for all tests."""

from helpers.pinned import (
    leave_the_checkout,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_unconfigure,
)

# isort: split
import gc
import logging
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.data_run import save_model
from helpers.exact import check_exact, plain, sharp
from helpers.saving_runs import Undisturbed, saving_inputs
from helpers.tiny_models import save_models, train_tokenizer
from transformers import PreTrainedTokenizerFast

from shardtune.log import logger, node_logger

# Fixtures and hooks that pytest finds here.
__all__ = ["check_exact", "plain", "pytest_runtest_teardown", "pytest_sessionfinish", "sharp"]
__all__ += ["pytest_unconfigure"]

# What is imported stays: looking through it for garbage takes a seventh of the tests' time.
gc.disable()

# A suite that runs in the background ignores Ctrl-C, and its processes would inherit that.
for _number, _action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    signal.signal(_number, _action)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the launches, which mostly wait, among files that compute, in the first half."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    launches = [path for path in files if path.parent.name == "launch"]
    others = [path for path in files if path not in launches]
    # Where it begins among the last files, one process runs it while the others have no more.
    others.sort(key=lambda path: path.name != "test_crash.py")
    step = len(others) // (2 * len(launches)) if launches else 0
    for number, path in enumerate(launches):
        others.insert(number * (step + 1), path)
    items[:] = [item for path in others for item in files[path]]


def pytest_collection_finish() -> None:
    leave_the_checkout()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    """A test that sets logging up must not change what the next one captures."""
    before = [(each.handlers, each.propagate) for each in (logger, node_logger)]
    yield
    for each, (handlers, propagate) in zip((logger, node_logger), before, strict=True):
        each.handlers, each.propagate = handlers, propagate


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """Return the folders of `llama` (tied), `qwen3` (untied) and `glm` (mixture of experts)."""
    return save_models(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    return saving_inputs(tmp_path_factory.mktemp("inputs"), models["llama"])


@pytest.fixture
def folder(tmp_path: Path, inputs: Path) -> Path:
    return Path(shutil.copytree(inputs, tmp_path / "here"))


@pytest.fixture(scope="session")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(inputs, tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose tokens are words, without weights."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let those that a command sets end with the test."""
    monkeypatch.setattr(logger, "handlers", logger.handlers)
    monkeypatch.setattr(logger, "level", logging.INFO)
