"""Six parts are all long tests, and a test that was in none of them is named."""

from __future__ import annotations

import json
import re
import shutil
import sys

from helpers import long_tests
from helpers.commands import completed
from helpers.long_tests import PARTS, not_run, part_of

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
