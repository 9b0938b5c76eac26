"""The command `inspect-data` in a process of its own."""

import json
import sys

import pytest
from helpers.commands import REPOSITORY, completed
from helpers.data_run import chat, save_model, write


@pytest.mark.full
def test_inspect_data_ends_quietly_when_its_reader_leaves(tmp_path):
    save_model(tmp_path / "model")
    train = write(tmp_path / "many.jsonl", [chat(f"number {i}") for i in range(3000)])
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {tmp_path}/model}}\ndata: {{train: {train}}}\n")
    command = f"{sys.executable} -m shardtune inspect-data --config {config} --json"
    done = completed(
        ["bash", "-c", f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY,
    )
    row, status = done.stdout.splitlines()
    assert json.loads(row)["record"] == 0
    assert status == "0"
    assert "Error" not in done.stderr
