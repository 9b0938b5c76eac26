"""The cache of tokenized data."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_a_second_start_is_cached_until_something_that_matters_changes(
    model: Path, tmp_path: Path
) -> None:
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    first = Run(model, train)
    assert first.lines[-1].startswith("Data: tokenized in ")
    train = train.rename(tmp_path / "renamed.jsonl")
    again = Run(model, train, date="2027-01-31", packing=False)
    assert again.lines == [f"Data: cached in {first.entry}"]
    assert again.prepared.key == first.prepared.key
    assert Run(save_model(tmp_path / "copy"), train).entry == first.entry
    dated = save_model(tmp_path / "dated", "{{ strftime_now('%d') }}" + TEMPLATE)
    changed = [
        Run(model, train, max_length=int(first.prepared.train.lengths.max()) - 2),
        Run(model, train, overflow="split"),
        Run(model, train, columns={"text": None}),
        Run(model, train, template_options={"text": None}),
        Run(model, train, loss_on="all"),
        Run(model, train, eval=str(train)),
        Run(save_model(tmp_path / "other", "Hello." + TEMPLATE), train),
        Run(dated, train),
        Run(dated, train, date="2026-02-01"),
        Run(model, write(tmp_path / "b.jsonl", [chat("how are you"), chat("hello", "World")])),
    ]
    assert len({run.entry for run in [first, *changed]}) == 11
    assert first.prepared.key not in {run.prepared.key for run in changed[:1] + changed[4:]}
    # Nothing was long enough to be split, and neither data nor template have a text.
    assert {run.prepared.key for run in changed[1:4]} == {first.prepared.key}


def test_an_unwritable_cache_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "file"))
    (problem,) = problems_of(model, write(tmp_path / "a.jsonl", [chat("q")]))
    assert f"{tmp_path}/file/data: the data cache cannot be written (Not a directory) - " in problem
    assert "SHARDTUNE_CACHE" in problem


def test_a_refused_build_leaves_nothing(model: Path, tmp_path: Path, cache: Path) -> None:
    problems_of(model, write(tmp_path / "a.jsonl", [chat("q"), "broken"]))
    assert list(cache.iterdir()) == []
