"""Valid records, and the messages about broken ones."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from helpers.data_run import calling, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.config import RECORD_FIELDS
from shardtune.data.forms import read_record
from shardtune.data.record_files import RecordChunk, dataset_chunks, file_chunks
from shardtune.data.records import Conversation, FileError, Outcome, RecordError

NAMES = [*RECORD_FIELDS, "role", "content", "tool_calls", "function", "name", "arguments"]
NAMES += ["thinking", "from", "value", "train", "weight"]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(["", "a", "user", "[]", "{"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": LEAVES, "content": JSON}), max_size=2)
RECORDS = st.dictionaries(st.sampled_from(RECORD_FIELDS), st.one_of(JSON, MESSAGES), max_size=3)


@given(st.one_of(JSON, RECORDS))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_json_is_a_record_or_refused_with_a_remedy(value):
    try:
        read, unread, notes = read_record(value)
    except RecordError as error:
        what, _, remedy = str(error).partition(" - ")
        assert what and remedy
        return
    record = read.content
    if "input_ids" in record:
        assert record.keys() <= {"input_ids", "loss_mask"}
        return
    forms = ({"messages"}, {"messages", "tools"}, {"prompt", "completion"}, {"text"})
    assert record.keys() in (*forms, {"prompt", "completion", "tools"})
    assert isinstance(record.get("tools", []), list)
    beside = {"system", "system_prompt", "label", "kto_tag", "chat_template_kwargs"}
    if not notes and not beside & value.keys():
        assert {*record, *unread} == {name for name, field in value.items() if field is not None}
    again, unread, _ = read_record(record)
    assert (again.content, unread) == (record, [])


ALPACA = {"instruction": "a", "output": "b"}


def sharegpt(*turns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "a"}, *turns]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


BROKEN = [
    (["text"], "the record is ['text']"),
    ({}, "has no field"),
    ({"id": 1}, "has id"),
    ({"completion": "a", "prompt": None}, "has completion"),
    (chat("q", text="a"), "can be read as messages or as text"),
    ({"prompt": "a", "completion": "b", "text": "c"}, "as prompt and completion or as text"),
    ({**ALPACA, "text": "c"}, "can be read as instruction and output or as text"),
    ({**ALPACA, "output": ["a"]}, "output is ['a']"),
    ({"conversations": ["a"]}, "conversations[0] is 'a'"),
    (sharegpt({"from": "human"}), "conversations[1] has from"),
    (sharegpt({"role": "user", "content": "a"}), "data.columns={messages: conversations}"),
    (sharegpt({"from": "bot", "value": "a"}), "conversations[1].from is 'bot'"),
    (sharegpt({"from": "gpt", "value": "a", "weight": 2}), "conversations[1] (assistant): "),
    ({**sharegpt({"from": "gpt", "value": "b"}), "system": ["a"]}, "system is ['a']"),
    ({**sharegpt({"from": "system", "value": "b"}), "system": "c"}, "has system and a system"),
    (message(weight=1.3), "messages[0] (assistant): weight is 1.3"),
    (message(train=0.3), "messages[0] (assistant): train is 0.3"),
    (message(loss_weight=math.nan), "messages[0] (assistant): loss_weight is nan"),
    (message(train=1, weight=0.5), "(assistant): train and weight contradict each other"),
    (message(train="yes"), "messages[0] (assistant): train is 'yes'"),
    (message(train=True, weight=0), "(assistant): train and weight contradict each other"),
    (message(role="user", weight=1), "messages[0] (user) is to be trained, by its weight"),
    ({"prompt": "a", "completion": ["b"]}, "prompt is 'a'"),
    ({"text": [None, True]}, "text is [null, true]"),
    (chat("q")["messages"], 'is a list of messages - write {"messages": [...]} around it'),
    (sharegpt()["conversations"], 'is a list of messages - write {"conversations": [...]} around'),
    ({"": 1, "a": 2}, "has '', a - write"),
    ({"messages": "hello"}, "messages is 'hello'"),
    ({"messages": []}, "messages is []"),
    ({"messages": ["hello"]}, "messages[0] is 'hello'"),
    ({"messages": [{"content": "a"}]}, "messages[0].role is null"),
    (message(role="Assistant "), "messages[0].role is 'Assistant ' - write assistant"),
    (message(role=5), "messages[0].role is 5"),
    (message(content=None), "messages[0] (assistant) has neither content nor tool_calls"),
    (message(content=4), "messages[0].content is 4"),
    (message(content=[{"type": "image_url", "url": "x"}]), "content has a part of type image_url"),
    (message(content=[{"type": "file"}]), "messages[0].content is [{"),
    ({"messages": "[{'role': 'user'}]"}, "messages is a list as Python prints it"),
    ({"messages": '{"role": "user"}'}, "messages is {'role': 'user'}"),
    ({"messages": "[" * 100_000}, "messages is '[[["),
    ({"messages": sharegpt()["conversations"]}, '"data.columns={conversations: messages}"'),
    (message(**{"from": "gpt", "value": "b"}), '"data.columns={conversations: messages}"'),
    (message(tool_calls=["f"]), "messages[0].tool_calls[0] is 'f'"),
    (message(tool_calls=""), "messages[0].tool_calls is ''"),
    (calling(5), "messages[0].tool_calls[0].function is 5"),
    (calling({"arguments": {}}), "tool_calls[0]: the name is null"),
    (calling({"name": "f", "arguments": [1]}), "tool_calls[0]: arguments is [1]"),
    (message(reasoning_content=["so"]), "messages[0].reasoning_content is ['so']"),
    (message(reasoning="a", thinking="b"), "different texts as thinking and reasoning"),
    (chat("q", tools="f("), "tools is a string that is not JSON"),
    (chat("q", tools=[{"function": "f"}]), "tools[0] is {'function': 'f'}"),
]


CHAT = chat("q", "a")["messages"]
NAMED_OTHERWISE = [
    ({"question": "q", "answer": "a", "id": 1}, ["output: answer", "prompt: question"], CHAT),
    ({"instruction": "q", "response": "a"}, ["output: response", "prompt: instruction"], CHAT),
    ({"input": "q", "output": "a"}, ["instruction: input", "prompt: input"], CHAT),
    (
        {"Frage: kurz": "q", "Antwort #1, d'hier": "a"},
        [
            "instruction: 'Frage: kurz', output: 'Antwort #1, d''hier'",
            "prompt: 'Frage: kurz', completion: 'Antwort #1, d''hier'",
        ],
        CHAT,
    ),
    (
        {"Frage": "q", "Antwort": "a"},
        ["instruction: Frage, output: Antwort", "prompt: Frage, completion: Antwort"],
        CHAT,
    ),
    (
        {"instruction": "q", "context": "c", "response": "a"},
        ["input: context, output: response"],
        chat("q\nc", "a")["messages"],
    ),
    ({"prompt": "q", "chosen": CHAT, "rejected": CHAT[:1]}, ["messages: chosen"], CHAT),
    ({"chosen": CHAT, "rejected": CHAT}, ["messages: chosen"], CHAT),
    ({"input_ids": [4, 5], "assistant_masks": [0, 1]}, ["loss_mask: assistant_masks"], []),
    ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}, ["completion: chosen"], CHAT),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, ["completion: chosen"], "a"),
    ({"chosen": "qa", "rejected": "qb"}, ["text: chosen"], "qa"),
    ({"dialog": sharegpt()["conversations"]}, ["conversations: dialog"], message(role="user")),
]


def tables_of(
    record: dict[str, Any], folder: Path, columns: dict[str, str | None]
) -> Iterator[RecordChunk]:
    """The chunks of a file and of a dataset with this record alone."""
    pq.write_table(pa.Table.from_pylist([record]), folder / "a.parquet")
    yield from file_chunks(folder / "a.parquet", columns)
    yield from dataset_chunks("name", Dataset.from_list([record]), 1, columns)


@pytest.mark.parametrize(("record", "columns", "read"), NAMED_OTHERWISE)
def test_fields_of_other_names_are_refused_with_the_columns_that_read_them(
    record, columns, read, tmp_path
):
    """Also where they are columns of a table, of which only our fields are read."""
    with pytest.raises(RecordError) as error:
        read_record(record)
    remedies = re.findall(r'"data\.columns=(\{.*?\})"', str(error.value))
    assert len(remedies) == len(columns)
    for chunk in tables_of(record, tmp_path, {}):
        (problem,) = chunk.parse()
        assert isinstance(problem, FileError) and str(problem) == str(error.value)
    for remedy, part in zip(remedies, columns, strict=True):
        assert part in remedy
        columns = yaml.safe_load(remedy)
        renamed, *_ = read_record(record, columns)
        for chunk in tables_of(record, tmp_path, columns):  # which is read whole
            assert read_record(*chunk.parse(), columns)[0] == renamed
        is_chat = isinstance(read, list) and "messages" in renamed.content
        if is_chat:
            assert renamed == Conversation(read)
        else:
            assert "messages" not in renamed.content or read


def test_messages_as_json_text_are_read():
    for name, turns in (("messages", CHAT), ("conversations", sharegpt()["conversations"])):
        as_text, _, notes = read_record({name: json.dumps(turns)})
        assert as_text == read_record({name: turns})[0]
        assert notes


@pytest.mark.parametrize(("record", "what"), BROKEN)
def test_a_broken_record_is_refused_with_a_remedy(record, what):
    with pytest.raises(RecordError) as error:
        read_record(record)
    assert what in str(error.value)
    assert " - " in str(error.value)


SPEAKERS = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "model"),
    "system": ("system",),
    "tool": ("tool", "function", "observation"),
}
TURNS = st.lists(
    st.tuples(
        st.sampled_from([(role, name) for role in SPEAKERS for name in SPEAKERS[role]]),
        st.text(),
        st.sampled_from([{}, {"train": False}, {"weight": 0.0}, {"weight": None}, {"name": "n"}]),
    ),
    min_size=1,
)


@given(TURNS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_sharegpt_is_read_as_messages(turns):
    conversations = [{"from": name, "value": text, **more} for (_, name), text, more in turns]
    messages = [
        {"role": role, "content": text, **{k: v for k, v in more.items() if v is not None}}
        for (role, _), text, more in turns
    ]
    notes = []
    for (role, _), _, more in turns:
        notes += [(Outcome.NULLS, "turns")] * (None in more.values())
        if role == "assistant" and more in ({"train": False}, {"weight": 0.0}):
            notes.append((Outcome.MARKED, "train" if "train" in more else "weight"))
    assert read_record({"conversations": conversations, "tools": "[]", "id": 1}) == (
        Conversation(messages, []),
        ["id"],
        [(Outcome.FOREIGN_FORM, "ShareGPT: conversations of from and value"), *notes],
    )


@given(TURNS, st.none() | st.text())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_system_field_of_sharegpt_is_a_turn(turns, system):
    """That of LLaMA-Factory's data."""
    conversations = [{"from": name, "value": text} for (_, name), text, _ in turns]
    record = {"conversations": conversations, "system": system}
    system_turns = [text for (role, _), text, _ in turns if role == "system"]
    has_system = bool(system and system.strip())
    if has_system and system_turns and system_turns != [system]:
        with pytest.raises(RecordError, match="has system and a system turn"):
            read_record(record)
        return
    first = [{"from": "system", "value": system}] if has_system and not system_turns else []
    expected = read_record({"conversations": [*first, *conversations]})
    assert read_record(record) == expected


@given(st.text(), st.none() | st.text(), st.text(), st.none() | st.text())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_alpaca_is_read_as_messages(instruction, more, output, system):
    record = {"instruction": instruction, "input": more, "output": output, "system": system}
    question = f"{instruction}\n{more}" if more else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    if system and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    form = (Outcome.FOREIGN_FORM, "Alpaca: instruction, input and output")
    assert read_record(record) == (Conversation(messages), [], [form])
