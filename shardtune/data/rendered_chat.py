"""A conversation as text: the prompt of each assistant turn, and the text that it must generate."""

# chat_encoder.py explains the derivation.

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shardtune.data.chat_template import ChatError, ChatTemplate, with_one_text
from shardtune.data.records import (
    NEXT_TEXT,
    REASONING_KEYS,
    Message,
    Note,
    Outcome,
    Tools,
    contains,
    message_texts,
    normalize,
    tool_function,
)

_MARK = "Qq0Mark0qQ"
_TEXT_KEYS = {"content", "text", "tool_calls", "function", "arguments", *REASONING_KEYS}


Rendered = tuple[list[Message], str]  # messages and their text


@dataclass(frozen=True)
class Turn:
    """Assistant turn `index`: text[:begin] is its prompt, text[begin:end] is generated."""

    index: int
    text: str
    begin: int
    end: int
    appended: bool  # the stop token that ends it, which the template does not write
    has_longer_prompt: bool  # with a part that the conversation's text leaves out
    weight: float = 1.0  # of its tokens in the loss


class RenderedChat:
    """A conversation, rendered by a template."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self._turns: dict[int, Turn] = {}

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, generation_prompt)

    def turn(self, i: int) -> Turn:
        """Return assistant turn i, verified; raises ChatError where it cannot be verified."""
        if i not in self._turns:
            self._turns[i] = self._derive_turn(i)
        return self._turns[i]

    def _derive_turn(self, i: int) -> Turn:
        if i == 0:
            said = "messages[0] is an assistant turn that nothing prompts"
            raise ChatError(f"{said} - put another message before it")
        before, through = self.messages[:i], self.messages[: i + 1]
        content = with_one_text(self.messages[i]).get("content") or ""
        self.template.require_closed(f"messages[{i}] (assistant)", content)
        prompt, text = self.render(before, True), self.render(through)
        generated = self._continuation(i - 1, (before, prompt), (through, text), True)
        has_longer_prompt = generated is None
        if generated is None:
            generated = self._behind_a_shorter_prompt(before, prompt, text)
        if generated is None:
            raise ChatError(
                f"the generation prompt of {self.template.name}, ...{prompt[-32:]!r}, is not in "
                f"its text of messages[{i}] (assistant) - use a template that begins a turn as it "
                "prompts for one, or other data.template_options",
                kind="the generation prompt is not in the text",
            )
        end = self._end_of_turn(i, text, generated)
        appended = "" if end else self._missing_stop(i, text)
        if _first_missing(self.messages[i], normalize(generated)):
            # The turn's text may begin within the prompt, where both open <think>.
            plain = self.render(before)
            in_prompt = prompt[len(plain) :] if prompt.startswith(plain) else ""
            self.require_texts(i, in_prompt + generated)
        self.require_parts(i, through)
        self._require_one_thought(i, prompt, generated)
        generated += appended
        end = len(prompt) + (end or len(generated))
        text = prompt + generated
        return Turn(i, text, len(prompt), end, bool(appended), has_longer_prompt)

    def _require_one_thought(self, i: int, prompt: str, generated: str) -> None:
        """Raise ChatError where turn i closes no thought that its prompt opens, or has another."""
        for begin, close in self.template.facts.thoughts:
            is_again = generated.lstrip().startswith(begin)
            if prompt.rstrip().endswith(begin) and (is_again or close not in generated):
                raise ChatError(
                    f"the generation prompt of {self.template.name} opens {begin}, and its text of "
                    f"messages[{i}] (assistant) {'opens another' if is_again else 'closes none'} - "
                    f"begin the content with it and {close}, or prompt for none",
                    kind="the prompt opens a thought",
                )
        if self.template.second_thought.search(f"{prompt[-99:]}\0{generated[:99]}"):
            raise ChatError(
                f"{self.template.name} closes a thought before that in the content of messages[{i}]"
                " (assistant) - write the thought as reasoning_content"
            )

    def _behind_a_shorter_prompt(self, before: list[Message], prompt: str, text: str) -> str | None:
        """Return the turn at the end of `text` if the prompt only begins with the turn's header."""
        # None where the prompt adds an open thought, which the turn would have to close, or the
        # turn begins with one, which the model would not write behind a closed one.
        probe = self.render([*before, {"role": "assistant", "content": NEXT_TEXT}])
        header = probe.partition(NEXT_TEXT)[0]
        if not (text.startswith(header) and prompt.startswith(header)):
            return None
        added, generated = prompt[len(header) :], text[len(header) :]
        for begin, end in self.template.facts.thoughts:
            if added.count(begin) > added.count(end) or generated.lstrip().startswith(begin):
                return None
        return generated

    def empty_thought(self, turn: Turn) -> Note | None:
        """Return a note where a turn has to generate a thought without a text."""
        generated = turn.text[turn.begin : turn.end].lstrip()
        thought = self.template.opened_thought(generated)
        if not thought or not generated[len(thought[0]) :].lstrip().startswith(thought[1]):
            return None
        option = self.template.facts.no_thought_option
        if not option or option in self.template.options:
            return Outcome.EMPTY_THOUGHT, ""
        return Outcome.EMPTY_THOUGHT_BUT, f"{{{option}: false}}"

    def _continuation(
        self, i: int, shorter: Rendered, longer: Rendered, prompted: bool = False
    ) -> str | None:
        """Return the text that `longer` has behind that of `shorter`, whose last message is i.

        `prompted`: this text ends with a generation prompt. None if the template writes something
        else behind message i in the longer conversation.
        """
        if longer[1].startswith(shorter[1]):
            return longer[1][len(shorter[1]) :]
        # More messages change how earlier ones are rendered (reasoning is dropped, a system text
        # moves). At inference the model sees the text of `shorter`: compare what follows message i.
        tail, longer_tail = (
            self._after_message(i, shorter, prompted),
            self._after_message(i, longer),
        )
        if tail is None or longer_tail is None or not longer_tail.startswith(tail):
            return None
        return longer_tail[len(tail) :]

    def _after_message(self, i: int, of: Rendered, prompted: bool = False) -> str | None:
        """Return what a rendering has after the texts of message i; None if a mark changes it."""
        (messages, text), marks = of, _with_marks(of[0][i])
        marked = self.render([*messages[:i], marks, *messages[i + 1 :]], prompted)
        is_same = _MARK in marked and marked.replace(_MARK, "") == text
        return marked.rpartition(_MARK)[2] if is_same else None

    def _end_of_turn(self, i: int, text: str, generated: str) -> int | None:
        """Return the end in `generated` of the stop token that ends turn i; None if none does."""
        stop = self.template.stop.search(generated)
        if stop and not self.template.only_stops.fullmatch(generated, stop.end()):
            # The message's own text may hold a stop token: look behind it.
            after = self._after_message(i, (self.messages[: i + 1], text))
            if after is None:
                raise ChatError(
                    f"cannot tell where {self.template.name} ends messages[{i}] (assistant): marks "
                    "in the message change its text - remove template markup from the message"
                )
            end = max(0, len(generated) - len(after))
            found = len(self.template.stop.findall(generated, 0, end))
            if found > _stop_count(self.template.stop, self.messages[i]):
                raise ChatError(
                    f"{self.template.name} writes the stop token {stop[0]!r} inside messages[{i}] "
                    "(assistant), where generation would end - use one that ends a turn once"
                )
            stop = self.template.stop.search(generated, end)
        return stop.end() if stop else None

    def _missing_stop(self, i: int, text: str) -> str:
        """Return the text through a stop token that a next message adds; the eos if none does."""
        is_last = i + 1 == len(self.messages)
        probe: Message = {"role": "user"} if is_last else self.messages[i + 1]
        calls = self.messages[i].get("tool_calls")
        if calls and is_last:
            name, call_id = tool_function(calls[0])["name"], calls[0].get("id")
            probe = {"role": "tool", "name": name, "tool_call_id": call_id}
        is_parts = isinstance(self.messages[i].get("content"), list)
        content = [{"type": "text", "text": NEXT_TEXT}] if is_parts else NEXT_TEXT
        through = self.messages[: i + 1]
        probed = [*through, probe | {"content": content}]
        try:
            added = self._continuation(i, (through, text), (probed, self.render(probed)))
        except ChatError:
            added = None  # the template refuses the probe
        head, has_probe, _ = (added or "").partition(NEXT_TEXT)
        stop = self.template.stop.search(head) if has_probe else None
        if stop is None and not is_last:
            after = (self._after_message(i, (through, text)) or "") + head
            token = self.template.token_in([after]) or "a token"
            raise ChatError(
                f"{self.template.name} writes no stop token behind messages[{i}] (assistant) - "
                f"if {token} ends turns, add its id to eos_token_id in the model's "
                "generation_config.json, else use another template, or data.loss_on=last"
            )
        return head[: stop.end()] if stop else self.template.eos_text

    def require_texts(self, i: int, text: str) -> None:
        """Raise ChatError when `text` lacks a text of message i."""
        self._refuse_missing(i, _first_missing(self.messages[i], normalize(text)))

    def require_parts(self, i: int, messages: list[Message]) -> None:
        """Raise ChatError when the rendering of `messages` lacks a part of message i."""
        # Each part gets a tag, so that equal text elsewhere does not count as the part.
        tagged, parts = _with_tags(messages[i])
        if set(parts.values()) <= {"text"}:
            return
        try:
            text = self.render([*messages[:i], tagged, *messages[i + 1 :]])
        except ChatError:
            return  # without tags it was rendered: a template that refuses them has read the parts
        missing = (part for tag, part in parts.items() if tag not in text)
        self._refuse_missing(i, next(missing, None))

    def _refuse_missing(self, i: int, missing: str | None) -> None:
        if missing is not None:
            known, remedy = "", "remove it from the record, or use a template that writes it"
            keys = [key for key in REASONING_KEYS if key in self.template.mentioned]
            if missing == "reasoning" and keys and not any(self.messages[i].get(k) for k in keys):
                known, remedy = f": it reads {' or '.join(keys)}", f"write it as {keys[0]}"
            if "tool call" in missing and "tool_calls" not in self.template.mentioned:
                known = ": it knows no tool calls"
                remedy = "leave such records out, or use a model whose template does"
            said = f"{self.template.name} leaves out the {missing} of messages[{i}] (assistant)"
            raise ChatError(f"{said}{known} - {remedy}")

    def notes(self, text: str) -> list[Note]:
        """Return notes on what is unusual about `text`, the rendering of all messages."""
        normalized, notes = normalize(text), []
        for i, message in enumerate(self.messages):
            content, role = message.get("content"), message["role"]
            if isinstance(content, list) and contains(normalized, str(content)):
                said = f"{self.template.name} writes a list of text parts as code"
                raise ChatError(f"{said} - give the content of a message as one text")
            is_context = role != "assistant" or message is self.messages[0]
            if is_context and (missing := _first_missing(message, normalized)):
                article = "an" if role == "assistant" else "a"
                notes.append((Outcome.LEFT_OUT, f"{missing} of {article} {role} message"))
                if missing == "text" and not _holds_a_line(message, normalized):
                    notes[-1] = Outcome.LOST, f"messages[{i}] ({role})"
            if role == "assistant" and _stop_count(self.template.stop, message):
                notes.append((Outcome.STOP_IN_TEXT, ""))
        if any(str(tool_function(tool).get("name")) not in text for tool in self.tools or []):
            notes.append((Outcome.LEFT_OUT, "tools"))
        return list(dict.fromkeys(notes))


