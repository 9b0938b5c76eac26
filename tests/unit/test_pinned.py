"""What machines decide and commands left no test finds; each long test is in one of six parts."""

import json
import os
import re
import shutil
import sys

import pytest
from helpers import long_tests
from helpers.commands import REPOSITORY, completed, finish
from helpers.long_tests import PARTS, not_run, part_of
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
TOUCHING = """
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
    (tmp_path / "test_some.py").write_text(TOUCHING.format(checkout=str(REPOSITORY)))
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


TESTS = [f"tests/test_{number}.py::test" for number in range(60)]


def test_each_test_is_in_one_part_and_those_that_no_part_ran_are_named():
    assert {part_of(test) for test in TESTS} == {*range(PARTS)}
    runs = [{"part": part, "left_out": TESTS} for part in range(PARTS)]
    assert not_run(TESTS, runs) == TESTS
    runs += [{"part": part, "left_out": TESTS[:1]} for part in range(PARTS) if part != 3]
    rest = [test for test in TESTS if part_of(test) == 3]
    assert not_run(TESTS, runs) == sorted({TESTS[0], *rest}, key=TESTS.index)
    assert not_run(TESTS, runs[PARTS:]) == [
        "part 3: make test-part COMMITS=3",
        *([TESTS[0]] if part_of(TESTS[0]) != 3 else []),
    ]


def test_what_a_part_did_not_run_is_on_record_and_comes_first_the_next_time(tmp_path):
    helpers = tmp_path / "tests/helpers"
    helpers.mkdir(parents=True)
    shutil.copy(str(long_tests.__file__), helpers)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\npythonpath = tests\n")
    names = [f"tests/test_a.py::test[{n}]" for n in range(40)]
    part = part_of(names[0])
    of_part = [name for name in names if part_of(name) == part]
    text = "import pytest\n@pytest.mark.parametrize('n', range(40))\ndef test(n, request):\n"
    text += f"    assert request.node.nodeid != {of_part[2]!r}\n"
    (tmp_path / "tests/test_a.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "helpers.long_tests"]
    command += ["--commits", f"{part}"]
    left = of_part[3:]
    for more, left_out, order in (
        (["-x"], left, of_part[:3]),
        (["--lf"], left, of_part[2:3]),  # no part
        ([], [], left + of_part[:3]),
    ):
        said = completed([*command, *more], cwd=tmp_path).stdout
        *_, run = json.loads((tmp_path / "tests/long_tests.json").read_text())
        assert run["part"] == part and run["left_out"] == sorted(left_out), said
        assert re.findall(r"^(\S+) (?:PASSED|FAILED) .*%", said, re.M) == order
