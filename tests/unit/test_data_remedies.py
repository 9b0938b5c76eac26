"""What is said of data that cannot be read or stands twice works when it is followed."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import REPOSITORY, completed, finish
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write

from shardtune.config import RECORD_FIELDS
from shardtune.data.forms.sharegpt import SHAREGPT_ROLES
from shardtune.data.forms.turns import MISNAMED_ROLES
from shardtune.data.records import MARKS, REASONING_KEYS

needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


def follow(command: str, folder: Path) -> None:
    subprocess.run(["bash", "-ec", command], cwd=folder, check=True)


WORDS = ["it's", 'the "one"', "both ' and \"", "plain", "a\\'b", "ünlike"] * 5
MANY = [
    [{f"{word} {i}": 1, "id": i} for i, word in enumerate(WORDS)],
    [chat(text, tools=text) for text in ("[", "{", '{"a"', "[1", "[]]")],
    [chat([{"text": [word]}]) for word in WORDS],
    [{"messages": [{"role": word, "content": None}]} for word in WORDS],
]


NO_JSON = ["{", "}", '{"a"', '{"a": }', '"a" 1', "{'a': 1}", '{"a": "\t"}', '{"a": "\\ud800"}']


@pytest.mark.parametrize("lines", [*([*map(json.dumps, each)] for each in MANY), NO_JSON])
def test_problems_fold_by_shape(lines, model, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(chat("q")), *lines]))
    said = problems_of(model, tmp_path / "a.jsonl")
    assert len(said) == 2 and said[0].endswith(f"(and {len(lines) - 1} more like it)"), said


def test_what_a_template_says_of_each_record_folds(tmp_path):
    check = "{% for m in messages %}{% if m.name %}{{ raise_exception('no name: ' + m.name) }}"
    model = save_model(tmp_path / "model", f"{check}{{% endif %}}{{% endfor %}}{TEMPLATE}")
    records = [chat(word) for word in WORDS]
    for record, word in zip(records, WORDS, strict=True):
        record["messages"][0]["name"] = word
    said = problems_of(model, write(tmp_path / "a.jsonl", records))
    assert len(said) == 2 and "more like it" in said[0], said


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz", "folder/a.ndjson"])
def test_ndjson_is_jsonl(name, model, tmp_path):
    file = write(tmp_path / name, [chat("q"), {"text": 4}])
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    source = file.parent if "/" in name else file
    assert problems_of(model, source)[0].startswith(f"{file}:2: text is 4")
    run = Run(model, source, on_broken={"drop": 0.5})
    assert [trained for _, trained in run.texts()] == ["fine<|im_end|>"]


@needs_jq
@pytest.mark.parametrize("name", ["data", "my data", "naïve"])
def test_an_object_around_the_records_is_unwrapped(name, model, tmp_path):
    file = tmp_path / "a.json"
    wrapped = {"version": "1", "of": ["a"], name: [chat("q"), chat("r")]}
    file.write_text(json.dumps(wrapped, indent=1))
    said, _ = problems_of(model, file)
    assert said.startswith(f"{file}[0]: one JSON object around the records in {name} - jq -c ")
    command = said.partition(" - ")[2].replace("OLD", str(file)).replace("NEW", "new.jsonl")
    follow(command, tmp_path)
    plain = Run(model, write(tmp_path / "b.jsonl", [chat("q"), chat("r")]))
    assert Run(model, tmp_path / "new.jsonl").prepared.key == plain.prepared.key


def test_one_record_in_a_file_is_not_unwrapped(model, tmp_path):
    file = tmp_path / "a.json"
    turns = [{"author": "user", "body": "q"}, {"author": "assistant", "body": "fine"}]
    file.write_text(json.dumps({"thread": turns}))
    assert "around the records" not in str(problems_of(model, file))
    columns = {"messages": "thread", "messages.role": "author", "messages.content": "body"}
    assert Run(model, file, columns=columns).texts()[0][1] == "fine<|im_end|>"


def test_the_command_removes_the_broken_lines(model, tmp_path):
    good = [chat(f"q{i}") for i in range(9)]
    records = [good[0], {"messages": []}, *good[1:5], {"text": 4}, *good[5:]]
    file = tmp_path / "it's mine.jsonl"
    file.write_text("\n\n".join(map(json.dumps, records)))
    *_, said = problems_of(model, file)
    assert "data.on_broken" not in said  # a fifth of them is broken
    (command,) = re.findall(r"\((sed .*)\)", said)
    follow(command, tmp_path)
    plain = Run(model, write(tmp_path / "b.jsonl", good))
    assert Run(model, tmp_path / "NEW.jsonl").prepared.key == plain.prepared.key


@pytest.mark.parametrize(
    ("name", "n_good", "n_broken", "offer"),
    [
        ("a.jsonl", 300, 11, '"data.on_broken={drop: 0.04}"'),
        ("a.json", 30, 1, '"data.on_broken={drop: 0.04}"'),
        ("a.jsonl.gz", 200, 1, "data.on_broken=drop"),
        ("a.jsonl", 60, 40, "repair or remove them"),
    ],
)
def test_other_broken_records_are_dropped_by_their_share(
    name, n_good, n_broken, offer, model, tmp_path
):
    records = [*(chat(f"q{i}") for i in range(n_good)), *[{"text": 4}] * n_broken]
    file = write(tmp_path / name, records)
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    *_, said = problems_of(model, file)
    assert " - repair or remove them" in said and said.endswith(offer)
    if "{" in offer:
        assert len(Run(model, file, on_broken={"drop": 0.04}).texts()) == n_good


def node(parent: str | None, role: str, text: Any, kind: str = "text") -> dict[str, Any]:
    content = {"content_type": kind, "parts": [text]}
    return {"parent": parent, "message": {"author": {"role": role}, "content": content}}


# The second conversation of each has a picture or a file, and is left out.
BRANCHES = {
    "root": {"parent": None, "message": None},
    "hidden": node("root", "system", ""),
    "question": node("hidden", "user", "Rain?"),
    "wrong": node("question", "assistant", "Wrong."),
    "thought": node("question", "assistant", "Clouds.", "thoughts"),
    "answer": node("thought", "assistant", "Yes."),
    "thanks": node("answer", "user", "Thanks."),
}
PICTURE = {
    "question": node(None, "user", {"asset_pointer": "a"}, "multimodal_text"),
    "answer": node("question", "assistant", "A cloud."),
}
CHATGPT = [
    {"title": "two branches", "current_node": "thanks", "mapping": BRANCHES},
    {"title": "a picture", "current_node": "answer", "mapping": PICTURE},
]


def said(sender: str, text: str, *content: Any, attachments: Any = ()) -> dict[str, Any]:
    shown = {"content": list(content)} if content else {}
    return {"sender": sender, "text": text, "attachments": [*attachments], "files": [], **shown}


THOUGHT = {"type": "thinking", "thinking": "Clouds."}, {"type": "text", "text": "Yes."}
UNREAD = "```\nThis block is not supported.\n```\nYes."
TALK = [said("human", "Rain?", {"type": "text", "text": "Rain?"})]
TALK += [said("assistant", UNREAD, *THOUGHT), said("human", "Thanks.")]
FILE = [said("human", "Read.", attachments=["a"]), said("assistant", "It says")]
CLAUDE = [{"name": "thoughts", "chat_messages": TALK}, {"name": "a file", "chat_messages": FILE}]


@needs_jq
@pytest.mark.parametrize(("name", "export"), [("chatgpt", CHATGPT), ("claude", CLAUDE)])
def test_the_documented_commands_read_exports(name, export, model, tmp_path):
    text = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^```bash\n(jq [^`]*> {name}.jsonl)\n```$", text, re.M)
    (tmp_path / "conversations.json").write_text(json.dumps(export))
    follow(command, tmp_path)
    (record,) = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
    turns = [("user", "Rain?"), ("assistant", "Yes."), ("user", "Thanks.")]
    assert record == {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert Run(model, tmp_path / f"{name}.jsonl").texts()[0][1] == "Yes.<|im_end|>"


def test_the_docs_name_every_field_mark_and_role_that_is_read():
    text = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
    records = text.partition("## Records")[2].partition("## Which tokens are trained")[0]
    read = {name for field in RECORD_FIELDS for name in field.split(".")}
    read |= {*MARKS, *REASONING_KEYS, *SHAREGPT_ROLES, *MISNAMED_ROLES, "from", "value"}
    assert {name for name in read if f"`{name}`" not in records} == set()


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


def test_a_role_counts_as_found_where_the_records_that_have_it_are_dropped(tmp_path):
    long = chat("Rain?", "yes " * 99)
    long["messages"][0]["role"] = "customer"
    file = write(tmp_path / "a.jsonl", [long, *[chat("Rain?", "Yes.")] * 99])
    options = {"roles": {"customer": "user"}, "max_length": 256, "overflow": "error"}
    run = Run(save_model(tmp_path / "model", TEMPLATE), file, on_broken="drop", **options)
    assert len(run.prepared.train) == 99
    assert not any("customer" in line for line in run.prepared.lines)
