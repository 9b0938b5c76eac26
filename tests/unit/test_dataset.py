from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write

from shardtune.data import tokenize
from shardtune.data.overflow import fit_to_length

ROOT = Path(__file__).parents[2]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_messages_need_a_template_and_text_does_not(tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare", template=None)
    assert len(Run(bare, write(tmp_path / "b.jsonl", [{"text": "hello you"}])).texts()) == 1
    (problem,) = problems_of(bare, write(tmp_path / "a.jsonl", [chat("q"), chat("r")]))
    assert f"the tokenizer of {bare} has no chat template - " in problem


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        (problem,) = problems_of(folder, tmp_path / "a.jsonl")
        assert problem.startswith(f"model.path={folder}: no tokenizer")


def test_nothing_to_train_is_dropped_loudly_or_refused(model: Path, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    run = Run(model, write(tmp_path / "a.jsonl", [silent, chat("q"), silent]))
    assert run.prepared.train.record.tolist() == [1]
    assert any(
        "WARNING: 2 records without a token to train" in line for line in run.prepared.lines()
    )
    (problem,) = problems_of(model, write(tmp_path / "b.jsonl", [silent]))
    assert "data.train: no token to train in 1 record" in problem
    (problem,) = problems_of(model, write(tmp_path / "c.jsonl", []))
    assert problem == f"data.train={tmp_path}/c.jsonl: no record in it - name data that has some"
    (problem,) = problems_of(model, tmp_path / "a.jsonl", eval=str(tmp_path / "b.jsonl"))
    assert "data.eval: no token to train" in problem


def test_pieces_hold_each_trained_token_once() -> None:
    draw = random.Random(0)
    for _ in range(500):
        n, length = draw.randint(1, 40), draw.randint(2, 12)
        trained = np.array([False] + [draw.random() < 0.5 for _ in range(n - 1)])
        pieces = fit_to_length(trained, length, "split")
        positions = [piece.start + int(t) for piece, flags in pieces for t in np.flatnonzero(flags)]
        assert positions == np.flatnonzero(trained).tolist()
        assert all(2 <= piece.stop - piece.start == len(flags) <= length for piece, flags in pieces)
        if n <= length and trained.any():
            assert [piece for piece, _ in pieces] == [slice(0, n)]


def test_overflow_is_counted(model: Path, tmp_path: Path) -> None:
    train = write(
        tmp_path / "a.jsonl",
        [{"text": "0123456789"}, {"text": "abc"}, {"prompt": "0123456789", "completion": "x"}],
    )
    whole = Run(model, train).prepared.train_summary
    assert (whole.tokens, whole.trained_tokens, whole.long_sequences) == (
        11 + 4 + 12,
        10 + 3 + 2,
        0,
    )

    cut = Run(model, train, max_length=5)
    summary = cut.prepared.train_summary
    assert [text for text, _ in cut.texts()] == ["01234", "abc<|im_end|>"]
    assert (summary.long_sequences, summary.lost_tokens, summary.lost_trained_tokens) == (
        2,
        6 + 12,
        6 + 2,
    )
    assert (summary.lost_records, summary.tokens + summary.lost_tokens) == (1, whole.tokens)
    assert any(
        "2 sequences longer than data.max_length=5, truncated" in line for line in summary.lines()
    )

    dropped = Run(model, train, max_length=5, overflow="drop").prepared.train_summary
    assert (dropped.sequences, dropped.lost_records, dropped.lost_tokens) == (1, 2, 11 + 12)

    split = Run(model, train, max_length=5, overflow="split")
    summary = split.prepared.train_summary
    assert [text for text, _ in split.texts()][:3] == ["01234", "45678", "89<|im_end|>"]
    assert not any(split.prepared.train[i][1][0] for i in range(summary.sequences))
    assert summary.trained_tokens == whole.trained_tokens
    assert summary.tokens - summary.repeated_tokens + summary.lost_tokens == whole.tokens

    problems = problems_of(model, train, max_length=5, overflow="error")
    assert [problem.partition(": ")[0] for problem in problems] == [
        f"{train}:1",
        f"{train}:3",
        "data.train",
    ]
    assert "has 11 tokens, more than data.max_length=5" in problems[0]


def test_evaluation_records_are_chosen_by_content(model: Path, tmp_path: Path) -> None:
    texts = [f"record number {i % 150}" for i in range(300)]  # each one twice
    records = [{"prompt": text, "completion": "fine", "id": i} for i, text in enumerate(texts)]
    run = Run(model, write(tmp_path / "a.jsonl", records), eval_fraction=0.3)
    train, held_out = run.prepared.train, run.prepared.eval
    assert held_out is not None
    assert sorted([*train.record.tolist(), *held_out.record.tolist()]) == list(range(300))
    chosen = {texts[i] for i in held_out.record}
    assert not chosen & {texts[i] for i in train.record}
    assert 25 <= len(chosen) <= 65

    random.Random(1).shuffle(texts)
    pq.write_table(
        pa.table({"completion": ["fine"] * 300, "prompt": texts}), tmp_path / "b.parquet"
    )
    assert pq.read_schema(tmp_path / "b.parquet").names != list(records[0])
    other = Run(model, tmp_path / "b.parquet", eval_fraction=0.3).prepared.eval
    assert other is not None
    assert {texts[i] for i in other.record} == chosen
    (problem,) = problems_of(
        model, write(tmp_path / "c.jsonl", [{"text": "one two"}]), eval_fraction=1e-9
    )
    assert "data.eval: data.eval_fraction leaves no record" in problem


def test_evaluation_data_of_its_own(model: Path, tmp_path: Path) -> None:
    train, other = (
        write(tmp_path / "a.jsonl", [chat("q")] * 20),
        write(tmp_path / "b.jsonl", [chat("r")]),
    )
    prepared = Run(model, train, eval=str(other), eval_fraction=0.5).prepared
    assert (len(prepared.train), len(prepared.eval or [])) == (20, 1)
    assert [line.partition(":")[0] for line in prepared.lines()] == ["data.train", "data.eval"]


def test_a_second_start_is_cached_until_something_that_matters_changes(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    first = Run(model, train)
    assert first.lines[-1].startswith("Data: tokenized in ")
    again = Run(model, train.rename(tmp_path / "renamed.jsonl"), date="2027-01-31", packing=False)
    assert again.lines == [f"Data: cached in {first.entry}"]
    assert again.prepared.key == first.prepared.key
    train = tmp_path / "renamed.jsonl"
    elsewhere = save_model(tmp_path / "copy")
    assert Run(elsewhere, train).entry == first.entry
    dated = save_model(tmp_path / "dated", "{{ strftime_now('%d') }}" + TEMPLATE)
    changed = [
        Run(model, train, max_length=int(first.prepared.train.lengths.max()) - 2),
        Run(model, train, overflow="split"),
        Run(model, train, loss_on="all"),
        Run(model, train, eval=str(train)),
        Run(save_model(tmp_path / "other", "Hello." + TEMPLATE), train),
        Run(dated, train),
        Run(dated, train, date="2026-02-01"),
        Run(model, write(tmp_path / "b.jsonl", [chat("how are you"), chat("hello", "World")])),
    ]
    assert len({run.entry for run in [first, *changed]}) == 9
    assert first.prepared.key not in {run.prepared.key for run in changed[:1] + changed[2:]}
    assert changed[1].prepared.key == first.prepared.key  # nothing was long enough to be split


def test_arrays_are_mapped_not_read(model: Path, tmp_path: Path) -> None:
    train = Run(model, write(tmp_path / "a.jsonl", [chat("q"), chat("how are you")])).prepared.train
    for column in (train.lengths, train.trained_counts, train.record):
        assert isinstance(column.base, np.memmap)
    for i in range(2):
        tokens, trained = train[i]
        assert (str(tokens.dtype), str(trained.dtype)) == ("int64", "bool")
        assert (len(tokens), trained.sum()) == (train.lengths[i], train.trained_counts[i])
    with pytest.raises(IndexError):
        train[2]


def test_a_damaged_entry_is_built_again(model: Path, tmp_path: Path, cache: Path) -> None:
    train = write(tmp_path / "a.jsonl", [chat("how are you")])
    first = Run(model, train)

    def damage_tokens() -> None:
        with (first.entry / "train.tokens").open("r+b") as file:
            file.truncate(8)

    for damage in (
        damage_tokens,
        (first.entry / "meta.json").unlink,
        (first.entry / "train.record").unlink,
    ):
        texts = first.texts()
        damage()
        again = Run(model, train)
        assert [line for line in again.lines if "is damaged" in line] == [
            f"Data: {first.entry} is damaged, building it again"
        ]
        assert again.texts() == texts
        assert names_in(cache) == [first.entry.name]
        first = again


def test_abandoned_builds_are_removed_when_old(model: Path, tmp_path: Path, cache: Path) -> None:
    for name, age_s in ((".old", 90_000), (".young", 60)):
        (cache / name).mkdir(parents=True)
        (cache / name / "train.tokens").touch()
        for path in (cache / name / "train.tokens", cache / name):
            os.utime(path, (time.time() - age_s,) * 2)
    entry = Run(model, write(tmp_path / "a.jsonl", [chat("q")])).entry
    assert names_in(cache) == sorted([".young", entry.name])


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
    assert names_in(cache) == []


PREPARE = """
import datetime, sys
from shardtune.config import DataConfig
from shardtune.data import tokenize
from shardtune.data.dataset import build_encoder, open_prepared, prepare_data
from shardtune.distributed.exit import run
from shardtune.log import setup_logging
def main():
    model, train, single_process_s, *more = sys.argv[1:]
    tokenize._SINGLE_PROCESS_S = float(single_process_s)
    setup_logging(True, True)
    for train in (train, *more):
        data = DataConfig(train=train)
        encoder = build_encoder(model, data, datetime.date(2026, 1, 31))
        print("ready", flush=True)
        input()
        entry = prepare_data(data, encoder)
        open_prepared(entry)
        print(entry, flush=True)
if __name__ == "__main__":
    run(main)
"""


def start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    (tmp_path / "prepare.py").write_text(PREPARE)
    command = [sys.executable, str(tmp_path / "prepare.py"), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    return process


def go_together(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            assert line, process.communicate()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def test_processes_that_race_share_one_entry(model: Path, tmp_path: Path, cache: Path) -> None:
    train = write(tmp_path / "a.jsonl", [chat(f"number {i}") for i in range(1000)])
    processes = [start(tmp_path, model, train, 60) for _ in range(2)]
    go_together(processes)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all("Data: tokenized" in output for output in outputs)
    (name,) = names_in(cache)
    assert [output.splitlines()[-1] for output in outputs] == [str(cache / name)] * 2
    run = Run(model, train)
    assert run.lines == [f"Data: cached in {cache / name}"]
    assert len(run.texts()) == 1000


def test_processes_that_finish_together_leave_the_entry_that_one_of_them_reads(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    trains = [write(tmp_path / f"{i}.jsonl", [chat(f"number {i}")]) for i in range(60)]
    processes = [start(tmp_path, model, trains[0], 60, *trains[1:]) for _ in range(2)]
    for _ in trains:
        go_together(processes)
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert len(names_in(cache)) == len(trains)


def test_workers_write_the_same_entry(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [chat(f"number {i}", "x" * (i % 50), id=i) for i in range(1500)] + [
        {"text": "how are you"}
    ]
    train = write(tmp_path / "a.jsonl", records)
    alone = Run(model, train, max_length=40, eval_fraction=0.2)
    kept = tmp_path / "alone"
    shutil.move(alone.entry, kept)
    monkeypatch.setattr(tokenize, "_SINGLE_PROCESS_S", 0.0)
    together = Run(model, train, max_length=40, eval_fraction=0.2)
    names = names_in(kept)
    assert names == names_in(together.entry)
    for name in names:
        left, right = (kept / name).read_bytes(), (together.entry / name).read_bytes()
        if name == "meta.json":
            assert json.loads(left) == json.loads(right)
        else:
            assert left == right, name
    write(train, [*records, "broken"])
    assert f"{train}:1502: a record is a JSON object" in problems_of(model, train, max_length=40)[0]


def start_workers(process: subprocess.Popen[str]) -> list[str]:
    """Let a started process begin; the ids of its workers, without the process that counts semaphores."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers: list[str] = []
    deadline = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        workers = [
            pid for pid in children.read_text().split() if b"spawn_main" in command_line(pid)
        ]
    assert workers
    return workers


def test_no_worker_outlives_a_killed_run(model: Path, tmp_path: Path) -> None:
    train = write(
        tmp_path / "a.jsonl", [chat(f"number {i} " + "how are you " * 100) for i in range(20_000)]
    )
    process = start(tmp_path, model, train, 0)
    try:
        workers = start_workers(process)
        time.sleep(1.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, errors = process.communicate(timeout=60)  # whoever is left holds its end of the pipe
    assert not any(command_line(pid) for pid in workers) and not errors


def test_an_interrupted_run_leaves_nothing_and_says_one_line(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    train = write(
        tmp_path / "a.jsonl", [chat(f"number {i} " + "how are you " * 100) for i in range(20_000)]
    )
    process = start(tmp_path, model, train, 0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = start_workers(process)
        time.sleep(1.0)  # the workers import their modules
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert (
        errors
        == "ERROR: ended by SIGINT before the first step, with nothing to save - run the same command again\n"
    )
    assert process.returncode == 1 and time.monotonic() - interrupted < 5
    assert not any(command_line(pid) for pid in workers)
    assert names_in(cache) == []


def command_line(pid: str) -> bytes:
    """Empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_the_summary_says_each_thing_once(model: Path, tmp_path: Path) -> None:
    records = [
        chat("q", id=1),
        {"text": "hello you"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    lines = Run(
        model, write(tmp_path / "a.jsonl", records * 3), max_length=8, overflow="split"
    ).prepared.lines()
    assert lines[0].startswith("data.train: 9 records, ")
    assert max(Counter(line.split()[1] for line in lines).values()) <= 3
    assert len(set(lines)) == len(lines)
    assert json.loads(json.dumps(lines)) == lines
