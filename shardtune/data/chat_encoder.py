"""The trained tokens of a record: those that the model must generate, through its stop token.

At inference the model gets P = the messages before a turn, rendered with a generation prompt. It
must then write T = what the template writes after that prompt for the turn, through the stop
token. So the text of a trained turn is P + T, with T trained. A conversation fits into one
sequence when its rendering begins with P + T of every trained turn. Where it does not (the template
rewrites earlier turns), each turn is a sequence of its own.

Contents are never searched for: they may be trimmed, repeated, or hold template markup. T is found
because the rendering begins with P, its end because only stop tokens follow. Otherwise the
conversation is rendered again with marks at the end of a message's texts, which count only if the
rendering is the same without them. A turn that cannot be verified is refused with a `ChatError`.
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
class EncodedSequence:
    """One sequence before packing; every list has one entry a token.

    `trained[i]`: the loss counts token i as a target; never the first token, which nothing
    predicts. `roles`, for display and empty unless asked for: the role of the message that holds
    token i, `template` for the template's own text, `appended` for a stop token that it does not
    write, `text` for plain text.
    """

    input_ids: list[int]
    trained: list[bool]
    roles: list[str]


@dataclass(frozen=True)
class EncodedRecord:
    """The sequences of one record, in the order of their turns.

    `added_tokens`: how many tokens more they have than one rendering of the whole conversation.
    `appended_stop`: the rendering lacks the last turn's stop token, which was appended. `notes`:
    sentences for the user.
    """

    sequences: list[EncodedSequence]
    added_tokens: int = 0
    appended_stop: bool = False
    notes: tuple[str, ...] = ()


def stop_token_ids(tokenizer: Any, model_path: str) -> list[int]:
    """Return the ids that end a turn: the tokenizer's eos, then the model's `eos_token_id`s.

    Those come from the generation config or, where that names none, from the model's config.
    `model_path` is a local directory or a hub id.

    Raises:
        OSError: neither config can be read.
        UserError: there is no id, or one that is not a token's number.
    """
    try:
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        if (Path(model_path) / "generation_config.json").exists():
            raise  # it exists and cannot be read
        declared = None
    if declared is None:
        text_config = AutoConfig.from_pretrained(model_path).get_text_config()
        declared = getattr(text_config, "eos_token_id", None)
    declared = declared if isinstance(declared, (list, tuple)) else [declared]
    ids = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *declared] if i is not None))
    if any(type(i) is not int or not 0 <= i < 2**32 for i in ids):
        raise UserError(
            f"{model_path} has eos_token_id {declared}, which is no token's number - "
            "correct its configuration"
        )
    if not ids:
        raise UserError(
            f"{model_path} names no end-of-sequence token - "
            "set eos_token_id in its generation_config.json"
        )
    return ids


class ChatEncoder:
    """Turns records, as `check_record` returns them, into token ids and their trained flags.

    Keeps nothing between records and can be pickled.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop_token_ids: the tokens at which generation stops.
        loss_on: `assistant` (every assistant turn), `last` (the last one) or `all` (every token
            but the first of a sequence, special tokens included).
        date: the date for templates that insert today's (`template.uses_date`), fixed so that the
            same data gives the same tokens tomorrow.
        template_name: the template's name in messages.

    Raises:
        UserError: the tokenizer gives no character offsets or has no stop token.
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
                f"{type(tokenizer).__name__} gives no character offsets - "
                "use one with a tokenizer.json"
            )
        texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in stop_token_ids}
        # A text cannot hold an id that the tokenizer cannot write (a padded vocabulary).
        texts = {i: text for i, text in texts.items() if text}
        if not texts:
            raise UserError(
                "the tokenizer has no stop token - set its eos_token or the model's eos_token_id"
            )
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.stop_token_ids = list(texts)
        eos_id = tokenizer.eos_token_id
        self._eos_id = eos_id if eos_id in texts else self.stop_token_ids[0]
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

        Without an assistant turn nothing is trained, unless `loss_on` is `all`.

        Raises:
            ChatError: the template raises, or its text does not show what must be generated.
        """
        chat = Conversation(self.template, messages, tools, with_roles)
        assistant = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        if not assistant or self.loss_on == "all":
            return self._encode_whole(chat, assistant)
        turns = [chat.turn(i) for i in (assistant[-1:] if self.loss_on == "last" else assistant)]
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
                    "a turn would begin inside the prompt's last token: "
                    "tokenized apart, as generation does"
                )
                sequence = self._encode(chat, turn.text, [turn], apart=True)
            sequences += sequence
        added = 0
        if len(turns) > 1:
            added = sum(len(s.input_ids) for s in sequences) - len(self._tokenize(whole)[0])
        return EncodedRecord(sequences, added, last.appended, tuple(dict.fromkeys(notes)))

    def encode_prompt_completion(
        self, prompt: Text, completion: Text, tools: Tools = None, *, with_roles: bool = False
    ) -> EncodedRecord:
        """Encode a prompt and its completion; the completion and one end token are trained.

        Two texts: the prompt's tokens are those that the model gets at inference, with BOS, even
        where the completion would merge into the last of them; `loss_on=all` trains them too. Two
        lists of messages: one conversation, in which only the completion's turns are trained.

        Raises:
            ChatError: as `encode_messages`, or the tokenizer cannot begin a text as the completion.
        """
        if not isinstance(prompt, str) or not isinstance(completion, str):
            return self.encode_messages(
                [*prompt, *completion], tools, with_roles=with_roles, first=len(prompt)
            )
        ids, _, length = self._tokenize_apart(prompt + completion, len(prompt))
        prompt_ids = self._with_bos(ids[:length])
        roles = ["user"] * len(prompt_ids) + ["assistant"] * (len(ids) - length)
        trained = [role == "assistant" or self.loss_on == "all" for role in roles]
        return self._with_stop(prompt_ids + ids[length:], trained, roles if with_roles else [])

    def encode_text(self, text: str, *, with_roles: bool = False) -> EncodedRecord:
        """Encode a plain text, all trained, with the tokenizer's BOS and an eos, each once."""
        ids = self._with_bos(self._tokenize(text)[0])
        return self._with_stop(ids, [True] * len(ids), ["text"] * len(ids) if with_roles else [])

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Prepend the tokenizer's BOS, unless `ids` begins with it (a rendered text)."""
        return ids if ids[: len(self._bos_ids)] == self._bos_ids else self._bos_ids + ids

    def _with_stop(self, ids: list[int], trained: list[bool], roles: list[str]) -> EncodedRecord:
        """Append the eos, unless `ids` ends with a trained stop token."""
        appended = not ids or ids[-1] not in self.stop_token_ids or not trained[-1]
        if appended:
            ids, trained = [*ids, self._eos_id], [*trained, True]
            roles = [*roles, "appended"] if roles else []
        sequence = EncodedSequence(ids, [False, *trained[1:]], roles)
        return EncodedRecord([sequence], appended_stop=appended)

    def _encode_whole(self, chat: Conversation, assistant: list[int]) -> EncodedRecord:
        """Encode the conversation as one sequence, all of it trained (`all`) or nothing."""
        turns = [chat.turn(i) for i in assistant[-1:] if i == len(chat.messages) - 1]
        text = turns[0].text if turns else chat.render(chat.messages)
        for i in assistant:
            chat.require_texts(i, text)
            chat.require_parts(i, chat.messages)
        ids, offsets = self._tokenize(text)
        trained = [self.loss_on == "all" and t > 0 for t in range(len(ids))]
        sequence = EncodedSequence(ids, trained, chat.roles(text, offsets, turns))
        appended = any(turn.appended for turn in turns)
        return EncodedRecord([sequence], 0, appended, tuple(chat.notes(turns)))

    def _compare_marks(self, chat: Conversation, encoded: EncodedSequence) -> list[str]:
        """Return a note if the template's own {% generation %} marks train other tokens."""
        if self.loss_on != "assistant" or not _GENERATION_TAG.search(chat.source):
            return []
        marked = chat.apply(
            chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        marked_flags = [flag == 1 for flag in marked["assistant_masks"]]
        if marked_flags == encoded.trained[: len(marked["input_ids"])]:
            return []
        return [
            f"the {{% generation %}} marks of {self.template.name} train other tokens; "
            "they are not used"
        ]

    def _tokenize(self, text: str) -> tuple[list[int], Offsets]:
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return out["input_ids"], out["offset_mapping"]

    def _encode(
        self, chat: Conversation, text: str, turns: list[Turn], apart: bool = False
    ) -> list[EncodedSequence]:
        """Return one sequence that trains the turns; none if a prompt has other tokens in it than
        at inference."""
        if apart:
            ids, offsets, _ = self._tokenize_apart(text, turns[0].begin)
        else:
            ids, offsets = self._tokenize(text)
        trained = [False] * len(ids)
        for turn in turns:
            first = self._prompt_length(text, ids, offsets, turn.begin)
            if first is None:
                return []
            end = self._stop_position(ids, offsets, first, turn.stop)
            trained[first : end + 1] = [True] * (end + 1 - first)
        return [EncodedSequence(ids, [False, *trained[1:]], chat.roles(text, offsets, turns))]

    def _prompt_length(self, text: str, ids: list[int], offsets: Offsets, begin: int) -> int | None:
        """Count the `ids` of the prompt text[:begin]; None if inference tokenizes it otherwise."""
        # Added tokens (markup) split the text before all else: look from the last of them on.
        last = bisect_left(offsets, (begin, -1)) - 1
        while last > 0 and ids[last] not in self._added_ids:
            last -= 1
        last = max(last, 0)
        prompt = self._tokenize(text[offsets[last][0] if last else 0 : begin])[0]
        return last + len(prompt) if ids[last : last + len(prompt)] == prompt else None

    def _stop_position(self, ids: list[int], offsets: Offsets, first: int, stop: int) -> int:
        """Return the position, from `first` on, of the stop token that covers character `stop`."""
        position = next((t for t in range(first, len(ids)) if offsets[t][1] > stop), -1)
        if position < 0 or ids[position] not in self.stop_token_ids:
            raise ChatError(
                f"the tokenizer writes the stop token of {self.template.name} as other tokens - "
                "check the model's eos_token_id against the template"
            )
        return position

    def _tokenize_apart(self, text: str, begin: int) -> tuple[list[int], Offsets, int]:
        """Tokenize text[:begin] as inference does, then the rest; also count the prompt's tokens.

        The tokens differ from those of the whole text only where the two would merge.
        """
        left, left_offsets = self._tokenize(text[:begin])
        joint, offsets = self._tokenize(text)
        if joint[: len(left)] == left:
            return joint, offsets, len(left)
        right, right_offsets = self._tokenize(text[begin:])
        joint_text, apart_text = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (joint, left + right)
        )
        if joint_text != apart_text:
            raise ChatError(
                f"the tokenizer cannot begin a text with {text[begin:][:20]!r} "
                f"behind {text[:begin][-20:]!r} - "
                "move the whitespace between them from one to the other"
            )
        offsets = left_offsets + [(a + begin, b + begin) for a, b in right_offsets]
        return left + right, offsets, len(left)
