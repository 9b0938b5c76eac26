"""Records of all forms, why one cannot be used, and what the log counts of the others.

`Conversation`, `Text` and `TokenRow` stand between the forms of records and templates.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

# Content of a probe message; letters and digits only: no filter of a template changes them.
NEXT_TEXT = "Qq0Probe0qQ"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in the order of transformers
# On a message, ours and other tools': whether its turn is trained where the mark is true.
MARKS = {
    **dict.fromkeys(("train", "weight", "trainable", "training"), True),
    **dict.fromkeys(("loss", "loss_mask", "loss_weight"), True),
    "masked": False,
}
WEIGHTS = ("weight", "loss_weight")  # of MARKS: between 0 and 1 a turn counts by so much
_MEDIA = re.compile(r"(image|picture|video|audio)s?")


@dataclass(frozen=True)
class Conversation:
    """Messages in the one form of all records that have turns."""

    # Each has a `role`; a `content`, a text or a list of parts of the types text and thinking; a
    # thought under one of REASONING_KEYS; `tool_calls`, whose arguments are objects; a mark of
    # MARKS, if it says whether its turn is trained; and what else its template may read.
    messages: list[Message]
    tools: Tools = None  # None if the record has none
    options: Mapping[str, Any] = field(default_factory=dict)  # of the template, for this record
    first: int = 0  # answers before this message are context

    @property
    def content(self) -> dict[str, Any]:
        """The record as JSON has it, by which evaluation data is chosen. Options do not count."""
        turns: dict[str, Any] = {"messages": self.messages}
        if self.first:
            turns = {"prompt": self.messages[: self.first]}
            turns["completion"] = self.messages[self.first :]
        return turns if self.tools is None else turns | {"tools": self.tools}

    @property
    def weights(self) -> dict[int, float]:
        """The weight of a message, from 0 to 1, by its index, for those whose marks say it."""
        weights = ((i, weight_of(message)) for i, message in enumerate(self.messages))
        return {i: weight for i, weight in weights if weight is not None}


@dataclass(frozen=True)
class Text:
    """A text that is trained, behind its `prompt` if it has one."""

    text: str
    prompt: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        if self.prompt is None:
            return {"text": self.text}
        return {"prompt": self.prompt, "completion": self.text}


@dataclass(frozen=True)
class TokenRow:
    """Tokens as they are, without padding. `loss_mask`: which are trained, if the record says.

    A float in it is a weight.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[float, ...] | None = None

    @property
    def content(self) -> dict[str, Any]:
        mask = {} if self.loss_mask is None else {"loss_mask": self.loss_mask}
        return {"input_ids": self.input_ids} | mask


Record = Conversation | Text | TokenRow


def tool_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the {name, arguments} of a tool call or tool, which may stand under `function`."""
    function: dict[str, Any] = call.get("function", call)
    return function


def weight_of(message: Message) -> float | None:
    """Return the weight that the marks of a message ask for; None if it has no mark."""
    marks = ((yes, message[m]) for m, yes in MARKS.items() if message.get(m) is not None)
    return next((float(value if yes else not value) for yes, value in marks), None)


def from_json(value: Any) -> Any:
    """Return the value of a JSON text, as tables hold it; any other text or value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def parsed(name: str, value: Any) -> Any:
    """Return a list that may be given as JSON text, as tables hold it."""
    if isinstance(value, str) and value.lstrip().startswith("[{'"):
        raise RecordError(f"{name} is a list as Python prints it - write it with json.dumps")
    return from_json(value)


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are not null. Reading them adds to `notes` what is unusual."""

    values: Mapping[str, Any]
    roles: Mapping[str, str]  # `data.roles`, from the data's names to ours
    notes: list[Note]

    def text(self, name: str) -> str:
        """Return the text of a field, empty if the record lacks the field."""
        text = self.values.get(name, "")
        require(isinstance(text, str), name, text, "a string")
        return str(text)

    def parsed(self, name: str) -> Any:
        """Return a value that may be given as JSON text, as tables hold lists."""
        return parsed(name, self.values.get(name, ""))


def without_nulls(value: Any, kept: str = "") -> Any:
    """Drop keys with None, but `kept`: Arrow gives each struct the keys of its column's others."""
    if isinstance(value, dict):
        pairs = ((key, item) for key, item in value.items() if item is not None or key == kept)
        return {key: without_nulls(item, kept) for key, item in pairs}
    return [without_nulls(item, kept) for item in value] if isinstance(value, list) else value


