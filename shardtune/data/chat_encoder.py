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
import re
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from shardtune.data.chat_template import ChatError, ChatTemplate, Conversation, Offsets, Tools, Turn
from shardtune.data.messages import Message
from shardtune.errors import UserError

Text = str | list[Message]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
        declared = getattr(
            AutoConfig.from_pretrained(model_path).get_text_config(), "eos_token_id", None
        )
    declared = declared if isinstance(declared, (list, tuple)) else [declared]
    ids = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *declared] if i is not None))
    if any(type(i) is not int or not 0 <= i < 2**32 for i in ids):
        raise UserError(
            f"{model_path} has eos_token_id {declared}, which is no token's number - correct its configuration"
        )
    if not ids:
        raise UserError(
            f"{model_path} names no end-of-sequence token - set eos_token_id in its generation_config.json"
        )
    return ids


class ChatEncoder:
    """Turns records, in the shape that `check_record` gives them, into token ids and their trained flags.

    `stop_token_ids`: what generation stops at. `loss_on`: `assistant` (every assistant turn), `last` (the last one) or
    `all` (every token but the first of a sequence, special tokens included). `date`: what templates that insert
    today's date get, so that the same data gives the same tokens tomorrow; it matters where `template.uses_date`.
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
            raise UserError(
                f"{type(tokenizer).__name__} gives no character offsets - use one with a tokenizer.json"
            )
        # An id that the tokenizer cannot write (a padded vocabulary) is in no text.
        texts = {
            i: text
            for i in stop_token_ids
            if (text := tokenizer.decode([i], skip_special_tokens=False))
        }
        if not texts:
            raise UserError(
                "the tokenizer has no stop token - set its eos_token or the model's eos_token_id"
            )
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.stop_token_ids = list(texts)
        self._eos_id = (
            tokenizer.eos_token_id if tokenizer.eos_token_id in texts else self.stop_token_ids[0]
        )
        self.template = ChatTemplate(
            tokenizer, template_name, date, list(texts.values()), texts[self._eos_id]
        )
        self._added_ids = set(tokenizer.get_added_vocab().values())
        plain, full = self._tokenize("a")[0], tokenizer("a")["input_ids"]
        self._bos_ids: list[int] = next(
            (full[:k] for k in range(len(full)) if full[k : k + len(plain)] == plain), []
        )

    def encode_messages(
        self,
        messages: list[Message],
        tools: Tools = None,
        *,
        with_roles: bool = False,
        first: int = 0,
    ) -> EncodedRecord:
        """Encode a conversation, in which assistant turns before index `first` are context.

        Without an assistant turn nothing is trained, unless `loss_on` is `all`. Raises ChatError when the template
        raises, or what must be generated cannot be shown to stand in its text.
        """
        chat = Conversation(self.template, messages, tools, with_roles)
        assistant = [
            i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first
        ]
        if not assistant or self.loss_on == "all":
            return self._encode_whole(chat, assistant)
        turns = [
            chat.turn(i) for i in (assistant if self.loss_on == "assistant" else assistant[-1:])
        ]
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
                notes.append(
                    "a turn would begin inside the prompt's last token: tokenized apart, as generation does"
                )
                sequence = self._encode(chat, turn.text, [turn], apart=True)
            sequences += sequence
        added = (
            sum(len(s.input_ids) for s in sequences) - len(self._tokenize(whole)[0])
            if len(turns) > 1
            else 0
        )
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
            return self.encode_messages(
                [*prompt, *completion], tools, with_roles=with_roles, first=len(prompt)
            )
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
            ids, trained, roles = (
                [*ids, self._eos_id],
                [*trained, True],
                [*roles, "appended"] if roles else [],
            )
        return EncodedRecord([Encoded(ids, [False, *trained[1:]], roles)], appended_stop=appended)

    def _encode_whole(self, chat: Conversation, assistant: list[int]) -> EncodedRecord:
        """The conversation in one sequence, of which `all` trains everything and nothing else does anything."""
        turns = [chat.turn(i) for i in assistant[-1:] if i == len(chat.messages) - 1]
        text = turns[0].text if turns else chat.render(chat.messages)
        for i in assistant:
            chat.require(i, text)
            chat.require_written(i, chat.messages)
        ids, offsets = self._tokenize(text)
        trained = [self.loss_on == "all" and t > 0 for t in range(len(ids))]
        sequence = Encoded(ids, trained, chat.roles(text, offsets, turns))
        return EncodedRecord(
            [sequence], 0, any(turn.appended for turn in turns), tuple(chat.notes(turns))
        )

    def _compare_marks(self, chat: Conversation, encoded: Encoded) -> list[str]:
        """A note where the template's own {% generation %} marks train other tokens."""
        if self.loss_on != "assistant" or not _GENERATION_TAG.search(chat.source):
            return []
        marked = chat.apply(
            chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if [flag == 1 for flag in marked["assistant_masks"]] == encoded.trained[
            : len(marked["input_ids"])
        ]:
            return []
        return [
            f"the {{% generation %}} marks of {self.template.name} train other tokens; they are not used"
        ]

    def _tokenize(self, text: str) -> tuple[list[int], Offsets]:
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return out["input_ids"], out["offset_mapping"]

    def _encode(
        self, chat: Conversation, text: str, turns: list[Turn], apart: bool = False
    ) -> list[Encoded]:
        """One sequence that trains the turns, or none where a prompt's tokens are not those of inference."""
        ids, offsets = (
            self._tokenize_apart(text, turns[0].begin)[:2] if apart else self._tokenize(text)
        )
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
            what = f"the tokenizer writes the stop token of {self.template.name} as other tokens"
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
        texts = [
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (joint, left + right)
        ]
        if texts[0] != texts[1]:
            what = f"the tokenizer cannot begin a text with {text[begin:][:20]!r} behind {text[:begin][-20:]!r}"
            raise ChatError(f"{what} - move the whitespace between them from one to the other")
        return (
            left + right,
            left_offsets + [(a + begin, b + begin) for a, b in right_offsets],
            len(left),
        )
