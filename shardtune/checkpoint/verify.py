"""Whether a checkpoint is what was saved, without a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from shardtune.checkpoint.manifest import check_files, open_checkpoint


def verify_checkpoint(directories: Sequence[Path]) -> list[str]:
    """Read every byte once, several files at a time, with a progress bar on a terminal.

    Returns for each file with which something is wrong `<what> - <what to do>`.

    Raises:
        UserError, DamagedCheckpoint: as open_checkpoint.
    """
    checkpoint = open_checkpoint(*directories)
    total = sum(
        int(entry["bytes"]) * len(checkpoint.find_all(name))
        for name, entry in checkpoint.files.items()
    )
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=checkpoint.name,
        disable=not sys.stderr.isatty(),
    ) as bar:
        verdicts = check_files(
            checkpoint, sorted(checkpoint.files), os.cpu_count() or 1, bar.update
        )
    problems = [
        f"{problem} - "
        + (
            "restore it, or use another checkpoint"
            if checkpoint.find(name)
            else "name all parts of the checkpoint, or restore it"
        )
        for name, problem in verdicts.items()
        if problem
    ]
    if not problems:
        print(f"{checkpoint.name}: intact, {len(checkpoint.files)} files, {total / 1e9:.2f} GB")
    return problems
