"""Ranks that are killed while a run saves: it resumes with the same numbers."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import finish
from helpers.faults import Fault, kills, then
from helpers.saving_runs import Undisturbed, checkpoints, hidden, run, said
from helpers.small_runs import steps_of

from shardtune.checkpoint import durable_fs


def killed(folder: Path, fault: Fault, newest: int, grace_s: float) -> int:
    """Run until the fault ends a rank; the newest step that was ever said to be saved."""
    done = run(
        folder,
        # More may be saved than was said.
        f"train.max_steps={max(checkpoints(folder), default=0) + 6}",
        "checkpoint.keep=1",
        "distributed.save_timeout_s=20",
        faults=(fault,),
        grace_s=grace_s,
    )
    assert done.returncode == -9, (fault, done.stdout, done.stderr)
    assert not newest or said(done, "Resumed from")[:1] >= [newest] or "Saved" not in done.stdout
    newest = max([newest, *said(done, "Saved")])
    assert max(checkpoints(folder), default=0) >= newest
    return newest


def check_kills(folder: Path, faults: list[Fault], undisturbed: Undisturbed) -> None:
    """Kill every launch of one run, in every second with a grace period for the other rank."""
    newest = 0
    for number, fault in enumerate(faults):
        newest = killed(folder, fault, newest, grace_s=number % 2 * 1.5)
    total = max(checkpoints(folder)) + 2
    finish(run(folder, f"train.max_steps={total}"))
    assert not hidden(folder)
    assert steps_of(folder / "run") == undisturbed(total)


def test_a_run_that_is_killed_in_a_save_resumes_with_the_same_numbers(folder, undisturbed):
    faults = [
        Fault("rename", "*/.checkpoint_*", kills(), rank=0, nth=2),
        Fault("write", "*/rank_00001.safetensors", kills(), rank=1, nth=70),
        Fault("unlink", "*.deleting/*", kills(), rank=0, nth=3),
        Fault("fsync", "*/COMPLETE", then(kills()), rank=0, nth=2),
    ]
    check_kills(folder, faults, undisturbed)


def note_calls(do: Callable[..., Any], path: Path, *arguments: Any) -> Any:
    """Write the calls of this rank to a file, after the number of those before the second save."""
    made = vars(durable_fs)["os"].calls
    calls: list[Any] = [
        next(n for n, call in enumerate(made) if "/.checkpoint_0000002." in call.path)
    ]
    for call in made:
        pattern = re.sub(
            r"/\.checkpoint_\d{7}\.[0-9a-f]{12}", "/.checkpoint_*." + "?" * 12, call.path
        )
        pattern = re.sub(r"huggingface/.+", "huggingface/*", pattern)  # all made alike
        calls.append([call.operation, re.sub(r"checkpoint_\d{7}", "checkpoint_*", pattern)])
    Path(f"calls{os.environ['RANK']}.json").write_text(json.dumps(calls), encoding="utf-8")
    return do(path, *arguments)


def points(folder: Path) -> Iterator[tuple[int, str, str, int]]:
    """Yield calls of the second save as rank, operation, pattern and count: of every second kind on
    each rank, in turns the first one and the last."""
    noting = Fault("open", "*/.checkpoint_0000003.*/rank_*", note_calls)
    finish(run(folder, "train.max_steps=3", "checkpoint.keep=1", faults=(noting,)))
    is_last = True
    for rank in (0, 1):
        second, *listed = json.loads((folder / f"calls{rank}.json").read_text(encoding="utf-8"))
        calls = [tuple(call) for call in listed]
        for operation, pattern in [*dict.fromkeys(calls[second:])][rank::2]:
            if (operation == "mkdir" and "huggingface" not in pattern) or (
                rank and pattern.endswith("/checkpoints")
            ):
                continue  # whichever rank comes first makes the directory, and syncs its name
            call, is_last = (operation, pattern), not is_last
            yield rank, *call, calls.count(call) if is_last else calls[:second].count(call) + 1


@pytest.mark.full
def test_a_run_killed_at_every_point_of_a_save_resumes_with_the_same_numbers(
    folder, tmp_path, inputs, undisturbed
):
    """A kill before a call is a kill after the call before it."""
    clean = Path(shutil.copytree(inputs, tmp_path / "clean"))
    faults = [
        Fault(operation, pattern, kills(), rank, nth)
        for rank, operation, pattern, nth in points(clean)
    ]
    print(f"{len(faults)} points")
    check_kills(folder, faults, undisturbed)
