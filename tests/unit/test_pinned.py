"""What a machine decides, and what commands left in the checkout, no test finds."""

from __future__ import annotations

import os
import sys

import pytest
from helpers.commands import REPOSITORY, completed, finish
from helpers.pinned import on_path

SEEN = """
import os, psutil, torch
from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.join import native_dtype
cores, memory = os.cpu_count(), available_memory() >> 30
print(native_dtype(torch.device("cpu")), cores, memory, os.listdir())
"""
OWN = {"TESTS", "PYTEST"}
# A file of tests whose children do that. It need not be there: asking for it is wrong.
TESTS = """
import subprocess, sys
def child(program):
    subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
def test_reads():
    child("open({checkout!r} + '/runs/demo/nothing')")
def test_writes():
    child("import os; os.mkdir({checkout!r} + '/docs/nowhere/new')")
def test_is_right():
    child("import os, shardtune.units; os.listdir({checkout!r}); os.mkdir('here')")
"""


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [("0", "float32"), ("1", "bfloat16")])
def test_a_process_finds_what_is_pinned_whatever_its_machine_has(has_bfloat16, dtype, tmp_path):
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault/sitecustomize.py").write_text("import os; os.listdir = lambda: 'fault'")
    environ = os.environ | on_path(tmp_path / "fault") | {"TESTS_HAVE_BFLOAT16": has_bfloat16}
    said = finish(completed([sys.executable, "-c", SEEN], cwd=tmp_path, env=environ))
    assert said == f"{dtype} 2 8 fault\n"


def test_a_test_that_touches_what_commands_left_in_the_checkout_fails_by_name(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS.format(checkout=str(REPOSITORY)))
    own = {name: each for name, each in os.environ.items() if name.partition("_")[0] not in OWN}
    plugin = ["-p", "helpers.pinned", "-p", "no:cacheprovider", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *plugin, "test_some.py"]
    said = completed(command, cwd=tmp_path, env=own | on_path(REPOSITORY / "tests")).stdout
    assert "3 passed, 2 errors" in said, said
    for name, line in [
        ("reads", "open runs/demo/nothing"),
        ("writes", "os.mkdir docs/nowhere/new"),
    ]:
        assert f"ERROR at teardown of test_{name} " in said, said
        assert f"test_some.py::test_{name} (call): {line} by " in said, said
