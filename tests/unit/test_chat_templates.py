"""The trained tokens of every stock chat template of the package trl.

ROWS is a witness that does not share the derivation: it says by hand, for each template, how its
generation prompt ends and which text a turn is.
"""

import datetime
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers.chat_cases import answer, bytes_tokenizer, show, user
from transformers import PreTrainedTokenizerFast

from shardtune.data.chat_encoder import ChatEncoder, ChatError, EncodedSequence
from shardtune.data.records import Conversation, Outcome

DATE = datetime.date(2026, 1, 2)


@pytest.fixture(scope="session")
def templates() -> Path:
    default = Path(__file__).parents[2] / ".venv" / "trl_templates"
    folder = Path(os.environ.get("SHARDTUNE_TRL_TEMPLATES", default))
    if not list(folder.glob("*.jinja")):
        pytest.fail(
            f"no chat templates in {folder} - "
            "`make test` fetches them, or set SHARDTUNE_TRL_TEMPLATES"
        )
    return folder


# What a template does, by hand. `{c}` is the content of a turn, `{r}` its reasoning; a refusal is
# the error's text.

PROMPT = "the generation prompt of"
NO_REASONING = "leaves out the reasoning"
NO_CALL = "leaves out the name of a tool call"
ROLES = "raises TemplateError.*(alternate|Only user and assistant roles|System role not supported)"
REFUSALS = (PROMPT, NO_REASONING, NO_CALL, ROLES)


@dataclass(frozen=True)
class Row:
    """One template: its generation prompt's end and what it trains, or one of REFUSALS.

    `one_sequence`: the cases of several turns whose turns fit into one sequence; the others give
    one a turn.
    """

    stops: str  # separated by blanks, the eos first
    prompt: str
    plain: str
    reasoned: str = NO_REASONING
    call: str = NO_CALL
    after_tool: str = ""  # the answer behind a tool message, where it is not `plain`
    after_tool_prompt: str = ""
    after_tool_last: str = ""  # the same with loss_on=last, where it differs
    system: str = ""  # the refusal of a system message
    one_sequence: str = "multi tools reasons"
    appended: bool = False
    parts: bool = False  # contents are lists of parts
    takes_text: bool = False  # as the arguments of tool calls
    left_out: tuple[str, ...] = ()  # what stands in no text of the case tools, which is said


CHATML = Row("<|im_end|> <|endoftext|>", "<|im_start|>assistant\n", "{c}<|im_end|>")
JSON_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
    "<|im_end|>"
)
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
PYTHON_CALL = "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|><|im_end|>"
QWEN3_5 = replace(
    CHATML,
    prompt="<|im_start|>assistant\n<think>\n",
    plain="\n</think>\n\n{c}<|im_end|>",
    reasoned="{r}\n</think>\n\n{c}<|im_end|>",
    call="\n</think>\n\n" + XML_CALL,
    # History has no reasoning; and its "<think>\n\n" has other tokens than "<think>\n" and "\n".
    one_sequence="",
)
NEMOTRON = replace(
    CHATML, prompt="<|im_start|>assistant\n<think>\n", plain=PROMPT, call=PROMPT, one_sequence=""
)
COHERE = Row(
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "{c}<|END_OF_TURN_TOKEN|>",
    after_tool=NO_CALL,
    after_tool_last=ROLES,
)
LLAMA3 = Row(
    "<|eot_id|> <|end_of_text|> <|eom_id|>",
    "assistant<|end_header_id|>\n\n",
    "{c}<|eot_id|>",
    left_out=("the tools",),
)
LLAMA3_1 = replace(
    LLAMA3,
    left_out=(),
    call='{"name": "weather", "parameters": {"city": "Paris", "days": 3}}<|eot_id|>',
)
GEMMA = Row(
    "<eos> <end_of_turn>",
    "<start_of_turn>model\n",
    "{c}<end_of_turn>",
    after_tool=NO_CALL,
    after_tool_last=ROLES,
    system=ROLES,
)
GEMMA4 = Row(
    "<eos> <turn|> <|tool_response>",
    "<|turn>model\n",
    "{c}<turn|>",
    call='<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_response>',
    after_tool_prompt="<tool_response|>",
)
GEMMA4_THINKING = replace(
    GEMMA4, reasoned="<|channel>thought\n{r}\n<channel|>{c}<turn|>", one_sequence="multi tools"
)
DEEPSEEK = Row(
    "<｜end▁of▁sentence｜>",
    "<｜Assistant｜><think>\n",
    PROMPT,
    reasoned=PROMPT,
    call=PROMPT,
    after_tool=PROMPT,
    after_tool_last="{c}<｜end▁of▁sentence｜>",
    after_tool_prompt="<｜tool▁outputs▁end｜>",
    left_out=("the tools",),
)
PHI3 = Row(
    "<|endoftext|> <|end|> <|assistant|>",
    "<|assistant|>\n",
    "{c}<|end|>",
    left_out=("the text of a tool message", "the tools"),
)
IDEFICS = Row(
    "<end_of_utterance>",
    "Assistant:",
    " {c}<end_of_utterance>",
    parts=True,
    left_out=("the tools",),
)
LFM2 = replace(CHATML, stops="<|im_end|>")
LFM2_5 = replace(
    LFM2, call=PYTHON_CALL, reasoned="<think>{r}</think>{c}<|im_end|>", one_sequence="multi tools"
)

