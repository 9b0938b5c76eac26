"""Marks, calls, thoughts and options in records are read as they are meant, or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.data_run import Run, chat, problems_of, save_model, write
from helpers.stock_templates import END, TEMPLATES, TOOL, chatml, stock_models, trained, turn

from shardtune.data.forms import read_record


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen2_5", "qwen3", "gemma4", "gemma4_v5", "llama3_1")
    return stock_models(tmp_path_factory.mktemp("models"), *names)


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
        ({"masked": 0.5}, "messages[1] (assistant): masked is 0.5"),
        ({"loss": "no"}, "messages[1] (assistant): loss is 'no'"),
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
    tools = '[{"name": "rain", "description": "Rain.", "parameters": {}}]'
    record = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    roles = {"human": "user", "gpt": "assistant"}
    ours = [turn(roles.get(name, name), text, tool_calls=None) for name, text in turns]
    records = [record | {"tools": tools}, {"messages": ours, "tools": tools}]
    run = Run(models["qwen2_5"], write(tmp_path / "a.jsonl", records))
    assert trained(run) == 2 * [f"I look.\n{CALL}\n{CALL}{END}3 mm.{END}"]


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
    assert [read_record(record).record.content for record in marked] == marked


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


THINKS = {"template_options": {"enable_thinking": True}}


@pytest.mark.parametrize("form", ["messages", "completion"])
@pytest.mark.parametrize(
    ("model", "opens"), [("qwen3", "<think>"), ("gemma4_v5", "<|channel>thought")], ids=str
)
def test_a_thought_that_was_cut_off_is_refused(model, opens, form, models, tmp_path):
    record: dict[str, Any] = chat("q", f"{opens}\nHm, long")
    if form == "completion":
        record = {"prompt": "q", "completion": f"{opens}\nHm, long"}
    said = problems_of(models[model], write(tmp_path / "a.jsonl", [record]), **THINKS)
    assert f"opens {opens} and does not close it: its thought was cut off - leave" in said[0]
    whole = write(tmp_path / "b.jsonl", [chat("q", "<think>\nHm\n</think>\n\nYes.")])
    assert Run(models["qwen3"], whole).texts()


def test_options_of_a_record_and_of_a_source_reach_the_template(models, tmp_path):
    thought = "<think>\nOften.\n</think>\n\n"
    records = [
        chat("a", "Yes.", chat_template_kwargs={"enable_thinking": False, "tone": 3, "no": []}),
        chat("b", f"{thought}Yes.", chat_template_kwargs={"enable_thinking": True}),
    ]
    file = write(tmp_path / "a.jsonl", records)
    run = Run(models["qwen3"], file)
    assert trained(run) == [f"Yes.{END}", f"{thought}Yes.{END}"]
    (unread,) = (line for line in run.prepared.lines if "WARNING: records with the option" in line)
    assert " tone, " in unread
    plain = [chat("c", "Yes.")]
    sources = [
        {"path": str(write(tmp_path / f"{name}.jsonl", plain)), "template_options": options}
        for name, options in (("x", {"enable_thinking": False}), ("y", {}))
    ]
    run = Run(models["qwen3"], sources)
    assert trained(run) == [f"Yes.{END}", f"<think>\n\n</think>\n\nYes.{END}"]
    assert any("data.template_options={enable_thinking: false}" in s for s in run.prepared.lines)
    taken = write(tmp_path / "t.jsonl", [chat("q", chat_template_kwargs={"tools": []})])
    assert "chat_template_kwargs.tools: the template gets" in problems_of(models["qwen3"], taken)[0]


def test_parts_of_thinking_are_trained(models, tmp_path):
    """A template that writes them gets them, another one the same as reasoning."""
    parts = [{"type": "thinking", "thinking": "Often."}, {"type": "text", "text": "Yes."}]
    file = write(tmp_path / "a.jsonl", [chat("q", parts)])
    assert trained(Run(models["qwen3"], file)) == [f"<think>\nOften.\n</think>\n\nYes.{END}"]
    template = chatml(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[T]{{ p.thinking }}[/T]{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}"
    )
    model = save_model(tmp_path / "model", template)
    assert trained(Run(model, file)) == [f"[T]Often.[/T]Yes.{END}"]
    both = [{**chat("q", parts)["messages"][1], "reasoning": "a"}]
    record = {"messages": [turn("user", "q"), *both]}
    said = problems_of(model, write(tmp_path / "b.jsonl", [record]))
    assert "has a part thinking and reasoning - keep one of them" in said[0]


def test_the_key_of_reasoning_that_a_template_reads_is_named(tmp_path):
    template = chatml(
        "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    )
    model = save_model(tmp_path / "model", template)
    record = chat("q")
    record["messages"][1]["reasoning_content"] = "Often."
    said = problems_of(model, write(tmp_path / "a.jsonl", [record]))
    assert "it reads reasoning - write it as reasoning" in said[0]
    record["messages"][1]["reasoning"] = record["messages"][1].pop("reasoning_content")
    assert trained(Run(model, write(tmp_path / "a.jsonl", [record]))) == [
        f"<think>Often.</think>fine{END}"
    ]


def test_what_was_rendered_before_is_a_warning(models, tmp_path):
    system = turn("system", f"You call functions. <tools>{json.dumps([TOOL])}</tools>")
    answer = turn("tool", "<tool_response>\n3\n</tool_response>")
    messages = [system, *chat("q")["messages"], answer, turn("assistant", "3 mm.")]
    file = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": [TOOL]}])
    lines = str(Run(models["qwen2_5"], file).prepared.lines)
    assert "WARNING: conversations whose tools stand in the system text" in lines
    assert "WARNING: conversations that hold <tool_response> of the chat template" in lines


def test_thoughts_that_the_template_takes_in_are_no_rendered_text(models, tmp_path):
    """Its generation prompt has the same token."""
    file = write(tmp_path / "a.jsonl", [chat("q", "<think>\nHm\n</think>\n\nYes.")])
    template = (TEMPLATES / "qwen3_5_think.jinja").read_text(encoding="utf-8")
    model = save_model(tmp_path / "model", template, more=["<think>", "</think>"])
    run = Run(model, file)
    assert trained(run) == [f"Hm\n</think>\n\nYes.{END}"]
    assert "of the chat template" not in str(run.prepared.lines)
    asked = chat("What does <think> do?", "<think>\nHm\n</think>\n\nYes.")
    run = Run(model, write(tmp_path / "a.jsonl", [asked]))
    assert "WARNING: conversations that hold <think>" in str(run.prepared.lines)


def test_answers_stand_behind_a_prompt_that_the_text_leaves_out(models, tmp_path):
    """Gemma 4 without thinking prompts with an empty thought, which its text has not."""
    messages = [*chat("one", "1")["messages"], *chat("two", "2")["messages"]]
    text = (TEMPLATES / "gemma4_v5.jinja").read_text(encoding="utf-8")
    begin, header, end = text.rpartition("{{- '<|turn>model\\n' -}}")
    empty = "{%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}"
    assert begin
    template = begin + header + empty + end
    model = save_model(tmp_path / "model", template, more=["<turn|>"], eos="<turn|>")
    run = Run(model, write(tmp_path / "a.jsonl", [{"messages": messages}]))
    prompt = "<|turn>user\n{}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    (first, one), (second, two) = run.texts()
    assert (one, two) == ("1<turn|>", "2<turn|>")
    assert (
        first.startswith(f"{prompt.format('one')}1<turn|>") and f"{prompt.format('two')}2" in second
    )
    (said,) = [line for line in run.prepared.lines if "generation prompt of inference" in line]
    assert re.search(r"WARNING: .*: 1 \| tokens added: \d+ - data.loss_on", said)
    thinking = chat("q")
    thinking["messages"][1]["reasoning"] = "Hm"
    (refused, _) = problems_of(model, write(tmp_path / "b.jsonl", [thinking]))
    assert "the generation prompt of" in refused


def test_a_template_file_takes_the_place_of_the_models(models, tmp_path):
    base = save_model(tmp_path / "base", None)
    file = write(tmp_path / "a.jsonl", [chat("q", "Yes.")])
    assert "has no chat template" in problems_of(base, file)[0]
    template = TEMPLATES / "qwen2_5.jinja"
    run = Run(base, file, chat_template=str(template))
    assert run.texts() == Run(models["qwen2_5"], file).texts()
    other = tmp_path / "other.jinja"
    other.write_text(template.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert Run(base, file, chat_template=str(other)).entry != run.entry
    (said,) = problems_of(base, file, chat_template=str(tmp_path / "none"))
    assert said.startswith(f"data.chat_template={tmp_path}/none cannot be read")


CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
# The prompt closes an empty thought, and thoughts are written beside calls alone, as Gemma 4 does.
BESIDE_CALLS = chatml(
    "{% if m.tool_calls and m.reasoning %}<|channel>thought\n{{ m.reasoning }}<channel|>{% endif %}"
    "{{ m.content }}" + CALLS,
    "<|channel>thought\n<channel|>",
)


def test_a_thought_beside_a_call_is_refused_behind_a_closed_one(tmp_path):
    model = save_model(tmp_path / "model", BESIDE_CALLS)
    call = {"type": "function", "function": {"name": "rain", "arguments": {}}}
    record = chat("Rain?", "")
    record["messages"][1]["tool_calls"] = [call]
    file = write(tmp_path / "a.jsonl", [record])
    assert trained(Run(model, file)) == [f"rain{{}}{END}"]
    record["messages"][1]["reasoning"] = "Look."
    assert "the generation prompt of" in problems_of(model, write(file, [record]))[0]


# Before an answer without reasoning, each closes an empty thought in its own way.
IN_TURN, OPENED = ("", "<think></think>"), ("<think>", "<think></think>")
CLOSED, OTHER = ("</think>", "</think>"), ("<think:a></think:a>", "<think:a></think:a>")


@pytest.mark.parametrize("template", [IN_TURN, OPENED, CLOSED, OTHER, "qwen3_8"], ids=str)
def test_a_thought_in_the_content_is_refused_behind_a_closed_one(template, tmp_path):
    if isinstance(template, str):
        model = stock_models(tmp_path, template)[template]
    else:
        prompt, empty = template
        turns = f"{{% if m.role == 'assistant' %}}{empty}{{% endif %}}{{{{ m.content }}}}"
        model = save_model(tmp_path / "model", chatml(turns, prompt))
    thought = chat("1+1?", "<think>\nOne.\n</think>\n\n2")
    said = problems_of(model, write(tmp_path / "a.jsonl", [thought]))
    assert "reasoning_content" in said[0]
    about = chat("1+1?", "It is <think></think> <think>.")
    (text,) = trained(Run(model, write(tmp_path / "a.jsonl", [about])))
    assert text.endswith(f"It is <think></think> <think>.{END}")
