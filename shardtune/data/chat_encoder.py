"""The trained tokens of a record are those that the model must generate, with the stop token."""

# At inference the model gets P = the messages before a turn, rendered with a generation prompt. It
# must then write T = what the template writes after that prompt for the turn, through the stop
# token. So the text of a trained turn is P + T, with T trained. A conversation fits into one
# sequence when its rendering begins with P + T of every trained turn. Where it does not (the
# template rewrites earlier turns), each turn is a sequence of its own.
#
# Contents are never searched for: they may be trimmed, repeated, or hold template markup. T is
# found because the rendering begins with P, its end because only stop tokens follow. Otherwise the
# conversation is rendered again with marks at the end of a message's texts, which count only if
# the rendering is the same without them. A turn that cannot be verified is refused.

from __future__ import annotations

import copy
import datetime
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from shardtune.data.chat_template import NO_OPTIONS, ChatError, ChatTemplate, Options
from shardtune.data.records import Conversation, Note, Outcome, Record, TokenRow, is_empty
from shardtune.data.rendered_chat import RenderedChat, Turn
from shardtune.errors import UserError

_MOST_VARIANTS = 64
_EMPTY: Note = (Outcome.EMPTY_ANSWER, "")
_EMPTY_QUESTION: Note = (Outcome.EMPTY_QUESTION, "")
Offsets = list[tuple[int, int]]


@dataclass(frozen=True)
class TrainedTurn:
    """The tokens [begin, end) of a sequence are the trained turn `message`, with its stop token.

    With `loss_on=all` the whole sequence is one turn. A completion of text is turn 0.
    """

    message: int
    begin: int
    end: int


@dataclass(frozen=True)
class EncodedSequence:
    """One sequence before packing; `input_ids` and `trained` have one entry a token."""

    input_ids: list[int]
    # Their weights as targets of the loss, 0 (untrained) to 1; 0 for the first token, which nothing
    # predicts.
    trained: list[float]
    turns: list[TrainedTurn] = field(default_factory=list)  # a plain text has none


@dataclass(frozen=True)
class EncodedRecord:
    """The sequences of one record, in the order of their turns; none if it trains nothing."""

    sequences: list[EncodedSequence]
    added_tokens: int = 0  # beyond one rendering of the whole conversation
    appended_stop: bool = False  # which the rendering of the last turn lacks
    apart: Outcome | None = None  # why its turns do not stand in one rendering
    notes: tuple[Note, ...] = ()  # its other outcomes
    # Of the whole record, if it did not fit and `sequences` hold its leading turns alone.
    too_long: list[EncodedSequence] = field(default_factory=list)

    def fits(self, max_length: int) -> bool:
        """Whether every sequence has at most `max_length` tokens."""
        return all(len(sequence.input_ids) <= max_length for sequence in self.sequences)


def stop_token_ids(tokenizer: Any, model_path: str, model_config: PreTrainedConfig) -> list[int]:
    """Return the ids that end a turn: the tokenizer's eos, then the model's `eos_token_id`s.

    The model's ids are in the generation config or, where that names none, in the model's config.
    Raises OSError where the generation config cannot be read.
    """
    try:
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        if (Path(model_path) / "generation_config.json").exists():
            raise  # it exists and cannot be read
        declared = None
    if declared is None:
        declared = getattr(model_config.get_text_config(), "eos_token_id", None)
    declared = declared if isinstance(declared, list) else [declared]
    return [i for i in dict.fromkeys([tokenizer.eos_token_id, *declared]) if i is not None]


