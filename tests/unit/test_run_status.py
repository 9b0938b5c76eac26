"""How a run stands after a step: a signal, an evaluation and the last step decide."""

from types import SimpleNamespace
from typing import Any

import pytest

import train_fsdp


@pytest.mark.parametrize(
    ("is_last", "evaluation", "is_stop_asked", "status"),
    [
        (False, "not due", False, "GOES_ON"),
        (False, "not due", True, "STOPPED"),
        (False, "made", False, "GOES_ON"),
        (False, "cut short", False, "STOPPED"),
        (False, "skipped", True, "STOPPED"),
        (True, "not due", False, "FINISHED"),
        (True, "not due", True, "FINISHED"),
        (True, "made", False, "FINISHED"),
        (True, "cut short", False, "STOPPED"),
        (True, "skipped", True, "STOPPED"),
    ],
)
def test_a_signal_stops_a_run_unless_its_last_step_is_made_and_evaluated(
    is_last, evaluation, is_stop_asked, status, monkeypatch
):
    evaluated: list[int] = []

    def evaluate(_: Any, step: int, stop: Any) -> bool:
        evaluated.append(step)
        return evaluation == "made"

    monkeypatch.setattr(train_fsdp, "evaluate", evaluate)
    run = SimpleNamespace(config=SimpleNamespace(eval=SimpleNamespace(every_steps=2)))
    schedule = SimpleNamespace(total_steps=4 if is_last else 8, is_due=lambda *_: True)
    data = SimpleNamespace(eval={} if evaluation == "not due" else {"": "a set"})
    context: Any = SimpleNamespace(run=run, schedule=schedule, data=data)
    step, stats = SimpleNamespace(number=4), SimpleNamespace(must_stop=is_stop_asked)
    assert train_fsdp.evaluate_if_due(context, step, stats, object()).name == status
    assert evaluated == [4] * (evaluation in ("made", "cut short"))
