"""Run one check: python -m distTest.gpu_check.check_process NAME RESULT.json."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from distTest.gpu_check.checks import CHECKS, Failed, Skipped

# The oldest versions for which the project has substitutes (shardtune/distributed/older_torch.py).
OLDEST = {"Python": "3.11", "torch": "2.11", "transformers": "5.17"}


def main() -> None:
    name, result = sys.argv[1], Path(sys.argv[2])
    check = next(check for check in CHECKS if check.name == name)
    outcome: dict[str, Any] = {"figures": {}}
    work = result.with_suffix("")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.environ["GPU_CHECK_WORK"] = str(work)
    try:
        require_environment()
        module, _, function = check.function.partition(".")
        summary, figures = getattr(import_module(f"distTest.gpu_check.{module}"), function)()
        outcome = {"verdict": "ok", "summary": summary, "figures": figures}
    except Skipped as why:
        outcome |= {"verdict": "skipped", "summary": str(why)}
    except Failed as failed:
        outcome = {"verdict": "failed", "summary": str(failed), "figures": failed.figures}
    finally:
        shutil.rmtree(work, ignore_errors=True)  # models and checkpoints
    result.write_text(json.dumps(outcome), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch waits up to 300 s for its compile workers


def require_environment() -> None:
    """Import the project, and look for a GPU. Raises Skipped."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        versions["Python"] = platform.python_version()
        if old := [n for n, oldest in OLDEST.items() if release(versions[n]) < release(oldest)]:
            needs = (f"needs {n} {OLDEST[n]}, and this is {versions[n]}" for n in old)
            raise Skipped(", ".join(needs))
        import_module("train_fsdp")
        import torch

        from shardtune.distributed.gpus import unseen_gpus
    except ImportError as error:
        raise Skipped(f"{sys.executable} lacks a package: {error}") from error
    if not torch.cuda.is_available():
        raise Skipped(unseen_gpus() or f"PyTorch {torch.__version__} sees no GPU")


def release(version: str) -> tuple[int, ...]:
    """Return (2, 13) of `2.13.0+cu130`."""
    return tuple(map(int, version.split("+")[0].split(".")[:2]))


if __name__ == "__main__":
    main()
