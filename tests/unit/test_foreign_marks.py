"""What other tools write into records is read as they mean it, or refused: never read past."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.data_run import Run, chat, problems_of, save_model, write
from helpers.stock_templates import END, TOOL, chatml, stock_models, trained, turn

from shardtune.data.records import check_record


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return stock_models(tmp_path_factory.mktemp("models"), "qwen2_5", "qwen3", "gemma4", "llama3_1")


QUESTIONS = [turn("user", "Rain?"), turn("user", "Really?")]


@pytest.mark.parametrize(
    ("no", "yes"),
    [
        ({"loss": False}, {"loss": True}),
        ({"training": False}, {}),
        ({"trainable": 0}, {"trainable": 1}),
        ({"masked": True}, {"masked": False}),
        ({"masked": 1}, {"masked": None}),
        ({"loss_mask": 0}, {"loss_mask": 1}),
        ({"loss_weight": 0.0}, {"loss_weight": 1.0}),
        ({"train": False, "loss": 0}, {"weight": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["messages", "conversations", "completion"])
def test_marks_of_other_tools_leave_answers_untrained(form, no, yes, models, tmp_path):
    messages = [QUESTIONS[0], turn("assistant", "Wrong.", **no)]
    messages += [QUESTIONS[1], turn("assistant", "Yes.", **yes)]
    record: dict[str, Any] = {"messages": messages}
    if form == "conversations":
        turns = [{"from": m["role"], "value": m["content"], **m} for m in messages]
        turns = [{k: v for k, v in t.items() if k not in ("role", "content")} for t in turns]
        record = {"conversations": turns}
    elif form == "completion":
        record = {"prompt": messages[:1], "completion": messages[1:]}
    run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", [record]))
    assert trained(run) == [f"Yes.{END}"]
    assert any(f"mark {next(iter(no))} leaves untrained: 1" in line for line in run.prepared.lines)
    assert not [line for line in run.prepared.lines if "nothing reads" in line]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"loss": "no"}, "messages[1] (assistant): loss is 'no'"),
        ({"masked": 0.5}, "messages[1] (assistant): masked is 0.5"),
        ({"loss": True, "masked": True}, "loss and masked contradict each other"),
        ({"train_detail": []}, "messages[1] (assistant) has train_detail"),
        ({"role": "asistant"}, "'asistant' - write assistant, or"),
        ({"role": "tool_calls"}, "'tool_calls' - write tool_call"),
        ({"tool_call": {"name": "f"}}, "a message has tool_call"),
        ({"function_call": {"name": "f"}, "tool_calls": [{}]}, "has function_call and tool_calls"),
        ({"function_call": {"name": "f", "arguments": "{"}}, "arguments is '{' - write a JSON"),
        ({"role": "tool_call"}, "messages[1].content is 'Yes.' - write a JSON object as"),
        ({"content": [{"type": "text", "value": "a"}]}, "has parts with value in place of text"),
    ],
)
def test_what_cannot_be_meant_is_refused(more, problem, models, tmp_path):
    record = {"messages": [QUESTIONS[0], turn("assistant", "Yes.") | more]}
    others = [{"messages": [turn("user", f"{i}?"), record["messages"][1]]} for i in range(30)]
    said = problems_of(models["qwen2_5"], write(tmp_path / "a.jsonl", [record, *others]))
    assert problem in said[0] and said[0].endswith("(and 30 more like it)") and len(said) == 2


CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call>'
EMPTY_CALL = '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>'
AS_TEXT = '{"name": "rain", "arguments": {"city": "Oslo"}}'
FUNCTION = {"name": "rain", "arguments": '{"city": "Oslo"}'}


def calls(*functions: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        ({"function_call": FUNCTION}, CALL),
        ({"tool_calls": calls(FUNCTION)}, CALL),
        ({"tool_calls": calls({"name": "rain", "arguments": ""})}, EMPTY_CALL),
        ({"tool_calls": calls({"name": "rain"})}, EMPTY_CALL),
        ({"tool_calls": calls({"name": "rain", "parameters": {"city": "Oslo"}})}, CALL),
        ({"tool_calls": [{"name": "rain", "input": {"city": "Oslo"}}]}, CALL),
        ({"tool_calls": json.dumps(calls(FUNCTION))}, CALL),
        ({"role": "tool_call", "content": json.dumps({"function": json.loads(AS_TEXT)})}, CALL),
        ({"role": "tool_call", "content": AS_TEXT}, CALL),
        ({"role": "function_call", "content": f"[{AS_TEXT}, {AS_TEXT}]"}, f"{CALL}\n{CALL}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["tool", "function", "tool_response", "observation"])
def test_calls_of_every_form_are_trained_and_their_answers_are_context(
    role, answer, written, models, tmp_path
):
    messages = [QUESTIONS[0], turn("assistant", "") | answer]
    messages += [turn(role, "3 mm", name="rain"), turn("assistant", "3 mm today.")]
    run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", [{"messages": messages}]))
    ((text, _),) = run.texts()
    assert trained(run) == [f"{written}{END}3 mm today.{END}"]
    assert "<tool_response>\n3 mm\n</tool_response>" in text
    said = [line for line in run.prepared.lines if "messages of the role" in line]
    assert bool(said) == (role != "tool") and (role == "tool" or f"{role}, read as tool" in said[0])


def test_turns_of_calls_belong_to_the_answer_before_them(models, tmp_path):
    turns = [("human", "Rain?"), ("gpt", "I look."), ("tool_call", AS_TEXT), ("tool_call", AS_TEXT)]
    turns += [("tool_response", "3"), ("gpt", "3 mm.")]
    record = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    record["tools"] = '[{"name": "rain", "description": "Rain.", "parameters": {}}]'
    run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", [record]))
    assert trained(run) == [f"I look.\n{CALL}\n{CALL}{END}3 mm.{END}"]


def test_only_a_template_that_takes_no_objects_gets_arguments_as_text(tmp_path):
    """One adds text to them, and one would write them as code."""
    write_calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ TEXT }}{% endfor %}"
    template = chatml("{{ m.content }}" + write_calls)
    message = turn("assistant", "", tool_calls=calls(FUNCTION))
    file = write(tmp_path / "a.jsonl", [{"messages": [QUESTIONS[0], message]}])
    said = "tool calls whose arguments the chat template gets as JSON text"
    for i, (write_them, is_text) in enumerate(
        [
            ("c.function.arguments | tojson", False),
            ("c.function.arguments", True),
            ("'' + c.function.arguments + ''", True),
        ]
    ):
        model = save_model(tmp_path / str(i), template.replace("TEXT", write_them))
        run = Run(model, file)
        assert trained(run) == ['rain {"city": "Oslo"}' + END]
        assert any(said in line for line in run.prepared.lines) == is_text


def test_tools_are_wrapped_where_the_template_takes_no_others(models, tmp_path):
    tool = {"name": "rain", "description": "Rain.", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": tool}]
    options = {"template_options": {"enable_thinking": True}}
    runs = [
        Run(models["gemma4"], write(tmp_path / "a.jsonl", [chat("q", tools=tools)]), **options)
        for tools in ([tool], wrapped)
    ]
    assert "declaration:rain" in runs[0].texts()[0][0] and runs[0].texts() == runs[1].texts()
    for name in ("tools", "functions"):
        file = write(tmp_path / "a.jsonl", [chat("q", **{name: [tool]})])
        ((bare, _),) = Run(models["qwen2_5"], file).texts()
        assert '{"name": "rain"' in bare and '"function"' not in bare


def test_parts_of_a_text_alone_are_texts(models, tmp_path):
    parts = [turn("user", [{"text": "Rain?"}]), turn("assistant", [{"text": "Yes."}])]
    options = {"template_options": {"enable_thinking": True}}
    for model in models.values():
        run, plain = (
            Run(model, write(tmp_path / "a.jsonl", [{"messages": each}]), **options)
            for each in (parts, chat("Rain?", "Yes.")["messages"])
        )
        assert run.texts() == plain.texts()


SYSTEM, ANSWER = [turn("system", "Be short.")], [QUESTIONS[0], turn("assistant", "Yes.")]
AROUND: list[dict[str, Any]] = [
    {"system": "Be short.", "messages": ANSWER},
    {"system": [{"text": "Be "}, {"text": "short."}], "messages": ANSWER},
    {"system_prompt": "Be short.", "messages": ANSWER},
    {"system_prompt": "Be short.", "prompt": ANSWER[:1], "completion": ANSWER[1:]},
    {"system_prompt": "Be short.", "prompt": ANSWER[:1], "completion": "Yes."},
    {"system_prompt": "Be short.", "instruction": "Rain?", "output": "Yes."},
    {"messages": [turn("developer", "Be short."), *ANSWER]},
    # A text that stands twice is one, and tables hold lists as JSON text.
    {"system_prompt": "Be short.", "messages": [*SYSTEM, *ANSWER]},
    {"system": [], "messages": [*SYSTEM, *ANSWER]},
    {"prompt": json.dumps([*SYSTEM, *ANSWER[:1]]), "completion": json.dumps(ANSWER[1:])},
    {"prompt": json.dumps([*SYSTEM, *ANSWER[:1]]), "completion": "Yes."},
]


@pytest.mark.parametrize("record", AROUND, ids=str)
def test_what_stands_around_the_turns_is_read(record, models, tmp_path):
    plain = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", [{"messages": [*SYSTEM, *ANSWER]}]))
    run = Run(models["qwen2_5"], write(tmp_path / "b.jsonl", [record]))
    assert run.texts() == plain.texts()


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_a_history_is_earlier_turns(loss_on, models, tmp_path):
    history = [["Rain?", "Yes."], ["Wind?", "No."]]
    messages = [*SYSTEM]
    for question, answer in [*history, ["Snow?", "No."]]:
        messages += [turn("user", question), turn("assistant", answer)]
    file = write(tmp_path / "a.jsonl", [{"messages": messages}])
    plain = Run(models["qwen2_5"], file, loss_on=loss_on)
    for each in (history, json.dumps(history)):
        record = {"instruction": "Snow?", "output": "No.", "system": "Be short.", "history": each}
        run = Run(models["qwen2_5"], write(tmp_path / "b.jsonl", [record]), loss_on=loss_on)
        assert run.texts() == plain.texts()


REFUSED = [
    ({"prompt": "q", "completion": "a", "system": "s"}, ["instruction: prompt", "system: null"]),
    ({"prompt": "q", "completion": "a", "history": [["q", "a"]]}, ["instruction", "history: null"]),
    ({"prompt": "q", "completion": "a", "tools": "[{}]"}, ["instruction", "tools: null"]),
    ({"text": "t", "system_prompt": "s"}, ["system_prompt: null"]),
    ({"text": "t", "role": "prompter"}, ["role: null"]),
    ({**chat("q"), "label": 0}, ["label: null"]),
    ({"prompt": "q", "completion": "a", "kto_tag": False}, ["kto_tag: null"]),
    ({"input": chat("q")["messages"][:1], "output": "a"}, ["prompt: input, completion: output"]),
]


@pytest.mark.parametrize(("record", "remedies"), REFUSED, ids=str)
def test_what_a_form_does_not_use_is_refused_with_columns_that_work(
    record, remedies, models, tmp_path
):
    file = write(tmp_path / "a.jsonl", [record, record])
    said, *_ = problems_of(models["qwen2_5"], file)
    found = [part.partition('"')[0] for part in said.split('"data.columns=')[1:]]
    assert len(found) == len(remedies)
    for columns, remedy in zip(found, remedies, strict=True):
        assert remedy in columns
        assert Run(models["qwen2_5"], file, columns=yaml.safe_load(columns)).texts()


def test_nulls_marks_and_options_change_no_hold_out(models, tmp_path):
    """A resume of a run that an older version began has the same records."""
    plain = [chat(f"q{i}", "a") for i in range(40)]
    optioned = [record | {"chat_template_kwargs": {"tone": 1}} for record in plain]
    texts = []
    for records in (plain, optioned):
        run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", records), eval_fraction=0.3)
        texts.append(run.texts())
    assert texts[0] == texts[1] and len(texts[0]) < 40
    marked = [chat(f"q{i}", "a") for i in range(40)]
    for record in marked:
        record["messages"][1] |= {"name": None, "tool_calls": None, "loss": True}
    assert [check_record(record).record for record in marked] == marked


def test_all_is_trained_where_the_assistant_begins(models, tmp_path):
    messages = [turn("assistant", "Hello."), *chat("q")["messages"]]
    file = write(tmp_path / "a.jsonl", [{"messages": messages}])
    (text,) = trained(Run(models["qwen3"], file, loss_on="all"))
    assert "Hello." in text and "fine" in text


def test_a_mark_that_overrides_the_choice_of_turns_is_said(models, tmp_path):
    messages = [*chat("q1", "a1")["messages"], *chat("q2", "a2")["messages"]]
    messages[1]["masked"] = False
    file = write(tmp_path / "a.jsonl", [{"messages": messages}])
    run = Run(models["qwen2_5"], file, loss_on="last")
    assert trained(run) == [f"a1{END}a2{END}"]
    assert any("whatever data.loss_on=last says: 1" in line for line in run.prepared.lines)


def test_columns_and_roles_reach_into_turns(models, tmp_path):
    turns = [{"author": "customer", "body": "Rain?"}, {"author": "agent", "body": "Yes."}]
    record = {"thread": turns}
    columns = {"messages": "thread", "messages.role": "author", "messages.content": "body"}
    roles = {"customer": "user", "agent": "assistant"}
    file = write(tmp_path / "a.jsonl", [record])
    run = Run(models["qwen2_5"], file, columns=columns, roles=roles)
    assert trained(run) == [f"Yes.{END}"]
    (said,) = problems_of(models["qwen2_5"], file, columns=columns)
    assert "no token to train" in said and "data.roles" in said
    wrong = columns | {"messages.content": "boddy"}
    said = problems_of(models["qwen2_5"], file, columns=wrong, roles=roles)
    assert any("data.columns.messages.content=boddy: no record of any source" in s for s in said)


def test_a_context_message_that_is_lost_is_a_warning(models, tmp_path):
    messages = [turn("critic", "Bad."), *chat("Rain?", "Yes.")["messages"]]
    run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", [{"messages": messages}]))
    said = [line for line in run.prepared.lines if "critic" in line]
    assert len(said) == 2 and sum("WARNING" in line for line in said) == 1


@pytest.mark.parametrize("role", ["function", "observation", "tool_response"])
def test_a_template_with_a_form_for_tools_writes_their_answers_in_it(role, models, tmp_path):
    """It would write the name of any other role as it is."""
    call = turn("assistant", "", tool_calls=calls(FUNCTION))
    texts = []
    for name in ("tool", role):
        messages = [QUESTIONS[0], call, turn(name, "3 mm", name="rain"), turn("user", "So?")]
        messages.append(turn("assistant", "3."))
        file = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": [TOOL]}])
        texts.append(Run(models["llama3_1"], file, loss_on="last").texts())
    assert texts[0] == texts[1] and "ipython" in texts[0][0][0]


def test_arguments_that_contradict_each_other_are_refused(models, tmp_path):
    beside = {"function": {"name": "rain"}, "arguments": {"city": "Oslo"}}
    message = turn("assistant", "", tool_calls=[beside])
    run = Run(
        models["qwen2_5"], write(tmp_path / "a.jsonl", [{"messages": [QUESTIONS[0], message]}])
    )
    assert trained(run) == [f"{CALL}{END}"]
    message["tool_calls"] = [FUNCTION | {"parameters": {"city": "Rome"}}]
    file = write(tmp_path / "a.jsonl", [{"messages": [QUESTIONS[0], message]}])
    assert "has arguments and parameters - keep one" in problems_of(models["qwen2_5"], file)[0]
