"""`shardtune ask`: a model's most likely answers, by transformers' text-generation pipeline."""

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

from shardtune.checkpoint.assets import read_listing
from shardtune.checkpoint.run_dir import ADAPTER, BEST
from shardtune.config_io import read_written
from shardtune.distributed.join import native_dtype
from shardtune.distributed.tensors import DTYPES
from shardtune.errors import UserError, print_errors
from shardtune.log import quiet_libraries
from shardtune.model.source.files import known_config, refusing
from shardtune.model.source.text_model import class_of
from shardtune.model.source.weight_files import ADAPTER_CONFIG, describe
from shardtune.model.traits import number
from shardtune.new_tokens import ROWS_OF_GROWTH
from shardtune.run_files import METRICS

_LONGEST = 1024  # tokens of an answer
_GENERATION = "generation_config.json"
Chat = list[dict[str, Any]]


def ask(path: str, question: str | None) -> None:
    """Print the answer to a question, else to each line of standard input. Raises UserError."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = Model(path, DTYPES[native_dtype(device)])
    except UserError as refusal:
        raise UserError(*(p.removeprefix("model.path=") for p in refusal.problems)) from refusal
    if question is not None:
        model.stream(question)
        return
    # Ctrl-C ends an answer, or the loop as Ctrl-D does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with contextlib.suppress(ImportError):
        import_module("readline")  # `input` uses it: a terminal cuts lines at 4,095 characters
    refused = False
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(prompt).strip():
                try:
                    model.stream(line)
                except UserError as refusal:
                    print_errors(*refusal.problems)
                    refused = True
                except KeyboardInterrupt:
                    print()
    if prompt:
        print()  # what follows, such as the shell's prompt, gets a line of its own
    elif refused:
        raise UserError("not every question has an answer - see above")


class Model:
    """A model and its tokenizer: of a run, of the folder of a model or an adapter, or of the hub.

    `options` are the chat template's; None: those of the run that has the folder.

    Raises:
        UserError: it cannot be opened.
    """

    def __init__(
        self, path: str, dtype: torch.dtype, options: Mapping[str, Any] | None = None
    ) -> None:
        quiet_libraries(is_main=True)
        transformers.utils.logging.set_verbosity_error()
        path, settings = _find(path)
        self._options = settings.get("data.template_options") if options is None else options
        self._path, base, file = path, path, Path(path) / ADAPTER_CONFIG
        with refusing(path, "it cannot be opened", "fetch or export it again"):
            if file.is_file():
                adapter = json.loads(file.read_bytes())
                base = adapter["base_model_name_or_path"]
                base = base or "a base that was drawn at random"
            config = known_config(base)
            model, report = class_of(config).from_pretrained(
                base,
                config=config,
                dtype=dtype,
                device_map="auto",
                trust_remote_code=False,
                output_loading_info=True,
            )
            if missing := report["missing_keys"]:
                raise ValueError(f"no {min(missing)}, {len(missing)} tensors in all")
            has_tokenizer = (Path(path) / "tokenizer_config.json").is_file()
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                path if has_tokenizer else base,
                config=config,
                padding_side="left",
                trust_remote_code=False,
            )
            if base != path:
                from peft import PeftModel

                # Of model.new_tokens; some tokenizers have more tokens than their model rows.
                of_rows = (adapter.get("trainable_token_indices") or {}).values()
                tokens = max((max(ids) + 1 for ids in of_rows), default=0)
                if adapter.get("modules_to_save"):
                    tokens = len(self.tokenizer)
                if tokens > model.get_input_embeddings().num_embeddings:
                    model.resize_token_embeddings(tokens, ROWS_OF_GROWTH, mean_resizing=False)
                with warnings.catch_warnings(action="ignore", category=FutureWarning):
                    model = PeftModel.from_pretrained(model, path)
            if (Path(path) / _GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(path)
            self._pipeline: Any = transformers.pipeline(
                "text-generation", model=model, tokenizer=self.tokenizer
            )
        positions = number(config.get_text_config(), "max_position_embeddings")
        self._positions = positions or sys.maxsize
        if not self.tokenizer.chat_template:
            print(f"WARNING: {path} has no chat template: it continues your text", file=sys.stderr)

    def stream(self, question: str) -> None:
        """Print the answer to a question while it is generated. Raises UserError."""
        readable = question.encode(errors="replace").decode()  # its bytes may be no UTF-8
        # One for each answer: one that Ctrl-C has ended leaves tokens in it.
        streamer = _Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.answer([[{"role": "user", "content": readable}]], _LONGEST, streamer=streamer)
        stops = self._pipeline.model.generation_config.eos_token_id
        if streamer.last not in (stops if isinstance(stops, list) else [stops]):
            print("WARNING: the answer is cut off here", file=sys.stderr)

    def answer(self, chats: Sequence[Chat], most_tokens: int, **generation: Any) -> list[str]:
        """Return the greedy answer to each chat. Raises UserError if one is too long.

        Without a chat template the model continues the last message.
        """
        has_template = self.tokenizer.chat_template is not None
        prompts = [chat[-1]["content"] for chat in chats]
        if has_template:
            try:
                prompts = self.tokenizer.apply_chat_template(
                    chats, tokenize=False, add_generation_prompt=True, **(self._options or {})
                )
            except Exception as error:  # a template may raise anything
                raise UserError(
                    f"the chat template of {self._path} refuses the question ({describe(error)}) "
                    "- mend chat_template.jinja there, or ask another model"
                ) from error
        ids = self.tokenizer(prompts, add_special_tokens=not has_template)["input_ids"]
        length, positions = max(map(len, ids)), self._positions
        if length >= positions:
            problem = f"the question has {length} tokens, the model {positions} positions"
            raise UserError(f"{problem} - shorten it")
        answers = self._pipeline(
            prompts,
            add_special_tokens=not has_template,
            return_full_text=False,
            batch_size=len(prompts),
            do_sample=False,
            max_new_tokens=min(most_tokens, positions - length),
            **generation,
        )
        return [texts[0]["generated_text"].strip() for texts in answers]


class _Streamer(TextStreamer):
    """Prints an answer, and keeps its last token, which tells whether the answer has ended."""

    last: int | None = None

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.last = int(value.flatten()[-1])


def _find(path: str) -> tuple[str, dict[str, Any]]:
    """Return a model's folder, or hub id, and the settings of the run that has it, if any.

    In a run it is the newer of model/ and adapter/.
    """
    given = Path(path)
    if not path or not given.is_dir():
        return path, {}
    names = ("config.json", ADAPTER_CONFIG)
    models = [given, given / "model", given / ADAPTER]
    models = [each for each in models if any((each / name).is_file() for name in names)]
    folder = max(models, key=_step_of, default=None)
    step_models = sorted(given.glob("models/step_" + 7 * "[0-9]"))[-1:]  # none moved aside
    if folder and step_models and _step_of(step_models[0]) > _step_of(folder):
        print(f"WARNING: {step_models[0]} is newer than {folder}, which answers", file=sys.stderr)
    if folder is None:
        saved = [given / BEST, *step_models]
        others = " or ".join(str(each) for each in saved if each.is_dir())
        raise UserError(
            f"{path}: no model in it, which a run writes at its end - name {others or 'another'}, "
            "or `shardtune export` a checkpoint and ask that"
        )
    for run in (given, *given.absolute().parents[:2]):
        if (run / METRICS).is_file():
            with contextlib.suppress(UserError):  # it is missing: the model answers all the same
                written = read_written(run / "config.yaml")
                return str(folder), {key: value for key, (value, _) in written.items()}
    return str(folder), {}


def _step_of(folder: Path) -> int:
    """Return the step of an exported model; 0 where it is not known."""
    return int((read_listing(folder) or {}).get("step", 0))
