"""`README.md` of an exported model: the card that the hub shows.

The source's card is about other weights and is not copied; its licence is.
https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardtune.checkpoint.assets import LICENSE_KEYS, SOURCE
from shardtune.run_files import VERSION


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
