"""Disks that fail and ranks that are late while a run saves: each is survived or named."""

import errno
import os
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import read_metrics
from helpers.faults import (
    ALWAYS,
    Fault,
    fails,
    leaves,
    run_with,
    stops,
    stops_until,
    then,
    waits_until,
    writes_less,
)
from helpers.saving_runs import (
    checkpoints,
    hidden,
    run,
    said,
)
from helpers.small_runs import steps_of

from shardtune.checkpoint import commit, durable_fs, saver
from shardtune.checkpoint.manifest import step_of

# Disks that fail

# Where, and on which rank, a save may fail; `{}` is its hidden directory.
PLACES = [
    ("mkdir", "{}", None, 1),  # of whichever rank comes first
    ("mkdir", "{}/huggingface", 0, 1),
    ("open", "{}/rank_00001.safetensors", 1, 1),
    ("write", "{}/rank_00000.safetensors", 0, 1),
    ("write", "{}/rank_00001.safetensors", 1, 9),
    ("fsync", "{}/rank_00001.safetensors", 1, 1),
    ("close", "{}/rank_00000.safetensors", 0, 1),
    ("write", "{}/huggingface/config.json", 0, 1),
    ("open", "{}/manifest.json", 0, 1),
    ("write", "{}/manifest.json", 0, 1),
    ("fsync", "{}/COMPLETE", 0, 1),
    ("fsync", "{}", 0, 2),
    ("rename", "{}", 0, 1),
]
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


def place(number: int, step: int, effect: Any) -> Fault:
    operation, pattern, rank, nth = PLACES[number]
    return Fault(
        operation, "*/" + pattern.format(f".checkpoint_{step:07d}." + "?" * 12), effect, rank, nth
    )


def test_a_save_that_fails_is_said_and_deleted_and_the_next_works(folder, undisturbed):
    """Every second one, each in another place and way."""
    ways = [(fails(error), os.strerror(error)) for error in ERRORS]
    effects = [(where, *ways[where % len(ways)]) for where in range(len(PLACES))]
    effects.append((4, fails(MemoryError("of the program")), "MemoryError: of the program"))
    # Renamed, and the name cannot be synced.
    effects.append((12, then(fails(errno.EIO)), os.strerror(errno.EIO)))
    faults = {
        2 * number: place(where, 2 * number, effect)
        for number, (where, effect, _) in enumerate(effects, 1)
    }
    total = 2 * len(effects) + 1
    given = (f"train.max_steps={total}", "checkpoint.keep=1000")
    done = run(folder, *given, faults=tuple(faults.values()))
    assert done.returncode == 0, done.stderr
    good = [step for step in range(1, total + 1) if step not in faults]
    assert said(done, "Not saved") == list(faults)
    assert said(done, "Saved") == good
    for step, (_, _, reason) in zip(faults, effects, strict=True):
        rank = r"\d" if faults[step].rank is None else faults[step].rank
        line = rf"^Not saved: checkpoint_{step:07d}: .*rank {rank} on \S+: .*{reason}"
        assert re.search(line, done.stdout, re.MULTILINE)
    assert checkpoints(folder) == good
    assert not hidden(folder)
    assert steps_of(folder / "run") == undisturbed(total)


def test_short_writes_are_continued(folder, undisturbed):
    """So are a failing deletion, which the next run repeats, and a failing last save."""
    short = Fault("write", "*/.checkpoint_0000001.*", writes_less(777), times=ALWAYS)
    undeleted = Fault("unlink", "*/.checkpoint_0000001.deleting/*", fails(errno.EIO))
    last = Fault(
        "write", "*/.checkpoint_0000004.*/rank_00000.safetensors", fails(errno.ENOSPC), rank=0
    )
    done = run(folder, "train.max_steps=4", "checkpoint.keep=1", faults=(short, undeleted, last))
    assert done.returncode == 1
    assert said(done, "Saved") == [1, 2, 3] and said(done, "Not saved") == [4]
    assert "an old checkpoint could not be deleted: rank 0" in done.stdout
    assert hidden(folder) == [".checkpoint_0000001.deleting"] and checkpoints(folder) == [3]
    problems = {save["step"]: save["problem"] for save in read_metrics(folder / "run", "save")}
    assert problems.pop(4).startswith("rank 0 on ") and problems == dict.fromkeys((1, 2, 3))
    assert re.fullmatch(
        r"ERROR: checkpoint_0000004 was not saved: rank 0 on .*No space left.* - .+",
        done.stderr.splitlines()[-1],
    )

    again = run(folder, "train.max_steps=4", "checkpoint.keep=1")
    assert again.returncode == 0, again.stderr
    assert said(again, "Resumed from") == [3]
    assert "left by saves that did not finish: .checkpoint_0000001.deleting (" in again.stdout
    assert not hidden(folder) and checkpoints(folder) == [4]
    assert steps_of(folder / "run") == undisturbed(4)