class ChatEncoder:
    """Turns records into token ids and their trained flags. It can be pickled.

    `stop_token_ids`: where generation stops, first the eos, with which a text ends; UserError if
    the tokenizer has no eos. `date`: for templates that insert today's, so that the same data gives
    the same tokens tomorrow. `name` and `options`: of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int],
        loss_on: str,
        date: datetime.date,
        name: str = "the chat template",
        options: Options = NO_OPTIONS,
    ) -> None:
        texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in stop_token_ids}
        # A text cannot hold an id that the tokenizer cannot write (a padded vocabulary).
        texts = {i: text for i, text in texts.items() if text}
        if not texts:
            remedy = "set its eos_token, or eos_token_id in the model's generation_config.json"
            raise UserError(f"the tokenizer has no stop token - {remedy}")
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.stop_token_ids = list(texts)
        self.template = ChatTemplate(tokenizer, name, date, list(texts.values()), options)
        self._variants: dict[str, ChatEncoder] = {}
        self._added_ids = set(tokenizer.get_added_vocab().values())
        self._largest_id = max(tokenizer.get_vocab().values())
        plain, full = self._tokenize("a")[0], tokenizer("a")["input_ids"]
        self.bos_ids: list[int] = next(
            (full[:k] for k in range(len(full)) if full[k : k + len(plain)] == plain), []
        )

    def variant(self, loss_on: str, options: Options) -> ChatEncoder:
        """Return an encoder with another `loss_on`, and with more options for the template."""
        if not options and loss_on == self.loss_on:
            return self
        key = json.dumps([loss_on, options], sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= _MOST_VARIANTS:  # each record may bring options
                self._variants.clear()
            encoder = copy.copy(self)
            encoder.loss_on = loss_on
            if options:
                encoder.template = self.template.with_options(options)
            self._variants[key] = encoder
        return self._variants[key]

    def encode(self, record: Record) -> EncodedRecord:
        """Encode a record. Raises RecordError where it cannot be encoded exactly."""
        if isinstance(record, Conversation):
            return self.part_encoder(record)(len(record.messages))
        if isinstance(record, TokenRow):
            return self._encode_tokens(record)
        if record.prompt is None:
            ids = self._with_bos(self._tokenize(record.text)[0])
            return self._with_stop(ids, [True] * len(ids))
        return self._encode_completion(record.prompt, record.text)

    def part_encoder(self, conversation: Conversation) -> Callable[[int], EncodedRecord]:
        """Return a function of `end` that encodes messages[:end] of a conversation.

        The turns to train are chosen from all messages, each is verified once. Raises ChatError
        where their text does not show what must be generated, UserError without a chat template.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the data has messages, and the tokenizer of {self.tokenizer.name_or_path} has no "
                "chat template - use that of an instruction-tuned model, name a file with one in "
                "data.chat_template, or write records with prompt and completion, or text"
            )
        messages, tools, notes = self.template.in_its_form(conversation)
        chat = RenderedChat(self.template, messages, tools)
        trained, weights = self._choose_turns(conversation, notes)

        def encode_part(end: int) -> EncodedRecord:
            within = {i: weights.get(i, 1.0) for i in trained if i < end}
            if self.loss_on == "all":
                lighter = {i: w for i, w in weights.items() if w < 1 and i < end}
                encoded = self._encode_all(chat, within, lighter, end)
            else:
                encoded = self._encode_turns(chat, within, end)
            empty = [_EMPTY for i in within if is_empty(messages[i])]
            asked = (m for m in messages[:end] if m["role"] == "user")
            empty += [_EMPTY_QUESTION for message in asked if is_empty(message)]
            of_all = notes if end == len(messages) else ()
            return replace(encoded, notes=(*of_all, *encoded.notes, *empty))

        return encode_part

    def _choose_turns(
        self, conversation: Conversation, notes: list[Note]
    ) -> tuple[list[int], dict[int, float]]:
        """Return the turns that are trained, and the weights that marks give to turns."""
        messages, flags = conversation.messages, conversation.weights
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        trained = [i for i in answers if i >= conversation.first]
        if self.loss_on == "last":
            trained = trained[-1:]
        elif self.loss_on == "all" and (others := [i for i in flags if i not in answers]):
            raise ChatError(
                f"messages[{others[0]}] ({messages[others[0]]['role']}) is not to be trained, and "
                "data.loss_on=all trains every message - remove its flag, or choose another"
            )
        if trained[:1] == [0] and self.loss_on != "all":  # no prompt leads to it: it is context
            trained = trained[1:]
            notes.append((Outcome.LEADING_ANSWER, ""))
        marked = [i for i in answers if flags.get(i) and i not in trained]
        notes += [(Outcome.TRAINED_BY_MARK, self.loss_on)] * len(marked)
        return [i for i in answers if flags.get(i, i in trained)], flags

    def _encode_turns(
        self, chat: RenderedChat, trained: dict[int, float], end: int
    ) -> EncodedRecord:
        """Encode messages[:end], in which these turns are trained, by their weights."""
        turns = [replace(chat.turn(i), weight=weight) for i, weight in trained.items()]
        if not turns:
            return EncodedRecord([])
        is_last = turns[-1].index == end - 1
        text = turns[-1].text if is_last else chat.render(chat.messages[:end])
        notes = tuple(chat.notes(text)) if end == len(chat.messages) else ()
        notes += tuple(note for turn in turns if (note := chat.empty_thought(turn)))
        has_longer_prompt = any(turn.has_longer_prompt for turn in turns)
        if not has_longer_prompt and (sequence := self._encode_whole(text, turns)):
            return EncodedRecord([sequence], 0, is_last and turns[-1].appended, notes=notes)
        sequences = [self._encode_turn(turn) for turn in turns]
        apart = Outcome.TURNS_APART if len(turns) > 1 else None
        if has_longer_prompt:
            apart, text = Outcome.LONGER_PROMPT, chat.render(chat.messages[:end])
        added = 0
        if apart:
            added = sum(len(s.input_ids) for s in sequences) - len(self._tokenize(text)[0])
        return EncodedRecord(sequences, added, turns[-1].appended, apart, notes)

    def _encode_all(
        self, chat: RenderedChat, trained: Iterable[int], lighter: dict[int, float], end: int
    ) -> EncodedRecord:
        """Encode messages[:end]; all tokens are trained, those of `lighter` turns by weight."""
        if not end:
            return EncodedRecord([])
        messages, appended = chat.messages[:end], False
        text = chat.render(messages)
        if messages[-1]["role"] == "assistant":  # the stop token may have to be appended
            last = RenderedChat(self.template, messages, chat.tools).turn(end - 1)
            text, appended = last.text, last.appended
        for i in trained:
            chat.require_texts(i, text)
            chat.require_parts(i, messages)
        ids, offsets = self._tokenize(text)
        flags: list[float] = [t > 0 for t in range(len(ids))]
        for i, weight in lighter.items():
            turn = chat.turn(i)
            if not text.startswith(turn.text[: turn.end]):
                said = f"is to count {weight:g}" if weight else "is not to be trained"
                raise ChatError(
                    f"{self.template.name} rewrites messages[{i}] (assistant), which {said} - "
                    "choose data.loss_on=assistant"
                )
            for t, (begin, stop) in enumerate(offsets):
                if stop > turn.begin and begin < turn.end:
                    flags[t] *= weight
        sequence = EncodedSequence(ids, flags, [TrainedTurn(end - 1, 0, len(ids))])
        notes = tuple(chat.notes(text)) if end == len(chat.messages) else ()
        return EncodedRecord([sequence], 0, appended, notes=notes)

    def _encode_completion(self, prompt: str, completion: str) -> EncodedRecord:
        """Encode two texts; the completion and one end token are trained.

        The prompt has the tokens that the model gets at inference, with BOS, even where the
        completion would merge into the last one; `loss_on=all` trains it too.
        """
        self.template.require_closed("completion", completion)
        ids, _, length = self._tokenize_apart(prompt + completion, len(prompt))
        prompt_ids = self._with_bos(ids[:length])
        trained: list[float] = [self.loss_on == "all"] * len(prompt_ids)
        trained += [True] * (len(ids) - length)
        encoded = self._with_stop(prompt_ids + ids[length:], trained, len(prompt_ids))
        empty = [_EMPTY_QUESTION] * (not prompt.strip()) + [_EMPTY] * (not completion.strip())
        return replace(encoded, notes=tuple(empty)) if empty else encoded

    def _encode_tokens(self, row: TokenRow) -> EncodedRecord:
        """Encode tokens as they are; those of its mask are trained, or all with `loss_on=all`."""
        if row.loss_mask is None and self.loss_on != "all":
            raise ChatError(
                "has input_ids without labels or loss_mask, which say what is trained - add one, "
                "or train every token by data.loss_on=all, or loss_on: all of the source"
            )
        if (largest := max(row.input_ids)) > self._largest_id:
            raise ChatError(
                f"has the token {largest}, and the largest one of the tokenizer is "
                f"{self._largest_id} - use the tokenizer that wrote the data"
            )
        trained = row.loss_mask or [True] * len(row.input_ids)
        return EncodedRecord([EncodedSequence([*row.input_ids], [False, *trained[1:]])])

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Prepend the tokenizer's BOS, unless `ids` begins with it, as a rendered text may."""
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else self.bos_ids + ids

    def _with_stop(
        self, ids: list[int], trained: list[float], begin: int | None = None
    ) -> EncodedRecord:
        """Append the eos, unless `ids` ends with a trained stop token; a turn begins at `begin`."""
        appended = not ids or ids[-1] not in self.stop_token_ids or not trained[-1]
        if appended:
            ids, trained = [*ids, self.stop_token_ids[0]], [*trained, True]
        turns = [] if begin is None else [TrainedTurn(0, begin, len(ids))]
        sequence = EncodedSequence(ids, [False, *trained[1:]], turns)
        return EncodedRecord([sequence], appended_stop=appended)

    def _encode_whole(self, text: str, turns: list[Turn]) -> EncodedSequence | None:
        """Return one sequence that trains all turns, or None if a turn's prompt differs in it."""
        if not all(text.startswith(turn.text[: turn.end]) for turn in turns):
            return None
        ids, offsets = self._tokenize(text)
        firsts = []
        for turn in turns:
            if (first := self._prompt_length(text, ids, offsets, turn.begin)) is None:
                return None
            firsts.append(first)
        return self._train(ids, offsets, firsts, turns)

    def _encode_turn(self, turn: Turn) -> EncodedSequence:
        """Return a sequence of a turn and its prompt, which is tokenized as at inference."""
        ids, offsets, first = self._tokenize_apart(turn.text, turn.begin)
        return self._train(ids, offsets, [first], [turn])

    def _train(
        self, ids: list[int], offsets: Offsets, firsts: Sequence[int], turns: list[Turn]
    ) -> EncodedSequence:
        """Return the sequence in which each turn is trained from `first` through its stop token."""
        trained: list[float] = [False] * len(ids)
        spans = []
        for first, turn in zip(firsts, turns, strict=True):
            stop = next(t for t, (_, end) in enumerate(offsets) if end >= turn.end)
            if ids[stop] not in self.stop_token_ids:
                raise ChatError(
                    f"the tokenizer writes the stop token of {self.template.name} as other tokens "
                    "- check the model's eos_token_id against the template"
                )
            trained[first : stop + 1] = [turn.weight] * (stop + 1 - first)
            spans.append(TrainedTurn(turn.index, first, stop + 1))
        return EncodedSequence(ids, [False, *trained[1:]], spans)

    def _tokenize(self, text: str) -> tuple[list[int], Offsets]:
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return out["input_ids"], out["offset_mapping"]

    def _prompt_length(self, text: str, ids: list[int], offsets: Offsets, begin: int) -> int | None:
        """Count the `ids` of the prompt text[:begin]; None if inference tokenizes it otherwise."""
        # A tokenizer splits a text at added tokens (markup) first: look from the last one on.
        last = bisect_left(offsets, (begin, -1)) - 1
        while last > 0 and ids[last] not in self._added_ids:
            last -= 1
        last = max(last, 0)
        prompt = self._tokenize(text[offsets[last][0] if last else 0 : begin])[0]
        return last + len(prompt) if ids[last : last + len(prompt)] == prompt else None

    def _tokenize_apart(self, text: str, begin: int) -> tuple[list[int], Offsets, int]:
        """Tokenize text[:begin] as inference does, then the rest; also count the former."""
        # The result differs from the tokens of the whole text only where the parts would merge.
        joint, offsets = self._tokenize(text)
        length = self._prompt_length(text, joint, offsets, begin)
        if length is not None:
            return joint, offsets, length
        left, left_offsets = self._tokenize(text[:begin])
        right, right_offsets = self._tokenize(text[begin:])
        if self._decode(joint) != self._decode(left + right):
            raise ChatError(
                f"the tokenizer cannot begin a text with {text[begin:][:20]!r} "
                f"behind {text[:begin][-20:]!r} - "
                "move the whitespace between them from one to the other",
                kind="the tokenizer cannot begin a text with the completion",
            )
        offsets = left_offsets + [(a + begin, b + begin) for a, b in right_offsets]
        return left + right, offsets, len(left)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
