"""`shardtune ask`: a model's most likely answers. transformers opens the model and generates."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, TextStreamer
from transformers.quantizers import AutoHfQuantizer

from shardtune.checkpoint.export.listing import read_listing
from shardtune.checkpoint.run_dir import ADAPTER, BEST
from shardtune.config_io import read_written
from shardtune.distributed.join import native_dtype
from shardtune.distributed.tensors import DTYPES
from shardtune.error_lines import print_errors
from shardtune.errors import UserError
from shardtune.log import quiet_libraries
from shardtune.model.source.config_json import method_of
from shardtune.model.source.files import known_config, model_folder, refusing
from shardtune.model.source.quantised import quantisation_in
from shardtune.model.source.text_model import class_of
from shardtune.model.source.weight_files import ADAPTER_CONFIG, describe
from shardtune.model.traits import number
from shardtune.run_files import METRICS

_LONGEST = 1024  # tokens of an answer
_GENERATION = "generation_config.json"
Chat = list[dict[str, Any]]


def ask(path: str, question: str | None) -> None:
    """Print the answer to a question, else to each line of standard input. Raises UserError."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(path, DTYPES[native_dtype(device)])

    def answer(text: str) -> None:
        readable = text.encode(errors="replace").decode()  # the bytes may be of another encoding
        # One for each answer: one that Ctrl-C has ended leaves tokens in it.
        streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.answer([[{"role": "user", "content": readable}]], _LONGEST, streamer)

    if question is not None:
        answer(question)
        return
    # Ctrl-C ends an answer, or the loop as Ctrl-D does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with contextlib.suppress(ImportError):
        import_module("readline")  # `input` uses it: a terminal cuts lines at 4,095 characters
    problems: list[str] = []
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(prompt).strip():
                try:
                    answer(line)
                except UserError as refusal:
                    if prompt:
                        print_errors(*refusal.problems)
                    else:
                        problems += refusal.problems
                except KeyboardInterrupt:
                    print()
    if problems:
        raise UserError(*problems)
    if prompt:
        print()  # what follows, such as the shell's prompt, gets a line of its own


