"""Records that are twice in the data are counted, and the documented command drops them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from helpers.commands import REPOSITORY, completed, finish
from helpers.data_run import Run, chat, write


def counts(run: Run) -> dict[str, str]:
    """The numbers of the lines about duplicates, by set and kind."""
    found = (
        re.match(r"(.*): WARNING: (exact|records that data.train has).*: (\d+ of \d+) -", line)
        for line in run.prepared.lines
    )
    return {f"{m[1]} {m[2][:5]}": m[3] for m in found if m}


def untrained(record: dict[str, Any], turn: int) -> dict[str, Any]:
    messages = [dict(message) for message in record["messages"]]
    messages[turn]["train"] = False
    return {"messages": messages}


def test_repetitions_and_evaluation_records_in_train_are_counted(model, tmp_path):
    two = {"messages": [*chat("a")["messages"], *chat("b")["messages"]]}
    twins = [untrained(two, 1), untrained(two, 3)]  # the same text, but not the same turn of it
    silent = {"messages": [{"role": "user", "content": "hello"}]}  # trains nothing
    records = [chat("q", id=1), chat("r"), chat("q", id=2), *twins, chat("q"), silent, silent]
    train = write(tmp_path / "train.jsonl", records)
    evaluation = write(tmp_path / "eval.jsonl", [chat("q"), two, chat("new"), chat("new")])
    run = Run(model, train, eval=str(evaluation))
    assert counts(run) == {
        "data.train exact": "2 of 6",
        "data.eval exact": "1 of 4",
        "data.eval recor": "2 of 4",
    }
    named = counts(Run(model, train, eval={"a": str(evaluation), "b": str(train)}))
    assert named["data.eval.a recor"] == "2 of 4" and named["data.eval.b recor"] == "6 of 6"
    examples = {
        line[:11]: record for line, record in run.prepared.examples.items() if "exact" in line
    }
    assert examples == {"data.train:": 2}
    (leak,) = (record for line, record in run.prepared.examples.items() if "data.train has" in line)
    assert leak == 0
    assert counts(Run(model, write(tmp_path / "good.jsonl", [chat("x"), chat("y")]))) == {}


def test_repetitions_are_found_over_chunks_sources_and_forms(model, tmp_path):
    many = [chat(f"q{i}") for i in range(700)]
    sources = [
        {"path": str(write(tmp_path / "a.jsonl", many)), "name": "a"},
        {"path": str(write(tmp_path / "b.jsonl", [*many[600:], many[0]])), "name": "b"},
    ]
    assert counts(Run(model, sources)) == {"data.train exact": "101 of 801"}
    held_out = Run(model, sources, eval_fraction=0.5)  # equal records are on the same side
    assert not [key for key in counts(held_out) if "recor" in key]
    cut = Run(
        model,
        write(tmp_path / "c.jsonl", [{"text": "ab" + "c" * i} for i in range(8)]),
        max_length=5,
        overflow="truncate",
    )
    assert counts(cut) == {"data.train exact": "4 of 8"}


def test_the_documented_command_drops_duplicates(model, tmp_path):
    section = (REPOSITORY / "docs/data.md").read_text("utf-8").partition("## Duplicates")[2]
    command = section.partition("```bash\n")[2].partition("```")[0]
    records = [chat("q", id=1), chat("r"), chat("q", id=2), {"text": "t"}, {"text": "u"}, chat("e")]
    train = write(tmp_path / "train.jsonl", records)
    train.write_text("\n" + train.read_text() + json.dumps(chat("r", id=7)))  # not ended
    evaluation = write(tmp_path / "eval.jsonl", [chat("e", id=9), {"text": "u"}])
    assert len(counts(Run(model, train, eval=str(evaluation)))) == 2
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finish(completed(["bash", "-ec", command], cwd=tmp_path, env=os.environ | ours))
    clean = Run(model, tmp_path / "clean.jsonl", eval=str(evaluation))
    assert counts(clean) == {} and len(clean.prepared.train) == 3
