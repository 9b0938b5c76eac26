"""The files of a model beside its weights.

A checkpoint and an export copy the source's. An export has two more: `export.json` lists its files,
and `README.md` is the card that the hub shows (https://huggingface.co/docs/hub/model-cards). The
source's card is about other weights and is not copied; its licence is.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash
import yaml
from huggingface_hub import metadata_load

from shardtune.model.source.files import FILES_BESIDE_WEIGHTS, model_folder
from shardtune.model.source.quantisation import QUANTIZATION
from shardtune.model.source.quantised import quantisation_in
from shardtune.model.source.weight_files import list_tensors
from shardtune.run_files import VERSION

SOURCE = "source_tensors.json"  # in checkpoints only
LICENSE_KEYS = ("license", "license_name", "license_link")  # in the front matter of a model's card
# How configurations announce layers of multi-token prediction, which transformers does not train.
_ANNOUNCING = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)
_TOKENS, _TOKENIZER, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
_WITH_TEMPLATE = (_TOKENIZER, "chat_template.json", "processor_config.json")
_DTYPE = ("dtype", "torch_dtype")
LISTING, _FORMAT = "export.json", 1
Entries = Mapping[str, Mapping[str, int | str]]  # size and digest of each file


def model_assets(folder: Path) -> dict[str, bytes]:
    """Return the source's small files, FILES_BESIDE_WEIGHTS, by file name.

    They are copies, except config.json: it loses the path that it was read from, and for a
    quantised source it names bfloat16, in which the weights are read.
    """
    left_out = links_out_of(folder)
    files = [path for path in _files_beside_weights(folder) if path not in left_out]
    assets = {path.name: path.read_bytes() for path in files}
    if "_name_or_path" in (values := json.loads(assets["config.json"])):
        del values["_name_or_path"]
        assets["config.json"] = _dump(values)
    if quantisation_in(folder):
        for part in (values, values.get("text_config") or {}):
            part.pop(QUANTIZATION, None)
        assets["config.json"] = with_dtype(_dump(values), "bfloat16")
    return assets


def links_out_of(folder: Path) -> list[Path]:
    """Return the files beside the weights that are links to other places than config.json.

    An export would publish the files that they point to. Links may also point to the folder of the
    real config.json (for folders of links) and to the hub's blobs.
    """
    home = folder.resolve()
    inside = {home, (folder / "config.json").resolve().parent}
    if home.parent.name == "snapshots":
        inside.add(home.parents[1] / "blobs")
    files = _files_beside_weights(folder)
    return [path for path in files if not inside & {*path.resolve().parents}]


def _files_beside_weights(folder: Path) -> list[Path]:
    files = {path for pattern in FILES_BESIDE_WEIGHTS for path in folder.glob(pattern)}
    return sorted(path for path in files if path.is_file())


def list_source(path: str) -> dict[str, Any]:
    folder = model_folder(path)
    assert folder, path  # its config.json was read
    absolute = str(folder.absolute()) if Path(path).is_dir() else path
    return {"path": absolute, "tensors": list_tensors(folder), "license": _license_in(folder)}


def _license_in(folder: Path) -> dict[str, Any]:
    """Return the licence that a model's card names, else the first line of its LICENSE, or {}."""
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        front = metadata_load(folder / "README.md") or {}
        known = {key: f"{front[key]}" for key in LICENSE_KEYS if front.get(key)}
    for file in sorted(folder.glob("LICENSE*")) if not known else ():
        with contextlib.suppress(OSError, ValueError):
            lines = file.read_text(encoding="utf-8").split("\n")
            known = {file.name: next((line.strip() for line in lines if line.strip()), file.name)}
    return known


def with_dtype(config_json: bytes, dtype: str) -> bytes:
    """Return config.json with another dtype, also where its sections name one."""
    values = json.loads(config_json)
    if not any(key in values for key in _DTYPE):
        values["dtype"] = dtype
    return _dump(_changed(values, lambda key, value: dtype if key in _DTYPE else value))


def with_stops(assets: Mapping[str, bytes], stops: list[int]) -> dict[str, bytes]:
    """Return the files with these in generation_config.json, if `generate` would not stop there."""
    declared = _declared_stops(assets)
    if {*stops} <= {*declared}:
        return dict(assets)
    values = json.loads(assets.get(_GENERATION, b"{}"))
    stops = [*dict.fromkeys([*stops, *declared])]
    return {**assets, _GENERATION: _dump(values | {"eos_token_id": stops})}


def _declared_stops(assets: Mapping[str, bytes]) -> list[int]:
    values = json.loads(assets.get(_GENERATION) or assets["config.json"])
    text = values.get("text_config") or {}
    declared = values.get("eos_token_id", text.get("eos_token_id"))
    return declared if isinstance(declared, list) else [i for i in [declared] if i is not None]