def is_full_until_step_3(do: Callable[..., Any], handle: int, data: bytes) -> Any:
    if not re.search(rb'"step": [34],', data):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    return do(handle, data)


def test_no_checkpoint_is_ahead_of_the_metrics(folder, undisturbed):
    """While their disk is full, training continues, nothing is saved, and no line is lost."""
    half_a_line = Fault("write", "*metrics.jsonl", writes_less(100))
    full = Fault("write", "*metrics.jsonl", is_full_until_step_3, nth=2, times=ALWAYS)
    done = run(
        folder,
        *("train.max_steps=4", "checkpoint.mode=sync", "checkpoint.keep=9"),
        faults=(half_a_line, full),
    )
    assert done.returncode == 0, done.stderr
    reason = os.strerror(errno.EDQUOT)
    assert said(done, "Not saved") == [1, 2]
    assert len(re.findall(f"Not saved: .*{reason}", done.stdout)) == 2
    assert done.stdout.count(f"metrics.jsonl cannot be written now ({reason})") == 1
    assert said(done, "Saved") == [3, 4] == checkpoints(folder)
    assert steps_of(folder / "run") == undisturbed(4)


# Ranks that are late


def run_with_deadlines(
    deadlines_s: dict[int, float], faults: list[Fault], arguments: list[str]
) -> None:
    """The saves of these steps have so many seconds, and all others as long as they take."""

    def limited(**fields: Any) -> commit.SaveAttempt:
        return commit.SaveAttempt(
            **fields | {"timeout_s": deadlines_s.get(step_of(fields["final"]), 1000.0)}
        )

    vars(saver)["SaveAttempt"] = limited
    run_with(faults, arguments)


def late(operation: str, step: int, effect: Callable[[str], Any]) -> tuple[Fault, Fault]:
    """Rank 1 is held up in that save until rank 0 has given it up."""
    given_up = f"given_up_{step}"
    return (
        Fault("rmdir", f"*/.checkpoint_{step:07d}." + "?" * 12, then(leaves(given_up)), 0),
        Fault(operation, f"*/.checkpoint_{step:07d}.*", effect(given_up), 1),
    )


def waits_for(path: str) -> Any:
    return waits_until(Path(path).exists)


@pytest.mark.parametrize(
    ("slow", "stopped"),
    [("write", "fsync"), pytest.param("open", "close", marks=pytest.mark.full)],
)
def test_a_save_is_given_up_when_a_rank_is_later_than_its_deadline(
    slow, stopped, folder, undisturbed
):
    """All ranks give the save up, and training continues."""
    faults = [*late(slow, 2, waits_for), *late(stopped, 4, stops_until)]
    work = partial(run_with_deadlines, {2: 0.5, 4: 0.5})
    done = run(folder, "train.max_steps=5", "checkpoint.keep=9", faults=faults, work=work)
    assert done.returncode == 0, done.stderr
    assert said(done, "Not saved") == [2, 4]
    assert said(done, "Saved") == [1, 3, 5] == checkpoints(folder)
    late_rank = r"no report from rank 1 within 0\.5 s \(distributed\.save_timeout_s\)"
    assert len(re.findall(rf"^Not saved: .*{late_rank}$", done.stdout, re.MULTILINE)) == 2
    assert not hidden(folder)
    assert steps_of(folder / "run") == undisturbed(5)


