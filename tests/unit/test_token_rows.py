"""Rows of tokens are trained as they are, other forms of records as the messages that they mean."""

import csv
import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write

from shardtune.data.forms import read_record

ROW = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, -100, 9]}
TRAINED = [False, False, True, False, True]


def rows(run: Run, name: str = "train") -> list[tuple[list[int], list[bool]]]:
    data = run.prepared.sets[name]
    return [
        (ids.tolist(), trained.tolist()) for ids, trained in map(data.__getitem__, range(len(data)))
    ]


ALIKE: list[dict[str, Any]] = [
    {},
    {"labels": None, "loss_mask": [0, 0, 1, 0, 1]},
    {"labels": None, "loss_mask": [True, False, True, False, True]},
    {"labels": None, "loss_weights": [0, 0.0, 1, False, 1.0]},
    {"labels": [5, -100, 7, -100, 9]},
    {"loss_mask": [1, 0, 1, 0, 1]},
    {"attention_mask": [1] * 5, "position_ids": [0, 1, 2, 3, 4]},
    {"system": "s", "tools": [{"name": "f"}], "token_type_ids": [0] * 5},
]


@pytest.mark.parametrize("more", ALIKE, ids=str)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "csv"])
def test_tokens_are_trained_as_they_are(form, more, model, tmp_path):
    record = {name: value for name, value in {**ROW, **more}.items() if value is not None}
    data = tmp_path / f"a.{form}"
    if form == "jsonl":
        write(data, [record])
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), data)
    elif form == "saved":
        Dataset.from_list([record]).save_to_disk(data)
    else:
        with data.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerows([record.keys(), [json.dumps(value) for value in record.values()]])
    run = Run(model, data)
    assert rows(run) == [(ROW["input_ids"], TRAINED)]
    assert len(run.prepared.lines) == 1 + len({"system", "tools", "token_type_ids"} & record.keys())


@pytest.mark.parametrize(("before", "behind"), [(0, 3), (2, 0), (2, 1)])
def test_padding_is_cut_off(before, behind, model, tmp_path):
    padded = {
        "input_ids": [0] * before + ROW["input_ids"] + [0] * behind,
        "labels": [0] * before + ROW["labels"] + [0] * behind,
        "attention_mask": [0] * before + [1] * 5 + [0] * behind,
    }
    beyond = padded | {"input_ids": [9**9] * before + ROW["input_ids"] + [-1] * behind}
    positions = [1] * before + [0, 1, 2, 3, 4] + [1] * behind
    records = [padded, beyond, padded | {"position_ids": positions}]
    records.append(padded | {"position_ids": [*range(len(positions))]})
    run = Run(model, write(tmp_path / "a.jsonl", records))
    assert rows(run) == [(ROW["input_ids"], TRAINED)] * 4
    assert any("attention_mask is 0: 4" in line for line in run.prepared.lines)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"labels": [-100, -100, 8, -100, 9]}, "labels[2] is 8 - write -100, or where it is trained"),
    ({"labels": [6, 7, 8, 9, -100]}, "labels[0] is 6"),  # shifted
    ({"labels": [-100, -100, 7, -1, 9]}, "labels[3] is -1"),
    ({"labels": [-100, -100, 7.0, -100, 9]}, "labels[2] is 7.0"),
    ({"labels": [-100, -100, 7, -100]}, "labels has 4 values, and input_ids 5"),
    ({"labels": "no"}, "labels is 'no'"),
    ({"loss_mask": [0, 0, 1, 0]}, "loss_mask has 4 values, and input_ids 5"),
    ({"loss_weights": [0, 0, 1.5, 0, 1]}, "loss_weights[2] is 1.5"),
    ({"loss_weights": [0, 0, "1", 0, 1]}, "loss_weights[2] is '1'"),
    ({"loss_weights": [0, 1, 0.5, 0, 1]}, "labels and loss_weights contradict each other"),
    ({"loss_mask": [0, 0, 1, 1, 1]}, "labels and loss_mask contradict each other"),
    ({"loss_mask": [0, 0, 0.5, 0, 1]}, "loss_mask[2] is 0.5"),
    ({"loss_mask": [0, 0, None, 0, 1]}, "loss_mask[2] is null"),
    ({"attention_mask": [1, 1, 1, 0, 1]}, "attention_mask[3] is 0"),
    ({"attention_mask": [1, 1, 1, 1, 2]}, "attention_mask[4] is 2"),
    ({"attention_mask": [0] * 5}, "attention_mask is [0, 0, 0, 0, 0]"),
    ({"attention_mask": [1]}, "attention_mask has 1 values, and input_ids 5"),
    ({"position_ids": [0, 1, 2, 0, 1]}, "position_ids[3] is 0"),
    ({"position_ids": [1, 2, 3, 4, 5]}, "position_ids[0] is 1"),
    ({"input_ids": [5, 6, -7, 8, 9]}, "input_ids[2] is -7"),
    ({"input_ids": [5, 6, True, 8, 9]}, "input_ids[2] is true"),
    ({"input_ids": [[5, 6, 7, 8, 9]]}, "labels has 5 values, and input_ids 1"),
    ({"input_ids": []}, "input_ids is []"),
    ({"input_ids": 5}, "input_ids is 5"),
    ({"input_ids": [300] * 5, "labels": [300] * 5}, "has the token 300"),
    ({"labels": None}, "has input_ids without labels or loss_mask"),
    ({"labels": None, "assistant_masks": [0, 0, 1, 0, 1]}, "has assistant_masks beside input_ids"),
    (chat("q"), "can be read as messages or as input_ids"),
    ({**chat("q"), "input_ids": None, "loss_mask": [0, 1]}, "has loss_mask beside messages"),
    ({**chat("q"), "input_ids": None, "loss_weights": [0, 1]}, "has loss_weights beside messages"),
    # Documents of a packed row would attend to one another.
    ({"seq_lengths": [2, 3]}, "has seq_lengths, so the row may hold several"),
    ({"cu_seqlens": [2, 3]}, "has cu_seqlens, so the row may hold several"),
]


