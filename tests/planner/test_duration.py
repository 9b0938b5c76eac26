"""The planned length of a run is the run's own."""

from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import Run, chat, save_model, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtune.config import Config
from shardtune.data.schedule import Position, Schedule, source_weights
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.run_length import RunLength, run_length


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


SOURCES = st.lists(
    st.fixed_dictionaries(
        {
            "answers": st.lists(st.integers(1, 90), min_size=1, max_size=12),
            "weight": st.sampled_from([0.0, 0.3, 1.0, 2.0, 2.5]),
            "max_records": st.sampled_from([None, 1, 5]),
        }
    ),
    min_size=1,
    max_size=3,
)


@given(data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_planned_steps_are_those_of_the_run(data, model, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path))
    sources = data.draw(SOURCES)
    for number, source in enumerate(sources):
        records = [chat("q", " ".join(["hello"] * n)) for n in source.pop("answers")]
        source |= {"path": str(write(tmp_path / f"{number}.jsonl", records))}
    stages, context = (data.draw(st.sampled_from([1, 2])) for _ in range(2))
    values: dict[str, Any] = {
        "train": sources,
        "packing": data.draw(st.booleans()),
        "max_length": 64,
        "overflow": data.draw(st.sampled_from(["split", "truncate"])),
    }
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "data": values,
            "parallel": {"stages": stages, "context": context},
            "train": {
                "epochs": data.draw(st.integers(1, 3)),
                "max_steps": data.draw(st.sampled_from([None, 2])),
                "gradient_accumulation_steps": 2,
            },
        }
    )
    layout = Layout.of(config, 4)
    planned, train = run_length(config, layout), config.train
    rows_per_step = 1 * 2 * 4 // stages // context
    schedule = Schedule(
        Run(model, **values).prepared.train,
        64,
        config.data.packing,
        config.run.seed,
        rows_per_step,
        train.epochs,
        train.max_steps,
        Position(),
        source_weights(config.data),
    )
    if not schedule.total_steps:
        assert isinstance(planned, str) and planned.endswith("has nothing to train")
        return
    assert isinstance(planned, RunLength)
    tokens = sum(step.lengths.sum() for step in schedule.steps())
    assert (planned.steps, planned.is_counted) == (schedule.total_steps, True)
    if all(float(source["weight"]).is_integer() for source in sources) and not train.max_steps:
        assert planned.tokens == tokens
