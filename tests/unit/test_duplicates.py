"""Evaluation records that are trained are counted, and the documented command drops them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from helpers.commands import REPOSITORY, completed, finish
from helpers.data_run import Run, chat, write


def counts(run: Run) -> dict[str, str]:
    """The numbers of the lines about records that are trained and evaluated, by set."""
    found = (
        re.match(r"(.*): WARNING: records that data.train has too: (\d+ of \d+) -", line)
        for line in run.prepared.lines
    )
    return {m[1]: m[2] for m in found if m}


def test_evaluation_records_in_train_are_counted(model, tmp_path):
    two = {"messages": [*chat("a")["messages"], *chat("b")["messages"]]}
    other = {"messages": [dict(message) for message in two["messages"]]}
    other["messages"][1]["train"] = False  # the same text, but not the same turn of it
    silent = {"messages": [{"role": "user", "content": "hello"}]}  # trains nothing
    records = [chat("q", id=1), chat("r"), chat("q", id=2), other, silent]
    train = write(tmp_path / "train.jsonl", records)
    evaluation = write(tmp_path / "eval.jsonl", [chat("q"), two, chat("new"), chat("new")])
    run = Run(model, train, eval=str(evaluation))
    assert counts(run) == {"data.eval": "2 of 4"}
    named = counts(Run(model, train, eval={"a": str(evaluation), "b": str(train)}))
    assert named == {"data.eval.a": "2 of 4", "data.eval.b": "4 of 4"}
    (leak,) = (record for line, record in run.prepared.examples.items() if "data.train has" in line)
    assert leak == 0
    assert counts(Run(model, write(tmp_path / "good.jsonl", [chat("x"), chat("x")]))) == {}


def test_leaks_are_found_over_chunks_and_sources(model, tmp_path):
    many = [chat(f"q{i}") for i in range(700)]
    sources = [
        {"path": str(write(tmp_path / "a.jsonl", many[:600])), "name": "a"},
        {"path": str(write(tmp_path / "b.jsonl", many[600:])), "name": "b"},
    ]
    evaluation = write(tmp_path / "eval.jsonl", [many[0], many[650], chat("new")])
    assert counts(Run(model, sources, eval=str(evaluation))) == {"data.eval": "2 of 3"}
    held_out = Run(model, [*sources, sources[0] | {"name": "again"}], eval_fraction=0.5)
    assert counts(held_out) == {}  # equal records are on the same side


def test_the_documented_command_drops_duplicates(model, tmp_path):
    section = (REPOSITORY / "docs/data.md").read_text("utf-8").partition("## Duplicates")[2]
    command = section.partition("```bash\n")[2].partition("```")[0]
    records = [chat("q", id=1), chat("r"), chat("q", id=2), {"text": "t"}, {"text": "u"}, chat("e")]
    train = write(tmp_path / "train.jsonl", records)
    train.write_text("\n" + train.read_text() + json.dumps(chat("r", id=7)))  # not ended
    evaluation = write(tmp_path / "eval.jsonl", [chat("e", id=9), {"text": "u"}])
    assert counts(Run(model, train, eval=str(evaluation))) == {"data.eval": "2 of 2"}
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finish(completed(["bash", "-ec", command], cwd=tmp_path, env=os.environ | ours))
    clean = Run(model, tmp_path / "clean.jsonl", eval=str(evaluation))
    assert counts(clean) == {} and len(clean.prepared.train) == 3