@pytest.mark.parametrize(("more", "problem"), REFUSED, ids=str)
def test_what_contradicts_is_refused_by_name(more, problem, model, tmp_path):
    record = {name: value for name, value in {**ROW, **more}.items() if value is not None}
    said, _ = problems_of(model, write(tmp_path / "a.jsonl", [record] * 3))
    assert said.partition(": ")[2].startswith(problem) and said.endswith("(and 2 more like it)")
    if columns := re.search(r"data\.columns=(\{.*?\})", said):
        Run(model, tmp_path / "a.jsonl", columns=yaml.safe_load(columns[1]))


def test_a_table_of_tokens_is_refused_as_lines_are(model, tmp_path):
    alone = {"input_ids": ROW["input_ids"]}
    for more in ({}, {**ROW, "cu_seqlens": [2, 3]}, {"completion_mask": [0, 0, 1, 0, 1]}):
        pq.write_table(pa.Table.from_pylist([alone | more]), tmp_path / "a.parquet")
        (in_table, *_), (in_line, *_) = (
            problems_of(model, data)
            for data in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", [alone | more]))
        )
        assert in_table.partition(": ")[2] == in_line.partition(": ")[2]
    columns = {"loss_mask": "completion_mask"}
    assert rows(Run(model, tmp_path / "a.parquet", columns=columns)) == [
        (ROW["input_ids"], TRAINED)
    ]


def test_loss_on_all_trains_ids_without_labels(model, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7]}, ROW])
    alone = ([5, 6, 7], [False, True, True])
    assert rows(Run(model, file, loss_on="all")) == [alone, (ROW["input_ids"], TRAINED)]
    chats = write(tmp_path / "chats.jsonl", [chat("q")])
    sources = [{"path": str(file), "loss_on": "all"}, {"path": str(chats)}]
    run = Run(model, sources)
    assert rows(run)[0] == alone and run.texts()[-1][1] == "fine<|im_end|>"


def test_texts_keep_the_ids_that_libraries_put_beside_them(model, tmp_path):
    record = {"text": "hello", "input_ids": [5, 6], "attention_mask": [1, 1]}
    run = Run(model, write(tmp_path / "a.jsonl", [record]))
    assert run.texts()[0][0] == "hello<|im_end|>"
    assert any("field input_ids, which nothing" in line for line in run.prepared.lines)


def test_tokens_are_the_same_as_the_chat_that_they_are_of(model, tmp_path):
    """Held out, cut, counted and packed alike."""
    chats = [chat(f"how {i}", "fine " * (1 + i % 7)) for i in range(40)]
    plain = Run(model, write(tmp_path / "chats.jsonl", [*chats, chats[3]]))
    tokens = [
        {"input_ids": ids, "loss_mask": [*map(int, trained)], "id": i}
        for i, (ids, trained) in enumerate(rows(plain))
    ]
    file = write(tmp_path / "a.jsonl", tokens)
    run = Run(model, file)
    assert run.prepared.key == plain.prepared.key
    assert len(rows(Run(model, [{"path": str(file), "max_records": 7}]))) == 7
    held = Run(model, file, eval_fraction=0.3)
    n_held = len(held.prepared.sets["eval"])
    assert 0 < n_held < 30 and n_held + len(held.prepared.train) == 41
    assert rows(Run(model, file, eval_fraction=0.3), "eval") == rows(held, "eval")
    shuffled = Run(model, write(tmp_path / "b.jsonl", tokens[::-1]), eval_fraction=0.3)
    assert rows(shuffled, "eval") == rows(held, "eval")[::-1]
    evaluated = Run(model, file, eval=str(file)).prepared.eval[""]
    assert evaluated.lengths.sum() == run.prepared.train.lengths.sum()


