"""What becomes of records: why one cannot be used, and what the log counts of the others."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


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