def is_media(name: str) -> bool:
    """Whether a field or a part has the name of images, videos or sounds."""
    return _MEDIA.fullmatch(name.lower()) is not None


def message_texts(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield (description, value) of each text; values in tool-call arguments may be no strings."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content or ""]:
        if not isinstance(part, str) and "thinking" in part:
            yield "reasoning", part["thinking"]
        else:
            yield "text", part if isinstance(part, str) else part["text"]
    yield "reasoning", next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    for call in message.get("tool_calls") or []:
        name = tool_function(call)["name"]
        yield "name of a tool call", name
        for value in _keys_and_values(tool_function(call).get("arguments")):
            yield f"arguments of tool call {name!r}", value


def _keys_and_values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _keys_and_values(inner)]
    return [value]


def is_empty(message: Message) -> bool:
    """Return whether a message has neither a text nor a tool call."""
    has_text = any(value.strip() for what, value in message_texts(message) if what == "text")
    return not has_text and not message.get("tool_calls")


def normalize(text: str) -> str:
    """Remove what a template may change when it writes a value: whitespace, quotes, escapes."""
    return "".join(text.split()).replace("\\", "").replace('"', "").replace("'", "")


def contains(normalized: str, value: Any, times: int = 1) -> bool:
    """Whether a normalized text holds a value at least `times` times, as it is or as JSON."""
    if value is None or normalized.count(normalize(str(value))) >= times:
        return True
    dumps = partial(json.dumps, value, default=str)  # Arrow has values that JSON has not
    forms = (normalize(dumps(ensure_ascii=ascii_only)) for ascii_only in (False, True))
    return any(normalized.count(form) >= times for form in forms)


class RecordError(ValueError):
    """A record cannot be used: `<what> - <what to do>`. Whoever catches it adds file and line.

    `kind`: the problem without the values of this record, alike for all records of one shape.
    """

    ends_file = False

    def __init__(self, problem: str, kind: str = "") -> None:
        super().__init__(problem, kind)
        self.problem, self.kind = problem, kind or problem

    def __str__(self) -> str:
        return self.problem


class FileError(RecordError):
    """No further record of a file can be used, so that none of them is merely left out."""

    ends_file = True


class _ShortRepr(reprlib.Repr):
    """Shortens values as reprlib does, but shows null, true and false as the data writes them."""

    def repr1(self, x: Any, level: int) -> str:
        return json.dumps(x) if x is None or x is True or x is False else super().repr1(x, level)


def require(condition: object, where: str, value: Any, remedy: str) -> None:
    """Raise RecordError where a value does not meet its condition."""
    if not condition:
        problem = f"{where} is {_ShortRepr().repr(value)} - write {remedy}"
        raise RecordError(problem, kind=f"{where} - {remedy}")


def shown_name(field: str) -> str:
    """Return the name of a field for a message, in quotes if it is invisible."""
    return field if field.strip() else repr(field)