ROWS = {
    "cohere": COHERE,
    "cohere2": replace(
        COHERE, prompt="<|START_RESPONSE|>", plain="{c}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    ),
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": replace(DEEPSEEK, left_out=(), takes_text=True),
    "diffusion_gemma": replace(GEMMA4_THINKING, after_tool="<|turn>model\n{c}<turn|>"),
    "gemma": GEMMA,
    "gemma3": replace(GEMMA, system=""),
    "gemma4": GEMMA4,
    "gemma4_v2": replace(
        GEMMA4,
        call=GEMMA4.call.replace("<|tool_response>", "<turn|>"),
        after_tool_prompt="<|turn>model\n",
    ),
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4_THINKING,
    "glm4moe": Row(
        "<|endoftext|> <|user|> <|observation|>",
        "<|assistant|>",
        "\n<think></think>\n{c}<|user|>",
        reasoned="\n<think>{r}</think>\n{c}<|user|>",
        call="\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
        one_sequence="multi tools",
        appended=True,
    ),
    "gptoss": Row(
        "<|return|> <|endoftext|> <|call|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>{c}<|return|>",
        reasoned="<|channel|>analysis<|message|>{r}<|end|><|start|>assistant"
        "<|channel|>final<|message|>{c}<|return|>",
        call=" to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        one_sequence="tools",
    ),
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "lfm2": LFM2,
    "lfm2_v2": replace(LFM2, call=PYTHON_CALL),
    "lfm2_2_5": LFM2_5,
    "lfm2_2_5_v2": LFM2_5,
    "lfm2_2_5_vl": LFM2_5,
    "llama3": LLAMA3,
    "llama3_1": LLAMA3_1,
    "llama3_2": LLAMA3_1,
    "llava_next": Row(
        "</s>", "[/INST]", " {c}</s>", after_tool=NO_CALL, after_tool_last=ROLES, parts=True
    ),
    "muse_glimmer": Row(
        "<|eot|>",
        "<|start|>assistant",
        " to=user<|message|>{c}<|eot|>",
        reasoned=" to=self<|message|>{r}<|eom|><|start|>assistant to=user<|message|>{c}<|eot|>",
        call=' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>",
    ),
    "nemotron_3_nano": replace(NEMOTRON, reasoned="{r}\n</think>\n{c}<|im_end|>"),
    "nemotron_3_super": replace(NEMOTRON, reasoned="{r}\n</think>\n{c}<|im_end|>"),
    "nemotron_3_ultra": replace(NEMOTRON, reasoned="{r}</think>{c}<|im_end|>"),
    "nemotron_3_5_lightning": replace(NEMOTRON, reasoned="{r}</think>{c}<|im_end|>"),
    "phi3": PHI3,
    "phi3_5": PHI3,
    "qwen2_5": replace(CHATML, call=JSON_CALL),
    "qwen2_5_vl": replace(CHATML, left_out=("the tools",)),
    "qwen3": replace(
        CHATML,
        plain="<think>\n\n</think>\n\n{c}<|im_end|>",
        reasoned="<think>\n{r}\n</think>\n\n{c}<|im_end|>",
        call="<think>\n\n</think>\n\n" + JSON_CALL,
        one_sequence="",
    ),
    "qwen3_instruct_2507": replace(CHATML, call=JSON_CALL),
    "qwen3_vl": replace(CHATML, call=JSON_CALL),
    "qwen3_5_nothink": replace(
        QWEN3_5,
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        plain="{c}<|im_end|>",
        reasoned=PROMPT,
        call=XML_CALL,
        one_sequence="tools",
    ),
    "qwen3_5_think": QWEN3_5,
    "qwen3_6": QWEN3_5,
    "qwen3_8": replace(QWEN3_5, one_sequence="reasons"),
}

# Cases

CITY = {"type": "string", "description": "A city."}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}},
}
TOOL = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "Rone"}
CASES = {
    "single": [user("Qone"), answer("Aone")],
    "multi": [user("Qone"), answer("Aone"), user("Qtwo"), answer("Atwo")],
    "system": [{"role": "system", "content": "Sone"}, user("Qone"), answer("Aone")],
    "call": [user("Qone"), answer("", tool_calls=[CALL])],
    "tools": [user("Qone"), answer("", tool_calls=[CALL]), TOOL, answer("Atwo")],
    "reason": [user("Qone"), answer("Aone", reasoning_content="Tone")],
}
LATER = [user("Qtwo"), answer("Atwo", reasoning_content="Ttwo")]
CASES["reasons"] = [*CASES["reason"], *LATER]


