"""A command says what it does, and that it still does it."""

from __future__ import annotations

import time

import pytest

from shardtune.planner import status_lines
from shardtune.planner.status_lines import StatusLines


def test_a_long_part_is_said_again_until_the_next_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_lines._SILENT_S <= 10, "documented"
    monkeypatch.setattr(status_lines, "_SILENT_S", 0.05)
    said, deadline = "", time.monotonic() + 20
    with StatusLines() as lines:
        lines.say("reading")
        while "still" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        lines.say("simulating")
    said += capsys.readouterr().err
    first, *again, last = said.splitlines()
    assert first == "Plan: reading" and last == "Plan: simulating"
    assert {line.split(",")[0] for line in again} == {"Plan: still at it"}