def with_template(assets: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Return the files with this chat template wherever they have one, or in a file of its own."""
    written = {}
    for name, content in assets.items():
        if name == _TEMPLATE:
            written[name] = template.encode()
        elif name.endswith(_WITH_TEMPLATE) and "chat_template" in (values := json.loads(content)):
            is_other = values["chat_template"] != template
            written[name] = _dump(values | {"chat_template": template}) if is_other else content
    return {**assets, **(written or {_TEMPLATE: template.encode()})}


def with_tokens(
    assets: Mapping[str, bytes], tokenizer: Any, ids: Iterable[int]
) -> dict[str, bytes]:
    """Return the files with the tokens `ids`, which `tokenizer` has and the source lacks."""
    # The source's files stay but for these tokens: other engines may not read what this
    # transformers would write.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = {name: (Path(folder) / name).read_bytes() for name in (_TOKENS, _TOKENIZER)}
    files = saved | dict(assets)
    new = {i: tokenizer.added_tokens_decoder[i].__getstate__() for i in sorted(ids)}
    tokens, config = (json.loads(files[name]) for name in (_TOKENS, _TOKENIZER))
    present = {token["id"] for token in tokens["added_tokens"]}
    tokens["added_tokens"] += [{"id": i, **new[i]} for i in new if i not in present]
    decoder = {str(i): token for i, token in new.items()}
    config["added_tokens_decoder"] = config.get("added_tokens_decoder", {}) | decoder
    files |= {_TOKENS: _dump(tokens), _TOKENIZER: _dump(config)}
    if _ADDED in files:
        by_text = {token["content"]: i for i, token in new.items()}
        files[_ADDED] = _dump(json.loads(files[_ADDED]) | by_text)
    return files


def without_announcements(config_json: bytes) -> tuple[bytes, list[str]]:
    """Return config.json with 0 extra layers, and the keys that this changed."""
    changed = []

    def none_announced(key: str, value: Any) -> Any:
        if key not in _ANNOUNCING or not value:
            return value
        changed.append(key)
        return 0

    values = _changed(json.loads(config_json), none_announced)
    return (_dump(values) if changed else config_json), changed


def _changed(values: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {
        key: _changed(value, change) if isinstance(value, dict) else change(key, value)
        for key, value in values.items()
    }


def _dump(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def listing_json(values: Mapping[str, Any]) -> bytes:
    """Return the file, whose last value is the digest of the others."""
    values = {"format": _FORMAT, **values}
    return (json.dumps({**values, "xxh3_128": _digest(values)}, indent=2) + "\n").encode()


def read_listing(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's file; None if it has none, or one that is damaged or of
    another format."""
    try:
        values: dict[str, Any] = json.loads((folder / LISTING).read_bytes())
        intact = values.pop("xxh3_128") == _digest(values)
        is_readable = values["format"] == _FORMAT and isinstance(values["files"], dict)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return values if intact and is_readable else None


def _digest(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(values).encode()).hexdigest()


def readme(
    state: Mapping[str, Any], assets: Mapping[str, bytes], metrics: Path, step: int, library: str
) -> str:
    """Return the card of a run's model after a step, which a library opens.

    `state`: a checkpoint's; older versions saved less. `metrics`: the run's file, for perplexities.
    """
    config, source = state["config"], json.loads(assets.get(SOURCE, b"{}"))
    base, rank = config["model"]["path"], config.get("lora", {}).get("rank")
    is_on_hub = source.get("path") == base and not Path(base).is_absolute()
    known = source.get("license", {})
    front = {key: value for key, value in known.items() if key in LICENSE_KEYS}
    front |= {"library_name": library, "tags": ["shardtune"]}
    front |= {"base_model": base} if is_on_hub else {}  # the hub takes no path of a folder
    rows = [
        ("Base model", base if is_on_hub else Path(base).name),
        ("Its licence", next(iter(known.values()), "not named in its files")),
        ("Trained", f"{f'LoRA of rank {rank}' if rank else 'all weights'}, {step} steps"),
    ]
    for name, records, tokens in state.get("sources", []):
        rows.append(("Data", f"{name}: {records:,} records, {tokens:,} trained tokens"))
    rows += _perplexities(metrics, step)
    rows.append(("Command", state.get("command", "not saved by its version")))
    table = [" | ".join(" ".join(t.replace("|", "\\|").split()) for t in row) for row in rows]
    head = f"---\n{yaml.safe_dump(front)}---\n\n# {Path(config['run']['dir']).name}\n\n"
    head += f"Fine-tuned with shardtune {VERSION}.\n\n| | |\n|---|---|\n"
    return head + "".join(f"| {row} |\n" for row in table)


def _perplexities(metrics: Path, step: int) -> Iterator[tuple[str, str]]:
    """Yield the perplexities of all held-out data before training and after the step."""
    with contextlib.suppress(OSError), metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(lambda line: '"eval"' in line, lines):
            with contextlib.suppress(ValueError, LookupError, TypeError):
                entry = json.loads(line)
                if entry["kind"] == "eval" and "set" not in entry and entry["step"] in (0, step):
                    when = "before" if entry["step"] == 0 else "after"
                    yield f"Held-out perplexity {when}", f"{entry['perplexity']:.4f}"
