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


def answering(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (["text"], "this is a list"),
        ({}, "has no field"),
        ({"id": 1}, "but id"),
        ({"prompt": "a"}, "a prompt and no completion"),
        ({"completion": "a", "prompt": None}, "a completion and no prompt"),
        (chat("q", text="a"), "has messages and text - keep one"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt+completion and text"),
        ({"prompt": "a", "completion": ["b"]}, "prompt is a string"),
        ({"prompt": "a", "completion": 4}, "completion is a number"),
        ({"text": {"a": 1}}, "text is an object"),
        ({"messages": "hello"}, "messages is a string"),
        ({"messages": ["hello"]}, "messages[0] is a string"),
        ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
        ({"messages": [{"role": "", "content": "a"}]}, "an empty string as its role"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0] has a number as its role"),
        ({"messages": [{"role": "user"}]}, "messages[0] (user) has neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content is a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a part that is not text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
            "messages[0].tool_calls is a list",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": ""}]},
            "messages[0].tool_calls is an empty string",
        ),
        (calling(5), "messages[0].tool_calls[0].function is a number"),
        (
            calling({"name": ["x"], "arguments": {}}),
            "messages[0].tool_calls[0] has a list as the function's name",
        ),
        (calling({"name": {"x": 1}}), "tool_calls[0] has an object as the function's name"),
        (calling({"arguments": {}}), "tool_calls[0] has null as the function's name"),
        (calling({"name": "f", "arguments": [1]}), "tool_calls[0] has a list as its arguments"),
        (answering(reasoning_content=["two and two"]), "messages[0].reasoning_content is a list"),
        (answering(thinking=2), "messages[0].thinking is a number"),
        (
            answering(reasoning="a", thinking="b"),
            "messages[0] has different texts as thinking and reasoning",
        ),
        (chat("q", tools={"name": "f"}), "tools is an object"),
        (chat("q", tools="f("), "tools is a string that is not JSON"),
    ],
)
def test_broken_records(record: Any, what: str) -> None:
    with pytest.raises(RecordError) as error:
        check_record(record)
    assert what in str(error.value)
    assert " - " in str(error.value)
