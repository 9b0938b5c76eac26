"""What cannot be compiled runs as it is, and is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from shardtune.distributed.compiling import (
    can_compile,
    compile_for_all_lengths,
    compiled_or_eager,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    can_compile.cache_clear()
    yield
    can_compile.cache_clear()
    torch._dynamo.reset()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("shardtune")]


def square(x: torch.Tensor) -> None:
    x.mul_(x).add_(3)


def test_all_that_is_compiled_adds_up_in_one_order(monkeypatch):
    """Else a GPU takes the fastest of some kernels, of which each has an order of its own."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda _, **options: given.update(options))
    compile_for_all_lengths(square)
    assert given == {"dynamic": True, "options": {"deterministic": True}}


@pytest.mark.full
def test_a_function_is_compiled_once_for_all_lengths():
    compilations = torch._dynamo.utils.counters["stats"]
    compiled = compiled_or_eager(square, "the square", CPU)
    before = compilations["unique_graphs"]
    for length in (7, 8, 1000):
        x = torch.arange(float(length))
        compiled(x)
        assert torch.equal(x, torch.arange(float(length)).square() + 3)
    assert compilations["unique_graphs"] == before + 1


def test_without_a_compiler_functions_run_eager_and_it_is_said_once(caplog):
    x = torch.full((5,), 2.0)
    with (
        inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}),
        caplog.at_level(logging.INFO, "shardtune"),
    ):
        for name in ("the square", "the other"):
            compiled_or_eager(square, name, CPU)(x)
    assert x.eq(52).all()
    (line,) = said(caplog)
    assert line.startswith("Compile: nothing is compiled for this CPU (")


@pytest.mark.full
def test_a_function_that_cannot_be_compiled_runs_eager_and_is_named_once(caplog):
    def with_a_break(x: torch.Tensor) -> None:
        x.add_(1)
        torch._dynamo.graph_break()

    x, call = torch.zeros(5), compiled_or_eager(with_a_break, "the break", CPU)
    with caplog.at_level(logging.INFO, "shardtune"):
        call(x)
        call(x)
    assert x.eq(2).all(), "what fails to compile has changed nothing"
    (line,) = said(caplog)
    assert line.startswith("Compile: the break runs eager (")
