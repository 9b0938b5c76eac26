"""Crashes of a machine that saves: the run resumes from every state that POSIX allows."""

import re
from collections.abc import Callable, Sequence

import pytest
from helpers.crash import RENAME, SAVES, SYNC, Judge, Operation, record
from helpers.faults import ALWAYS, DiskOs, Fault

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import ASSETS


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's own writes need no sync."""
    monkeypatch.setattr(
        durable_fs, "os", DiskOs(Fault("fsync", "*", lambda do, handle: None, times=ALWAYS))
    )


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Judge]:
    """By the number of ranks and of disks; each is recorded once."""
    made: dict[tuple[int, int], Judge] = {}

    def judge(ranks: int, disks: int) -> Judge:
        if (ranks, disks) not in made:
            folder = tmp_path_factory.mktemp(f"crash{ranks}{disks}")
            made[ranks, disks] = Judge(record(folder, ranks, disks), folder / "state")
        return made[ranks, disks]

    return judge


@pytest.mark.parametrize(
    ("ranks", "disks"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.full)]
)
def test_no_crash_breaks_a_promise(ranks, disks, judges):
    judge = judges(ranks, disks)
    violation, states = judge.first_violation(judge.recording.operations)
    assert not violation
    operations = len(judge.recording.operations)
    print(f"{ranks} ranks, {disks} disks: {operations} operations, {states} states")
    assert {verdict.resumed for verdict in judge.verdicts.values()} == {0, *SAVES}


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "disks"), [(1, 1), (2, 2)])
def test_every_sync_and_every_rename_is_needed(ranks, disks, judges):
    """Except those that a later sync repeats, and those of other disks' copies of assets.

    The first start has no metrics yet, and its sync of their name is repeated by that of
    `checkpoints`. Of two disks a third of the second is tried: the first is as one alone.
    """
    judge = judges(ranks, disks)
    operations = judge.recording.operations
    first_write = next(n for n, operation in enumerate(operations) if operation.kind == "write")
    unneeded, made_up_for, copies = set[int](), set[int](), set[int]()
    for number, operation in enumerate(operations):
        if disks == 2 and (operation.label.startswith("disk0") or number % 3):
            continue
        if operation.kind in (SYNC, RENAME):
            violation, _ = judge.first_violation(operations[:number] + operations[number + 1 :])
            if not violation:
                unneeded.add(number)
            if operation.kind == SYNC and number < first_write:
                made_up_for.add(number)
            is_of_names = operation.kind == SYNC and operation.inode in judge.recording.directories
            if is_of_names and _makes_no_more_than_attempts_durable(
                operations[:number], operation.inode
            ):
                made_up_for.add(number)
            if f"/{ASSETS}" in operation.label and not operation.label.startswith("disk0"):
                copies.add(number)

    def named(numbers: set[int]) -> list[str]:
        return [
            f"{operations[number].kind} {operations[number].label}" for number in sorted(numbers)
        ]

    assert not named(unneeded - made_up_for - copies)
    if disks == 1:
        assert named(unneeded) == named(made_up_for)


def _makes_no_more_than_attempts_durable(before: Sequence[Operation], directory: int) -> bool:
    """Whether all that this sync makes durable are names of an attempt that is not complete yet."""
    last_sync = max(
        (n for n, o in enumerate(before) if o.kind == SYNC and o.inode == directory), default=-1
    )
    changes = [o for o in before[last_sync + 1 :] if o.directory == directory and o.name]
    return all(o.kind == "create" and re.match(rf"\.|rank_|{ASSETS}$", o.name) for o in changes)
