"""Small tokenizers and chat templates, and what an encoder trains with them."""

import datetime
import itertools
import operator
from pathlib import Path

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shardtune.data.chat_encoder import ChatEncoder, EncodedSequence
from shardtune.data.records import Conversation

DATE = datetime.date(2026, 3, 9)
CASES = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "chat" / "cases.yaml").read_text(encoding="utf-8")
)
TEMPLATES = CASES["templates"]
CHATML = TEMPLATES["chatml"]


def bytes_tokenizer(
    template: str | dict[str, str] = CHATML, stops: str = "<|im_end|>", more: str = ""
) -> PreTrainedTokenizerFast:
    """A token a byte, but two line breaks are one token, as in large vocabularies.

    `more`: other added tokens.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "Ġa"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ"), ("Ġ", "a")]))
    split = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?\w+|\s+|[^\s\w]+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=stops.split()[0])
    tokenizer.add_tokens(["<|im_start|>", *stops.split(), *more.split()], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def words_tokenizer(kind: str, template: str = CHATML) -> PreTrainedTokenizerFast:
    """Like Llama 2's: words with `▁` in front, the first one too, and `<s>` before plain text."""
    backend = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if kind == "first" else "always"
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="first" if kind == "first" else "always")
    words = ["hello world Paris is the capital of France assistant user \n : . "] * 3
    special = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
    more = {"unk_token": "<unk>"} if kind == "unigram" else {}
    backend.train_from_iterator(
        words, trainer(vocab_size=120, special_tokens=special, show_progress=False, **more)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def user(text: object) -> dict:
    return {"role": "user", "content": text}


def answer(text: object, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(arguments: object, name: str = "f") -> dict:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def encoder(
    template: str | dict[str, str] = CHATML,
    loss_on: str = "assistant",
    stops: str = "<|im_end|>",
    more: str = "",
) -> ChatEncoder:
    tokenizer = bytes_tokenizer(template, stops, more)
    stop_ids = tokenizer.convert_tokens_to_ids(stops.split())
    return ChatEncoder(tokenizer, stop_ids, loss_on, DATE, "T")


def show(tokenizer: PreTrainedTokenizerFast, sequence: EncodedSequence) -> str:
    """The text of a sequence with its trained runs in ‹ ›."""
    pairs = zip(sequence.trained, sequence.input_ids, strict=True)
    runs = []
    for flag, run in itertools.groupby(pairs, key=operator.itemgetter(0)):
        text = tokenizer.decode([token for _, token in run])
        runs.append(f"‹{text}›" if flag else text)
    return "".join(runs)


def shown(chat: ChatEncoder, messages: list, tools: list | None = None) -> list[str]:
    """The sequences of a conversation, as `show` writes them."""
    sequences = chat.encode(Conversation(messages, tools)).sequences
    return [show(chat.tokenizer, sequence) for sequence in sequences]


TWO_TURNS = [user("q1"), answer("a1"), user("q2"), answer("a2")]
Q1, Q2 = "<|im_start|>user\nq1<|im_end|>\n", "<|im_start|>user\nq2<|im_end|>\n"
A = "<|im_start|>assistant\n"
