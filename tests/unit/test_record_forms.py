"""Other forms of records give the tokens of the same messages, and columns name them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write

from shardtune.data.records import check_record


def sharegpt(i: int) -> dict[str, Any]:
    turns = [("system", "be kind"), ("human", f"how {i}"), ("gpt", "unsure")]
    turns += [("observation", "4"), ("model", f"fine {i}")]
    values: list[dict[str, Any]] = [{"from": name, "value": text} for name, text in turns]
    values[2] |= {"train": False} if i % 2 else {}
    return {"conversations": values, "tools": '[{"type": "function", "function": {"name": "f"}}]'}


def alpaca(i: int) -> dict[str, Any]:
    record = {"instruction": "add", "input": f"{i}" if i % 3 else "", "output": str(i + 1)}
    return record | {"system": "be brief" if i % 2 else ""}


@pytest.mark.parametrize("case", ["sharegpt", "alpaca", "renamed.jsonl", "renamed.parquet"])
@pytest.mark.parametrize(
    "options", [{}, {"eval_fraction": 0.4}, {"loss_on": "last"}, {"max_length": 90}], ids=str
)
def test_each_form_gives_the_tokens_of_the_same_messages(case, options, model, tmp_path):
    """`test_records.py` says by hand which messages these are."""
    theirs = [sharegpt(i) if case == "sharegpt" else alpaca(i) for i in range(30)]
    ours = [check_record(record).record for record in theirs]
    plain = Run(model, write(tmp_path / "ours.jsonl", ours), **options)
    if case.startswith("renamed"):
        names = {"instruction": "q", "output": "a"}
        theirs = [{names.get(k, k): v for k, v in r.items()} | {"text": "no"} for r in theirs]
        options = {"columns": {**names, "text": None}, **options}
    file = write(tmp_path / "theirs.jsonl", theirs)
    if case.endswith("parquet"):
        file = tmp_path / case
        pq.write_table(pa.Table.from_pylist(theirs), file)
    run = Run(model, file, **options)
    assert run.texts() == plain.texts() and run.prepared.key == plain.prepared.key
    form = "ShareGPT" if case == "sharegpt" else "Alpaca"
    counts = [int(line.split()[-1]) for line in run.prepared.lines if f"form of {form}" in line]
    assert sum(counts) == len(theirs) and len(counts) == len(run.prepared.sets)


def test_columns_that_match_nothing_are_refused(model, tmp_path):
    records = [{"question": "q", "answer": "a", "score": 1}, {"text": "t", "score": None}]
    train = write(tmp_path / "a.jsonl", records)
    columns = {"prompt": "question", "completion": "anwser", "text": None}
    problems = problems_of(model, train, columns=columns)
    (unmatched,) = (line for line in problems if line.startswith("data.columns.completion=anwser"))
    assert unmatched.endswith(" answer, question, score, text") and "2 of 2" in problems[-1]
    write(train, records[:1])
    good = Run(model, train, columns=columns | {"completion": "answer"})
    assert good.texts() == [("qa<|im_end|>", "a<|im_end|>")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_apply_to_the_sources_that_have_them(kind, model, tmp_path):
    forms = {
        "renamed": ({"question": "q1", "answer": "a1"}, {"prompt": "q1", "completion": "a1"}),
        "ours": ({"prompt": "q2", "completion": "a2"}, {"prompt": "q2", "completion": "a2"}),
        "tools": (chat("q3", functions='[{"name": "f"}]'), chat("q3", tools='[{"name": "f"}]')),
        "chats": (chat("q4"), chat("q4")),
        "turns": ({"conversations": chat("q5")["messages"]}, chat("q5")),
    }
    columns = {"prompt": "question", "completion": "answer"}
    columns |= {"tools": "functions", "messages": "conversations"}
    theirs, ours = [], []
    for name, (record, plain) in forms.items():
        for folder, sources, written in (("theirs", theirs, record), ("ours", ours, plain)):
            file = write(tmp_path / folder / f"{name}.jsonl", [written])
            if kind == "parquet":
                file = file.with_suffix(".parquet")
                pq.write_table(pa.Table.from_pylist([written]), file)
            sources.append({"path": str(file)})
    run, plain = Run(model, theirs, columns=columns), Run(model, ours)
    assert run.texts() == plain.texts() and len(run.texts()) == 5
    # Evaluation data may have our names where the training data has others.
    evaluated = {"eval": theirs[3]["path"], "columns": {"tools": "functions"}}
    assert '"name": "f"' in Run(model, [theirs[2]], **evaluated).texts()[0][0]
    both = write(tmp_path / "both.jsonl", [chat("q"), {"question": "q", "prompt": "q"}])
    problems = problems_of(model, [*theirs, {"path": str(both)}], columns=columns)
    assert problems[0].startswith(f"{both}:2: has prompt and question, which data.columns reads")


def test_template_options_reach_the_template(tmp_path):
    model = save_model(tmp_path / "model", "{{ greeting }}" + TEMPLATE)
    train, other = (
        write(tmp_path / "a.jsonl", [chat("q")]),
        write(tmp_path / "b.jsonl", [chat("r")]),
    )
    run = Run(model, train, eval=str(other), template_options={"greeting": "hi", "tone": 3})
    for dataset in run.prepared.sets.values():
        assert run.encoder.tokenizer.decode(dataset[0][0]).startswith("hi<|im_start|>")
    assert "tone" in run.prepared.lines[0] and "greeting" not in str(run.prepared.lines)
    taken = ("add_generation_prompt", "eos_token", "messages", "tokenize", "tools")
    problems = problems_of(model, train, template_options=dict.fromkeys(taken, 1) | {"tone": 1})
    assert [problem.partition(":")[0] for problem in problems] == [
        f"data.template_options.{name}" for name in taken
    ]


def test_nulls_that_arrow_put_into_json_lines_are_dropped_and_counted(model, tmp_path):
    """A struct of Arrow has the keys of all structs of its column."""
    calls = [{"function": {"name": "f", "arguments": {"a": {"b": 1}}}}]
    part = {"type": "text", "text": "Look."}
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "object"}}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [part], "tool_calls": calls},
    ]
    plain = Run(model, write(tmp_path / "a.jsonl", [{"messages": messages, "tools": [tool]}]))
    messages[0] |= {"tool_calls": None}
    calls[0]["function"] |= {"arguments": {"a": {"b": 1, "c": None}, "d": None}, "strict": None}
    part["thinking"] = None
    tool["parameters"]["properties"]["d"] = None
    run = Run(model, write(tmp_path / "b.jsonl", [{"messages": messages, "tools": [tool]}]))
    assert run.texts() == plain.texts()
    null = [line for line in run.prepared.lines if "null" in line]
    assert [line.rpartition(" ")[2] for line in null] == ["2", "1"]
    assert not [line for line in plain.prepared.lines if "null" in line]
    text = json.dumps({"d": None})
    calls[0]["function"]["arguments"] = text
    run = Run(model, write(tmp_path / "c.jsonl", [{"messages": messages}]))
    assert text in run.texts()[0][1]


def test_a_null_content_that_a_template_cannot_take_is_named(tmp_path):
    model = save_model(tmp_path / "model", TEMPLATE.replace("m.content is", "(m.content + '') is"))
    record = chat("q", None)
    record["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
    said = problems_of(model, write(tmp_path / "a.jsonl", [record]))
    assert '""' in said[0]
    record["messages"][1]["content"] = ""
    assert Run(model, write(tmp_path / "a.jsonl", [record])).texts()


def test_a_role_that_no_record_has_is_refused(model, tmp_path):
    turns = [{"from": "customer", "value": "q"}, {"from": "gpt", "value": "a"}]
    shared = write(tmp_path / "a.jsonl", [{"conversations": turns}])
    ours = write(tmp_path / "b.jsonl", [chat("q")])
    roles = {"customer": "user"}
    Run(model, [{"path": str(ours)}, {"path": str(shared)}], roles=roles)
    Run(model, shared, eval=str(ours), roles=roles)
    Run(model, ours, eval=str(shared), roles=roles)
    (said,) = problems_of(model, ours, roles=roles)
    assert said.startswith("data.roles.customer: ") and "assistant, user" in said
    (said,) = problems_of(model, shared, roles=roles | {"agnet": "assistant"})
    assert said.startswith("data.roles.agnet: ") and "customer, gpt" in said
    records = [{"conversations": turns}] + [chat(f"q{i}") for i in range(9)]
    for fraction in (0.2, 0.8):  # a record that is held out counts
        Run(model, write(tmp_path / "c.jsonl", records), roles=roles, eval_fraction=fraction)


def test_the_token_that_ends_turns_is_named_where_it_is_no_stop(tmp_path):
    model = save_model(tmp_path / "model", eos="<|endoftext|>")
    messages = [*chat("q")["messages"], *chat("r")["messages"]]
    said = problems_of(model, write(tmp_path / "a.jsonl", [{"messages": messages}]))
    assert "<|im_end|>" in said[0] and "eos_token_id" in said[0]
