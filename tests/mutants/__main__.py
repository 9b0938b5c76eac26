"""Break the code on purpose and name the edits that no test notices: `make mutants`.

Each edit is made in a copy of the tracked files of its own, where its tests run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import ROOT, Mutant, read_mutants

TIMEOUT_S = 600  # for the tests of one edit; an edit that makes them hang is noticed as well


def copy_tree(folder: Path) -> None:
    """Copy the tracked and the new files, and link what git ignores: environment and models."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in (".venv", "models"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)


def failed_tests(folder: Path, tests: Iterable[str]) -> list[str]:
    """Run tests in this copy and return the names of those that fail, or why none could run."""
    # With the long cases: a test that is left out would end like one that fails.
    options = ["-q", "-x", "-rfE", "-m", "", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    try:
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return [f"no end within {TIMEOUT_S} s"]
    if run.returncode == 0:
        return []
    lines = run.stdout.splitlines() or run.stderr.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed or [f"pytest ended with {run.returncode}: {(lines or ['no output'])[-1]}"]


def notice(mutant: Mutant | None, tests: Iterable[str]) -> tuple[list[str], float]:
    """Return the tests that fail under an edit, or under none, and the seconds that this took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_tree(folder)
        if mutant:
            mutant.apply(folder)
        return failed_tests(folder, tests), time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="edits whose room or sentence has this text")
    parser.add_argument("--jobs", type=int, default=2, help="edits tried at the same time")
    arguments = parser.parse_args()
    mutants = [
        mutant for mutant in read_mutants() if arguments.only in f"{mutant.room}: {mutant.edit}"
    ]
    if not mutants:
        parser.error(f"no edit has {arguments.only!r} in its room or sentence")
    # A test that fails without any edit would notice every one.
    unbroken, seconds = notice(None, sorted({test for each in mutants for test in each.tests}))
    if unbroken:
        print(f"ERROR: without any edit {', '.join(unbroken)} fails - mend the tree first")
        return 1
    print(f"All tests of {len(mutants)} edits pass without them ({seconds:.0f} s)", flush=True)
    survived = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda mutant: notice(mutant, mutant.tests), mutants)
        for mutant, (failed, seconds) in zip(mutants, results, strict=True):
            survived += not failed
            verdict = f"noticed by {failed[0]}" if failed else "SURVIVED"
            print(f"{mutant.room}: {mutant.edit}: {verdict} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} edits noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
