"""Thoughts, templates and their options: trained as the template means them, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import Run, chat, problems_of, save_model, write
from helpers.stock_templates import END, TEMPLATES, TOOL, chatml, stock_models, trained, turn


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return stock_models(tmp_path_factory.mktemp("models"), "qwen2_5", "qwen3", "gemma4_v5")


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
    assert "rendered already" not in str(run.prepared.lines)
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
