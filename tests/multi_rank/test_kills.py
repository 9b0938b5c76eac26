"""Ranks that are killed while a run saves: it resumes with the same numbers.

unit/test_crash.py tries every point of a save, with the states that a crash leaves on a disk.
"""

from pathlib import Path

from helpers.commands import finish
from helpers.faults import Fault, kills, then
from helpers.saving_runs import Undisturbed, checkpoints, hidden, run, said
from helpers.small_runs import steps_of


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
