"""Processes that tokenize: the workers of a run, and several runs at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, piped, wait_until
from helpers.data_run import Run, chat, problems_of, write
from helpers.launches import command, descendants
from helpers.pinned import on_path

from shardtune.data import tokenize

# Prepares each of the data files named on its command line, once a line comes on standard input.
PREPARE = """
import datetime, sys
from shardtune.config import DataConfig, ModelConfig
from shardtune.data import tokenize
from shardtune.data.dataset import build_encoder, open_prepared, prepare_data
from shardtune.distributed.exit_code import run
from shardtune.log import setup_logging
def main():
    model, single_process_s, *files = sys.argv[1:]
    tokenize._SINGLE_PROCESS_S = float(single_process_s)
    setup_logging(True, True)
    for file in files:
        data = DataConfig(train=file)
        encoder = build_encoder(ModelConfig(path=model), data, datetime.date(2026, 1, 31))
        print("ready", flush=True)
        input()
        entry = prepare_data(data, encoder)
        open_prepared(entry)
        print(entry, flush=True)
if __name__ == "__main__":
    run(main)
"""


pytestmark = pytest.mark.usefixtures("cache")


def start(model: Path, single_process_s: float, *files: Path) -> subprocess.Popen[str]:
    script = files[0].with_name("prepare.py")
    script.write_text(PREPARE)
    arguments = [sys.executable, script, model, str(single_process_s), *files]
    env = os.environ | on_path(REPOSITORY)
    return piped(arguments, model.parent, env, stdin=subprocess.PIPE, process_group=0)


def go_together(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            assert line, process.communicate()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.full
def test_runs_that_race_share_the_cache_entry_that_one_of_them_writes(model, tmp_path, cache):
    """Also when they find it damaged."""
    files = [write(tmp_path / f"{i}.jsonl", [chat(f"number {i}")]) for i in range(20)]
    processes = [start(model, 60, *files, *files) for _ in range(2)]
    for _ in files:
        go_together(*processes)
    for file in files:
        os.truncate(Run(model, file).entry / "train.tokens", 1)
        go_together(*processes)
    for process in processes:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert Path(output.splitlines()[-1]) == Run(model, files[-1]).entry
    assert len(list(cache.iterdir())) == len(files)


def test_workers_write_the_cache_entry_of_one_process(model, tmp_path, monkeypatch):
    records = [chat(f"number {i}", "x" * (i % 50), id=i) for i in range(1500)]
    records.append({"text": "how are you"})
    train = write(tmp_path / "a.jsonl", records)
    alone = shutil.move(Run(model, train, max_length=40, eval_fraction=0.2).entry, tmp_path / "b")
    monkeypatch.setattr(tokenize, "_SINGLE_PROCESS_S", 0.0)
    together = Run(model, train, max_length=40, eval_fraction=0.2).entry
    contents = [
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (alone, together)
    ]
    metas = [json.loads(content.pop("meta.json")) for content in contents]
    assert contents[0] == contents[1] and metas[0] == metas[1]


@pytest.mark.full
def test_a_worker_names_the_line_of_a_broken_record(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "_SINGLE_PROCESS_S", 0.0)
    records = [chat(f"number {i}") for i in range(1501)]
    train = write(tmp_path / "a.jsonl", [*records, "broken"])
    assert (
        f"{train}:1502: the record is 'broken' - write a JSON object"
        in problems_of(model, train, max_length=40)[0]
    )


@pytest.fixture
def long_data(tmp_path: Path) -> Path:
    text = "how are you " * 100
    return write(tmp_path / "a.jsonl", [chat(f"number {i} {text}") for i in range(20_000)])


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The ids of its workers, without the process that counts semaphores."""
    return [pid for pid in descendants(process.pid) if "spawn_main" in command(pid)]


def wait_for_workers(process: subprocess.Popen[str]) -> list[int]:
    wait_until(lambda: len(workers_of(process)) >= 2, within_s=240)
    time.sleep(1.0)  # the workers import their modules
    return workers_of(process)


@pytest.mark.full
def test_no_worker_outlives_a_killed_run(model, long_data):
    process = start(model, 0, long_data)
    try:
        go_together(process)
        workers = wait_for_workers(process)
    finally:
        process.kill()
    process.communicate(timeout=240)  # a worker that is left holds its end of the pipe
    assert not any(command(pid) for pid in workers)


@pytest.mark.full
def test_an_interrupted_tokenization_leaves_nothing_and_says_one_line(model, long_data, cache):
    process = start(model, 0, long_data)
    try:
        go_together(process)
        workers = wait_for_workers(process)
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        errors = process.communicate(timeout=240)[1]
    finally:
        process.kill()
    (line,) = errors.splitlines()
    assert line.startswith("ERROR: ended by SIGINT before the first step")
    assert process.returncode == 1 and time.monotonic() - interrupted < 5
    assert not any(command(pid) for pid in workers)
    assert list(cache.iterdir()) == []
