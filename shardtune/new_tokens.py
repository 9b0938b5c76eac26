"""`model.new_tokens`: tokens that the source's tokenizer lacks, and what their rows are made of.

The row of a new token, of the embedding and of the head, is the mean of the rows of the pieces in
which the source's tokenizer wrote its text. Rows behind the tokenizer's tokens come first; where
they do not suffice, the vocabulary grows to the next multiple of 64; rows of growth that no token
gets are the mean of all these. A text that is a token already keeps its row, as its own piece; with
adapters that row trains like a new one (`lora.rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from shardtune.config import ModelConfig
from shardtune.errors import UserError
from shardtune.hub import read_config_json

ROWS_OF_GROWTH = 64  # the vocabulary grows to a multiple of these
PIECES = "pieces_of_new_tokens"  # where a model's configuration has them, by the text of the id


class NewTokens(NamedTuple):
    """The pieces of each token that is named, by its id, and sentences about tokens that exist."""

    pieces: dict[int, list[int]]
    notes: list[str]

    @classmethod
    def of(cls, config: Any) -> NewTokens:
        """Return the tokens that `read_model_config` wrote into a model's configuration."""
        # A flat config.json of a model that also sees has them above the text's own section.
        given = getattr(config, PIECES, None) or getattr(config.get_text_config(), PIECES, {})
        return cls({int(i): pieces for i, pieces in given.items()}, [])

    def vocabulary(self, vocabulary: int) -> int:
        """Return the rows of a source's embedding that has so many, with those of new tokens.

        Raises UserError if a piece has no row in the source.
        """
        if (last := max((max(ids) for ids in self.pieces.values()), default=0)) >= vocabulary:
            raise UserError(
                f"model.new_tokens: the tokenizer has token {last}, the model {vocabulary} rows - "
                "give the model more by resize_token_embeddings, or the tokenizer fewer tokens"
            )
        needed = max(self.pieces, default=-1) + 1
        return vocabulary if needed <= vocabulary else -(-needed // ROWS_OF_GROWTH) * ROWS_OF_GROWTH


def read_new_tokens(model: ModelConfig) -> NewTokens:
    """Read the source's tokenizer, and return what add_new_tokens returns, and raises."""
    if not model.new_tokens:
        return NewTokens({}, [])
    config = read_config_json(model.path)
    return add_new_tokens(AutoTokenizer.from_pretrained(model.path, config=config), model)


def add_new_tokens(tokenizer: Any, model: ModelConfig) -> NewTokens:
    """Add the tokens to the source's tokenizer. Raises UserError: every problem at once."""
    given = model.new_tokens
    by_kind = given if isinstance(given, Mapping) else {"plain": given}
    texts = [text for of_kind in by_kind.values() for text in of_kind]
    known = tokenizer.get_vocab()
    spellings, added = {token.casefold(): token for token in known}, tokenizer.added_tokens_decoder
    pieces = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts}
    problems, notes, old = [], list[str](), set[str]()
    for text, count in Counter(texts).items():
        ids = pieces[text]
        read = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if count > 1:
            problems.append(f"{text!r} stands there {count} times - name it once")
        elif read.strip(" ") != text.strip(" "):
            problems.append(f"the tokenizer reads {text!r} as {read!r} - name another text")
        elif len(ids) == 1 and read == text:
            notes.append(f"model.new_tokens: {text!r} is a token already, and keeps its row")
            old.add(text)
        elif text in known:  # of a tokenizer that has other characters for bytes
            problems.append(f"{text!r} is how the tokenizer writes other bytes - name another text")
        elif within := next((added[i].content for i in ids if i in added), ""):
            problems.append(f"{text!r} has the token {within!r} in it - name the rest alone")
        elif (other := spellings.get(text.casefold())) is not None:
            notes.append(f"model.new_tokens: {text!r} is the token {other!r} but for its case")
    for kind, of_kind in by_kind.items():
        is_special, lacking = kind == "special", [text for text in of_kind if text not in old]
        tokens = [AddedToken(text, normalized=False, special=is_special) for text in lacking]
        tokenizer.add_tokens(tokens, special_tokens=is_special)
    new = {text: tokenizer.convert_tokens_to_ids(text) for text in texts if text not in old}
    for text, i in new.items():
        if tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"].count(i) != 1:
            problems.append(f"the tokenizer does not write {text!r} as one token - name another")
    if problems:
        raise UserError(*(f"model.new_tokens: {problem}" for problem in problems))
    of_old = {pieces[text][0]: pieces[text] for text in texts if text in old}
    return NewTokens(of_old | {i: pieces[text] for text, i in new.items()}, notes)


class WithNewRows:
    """A tensor in a file, of a row for each token, with the rows of new tokens, in float32."""

    def __init__(self, stored: Any, new: NewTokens) -> None:
        self._stored, self._new = stored, new
        self._rows, *self._others = stored.get_shape()

    def get_shape(self) -> list[int]:
        return [self._new.vocabulary(self._rows), *self._others]

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a box of the tensor."""
        cuts = (slice(None),) if index is Ellipsis else index
        first, others = range(self.get_shape()[0])[cuts[0]], tuple(cuts[1:])
        own = slice(min(first.start, self._rows), min(first.stop, self._rows))
        content = self._read(own, others)
        if lacking := len(first) - len(content):
            # Zeros would be likelier than all tokens of a model whose logits are all negative.
            means = [self.mean(pieces, others) for pieces in self._new.pieces.values()]
            mean = torch.stack(means).mean(0, keepdim=True)
            content = torch.cat([content, *[mean] * lacking])
        for row, pieces in self._new.pieces.items():
            if row in first:
                content[row - first.start] = self.mean(pieces, others)
        return content

    def only_new(self) -> _NewRows:
        return _NewRows(self, [pieces for _, pieces in sorted(self._new.pieces.items())])

    def _read(self, rows: slice, others: tuple[slice, ...]) -> torch.Tensor:
        part: torch.Tensor = self._stored[(rows, *others)]
        return part.float()

    def mean(self, pieces: Sequence[int], others: tuple[slice, ...]) -> torch.Tensor:
        return torch.cat([self._read(slice(i, i + 1), others) for i in pieces]).mean(0)


class _NewRows:
    """The rows of new tokens alone, sorted by their ids."""

    def __init__(self, all_rows: WithNewRows, pieces: Sequence[Sequence[int]]) -> None:
        self._all_rows, self._pieces = all_rows, pieces

    def get_shape(self) -> list[int]:
        return [len(self._pieces), *self._all_rows.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._all_rows.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *others = (slice(None),) if index is Ellipsis else index
        rows = [self._all_rows.mean(ids, tuple(others)) for ids in self._pieces[first]]
        return torch.stack(rows) if rows else self._all_rows[(slice(0, 0), *others)]