class Model:
    """A model and its tokenizer: of a run, of the folder of a model or an adapter, or of the hub.

    `options` are the chat template's; None: those of the run that has the folder.

    Raises:
        UserError: it cannot be opened.
    """

    def __init__(
        self, path: str, dtype: torch.dtype, options: Mapping[str, Any] | None = None
    ) -> None:
        self._model: Any
        quiet_libraries(is_main=True)
        transformers.utils.logging.set_verbosity_error()
        path, run = _find(path)
        self._options = (run.get("data.template_options") or {}) if options is None else options
        self._path = path
        try:
            if (file := Path(path) / ADAPTER_CONFIG).is_file():
                with refusing(path, "the adapter cannot be read", "export it again"):
                    base = json.loads(file.read_bytes())["base_model_name_or_path"]
                    self._open(base or "a base that was drawn at random", dtype, path)
                    from peft import PeftModel

                    with warnings.catch_warnings(action="ignore", category=FutureWarning):
                        self._model = PeftModel.from_pretrained(self._model, path)
            else:
                self._open(path, dtype, path)
        except UserError as refusal:
            raise UserError(*(p.removeprefix("model.path=") for p in refusal.problems)) from refusal
        if not self.tokenizer.chat_template:
            print(f"WARNING: {path} has no chat template: it continues your text", file=sys.stderr)

    def _open(self, path: str, dtype: torch.dtype, answering: str) -> None:
        """Open a model, with the tokenizer and the stop tokens of `answering`, if it has them."""
        config, again = known_config(path), "fetch or export the model again"
        has_tokenizer = (Path(answering) / "tokenizer_config.json").is_file()
        with refusing(path, "no tokenizer that transformers can read", again):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                answering if has_tokenizer else path,
                config=config,
                padding_side="left",
                trust_remote_code=False,
            )
        with refusing(path, "its weights cannot be read", again):
            quantisation = quantisation_in(model_folder(path) or Path(path))
            if quantisation and not AutoHfQuantizer.supports_quant_method(quantisation):
                raise ValueError(f"quantised by {method_of(quantisation)}")
            try:
                self._model, report = class_of(config).from_pretrained(
                    path,
                    config=config,
                    dtype=dtype,
                    device_map="auto",
                    trust_remote_code=False,
                    output_loading_info=True,
                )
            except (MemoryError, torch.OutOfMemoryError) as error:
                problem = f"{path}: too little memory is free for it - free some"
                raise UserError(f"{problem}, or hide GPUs: CUDA_VISIBLE_DEVICES=") from error
            if missing := report["missing_keys"]:
                raise ValueError(f"no {min(missing)}, {len(missing)} tensors in all")
        if (Path(answering) / _GENERATION).is_file():
            with refusing(answering, f"no {_GENERATION} that transformers can read", again):
                self._model.generation_config = GenerationConfig.from_pretrained(answering)
        self._positions = number(config.get_text_config(), "max_position_embeddings")

    def answer(
        self, chats: Sequence[Chat], most_tokens: int, streamer: TextStreamer | None = None
    ) -> list[str]:
        """Return the greedy answer to each chat. Raises UserError if one is too long.

        Without a chat template the model continues the last message.
        """
        given: dict[str, Any] = {"padding": len(chats) > 1, "return_tensors": "pt"}
        if self.tokenizer.chat_template:
            given |= {"add_generation_prompt": True, "return_dict": True, **self._options}
            try:
                inputs = self.tokenizer.apply_chat_template(chats, **given)
            except Exception as error:  # a template may raise anything
                raise UserError(
                    f"the chat template of {self._path} refuses the question ({describe(error)}) "
                    "- mend chat_template.jinja there, or ask another model"
                ) from error
        else:
            inputs = self.tokenizer([chat[-1]["content"] for chat in chats], **given)
        length = inputs["input_ids"].shape[1]
        if not length:
            raise UserError(f"the chat template of {self._path} leaves the question out - mend it")
        if (room := (self._positions or sys.maxsize) - length) < 1:
            problem = f"the question has {length} tokens, the model {self._positions} positions"
            raise UserError(f"{problem} - shorten it")
        generated = self._model.generate(
            **{key: inputs[key].to(self._model.device) for key in ("input_ids", "attention_mask")},
            max_new_tokens=min(most_tokens, room),
            do_sample=False,
            streamer=streamer,
        )[:, length:]
        stops = self._model.generation_config.eos_token_id
        if streamer and generated[0, -1] not in torch.tensor(stops if stops is not None else []):
            print(f"WARNING: cut off after {generated.shape[1]} tokens", file=sys.stderr)
        texts = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _find(path: str) -> tuple[str, dict[str, Any]]:
    """Return a model's folder, or hub id, and the settings of the run that has it, if any.

    In a run it is the newer of model/ and adapter/.
    """
    given = Path(path)
    if given.is_file() or not path:
        raise UserError(f"{path or 'an empty name'} is not a folder - name a run or a model")
    if not given.is_dir():
        return path, {}
    models, names = [given, given / "model", given / ADAPTER], ("config.json", ADAPTER_CONFIG)
    models = [each for each in models if any((each / name).is_file() for name in names)]
    folder = max(models, key=_step_of, default=None)
    runs = [each for each in (given, *given.absolute().parents[:2]) if (each / METRICS).is_file()]
    step_models = sorted(given.glob("models/step_" + 7 * "[0-9]"))[-1:]  # none moved aside
    if folder and step_models and _step_of(step_models[0]) > _step_of(folder):
        print(f"WARNING: {step_models[0]} is newer than {folder}, which answers", file=sys.stderr)
    if folder is None:
        saved = [given / BEST, *step_models]
        others = " or ".join(str(each) for each in saved if each.is_dir())
        what = "the run has no model yet, it writes one at its end"
        what = what if given in runs else "no model, since it has no config.json, and no run"
        remedy = f"name {others or 'another'}, or `shardtune export` a checkpoint and ask that"
        raise UserError(f"{path}: {what} - {remedy}")
    settings: dict[str, Any] = {}
    for run in runs[:1]:
        with contextlib.suppress(UserError):
            settings = {k: value for k, (value, _) in read_written(run / "config.yaml").items()}
    return str(folder), settings


def _step_of(folder: Path) -> int:
    """Return the step of an exported model; 0 where it is not known."""
    return int((read_listing(folder) or {}).get("step", 0))
