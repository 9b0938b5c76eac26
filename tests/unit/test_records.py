"""Valid records, and the messages about broken ones."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.data_run import calling, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.data.records import READ_FIELDS, RecordError, check_record

NAMES = [*READ_FIELDS, "role", "content", "tool_calls", "function", "name", "arguments", "thinking"]
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
RECORDS = st.dictionaries(st.sampled_from(READ_FIELDS), st.one_of(JSON, MESSAGES), max_size=3)


@given(st.one_of(JSON, RECORDS))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_json_is_a_record_or_refused_with_a_remedy(value: Any) -> None:
    try:
        record, unread = check_record(value)
    except RecordError as error:
        what, _, remedy = str(error).partition(" - ")
        assert what and remedy
        return
    forms = ({"messages"}, {"messages", "tools"}, {"prompt", "completion"}, {"text"})
    assert record.keys() in (*forms, {"prompt", "completion", "tools"})
    assert isinstance(record.get("tools", []), list)
    assert {*record, *unread} == {name for name, field in value.items() if field is not None}
    assert check_record(record) == (record, [])


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (["text"], "the record is ['text']"),
        ({}, "has no field"),
        ({"id": 1}, "has id"),
        ({"completion": "a", "prompt": None}, "has completion"),
        (chat("q", text="a"), "has messages, text"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "has completion, prompt, text"),
        ({"prompt": "a", "completion": ["b"]}, "prompt is 'a'"),
        ({"prompt": "a", "completion": 4}, "completion is 4"),
        ({"text": {"a": 1}}, "text is {'a': 1}"),
        ({"messages": "hello"}, "messages is 'hello'"),
        ({"messages": []}, "messages is []"),
        ({"messages": ["hello"]}, "messages[0] is 'hello'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is None"),
        (message(role=""), "messages[0].role is ''"),
        (message(role=5), "messages[0].role is 5"),
        (message(content=None), "messages[0] (assistant) has neither content nor tool_calls"),
        (message(content=4), "messages[0].content is 4"),
        (message(content=[{"type": "image", "url": "x"}]), "messages[0].content is [{"),
        (message(tool_calls=["f"]), "messages[0].tool_calls[0] is 'f'"),
        (message(tool_calls=""), "messages[0].tool_calls is ''"),
        (calling(5), "messages[0].tool_calls[0].function is 5"),
        (calling({"name": ["x"]}), "messages[0].tool_calls[0]: the name is ['x']"),
        (calling({"arguments": {}}), "tool_calls[0]: the name is None"),
        (calling({"name": "f", "arguments": [1]}), "tool_calls[0]: arguments is [1]"),
        (message(reasoning_content=["so"]), "messages[0].reasoning_content is ['so']"),
        (message(thinking=2), "messages[0].thinking is 2"),
        (chat("q", tools={"name": "f"}), "tools is {'name': 'f'}"),
        (chat("q", tools="f("), "tools is a string that is not JSON"),
        (chat("q", tools=[{"function": "f"}]), "tools[0] is {'function': 'f'}"),
    ],
)
def test_broken_records(record: Any, what: str) -> None:
    with pytest.raises(RecordError) as error:
        check_record(record)
    assert what in str(error.value)
    assert " - " in str(error.value)