def test_no_save_is_committed_after_its_deadline(folder):
    """Even if all ranks have reported in time."""
    work = partial(run_with_deadlines, {2: 0})
    done = run(folder, "train.max_steps=3", "checkpoint.keep=9", ranks=1, work=work)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Not saved: checkpoint_0000002: .+ 0 s \(distr", done.stdout, re.MULTILINE)
    assert said(done, "Saved") == [1, 3] == checkpoints(folder)
    assert not hidden(folder)


def run_impatiently(
    deadlines_s: dict[int, float], faults: list[Fault], arguments: list[str]
) -> None:
    vars(commit)["_DECISION_ARRIVES_S"] = 0.5
    vars(saver)["_STUCK_AFTER_S"] = 1
    run_with_deadlines(deadlines_s, faults, arguments)


def has_trained(step: int) -> bool:
    return len(read_metrics(Path("run"), "step")) >= step


def test_no_rank_trains_while_a_stalled_disk_reads_the_tensors_of_the_run(folder):
    """With mode `sync` they are not copied. The disk answers only after two more steps."""
    stalled = Fault(
        "write", "*/rank_00000.safetensors", waits_until(partial(has_trained, 4)), 0, nth=3
    )
    given = ("train.max_steps=6", "checkpoint.every_steps=2", "checkpoint.mode=sync")
    given = (*given, "distributed.save_timeout_s=0.5")
    done = run(folder, *given, faults=[stalled], work=partial(run_impatiently, {2: 0.5}))
    assert done.returncode == 1, done.stdout
    line = next(line for line in done.stderr.splitlines() if line.startswith("ERROR: "))
    what = "checkpoint_0000002 was not saved: the disk of rank 0 does not answer"
    assert line.startswith(f"ERROR: {what} - ")
    assert len(steps_of(folder / "run")) == 2
    assert not list(folder.glob("run/checkpoints/*/COMPLETE"))


def test_rank_0_decides_on_a_save_that_the_others_gave_up(folder, undisturbed):
    """The checkpoints that it logs as saved are whole, although the others have given up."""
    stopped = Fault("rename", "*/.checkpoint_0000002.*", stops(3), 0)
    given = ("train.max_steps=4", "checkpoint.keep=9", "checkpoint.mode=sync")
    done = run(folder, *given, faults=[stopped], work=partial(run_impatiently, {2: 0.5}))
    assert done.returncode == 0, done.stderr
    assert set(checkpoints(folder)) == set(said(done, "Saved")) >= {1, 3, 4}
    assert steps_of(folder / "run") == undisturbed(4)


# For long


def note_size(do: Callable[..., Any], path: Path, *arguments: Any) -> Any:
    """Note resident memory and open files, without the list of calls that DiskOs keeps."""
    vars(durable_fs)["os"].calls.clear()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    with Path(f"sizes{os.environ['RANK']}").open("a", encoding="utf-8") as file:
        file.write(f"{pages * resource.getpagesize()} {files}\n")
    return do(path, *arguments)


@pytest.mark.full
def test_200_saves_leak_neither_memory_nor_files(folder):
    """Half of them fail."""
    failing = Fault(
        "write", "*/.checkpoint_??????[02468].*/rank_00001.*", fails(errno.EIO), 1, 1, ALWAYS
    )
    faults = (Fault("open", "*/rank_*.safetensors", note_size, times=ALWAYS), failing)
    done = run(folder, "train.max_steps=201", "checkpoint.keep=2", faults=faults)
    assert done.returncode == 0, done.stderr
    assert len(said(done, "Not saved")) == 100 and len(said(done, "Saved")) == 101
    for rank in (0, 1):
        lines = (folder / f"sizes{rank}").read_text(encoding="utf-8").splitlines()
        memory, files = zip(*(map(int, line.split()) for line in lines), strict=True)
        assert max(memory[-20:]) < max(memory[20:40]) + 4_000_000
        assert max(files[-20:]) <= max(files[20:40])