def _stop_count(stop: re.Pattern[str], message: Message) -> int:
    """Count the stop tokens in the texts of a message."""
    texts = (value for _, value in message_texts(message) if isinstance(value, str))
    return sum(len(stop.findall(text)) for text in texts)


def _first_missing(message: Message, normalized: str) -> str | None:
    """Return the description of the first text of a message that a normalized text lacks."""
    times: Counter[tuple[type, Any]] = Counter()  # two equal calls must be there twice
    for description, value in message_texts(message):
        times[type(value), value] += 1
        if not contains(normalized, value, times[type(value), value]):
            return description
    return None


def _holds_a_line(message: Message, normalized: str) -> bool:
    """Whether a normalized text has any line of a message's texts."""
    texts = (str(value) for description, value in message_texts(message) if description == "text")
    lines = (normalize(line) for text in texts for line in text.splitlines())
    return any(line and line in normalized for line in lines)


def _with_marks(value: Any, mark: str = _MARK, everything: bool = False) -> Any:
    """Copy a message with a mark at the end of each text.

    Roles, names and types stay as they are, unless `everything` is marked.
    """
    if isinstance(value, dict):
        return {
            key: _with_marks(inner, mark, everything or key == "arguments")
            if everything or key in _TEXT_KEYS
            else inner
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_with_marks(inner, mark, everything) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value  # templates often write nothing for an empty text
    body = value.rstrip()  # a template that trims still trims
    return body + mark + value[len(body) :]


def _with_tags(message: Message) -> tuple[Message, dict[str, str]]:
    """Copy a message with a mark of its own in each part; also return the parts by their marks.

    The parts are content, reasoning, and the name and the arguments of each tool call, where they
    are not empty.
    """
    parts: dict[str, str] = {}

    def tagged(value: Any, part: str) -> Any:
        tag = f"Qq{len(parts)}Tag{len(parts)}qQ"
        marked = _with_marks(value, tag, everything=isinstance(value, dict))
        if isinstance(value, dict) and value:
            marked[_MARK] = tag  # the values may all be numbers, and only the keys be written
        if marked != value:
            parts[tag] = part
        return marked

    def tagged_call(call: dict[str, Any]) -> dict[str, Any]:
        function = tool_function(call)
        name, arguments = function["name"], function.get("arguments")
        copy = function | {"name": tagged(name, "name of a tool call")}
        if arguments:
            copy["arguments"] = tagged(arguments, f"arguments of tool call {name!r}")
        return call | ({"function": copy} if "function" in call else copy)

    result = dict(message)
    if "content" in message:
        result["content"] = tagged(message["content"], "text")
    if keys := [key for key in REASONING_KEYS if message.get(key)]:
        result |= dict.fromkeys(keys, tagged(message[keys[0]], "reasoning"))
    if message.get("tool_calls"):
        result["tool_calls"] = [tagged_call(call) for call in message["tool_calls"]]
    return result, parts
