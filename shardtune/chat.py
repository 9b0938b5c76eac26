"""Which tokens of a record are trained: what the model must generate, through its stop token, and nothing else.

At inference the model is given P = the messages before a turn, rendered with a generation prompt; it must then write
T = what the template puts behind that prompt for the turn, through the stop token. So the text of a trained turn is
P + T with T trained. A conversation fits into one sequence when its rendering begins with P + T of every trained turn;
where it does not (the template rewrites earlier turns), each turn is a sequence of its own.

Contents are never searched for: they may be trimmed, repeated, or hold template markup. T is found because the
rendering begins with P, its end because nothing but stop tokens follows. Where that does not hold, the conversation is
rendered again with marks behind a message's texts, which count only if the rendering is otherwise the same. What cannot
be shown is refused with a `ChatError`.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from shardtune.errors import Refused

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Text = str | list[Message]
Offsets = list[tuple[int, int]]

_MARK, _PROBE = "Qq0Mark0qQ", "Qq0Probe0qQ"  # letters and digits only: no filter of a template changes them
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names that transformers reads, in its order
_TEXT_KEYS = {"content", "text", "tool_calls", "function", "arguments", *_REASONING_KEYS}
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_DIRECTIVES = ("%Y", "%y", "%m", "%d", "%B", "%b", "%A", "%a", "%j", "%H", "%I", "%M", "%S", "%p", "%F", "%D")


class ChatError(ValueError):
    """One record cannot be encoded exactly; the text is `<what> - <what to do>` (the caller adds file and number)."""


@dataclass(frozen=True)
class Encoded:
    """One sequence before packing; every list has one entry a token.

    `trained[i]`: the loss counts token i as a target; never the first token, which nothing predicts. `roles`, for
    display and empty unless asked for: the role of the message that token i stands in, `template` for what the template
    writes itself, `appended` for a stop token that it leaves out, `text` for plain text.
    """

    input_ids: list[int]
    trained: list[bool]
    roles: list[str]


@dataclass(frozen=True)
class EncodedRecord:
    """The sequences of one record, in the order of their turns, and what there is to say about it.

    `added_tokens`: tokens that these sequences have more than one rendering of the whole conversation. `appended_stop`:
    the last turn's stop token is not in its rendering and was appended. `notes`: sentences to count and say once each.
    """

    sequences: list[Encoded]
    added_tokens: int = 0
    appended_stop: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Turn:
    """Assistant turn `index`: text[:begin] is given, text[begin:end] generated, text[stop:end] is its stop token."""

    index: int
    text: str
    begin: int
    stop: int
    end: int
    appended: bool


def stop_token_ids(tokenizer: Any, model_path: str) -> list[int]:
    """The ids that end a turn: the tokenizer's eos and every `eos_token_id` of the model's generation config.

    Without a generation config, or one that names none, they come from the model's config. `model_path` is a local
    directory or a hub id. Raises OSError when neither config can be read, Refused when no id is found.
    """
    try:
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        if (Path(model_path) / "generation_config.json").exists():
            raise  # it is there and says something that cannot be read
        declared = None
    if declared is None:
        declared = getattr(AutoConfig.from_pretrained(model_path).get_text_config(), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, (list, tuple)) else [declared])]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    if not ids:
        raise Refused(f"{model_path} names no end-of-sequence token - set eos_token_id in its generation_config.json")
    return ids


class ChatEncoder:
    """Turns records, in the shape that `check_record` gives them, into token ids and their trained flags.

    `stop_token_ids`: what generation stops at. `loss_on`: `assistant` (every assistant turn), `last` (the last one) or
    `all` (every token but the first of a sequence, special tokens included). `date`: what templates that insert
    today's date get, so that the same data gives the same tokens tomorrow; it matters where `uses_date`.
    `template_name` stands in messages. Keeps nothing between records and can be pickled.
    Raises Refused when the tokenizer gives no character offsets or has no stop token.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int],
        loss_on: str,
        date: datetime.date,
        template_name: str = "the chat template",
    ) -> None:
        if not tokenizer.is_fast:
            raise Refused(f"{type(tokenizer).__name__} gives no character offsets - use one with a tokenizer.json")
        # An id that the tokenizer cannot write (a padded vocabulary) is in no text.
        texts = {i: text for i in stop_token_ids if (text := tokenizer.decode([i], skip_special_tokens=False))}
        if not texts:
            raise Refused("the tokenizer has no stop token - set its eos_token or the model's eos_token_id")
        alternatives = "|".join(re.escape(text) for text in sorted(texts.values(), key=len, reverse=True))
        self.tokenizer, self.loss_on, self.date, self.template_name = tokenizer, loss_on, date, template_name
        self.stop_token_ids = list(texts)
        self.stop = re.compile(alternatives)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        self.uses_date = "strftime_now" in json.dumps(tokenizer.chat_template)
        self._eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id in texts else self.stop_token_ids[0]
        self.eos_text = texts[self._eos_id]
        self._added_ids = set(tokenizer.get_added_vocab().values())
        plain, full = self._tokenize("a")[0], tokenizer("a")["input_ids"]
        self._bos_ids: list[int] = next((full[:k] for k in range(len(full)) if full[k : k + len(plain)] == plain), [])

    def encode_messages(
        self, messages: list[Message], tools: Tools = None, *, with_roles: bool = False, first: int = 0
    ) -> EncodedRecord:
        """Encode a conversation, in which assistant turns before index `first` are context.

        Without an assistant turn nothing is trained. Raises ChatError when the template raises, or what must be
        generated cannot be shown to stand in its text.
        """
        chat = _Conversation(self, messages, tools, with_roles)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not assistant or self.loss_on == "all":
            return self._encode_whole(chat, assistant)
        turns = [chat.turn(i) for i in (assistant if self.loss_on == "assistant" else assistant[-1:])]
        last = turns[-1]
        whole = last.text if last.index == len(messages) - 1 else chat.render(messages)
        notes, sequences = chat.notes(turns), []
        if all(whole.startswith(turn.text[: turn.end]) for turn in turns):
            sequences = self._encode(chat, whole, turns)
        if sequences:
            notes += self._compare_marks(chat, sequences[0])
            return EncodedRecord(sequences, 0, last.appended and whole is last.text, tuple(notes))
        for turn in turns:
            sequence = self._encode(chat, turn.text, [turn])
            if not sequence:
                notes.append("a turn would begin inside the prompt's last token: tokenized apart, as generation does")
                sequence = self._encode(chat, turn.text, [turn], apart=True)
            sequences += sequence
        added = sum(len(s.input_ids) for s in sequences) - len(self._tokenize(whole)[0]) if len(turns) > 1 else 0
        return EncodedRecord(sequences, added, last.appended, tuple(dict.fromkeys(notes)))

    def encode_prompt_completion(
        self, prompt: Text, completion: Text, tools: Tools = None, *, with_roles: bool = False
    ) -> EncodedRecord:
        """Encode a prompt and its completion, of which the completion and one end token are trained.

        Two texts: the prompt's tokens are those that inference gives to the model, BOS included, also where the
        completion would merge into the last of them; `loss_on` `all` trains them as well. Two lists of messages: one
        conversation, in which only the completion's assistant turns are trained. Raises ChatError.
        """
        if not isinstance(prompt, str) or not isinstance(completion, str):
            return self.encode_messages([*prompt, *completion], tools, with_roles=with_roles, first=len(prompt))
        ids, _, length = self._tokenize_apart(prompt + completion, len(prompt))
        left = self._with_bos(ids[:length])
        roles = ["user"] * len(left) + ["assistant"] * (len(ids) - length)
        trained = [role == "assistant" or self.loss_on == "all" for role in roles]
        return self._finish(left + ids[length:], trained, roles if with_roles else [])

    def encode_text(self, text: str, *, with_roles: bool = False) -> EncodedRecord:
        """Encode a plain text, all of it trained, with the tokenizer's BOS and an eos unless it has them already."""
        ids = self._with_bos(self._tokenize(text)[0])
        return self._finish(ids, [True] * len(ids), ["text"] * len(ids) if with_roles else [])

    def _with_bos(self, ids: list[int]) -> list[int]:
        """`ids` behind the tokenizer's BOS, which a text that was rendered before may hold already."""
        return ids if ids[: len(self._bos_ids)] == self._bos_ids else self._bos_ids + ids

    def _finish(self, ids: list[int], trained: list[bool], roles: list[str]) -> EncodedRecord:
        appended = not ids or ids[-1] not in self.stop_token_ids or not trained[-1]
        if appended:
            ids, trained, roles = [*ids, self._eos_id], [*trained, True], [*roles, "appended"] if roles else []
        return EncodedRecord([Encoded(ids, [False, *trained[1:]], roles)], appended_stop=appended)

    def _encode_whole(self, chat: _Conversation, assistant: list[int]) -> EncodedRecord:
        """The conversation in one sequence, all trained when it has an assistant turn, nothing otherwise."""
        turns = [chat.turn(i) for i in assistant[-1:] if i == len(chat.messages) - 1]
        text = turns[0].text if turns else chat.render(chat.messages)
        for i in assistant:
            chat.require(i, text)
        ids, offsets = self._tokenize(text)
        sequence = Encoded(ids, [bool(assistant) and t > 0 for t in range(len(ids))], chat.roles(text, offsets, turns))
        return EncodedRecord([sequence], 0, any(turn.appended for turn in turns), tuple(chat.notes(turns)))

    def _compare_marks(self, chat: _Conversation, encoded: Encoded) -> list[str]:
        """A note where the template's own {% generation %} marks train other tokens."""
        if self.loss_on != "assistant" or not _GENERATION_TAG.search(chat.template):
            return []
        marked = chat.apply(chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        if [flag == 1 for flag in marked["assistant_masks"]] == encoded.trained[: len(marked["input_ids"])]:
            return []
        return [f"the {{% generation %}} marks of {self.template_name} train other tokens; they are not used"]

    def _tokenize(self, text: str) -> tuple[list[int], Offsets]:
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return out["input_ids"], out["offset_mapping"]

    def _encode(self, chat: _Conversation, text: str, turns: list[_Turn], apart: bool = False) -> list[Encoded]:
        """One sequence that trains the turns, or none where a prompt's tokens are not those of inference."""
        ids, offsets = self._tokenize_apart(text, turns[0].begin)[:2] if apart else self._tokenize(text)
        trained = [False] * len(ids)
        for turn in turns:
            first = self._prompt_length(text, ids, offsets, turn.begin)
            if first is None:
                return []
            end = self._stop_position(ids, offsets, first, turn.stop)
            trained[first : end + 1] = [True] * (end + 1 - first)
        return [Encoded(ids, [False, *trained[1:]], chat.roles(text, offsets, turns))]

    def _prompt_length(self, text: str, ids: list[int], offsets: Offsets, begin: int) -> int | None:
        """How many of `ids` are the prompt text[:begin] as inference tokenizes it; None where they are not."""
        # Added tokens (markup) cut the text before all else: the prompt from its last one on is enough to look at.
        last = bisect_left(offsets, (begin, -1)) - 1
        while last > 0 and ids[last] not in self._added_ids:
            last -= 1
        last = max(last, 0)
        prompt = self._tokenize(text[offsets[last][0] if last else 0 : begin])[0]
        return last + len(prompt) if ids[last : last + len(prompt)] == prompt else None

    def _stop_position(self, ids: list[int], offsets: Offsets, first: int, stop: int) -> int:
        """The position of the stop token that covers character `stop`, from position `first` on."""
        position = next((t for t in range(first, len(ids)) if offsets[t][1] > stop), -1)
        if position < 0 or ids[position] not in self.stop_token_ids:
            what = f"the tokenizer writes the stop token of {self.template_name} as other tokens"
            raise ChatError(f"{what} - check the model's eos_token_id against the template")
        return position

    def _tokenize_apart(self, text: str, begin: int) -> tuple[list[int], Offsets, int]:
        """The tokens of text[:begin] as inference has them, those of the rest, and how many are the prompt's.

        Only where the two would merge do they differ from the tokens of the whole text.
        """
        left, left_offsets = self._tokenize(text[:begin])
        joint, offsets = self._tokenize(text)
        if joint[: len(left)] == left:
            return joint, offsets, len(left)
        right, right_offsets = self._tokenize(text[begin:])
        texts = [self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (joint, left + right)]
        if texts[0] != texts[1]:
            what = f"the tokenizer cannot begin a text with {text[begin:][:20]!r} behind {text[:begin][-20:]!r}"
            raise ChatError(f"{what} - move the whitespace between them from one to the other")
        return left + right, left_offsets + [(a + begin, b + begin) for a, b in right_offsets], len(left)


class _Conversation:
    """One conversation as text: what inference is given for a turn, and what it must generate."""

    def __init__(self, encoder: ChatEncoder, messages: list[Message], tools: Tools, with_roles: bool) -> None:
        self.encoder, self.messages, self.tools, self.with_roles = encoder, messages, tools, with_roles
        self.name = encoder.template_name
        try:
            self.template = encoder.tokenizer.get_chat_template(None, tools=tools)
        except ValueError as error:
            raise ChatError(f"{error} - give the tokenizer a chat template, or write prompt and completion") from error
        if "strftime_now" in self.template:
            self.template = _date_macro(encoder.date) + self.template

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """`apply_chat_template` of some messages; raises ChatError when the template raises."""
        apply = self.encoder.tokenizer.apply_chat_template
        try:
            return apply(messages, tools=self.tools, chat_template=self.template, **options)
        except Exception as error:  # a template is somebody's program: it may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            what = f"{self.name} raises {type(error).__name__} on {len(messages)} messages (... {roles}): {error}"
            raise ChatError(f"{what} - change the messages to what it supports, or use another template") from error

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.apply(messages, add_generation_prompt=generation_prompt, tokenize=False)

    def turn(self, i: int) -> _Turn:
        """Assistant turn i behind its generation prompt, verified; raises ChatError where it cannot be."""
        if i == 0:
            raise ChatError("messages[0] is an assistant turn that nothing prompts - put another message before it")
        prompt, text = self.render(self.messages[:i], True), self.render(self.messages[: i + 1])
        rest = self._behind_prompt(i, prompt, text)
        span = self._stop_in(i, text, rest)
        appended = "" if span else self._missing_stop(i, text)
        if _lost(self.messages[i], _squeeze(rest)):
            # What must be generated may begin in the prompt: a content that opens <think> as the prompt does.
            plain = self.render(self.messages[:i])
            self.require(i, (prompt[len(plain) :] if prompt.startswith(plain) else "") + rest)
        begin, end = len(prompt), len(prompt) + (span[1] if span else len(rest) + len(appended))
        stop = begin + span[0] if span else end - len(self.encoder.stop.findall(appended)[-1])
        return _Turn(i, prompt + rest + appended, begin, stop, end, bool(appended))

    def _behind_prompt(self, i: int, prompt: str, text: str) -> str:
        """What `text`, the rendering through turn i, holds behind the turn's generation prompt."""
        if text.startswith(prompt):
            return text[len(prompt) :]
        # The turn changes how messages before it are rendered. What inference gives stays what it is; the turn is what
        # stands behind the end of the prompt, if that still stands behind the message before.
        tail = self._behind_message(self.messages[:i], i - 1, prompt, True)
        rest = self._behind_message(self.messages[: i + 1], i - 1, text)
        if tail is None or rest is None or not rest.startswith(tail):
            what = f"the generation prompt of {self.name}, ...{prompt[-32:]!r}, is not in its text of messages[{i}]"
            raise ChatError(f"{what} (assistant) - use a template that begins a turn as it prompts for one")
        return rest[len(tail) :]

    def _behind_message(self, messages: list[Message], i: int, text: str, prompted: bool = False) -> str | None:
        """What `text`, the rendering of `messages`, holds behind the last text of message i; None where unknown."""
        marked = self.render([*messages[:i], _marked(messages[i]), *messages[i + 1 :]], prompted)
        return marked.rpartition(_MARK)[2] if _MARK in marked and marked.replace(_MARK, "") == text else None

    def _stop_in(self, i: int, text: str, rest: str) -> tuple[int, int] | None:
        """Where in `rest` the stop token that ends turn i stands; None where the template writes none."""
        stop = self.encoder.stop
        found = stop.search(rest)
        if found is None:
            return None
        own = sum(len(stop.findall(value)) for _, value in _texts(self.messages[i]) if isinstance(value, str))
        if not own and self.encoder.only_stops.fullmatch(rest, found.end()):
            return found.span()
        behind = self._behind_message(self.messages[: i + 1], i, text)
        if behind is None:
            what = f"cannot tell where {self.name} ends messages[{i}] (assistant): marks in the message change its text"
            raise ChatError(f"{what} - remove template markup from the message")
        end_of_message = max(0, len(rest) - len(behind))
        if len(stop.findall(rest, 0, end_of_message)) > own:
            what = f"{self.name} writes the stop token {found[0]!r} inside messages[{i}] (assistant)"
            raise ChatError(f"{what}, where generation would end - use a template that ends a turn once")
        last = stop.search(rest, end_of_message)
        return last.span() if last else None

    def _missing_stop(self, i: int, text: str) -> str:
        """What a next message would put behind `text`, through a stop token; the eos if that is none."""
        is_last = i + 1 == len(self.messages)
        calls, content = self.messages[i].get("tool_calls"), self.messages[i].get("content")
        probe: Message = {"role": "user"} if is_last else {"role": self.messages[i + 1]["role"]}
        if calls and (is_last or probe["role"] == "tool"):
            probe = {"role": "tool", "name": _function(calls[0]).get("name"), "tool_call_id": calls[0].get("id")}
        probe["content"] = [{"type": "text", "text": _PROBE}] if isinstance(content, list) else _PROBE
        through = [*self.messages[: i + 1], probe]
        try:
            probed = self.render(through)
        except ChatError:
            probed = ""  # a template that refuses the probe cannot say what follows
        behind = probed[len(text) :] if probed.startswith(text) else None
        if probed and behind is None:
            # The probe changes how the turn itself is rendered (reasoning dropped): compare behind its last text.
            tail, after = self._behind_message(through[:-1], i, text), self._behind_message(through, i, probed)
            if tail is not None and after is not None and after.startswith(tail):
                behind = after[len(tail) :]
        head, found_probe, _ = (behind or "").partition(_PROBE)
        stop = self.encoder.stop.search(head) if found_probe else None
        if stop is None and not is_last:
            what = f"{self.name} writes no stop token behind messages[{i}] (assistant)"
            raise ChatError(f"{what} - use a template that ends every turn, or data.loss_on=last")
        return head[: stop.end()] if stop else self.encoder.eos_text

    def require(self, i: int, text: str) -> None:
        """Raises ChatError when `text` leaves out something of message i, naming what."""
        lost = _lost(self.messages[i], _squeeze(text))
        if lost is not None:
            what = f"{self.name} leaves out the {lost} of messages[{i}] ({self.messages[i]['role']})"
            raise ChatError(f"{what} - remove it from the record, or use a template that writes it")

    def notes(self, turns: list[_Turn]) -> list[str]:
        """What is odd about the record and yet exact; raises ChatError where contents are written as code."""
        if not turns:
            return []
        notes, squeezed = [], _squeeze(turns[-1].text)
        for message in self.messages[: turns[-1].index + 1]:
            parts = message.get("content")
            if isinstance(parts, list) and _holds(squeezed, str(parts)):
                what = f"{self.name} writes a list of text parts as code"
                raise ChatError(f"{what} - give the content of a message as one text")
            lost = _lost(message, squeezed)
            if lost and message["role"] != "assistant":
                notes.append(f"{self.name} leaves out the {lost} of a {message['role']} message")
        if any(not _holds(squeezed, _function(tool).get("name")) for tool in self.tools or []):
            notes.append(f"{self.name} leaves out the tools")
        for turn in turns:
            texts = [(what, v) for what, v in _texts(self.messages[turn.index]) if isinstance(v, str)]
            if any(self.encoder.stop.search(value) for _, value in texts):
                notes.append("an assistant turn holds the text of a stop token: generation would end there")
            if any(what.startswith("arguments") and '"' in v and v not in turn.text for what, v in texts):
                notes.append(f"{self.name} encodes tool-call arguments given as JSON text again: give them as objects")
        return list(dict.fromkeys(notes))

    def roles(self, text: str, offsets: Offsets, turns: list[_Turn]) -> list[str]:
        """A role for each token, where asked for: texts are looked up one behind another, at best effort."""
        if not self.with_roles:
            return []
        spans, at = [], 0
        for message in self.messages:
            for body in (value.strip() for _, value in _texts(message) if isinstance(value, str)):
                if body and (found := text.find(body, at)) >= 0:
                    at = found + len(body)
                    spans.append((found, at, message["role"]))
        spans += [(turn.begin, turn.end, "assistant") for turn in turns]
        spans += [(turn.stop, turn.end, "appended") for turn in turns if turn.appended and turn.end == len(text)]
        roles = ["template"] * len(offsets)
        for begin, end, role in spans:
            first, last = bisect_left(offsets, (begin, -1)), bisect_left(offsets, (end, -1))
            roles[first:last] = [role] * (last - first)
        return roles


def _function(call: Any) -> dict[str, Any]:
    """The {name, arguments} of a tool call (or tool), which stand under `function` or for themselves."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


def _texts(message: Message) -> Iterator[tuple[str, Any]]:
    """(what it is, value) of everything that a message says; values in tool-call arguments may be numbers."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield "text", text
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if isinstance(reasoning, str):
        yield "reasoning", reasoning
    for call in message.get("tool_calls") or []:
        name = _function(call).get("name")
        yield "name of a tool call", name
        for value in _leaves(_function(call).get("arguments")):
            yield f"arguments of tool call {name!r}", value


def _leaves(value: Any) -> list[Any]:
    """The keys and values in tool-call arguments."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, list) else [value]


def _squeeze(text: str) -> str:
    """`text` without what a template may change when it writes a value: whitespace, quotes and escapes."""
    return "".join(text.split()).replace("\\", "").replace('"', "").replace("'", "")


def _holds(squeezed: str, value: Any, times: int = 1) -> bool:
    """Whether a squeezed text holds a value so many times, as it is or in one of the ways to write it as JSON."""
    if value is None or squeezed.count(_squeeze(str(value))) >= times:
        return True
    forms = (_squeeze(json.dumps(value, ensure_ascii=ascii_only)) for ascii_only in (False, True))
    return any(squeezed.count(form) >= times for form in forms)


def _lost(message: Message, squeezed: str) -> str | None:
    """What the first thing of a message is that a squeezed text does not hold."""
    seen: Counter[tuple[type, Any]] = Counter()  # two calls alike must be there twice
    for what, value in _texts(message):
        seen[type(value), value] += 1
        if not _holds(squeezed, value, seen[type(value), value]):
            return what
    return None


def _marked(value: Any, everything: bool = False) -> Any:
    """A message with a mark at the end of each of its texts; roles, names and types stay what they are."""
    if isinstance(value, dict):
        marked = {key: _marked(inner, everything or key == "arguments") for key, inner in value.items()}
        return marked if everything else {key: marked[key] if key in _TEXT_KEYS else value[key] for key in value}
    if isinstance(value, list):
        return [_marked(inner, everything) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value  # for an empty text templates often write nothing
    body = value.rstrip()  # a trim stays a trim
    return body + _MARK + value[len(body) :]


def _date_macro(date: datetime.date) -> str:
    """Template code that fixes `strftime_now`: as arguments transformers gives a template plain data, no functions."""
    values = {directive: date.strftime(directive) for directive in _DATE_DIRECTIVES}
    values |= {"%-d": str(date.day), "%-m": str(date.month), "%e": f"{date.day:2}"}
    replaced = "".join(f"|replace({directive!r}, {value!r})" for directive, value in values.items())
    return "{% macro strftime_now(format) %}{{ format" + replaced + " }}{% endmacro +%}"
