"""What is gone from the commands of `benchmarks` and `distTest`, and what takes its place.

A section, check or option that goes gets a row here, and no code of its own. Imports the standard
library alone.
"""

import sys
from collections.abc import Sequence

_READ = "read its result in docs/measured.md"
_ON_PRETENDED = "run make test-full: it tests this on pretended GPUs"
# By command: each word that is gone, and what to do.
GONE: dict[str, dict[str, str]] = {
    "benchmarks": {
        "convergence": "run the demo with its settings, or read its result in docs/measured.md",
        "epoch": "run one, or read its result in docs/measured.md",
        "--epochs": "give one --steps",
        "--families": "leave it out: cable runs both",
        "gpu": "run make gpu-check",
        "growth": _READ,
        "head": _READ,
        "kernels": "run shardtune plan, or read its result in docs/measured.md",
        "--head-tokens": _READ,
        **dict.fromkeys(("rounding", "card", "experts", "checkpoint", "scaling", "two"), _READ),
        **dict.fromkeys(("traffic", "records", "sinks", "profile"), _READ),
        "runs": "run models, which trains each architecture, too",
        "--only": "leave it out: models writes all rows",
        "--sections": "name a section: one, cable or all",
        "--short": "give --mixes prompts --rounds 1 --steps 2",
        "--sides": "leave it out: one runs shardtune, TRL packed and HF Trainer",
        **dict.fromkeys(
            ("--tokens", "--epoch-tokens", "--max-length"),
            "leave it out: one step has 1,536 tokens",
        ),
    },
    "gpu-check": {
        "peers": "run make bench: it compares with TRL and HF Trainer on CPUs",
        "--peers": "leave it out: no check runs TRL",
        "--more": "leave it out: nine checks are all",
        "ceiling": "run speed-glm-4.5-air: it says the MFU of the whole run",
        "resume": "run losses: it compares the bits of a resume, too",
        "speed-glm-4.5-air-8192": "run speed-glm-4.5-air",
        **dict.fromkeys(("speed-llama3-8b", "speed-qwen3-8b-lora"), "run speed-llama3-8b-lora"),
        **dict.fromkeys(("memory-dense-8b", "memory-lora"), "run speed-llama3-8b-lora"),
        **dict.fromkeys(("offload", "packing", "async-save", "two-gpus"), _ON_PRETENDED),
    },
}


def refuse_gone(command: str, words: Sequence[str]) -> None:
    """Exit with code 2 if a word of a command line is gone, and say what to do."""
    for word in words:
        if remedy := GONE[command].get(word.partition("=")[0]):
            print(f"ERROR: {word} is gone - {remedy}", file=sys.stderr)
            sys.exit(2)
