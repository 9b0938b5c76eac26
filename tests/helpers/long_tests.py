"""`make test-part`: a sixth of the long tests, chosen by the number of commits, in limited time.

tests/long_tests.json keeps what the last six parts were. It tells which tests were in none of them.
"""

import datetime
import json
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

PARTS = 6
LIMIT_S = 12 * 60  # a test may begin: the last ones take a minute or two
RECORD = Path(__file__).resolve().parent.parent / "long_tests.json"
LEFT_OUT = f"left out, since {LIMIT_S // 60} minutes were over"
NOT_RUN = f"in none of the last {PARTS} parts"
_STARTED = pytest.StashKey[float]()
_PART, _UNRUN = pytest.StashKey[set[str]](), pytest.StashKey[set[str]]()
Run = dict[str, Any]


def part_of(test: str) -> int:
    """Return the part of a test, which other tests do not move."""
    return zlib.crc32(test.encode()) % PARTS


def not_run(tests: Iterable[str], runs: list[Run]) -> list[str]:
    """Return the tests that none of these runs holds, and the parts that none of them was."""
    absent = {*range(PARTS)} - {run["part"] for run in runs}
    return [
        *(f"part {part}: make test-part COMMITS={part}" for part in sorted(absent)),
        *(
            test
            for test in tests
            if part_of(test) not in absent
            and all(test in run["left_out"] for run in runs if run["part"] == part_of(test))
        ),
    ]


def with_run(part: int, left_out: list[str]) -> list[Run]:
    """Return the last parts on record, and this one. Raises UsageError."""
    try:
        before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
        before = [{name: run[name] for name in ("part", "date", "left_out")} for run in before]
    except (ValueError, TypeError, KeyError) as error:
        raise pytest.UsageError(f"{RECORD} is damaged - write [] into it") from error
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [*before, {"part": part, "date": date, "left_out": left_out}][-PARTS:]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--commits", type=int, required=True, help="the number of commits")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED], config.stash[_PART], config.stash[_UNRUN] = (
        time.monotonic(),
        set(),
        set(),
    )
    with_run(0, [])  # a damaged record ends the command here


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("commits") % PARTS
    *before, this = with_run(part, [])
    unrun = not_run([item.nodeid for item in items], [*before, this])
    # A machine that is too slow for a part would leave out the same ones each time.
    first = {test for run in before if run["part"] == part for test in run["left_out"]}
    items[:] = [item for item in items if part_of(item.nodeid) == part]
    items.sort(key=lambda item: item.nodeid not in first)
    own = [item.nodeid for item in items]
    if hasattr(config, "workeroutput"):  # a process that reports nothing
        config.workeroutput |= {"unrun": unrun, "part": own}
    config.stash[_UNRUN].update(unrun)
    config.stash[_PART].update(own)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - item.config.stash[_STARTED] > LIMIT_S:
        pytest.skip(LEFT_OUT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[_UNRUN].update(output.get("unrun", []))
    node.config.stash[_PART].update(output.get("part", []))


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # another process reports
        return
    part = config.getoption("commits") % PARTS
    stats = terminalreporter.stats
    skipped = {each.nodeid: str(each.longrepr) for each in stats.get("skipped", [])}
    late = sorted(test for test, why in skipped.items() if LEFT_OUT in why)
    terminalreporter.section(f"part {part} of 0 to {PARTS - 1} of the long tests")
    for title, tests in ((LEFT_OUT, late), (NOT_RUN, sorted(config.stash[_UNRUN]))):
        terminalreporter.write_line(f"{title}: {len(tests) or 'none'}")
        for test in tests:
            terminalreporter.write_line(f"  {test}")
    chosen = (config.option.keyword, config.option.lf, config.getoption("stepwise"))
    is_part = config.args_source != pytest.Config.ArgsSource.TESTPATHS or any(chosen)
    has_errors = any(each.when == "collect" for each in stats.get("error", []))
    if config.option.collectonly or is_part or has_errors or exitstatus not in (0, 1):
        return
    ran = {each.nodeid for how in ("passed", "failed") for each in stats.get(how, [])}
    runs = json.dumps(with_run(part, sorted(config.stash[_PART] - ran)), indent=1)
    RECORD.write_text(runs + "\n", encoding="utf-8")
