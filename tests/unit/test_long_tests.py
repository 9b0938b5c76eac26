"""Six parts are all long tests, and a test that was in none of them is named."""

from __future__ import annotations

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