def conversation(case: str, row: Row) -> tuple[list[dict], list | None]:
    messages = CASES[case]
    if row.parts:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return messages, TOOLS if case in ("call", "tools") else None


def expected_turns(case: str, row: Row, loss_on: str) -> list[str]:
    """The generated text of each trained turn, or [a refusal]."""
    after_tool = (loss_on == "last" and row.after_tool_last) or row.after_tool or row.plain
    turns = {
        "single": [row.plain.replace("{c}", "Aone")],
        "multi": [row.plain.replace("{c}", c) for c in ("Aone", "Atwo")],
        "system": [row.system or row.plain.replace("{c}", "Aone")],
        "call": [row.call],
        "tools": [row.call, after_tool.replace("{c}", "Atwo")],
        "reason": [row.reasoned.replace("{c}", "Aone").replace("{r}", "Tone")],
        "reasons": [
            row.reasoned.replace("{c}", c).replace("{r}", r)
            for c, r in (("Aone", "Tone"), ("Atwo", "Ttwo"))
        ],
    }[case]
    turns = turns if loss_on == "assistant" else turns[-1:]
    refusals = [turn for turn in turns if turn in REFUSALS]
    return refusals[:1] or turns


# Tokens


def make_tokenizer(stops: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes in which the template's markup is tokens."""
    markup = sorted(set(re.findall(r"<[|｜]?/?[A-Za-z_▁]+[|｜]?>", template)))
    tokenizer = bytes_tokenizer(template, stops, " ".join(markup))
    tokenizer.bos_token = "<bos>"
    return tokenizer


def runs(sequence: EncodedSequence) -> list[tuple[int, int]]:
    """(first, end) of each run of trained tokens."""
    flags = [False, *sequence.trained, False]
    edges = [i for i in range(1, len(flags)) if flags[i] != flags[i - 1]]
    return [(first - 1, end - 1) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def check_accepted(encoder: ChatEncoder, case: str, row: Row, turns: list[str]) -> None:
    messages, tools = conversation(case, row)
    tokenizer = encoder.tokenizer
    record = encoder.encode(Conversation(messages, tools))
    one_sequence = len(turns) == 1 or case in row.one_sequence.split()
    assert len(record.sequences) == (1 if one_sequence else len(turns))
    assert record.appended_stop == row.appended
    assert (record.added_tokens > 0) == (not one_sequence)
    notes = [
        (outcome, detail) for outcome, detail in record.notes if outcome is not Outcome.STAND_IN
    ]
    left_out = {f"the {detail}" for outcome, detail in notes if outcome is Outcome.LEFT_OUT}
    if (Outcome.LOST, "messages[2] (tool)") in notes:
        left_out.add("the text of a tool message")
    assert left_out == (set(row.left_out) if case == "tools" else set())
    found = [(s, first, end) for s in record.sequences for first, end in runs(s)]
    assert [tokenizer.decode(s.input_ids[first:end]) for s, first, end in found] == turns
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, (sequence, first, end) in zip(positions[-len(turns) :], found, strict=True):
        context = tokenizer.decode(sequence.input_ids[:first])
        ending = (messages[i - 1]["role"] == "tool" and row.after_tool_prompt) or row.prompt
        assert context.endswith(ending)
        assert sequence.input_ids[end - 1] in encoder.stop_token_ids
        question = messages[i - 1]["content"]
        question = question if isinstance(question, str) else question[0]["text"]
        assert question in context or (
            case == "tools" and "the text of a tool message" in row.left_out
        )
        if not encoder.template.facts.adds_date:  # what transformers gives to generate()
            given = messages[:i]
            if row.takes_text:
                given = json.loads(json.dumps(given))
                for message in given:
                    for call in message.get("tool_calls", []):
                        function = call["function"]
                        function["arguments"] = json.dumps(function["arguments"])
            prompt = tokenizer.apply_chat_template(given, tools=tools, add_generation_prompt=True)
            assert sequence.input_ids[:first] == prompt["input_ids"]


def encoder_of(
    templates: Path, name: str, loss_on: str, options: dict[str, bool] | None = None
) -> ChatEncoder:
    template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(ROWS[name].stops, template)
    stops = tokenizer.convert_tokens_to_ids(ROWS[name].stops.split())
    return ChatEncoder(tokenizer, stops, loss_on, DATE, "T", options or {})


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
@pytest.mark.parametrize("name", ROWS)
def test_a_stock_template_trains_its_answers_or_is_refused(templates, name, loss_on):
    row, encoder = ROWS[name], encoder_of(templates, name, loss_on)
    for case in CASES:
        turns = expected_turns(case, row, loss_on)
        if turns[0] not in REFUSALS:
            check_accepted(encoder, case, row, turns)
            continue
        with pytest.raises(ChatError, match=turns[0]):
            print(name, case, encoder.encode(Conversation(*conversation(case, row))))


def test_what_a_stock_template_does_is_found_by_trials(templates):
    for name, row in ROWS.items():
        facts = encoder_of(templates, name, "assistant").template.facts
        assert facts.keeps_thoughts == (name in ("muse_glimmer", "qwen3_8"))
        assert facts.ends_answers == ("in the next turn" if row.appended else "in the turn"), name
        assert (facts.writes_system, facts.takes_objects) == (not row.system, not row.takes_text)
        assert facts.takes_tools or row.call in REFUSALS, name


def test_every_stock_template_has_a_row(templates):
    names = {path.stem for path in templates.glob("*.jinja") if not path.stem.endswith("_training")}
    assert names == set(ROWS)


# data.template_options

NO_THINK = "<think>\n\n</think>\n\n"
QWEN = "<|im_start|>user\nQ{}<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_THOUGHTS = {
    # By hand from the templates: the text of each sequence with ‹what is trained›.
    ("glm4moe", "reason"): None,
    ("glm4moe", "multi"): [
        "[gMASK]<sop><|user|>\nQone/nothink<|assistant|>"
        "\n<think></think>‹\nAone<|user|>›\nQtwo/nothink<|assistant|>\n<think></think>"
        "‹\nAtwo<|user|>›"
    ],
    ("qwen3", "reason"): None,
    ("qwen3", "multi"): [
        QWEN.format("one") + f"{NO_THINK}‹Aone<|im_end|>›\n",
        QWEN.format("one")
        + "Aone<|im_end|>\n"
        + QWEN.format("two")
        + f"{NO_THINK}‹Atwo<|im_end|>›\n",
    ],
}


@pytest.mark.parametrize(("name", "case"), WITHOUT_THOUGHTS)
def test_masks_follow_enable_thinking(templates, name, case):
    """It is true by default, as in the rows above."""
    encoder = encoder_of(templates, name, "assistant", {"enable_thinking": False})
    expected = WITHOUT_THOUGHTS[name, case]
    if expected is None:  # the model would have to think behind a prompt that says it has not to
        with pytest.raises(ChatError, match=f"{PROMPT} T.* is not in .*data.template_options"):
            encoder.encode(Conversation(CASES[case]))
        return
    sequences = encoder.encode(Conversation(CASES[case])).sequences
    assert [show(encoder.tokenizer, sequence) for sequence in sequences] == expected
    first, options = runs(sequences[0])[0][0], {"add_generation_prompt": True}
    prompt = encoder.tokenizer.apply_chat_template(
        CASES[case][:1], **options, enable_thinking=False
    )
    assert sequences[0].input_ids[:first] == prompt["input_ids"]