def test_turns_and_tokens_count_by_their_weights(model, tmp_path):
    """Also where a record is cut; and data whose weights are all 0 or 1 is as without them."""
    records = [chat("how", "fine " * 5) for _ in range(4)]
    plain = Run(model, write(tmp_path / "plain.jsonl", records))
    for record, more in zip(
        records,
        [{"weight": 0.3}, {"loss_weight": 0.5}, {"weight": 1.0}, {"weight": 0}],
        strict=True,
    ):
        record["messages"][1] |= more
    turns = Run(model, write(tmp_path / "turns.jsonl", records))
    ones = [(ids, [float(flag) for flag in flags]) for ids, flags in rows(plain)]
    expected = [
        (ids, [np.float32(weight * flag) for flag in flags])
        for (ids, flags), weight in zip(ones[:3], (0.3, 0.5, 1), strict=True)
    ]
    assert rows(turns) == expected and rows(plain) == ones
    n = int(sum(ones[0][1]))
    line = f"data.train: trained tokens by weight | 0.3: {n}, 0.5: {n}, 1: {n}"
    assert line in turns.prepared.lines and "by weight" not in str(plain.prepared.lines)
    train = turns.prepared.train
    assert train.trained_counts.tolist() == [n] * 3
    assert train.trained_weights == pytest.approx([0.3 * n, 0.5 * n, n])
    tokens = [
        {"input_ids": ids, "loss_weights": [0.3 * (w > 0) if i == 0 else float(w) for w in weights]}
        for i, (ids, weights) in enumerate(rows(turns))
    ]
    file = write(tmp_path / "tokens.jsonl", tokens)
    assert rows(Run(model, file)) == rows(turns)
    assert Run(model, file).prepared.key == turns.prepared.key != plain.prepared.key
    cut = Run(model, file, overflow="split", max_length=20)
    assert max(len(ids) for ids, _ in rows(cut)) == 20
    kept = [weight for _, weights in rows(cut) for weight in weights if weight]
    assert kept == [weight for _, weights in expected for weight in weights if weight]
    records[3]["messages"][1].pop("weight")
    for i, mark in enumerate((1, True, 1.0)):
        records[i]["messages"][1] = {"role": "assistant", "content": "fine " * 5, "weight": mark}
    assert Run(model, write(tmp_path / "ones.jsonl", records)).prepared.key == plain.prepared.key
    everything = Run(model, write(tmp_path / "all.jsonl", [tokens[0]]), loss_on="all")
    assert rows(everything) == rows(turns)[:1]
    records[0]["messages"][1]["weight"] = 0.25
    ((_, weights),) = rows(Run(model, write(tmp_path / "all.jsonl", records[:1]), loss_on="all"))
    assert weights == [0.0, *(0.25 if flag else 1.0 for flag in ones[0][1][1:])]


@pytest.mark.parametrize("overflow", ["turns", "split", "truncate", "drop", "error"])
def test_rows_that_are_too_long_are_cut_as_texts_are(overflow, model, tmp_path):
    record = {"input_ids": [*range(20)], "labels": [*range(20)]}
    short = {"input_ids": [1, 2], "labels": [1, 2]}
    file = write(tmp_path / "a.jsonl", [record, short])
    options = {"overflow": overflow, "max_length": 8}
    if overflow == "error":
        assert "has 20 tokens, more than" in problems_of(model, file, **options)[0]
        return
    pieces = {"truncate": [range(8)], "drop": []}.get(
        overflow, [range(8), range(7, 15), range(14, 20)]
    )
    expected = [([*piece], [False] + [True] * (len(piece) - 1)) for piece in pieces]
    run = Run(model, file, **options)
    assert rows(run) == [*expected, ([1, 2], [False, True])]
    assert any("records longer than data.max_length=8, " in line for line in run.prepared.lines)


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
    as_messages = [read_record(record).record.content for record in theirs]
    plain = Run(model, write(tmp_path / "messages.jsonl", as_messages), **options)
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
