"""Outcomes of records on their way to sequences, and the lines of the log that count them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from enum import Enum
from typing import NamedTuple

NAMED_PROBLEMS = 10


def shown_name(field: str) -> str:
    """Return the name of a field for a message, in quotes if it is invisible."""
    return field if field.strip() else repr(field)


class Outcome(Enum):
    """An outcome of a record: its sentence in the log, and whether the sentence is a warning.

    `{}` in the sentence is replaced by a detail, such as a name.
    """

    NULLS = "{} with null in place of a value, read as if it were not there"
    FOREIGN_FORM = "records in the form of {}"
    UNREAD_FIELD = "records with the field {}, which nothing reads"
    UNREAD_MEDIA = "records with the field {}, of which nothing is trained but the text", True
    MEDIA_TAG = "records with {} in their text, which is trained as text", True
    RENDERED_TEXT = (
        "texts that hold {} of the chat template, so rendered already: all of them is trained, the "
        "questions too, where messages would train the answers",
        True,
    )
    RENDERED_PROMPT = (
        "prompts or completions that hold {} of the chat template, so rendered already: the "
        "completions alone are trained"
    )
    RENDERED_MESSAGE = (
        "conversations that hold {} of the chat template in their texts: right where they speak of "
        "it, else give the messages as they were before a template rendered them",
        True,
    )
    RENDERED_TOOLS = (
        "conversations whose tools stand in the system text, so rendered already, and in tools: "
        "the chat template writes them twice",
        True,
    )
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
    ARGUMENTS_AS_TEXT = (
        "tool calls whose arguments the chat template gets as JSON text: it takes no objects"
    )
    EMPTY_QUESTION = "questions without a text", True
    EMPTY_ANSWER = "answers without a text, trained to end at once", True
    EMPTY_THOUGHT = "answers that train an empty thought"
    EMPTY_THOUGHT_BUT = (
        "answers that train an empty thought; data.template_options={} puts it into the prompt"
    )
    UNREAD_OPTION = "records with the option {}, which the chat template does not read", True
    UNTRAINED = "records without a token to train, dropped", True
    END_APPENDED = "records to which the end token was appended"
    LONGER_PROMPT = (
        "records whose answers stand behind the generation prompt of inference, of which the "
        "template's text leaves out a part: a sequence per turn"
    )
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
TOO_LONG = (
    Outcome.CUT_BEHIND_A_TURN,
    Outcome.TRUNCATED,
    Outcome.SPLIT,
    Outcome.PARTLY_DROPPED,
    Outcome.DROPPED,
)


class FirstRecord(NamedTuple):
    """The first record of an outcome: its index in its set, and its file and line."""

    record: int
    place: str


class OutcomeCounts(Counter[tuple[Outcome, str, str]]):
    """How often each outcome happened, by its detail, and the sum of each of its effects.

    The third part of a key is the effect, or "" for the number of records.
    """

    def add(self, outcome: Outcome, detail: str = "", records: int = 1, **effects: int) -> None:
        self[outcome, detail, ""] += records
        for effect, count in effects.items():
            self[outcome, detail, effect.replace("_", " ")] += count

    def lines(self, warning: str = "WARNING: ") -> dict[tuple[Outcome, str], str]:
        """Return a line for each outcome, in the order of their first records, with its effects.

        `warning`: the prefix of an outcome that warns.
        """
        lines: dict[tuple[Outcome, str], str] = {}
        for (outcome, detail, effect), count in self.items():
            if count:
                line = lines.get((outcome, detail), warning if outcome.warns else "")
                words = f" | {effect}" if effect else outcome.sentence.format(shown_name(detail))
                lines[outcome, detail] = f"{line}{words}: {count}"
        return lines


class BrokenRecord(NamedTuple):
    """Why a record cannot be used. `ends_file`: the rest of its file cannot be used either.

    `record`: its index in its set. `kind`: the problem without the record's own values.
    """

    record: int
    place: str
    problem: str
    ends_file: bool
    kind: str


class BrokenRecords:
    """The broken records of a source, folded by the kinds of their problems."""

    def __init__(self) -> None:
        self.count, self.end_files = 0, False
        self._places: list[str] = []
        self._firsts: dict[str, BrokenRecord] = {}
        self._alike: Counter[str] = Counter()

    def add(self, broken: BrokenRecord) -> None:
        self.count += 1
        self.end_files |= broken.ends_file
        if len(self._places) <= NAMED_PROBLEMS:
            self._places.append(broken.place)
        kind = re.sub(r"\d+|'[^']*'|(?<=]) \([^)]*\)", "0", broken.kind)  # (its role)
        if kind in self._firsts or len(self._firsts) < NAMED_PROBLEMS:
            self._firsts.setdefault(kind, broken)
            self._alike[kind] += 1

    def removal(self) -> str:
        """Return a command to leave these lines out, or "" if many or not of one .jsonl."""
        files, numbers = zip(*(place.rpartition(":")[::2] for place in self._places), strict=True)
        is_one = len(set(files)) == 1 and files[0].endswith((".jsonl", ".ndjson"))
        if not is_one or self.count > NAMED_PROBLEMS:
            return ""
        lines = ";".join(f"{number}d" for number in numbers)
        return f" (sed '{lines}' {shlex.quote(files[0])} > NEW.jsonl)"

    def lines(self) -> dict[str, int]:
        """Return a line for each of the first kinds, with the index of its first record."""
        lines = {}
        for kind, first in self._firsts.items():
            more = f" (and {n} more like it)" if (n := self._alike[kind] - 1) else ""
            lines[f"{first.place}: {first.problem}{more}"] = first.record
        return lines
