"""Run chosen tests, and the checks of a GPU on a pretended one, under other versions of packages:

python -m tests.versions [--python PROGRAM] [--keep] ["torch==2.11.0 transformers==5.17.0" ...]

Builds an environment for each of them in .venv/versions, some 5 GB, and prints a row of
docs/support.md for it. `make versions` tries all of PAIRS.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / ".venv/versions"
PAIRS = (
    "torch==2.11.0 transformers==5.17.0",
    "torch==2.12.0 transformers==5.20.0",
    "torch==2.13.0 transformers==5.23.0",
    "torch==2.14.1 transformers==5.24.0",
    "torch==2.15.0 transformers==5.24.0",  # PIP_CONSTRAINT=/dev/null where pip has a lower cap
)
# FSDP, loss, packing, checkpoints and resumes, plans, experts, adapters, templates, kernels.
_UNIT = ("loss", "order", "grouped_experts", "compiled_layers", "varlen")
_UNIT += ("optimizer_rules", "older_torch", "lora", "chat_templates")
_RANKS = ("run", "resume", "parallel", "loading", "run_plan", "expert_parallel", "adapters")
TESTS = [
    *(f"tests/unit/test_{name}.py" for name in _UNIT),
    *(f"tests/multi_rank/test_{name}.py" for name in _RANKS),
    *("tests/planner/test_simulate.py", "tests/pretend/test_pretend_device.py"),
    *("tests/pretend/test_pretend_training.py", "tests/pretend/test_pretend_packing.py"),
    "tests/pretend/test_triton_source.py",
]
_TOOLS = r"^(?:pytest|hypothesis|peft|import-linter|gguf|tensorboard)\b\S*"

_OUTCOMES = ("failure", "error", "skipped")
_REFUSED = "cannot spread experts|no attribute '_expand_parallel_plan'"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="REQUIREMENTS")
    parser.add_argument("--python", default=sys.executable, help="of the environments")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    options = parser.parse_args()
    print("| versions | Python | day | tests | checks of a pretended GPU |\n|---|---|---|---|---|")
    for pair in options.pairs:
        folder = FOLDER / re.sub(r"[^\w.]+", "-", pair)
        try:
            python = build(folder, pair.split(), options.python)
            print(
                f"| {versions(python)} | {run_tests(python)} | {run_checks(python)} |", flush=True
            )
        except subprocess.CalledProcessError as error:
            print(f"| {pair} | not installed: see above ({error}) | | | |", flush=True)
        finally:
            if not options.keep:
                shutil.rmtree(folder / "env", ignore_errors=True)


def build(folder: Path, pair: list[str], program: str) -> Path:
    """Return the Python of an environment with these packages and what the project needs.

    Triton comes with a build of PyTorch for CUDA, and is installed beside one for CPUs.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    tools = (REPOSITORY / "requirements-dev.txt").read_text(encoding="utf-8")
    needs = [*pair, *project["project"]["dependencies"], *re.findall(_TOOLS, tools, re.MULTILINE)]
    python = folder / "env/bin/python"
    subprocess.run([program, "-m", "venv", str(folder / "env")], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *needs, "triton"], check=True)
    return python


def versions(python: Path) -> str:
    """Return the versions that count, Python's and the day, as cells."""
    code = (
        "import platform, importlib.metadata as m, torch\n"
        "names = 'transformers', 'triton', 'peft', 'pydantic', 'numpy'\n"
        "found = ', '.join(f'{name} {m.version(name)}' for name in names)\n"
        "print(f'torch {torch.__version__}, {found} | {platform.python_version()}')"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return f"{done.stdout.strip()} | {datetime.date.today().isoformat()}"


def run_tests(python: Path) -> str:
    """Run TESTS; return how many passed, and the names of those that failed."""
    report = python.parents[2] / "tests.xml"
    log = report.with_suffix(".log")
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(
            [*command, f"--junitxml={report}", *TESTS],
            cwd=REPOSITORY,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    outcomes, failed = Counter[str](), []
    for case in ET.parse(report).iter("testcase"):
        kind, text = next(
            ((each.tag, each.text or "") for each in case if each.tag in _OUTCOMES), ("passed", "")
        )
        if kind == "failure" and re.search(_REFUSED, text):
            kind = "of experts that this transformers cannot spread"
        outcomes[kind] += 1
        if kind in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    for name in failed:
        print(f"{log}: {name}", file=sys.stderr)
    return ", ".join(f"{number} {kind}" for kind, number in outcomes.most_common())


def run_checks(python: Path) -> str:
    """Run the tiny checks of a GPU; return how many were ok, and the names of the others."""
    out = python.parents[2] / "gpu-check"
    check = [python, "-m", "distTest.gpu_check", "--tiny", "--out", out]
    command = [python, "-m", "tests.pretend_gpu", "--gpus", "1", *check]
    with (python.parents[2] / "gpu-check.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=log, check=False)
    checks = json.loads((out / "results.json").read_text(encoding="utf-8"))["checks"]
    others = [f"{c['check']} {c['verdict']}" for c in checks if c["verdict"] != "ok"]
    return ", ".join([f"{len(checks) - len(others)} ok", *others])


if __name__ == "__main__":
    main()
