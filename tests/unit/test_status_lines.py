"""A command says what it does, and that it still does it."""

from __future__ import annotations

import time

from shardtune.planner import status_lines
from shardtune.planner.status_lines import status_lines as running


def test_long_work_is_said_again_until_it_ends(capsys, monkeypatch):
    assert status_lines._EVERY_S <= 10, "documented"
    monkeypatch.setattr(status_lines, "_EVERY_S", 0.05)
    said, deadline = "", time.monotonic() + 20
    with running() as say:
        say("reading")
        while "still" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        say("simulating")
    said += capsys.readouterr().err
    first, *again = [line.split(",")[0] for line in said.splitlines()]
    assert first == "Plan: reading" and {*again} == {"Plan: simulating", "Plan: still at it"}