class Outcome(Enum):
    """An outcome of a record: its sentence in the log, with a detail for `{}`; whether it warns."""

    NULLS = "{} with null in place of a value, read as if it were not there"
    FOREIGN_FORM = "records in the form of {}"
    UNREAD_FIELD = "records with the field {}, which nothing reads"
    UNREAD_MEDIA = "records with the field {}, of which nothing is trained but the text", True
    MEDIA_TAG = "records with {} in their text, which is trained as text", True
    RENDERED_TEXT = "texts rendered already, by {}: all is trained, the questions too", True
    RENDERED_PROMPT = "prompts or completions rendered already, by {}: the latter are trained"
    RENDERED_MESSAGE = "conversations that hold {} of the chat template, as rendered ones do", True
    RENDERED_TOOLS = "conversations whose tools stand in the system text, too: written twice", True
    PARTS_JOINED = "records whose text parts are joined: the chat template takes one text"
    MARKED = "answers that their mark {} leaves untrained"
    TRAINED_BY_MARK = "answers that their mark trains, whatever data.loss_on={} says"
    PADDING_CUT = "rows of tokens whose padding is cut off, where their attention_mask is 0"
    OTHER_ROLE = "turns of the role {}, taken as context: data.roles maps it if they are answers"
    ROLE = "turns of the role {} in the data"
    LEADING_ANSWER = "conversations that begin with the assistant, whose first turn is context"
    LEFT_OUT = "the chat template leaves out the {}"
    LOST = "the chat template leaves out the whole text of {}", True
    STAND_IN = "messages of the role {}, as the chat template does not write it"
    STOP_IN_TEXT = "an assistant turn holds the text of a stop token: generation would end there"
    ARGUMENTS_AS_TEXT = "tool calls whose arguments the chat template gets as JSON text"
    EMPTY_QUESTION = "questions without a text", True
    EMPTY_ANSWER = "answers without a text, trained to end at once", True
    EMPTY_THOUGHT = "answers that train an empty thought"
    EMPTY_THOUGHT_BUT = "answers that train an empty thought; data.template_options={} avoids it"
    UNREAD_OPTION = "records with the option {}, which the chat template does not read", True
    UNTRAINED = "records without a token to train, dropped", True
    END_APPENDED = "records to which the end token was appended"
    LONGER_PROMPT = "records whose generation prompt of inference is longer: a sequence per turn"
    TURNS_APART = "records whose earlier turns the template rewrites: a sequence per turn"
    # The detail of these is data.max_length; overflow.py chooses among them.
    CUT_BEHIND_A_TURN = "records longer than data.max_length={}, cut behind the last turn that fits"
    TRUNCATED = "records longer than data.max_length={}, truncated"
    SPLIT = "records longer than data.max_length={}, split into rows"
    PARTLY_DROPPED = "records longer than data.max_length={}, partly dropped", True
    DROPPED = "records longer than data.max_length={}, dropped", True

    def __init__(self, sentence: str, warns: bool = False) -> None:
        self.sentence, self.warns = sentence, warns


Note = tuple[Outcome, str]  # what happened to a record, and its detail
_TOO_LONG = "CUT_BEHIND_A_TURN TRUNCATED SPLIT PARTLY_DROPPED DROPPED"
TOO_LONG = [Outcome[name] for name in _TOO_LONG.split()]


class FirstRecord(NamedTuple):
    """The first record of an outcome: its index in its set, and its file and line."""

    record: int
    place: str


class OutcomeCounts(Counter[tuple[Outcome, str, str]]):
    """How often each outcome happened, by its detail; effect "": the number of its records."""

    def add(self, outcome: Outcome, detail: str = "", records: int = 1, **effects: int) -> None:
        self[outcome, detail, ""] += records
        for effect, count in effects.items():
            self[outcome, detail, effect.replace("_", " ")] += count

    def lines(self, warning: str = "WARNING: ") -> dict[tuple[Outcome, str], str]:
        """Return a line for each outcome, in the order of their first records, with its effects."""
        lines: dict[tuple[Outcome, str], str] = {}
        for (outcome, detail, effect), count in self.items():
            if count:
                line = lines.get((outcome, detail), warning if outcome.warns else "")
                words = f" | {effect}" if effect else outcome.sentence.format(shown_name(detail))
                lines[outcome, detail] = f"{line}{words}: {count}"
        return lines


@dataclass
class RecordSums:
    """Sums over records that are not broken, of a chunk, a source or a set."""

    n_records: int = 0  # with those that are untrained and dropped
    n_sequences: int = 0
    longest: int = 0  # tokens of a sequence before it is cut
    outcomes: OutcomeCounts = field(default_factory=OutcomeCounts)
    first_records: dict[tuple[Outcome, str, str], FirstRecord] = field(default_factory=dict)

    def include(self, later: RecordSums) -> None:
        """Add the sums over records behind these."""
        self.n_records += later.n_records
        self.n_sequences += later.n_sequences
        self.longest = max(self.longest, later.longest)
        self.outcomes.update(later.outcomes)
        self.first_records = later.first_records | self.first_records


class BrokenRecord(NamedTuple):
    """Why a record cannot be used."""

    record: int  # its index in its set
    place: str
    problem: str
    ends_file: bool  # the rest of its file cannot be used either
    kind: str  # the problem without the record's own values
