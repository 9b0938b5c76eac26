"""Nodes with disks of their own: each also holds its neighbour's part, and any disk may die."""

import errno
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import finish
from helpers.faults import ALWAYS, Fault, fails, kills, run_with, then, waits_until
from helpers.ranks import run_script, train, train_on_nodes
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    close_to,
    digests,
    flip_bit,
    names,
    steps_of,
    write_inputs,
)

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.mirror import Mirror

SAVES = (*SETTINGS, *CONSTANT, "checkpoint.every_steps=2", "export.final=false")
MIRRORED = r"Mirrored checkpoint_(\d+): each node holds its neighbour's part \(.+ GB in \d+ s\)"
COPY = "*/checkpoint_*/rank_*.partial"
# Where the leader of which node dies: during a save, while copies are made, between both, while the
# oldest goes; at what makes a file count, that of either node.
POINTS = {
    "writes its file": ("write", "*/.checkpoint_0000006.*/rank_*", [1]),
    "writes the manifest": ("open", "*/.checkpoint_0000006.*/manifest.json", [0]),
    "completes": ("fsync", "*/.checkpoint_0000006.*/COMPLETE", [1]),
    "commits": ("rename", "*/.checkpoint_0000006.*", [0]),
    "opens a copy": ("open", COPY, [0]),
    "writes a copy": ("write", COPY, [1]),
    "syncs a copy": ("fsync", COPY, [0]),
    "names a copy": ("rename", COPY, [1]),
    "gets the metrics": ("open", "*/metrics.tmp", [1]),  # of node 0
    "deletes the oldest": ("unlink", "*/.checkpoint_*.deleting/*", [0]),
}


def disks(root: Path, model: Path, *ranks: int) -> list[tuple[Path, int]]:
    """A folder and a number of ranks for each node."""
    return [(write_inputs(root / f"node{n}", model), size) for n, size in enumerate(ranks)]


def replace_disk(node: tuple[Path, int]) -> None:
    shutil.rmtree(node[0] / "run")


def is_mirrored(*parts: Path) -> bool:
    """Whether each of two disks has the files of all three ranks."""
    return all(len([*part.glob("rank_*.safetensors")]) == 3 for part in parts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """The run directory of ten steps of three ranks on one disk."""
    folder = write_inputs(tmp_path_factory.mktemp("whole"), models["glm"])
    assert train(3, *SAVES, "train.max_steps=10", cwd=folder).returncode == 0
    return folder / "run"


def test_each_node_holds_its_neighbours_part(tmp_path, models, whole):
    nodes = disks(tmp_path, models["glm"], 1, 1, 1)
    said = finish(train_on_nodes(nodes, *SAVES, "train.max_steps=4"))
    assert [int(step) for step in re.findall(MIRRORED, said)] == [2, 4] or "go on" in said, said
    parts = [checkpoint(folder / "run", 4) for folder, _ in nodes]
    for n, part in enumerate(parts):
        ranks = {f"rank_{rank:05d}.safetensors" for rank in (n, (n - 1) % 3)}
        assert ranks == {name for name in names(part) if name.startswith("rank")}
    assert steps_of(nodes[1][0] / "run") == steps_of(nodes[0][0] / "run")
    assert run(["verify", *map(str, parts[:2])]) == 0
    replace_disk(nodes[0])
    said = finish(train_on_nodes(nodes, *SAVES, "train.max_steps=8"))
    assert "Resumed from checkpoint_0000004" in said and "up to 4 are on node 1" in said
    assert steps_of(nodes[0][0] / "run") == steps_of(whole)[4:8]
    assert steps_of(nodes[1][0] / "run") == steps_of(whole)[:8]


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "dead"),
    [(point, dead) for point, (_, _, nodes) in POINTS.items() for dead in nodes],
)
def test_a_node_that_dies_with_its_disk_loses_at_most_one_checkpoint(
    point, dead, tmp_path, models, whole
):
    """A fresh one starts, and the run goes on to the bit, without a part of an unfinished copy."""
    nodes = disks(tmp_path, models["glm"], 2, 1)
    operation, path, _ = POINTS[point]
    # Of copies the first of the second checkpoint: node 1 gets two files of each.
    nth = {COPY: 2 + dead, "*/metrics.tmp": 2}.get(path, 1)
    death = Fault(operation, path, kills(), rank=2 * dead, nth=nth)
    first = waits_until(partial(is_mirrored, *(checkpoint(f / "run", 2) for f, _ in nodes)))
    faults = [death, replace(death, effect=first)]
    given = (*SAVES, "train.max_steps=8")
    killed = train_on_nodes(nodes, *given, work=partial(run_with, faults))
    assert killed.returncode != 0, killed.stdout
    replace_disk(nodes[dead])
    said = finish(train_on_nodes(nodes, *SAVES, "train.max_steps=10"))
    resumed = re.search(r"Resumed from checkpoint_(\d+)", said)
    assert resumed, said
    expected = steps_of(whole)[int(resumed[1]) if dead == 0 else 0 :]
    assert steps_of(nodes[0][0] / "run") == expected
    assert not [path for folder, _ in nodes for path in folder.rglob("*.partial")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "ranks", "more"),
    [
        ("llama", (2, 2), ("parallel.stages=2", "train.gradient_accumulation_steps=2")),
        ("glm", (2, 2), ("parallel.expert=2",)),
        ("llama", (1, 1, 1), ("lora.rank=4",)),
    ],
)
def test_meshes_and_adapters_outlive_a_disk(model, ranks, more, tmp_path, models):
    nodes = disks(tmp_path, models[model], *ranks)
    alone = write_inputs(tmp_path / "alone", models[model])
    finish(train(sum(ranks), *SAVES, *more, "train.max_steps=6", cwd=alone))
    finish(train_on_nodes(nodes, *SAVES, *more, "train.max_steps=4"))
    replace_disk(nodes[-1])
    assert "Resumed from checkpoint_0000004" in finish(
        train_on_nodes(nodes, *SAVES, *more, "train.max_steps=6")
    )
    assert steps_of(nodes[0][0] / "run") == steps_of(alone / "run")


@pytest.mark.parametrize("left", [1, pytest.param(0, marks=pytest.mark.full)])
def test_one_node_goes_on_alone(left, tmp_path, models):
    """With its own curves, also where node 0 wrote them."""
    nodes, rows = disks(tmp_path, models["glm"], 1, 1), "train.gradient_accumulation_steps="
    whole = write_inputs(tmp_path / "whole", models["glm"])
    finish(train(2, *SAVES, f"{rows}2", "train.max_steps=6", cwd=whole))
    finish(train_on_nodes(nodes, *SAVES, f"{rows}2", "train.max_steps=4"))
    replace_disk(nodes[1 - left])
    given = (*SAVES, f"{rows}4", "train.max_steps=6")
    assert "Resumed from checkpoint_0000004" in finish(train(1, *given, cwd=nodes[left][0]))
    assert steps_of(nodes[left][0] / "run") == close_to(steps_of(whole / "run"))


@pytest.mark.parametrize("error", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.full)])
def test_a_disk_that_takes_no_copy_ends_the_mirrors_alone(error, tmp_path, models, whole):
    nodes = disks(tmp_path, models["glm"], 2, 1)
    full = Fault("write", "*.partial", fails(error), rank=2, times=ALWAYS)
    done = train_on_nodes(nodes, *SAVES, "train.max_steps=8", work=partial(run_with, [full]))
    said = finish(done) + done.stderr
    assert said.count("Not mirrored: checkpoint_0000002: rank 2 on ") == 1
    assert said.count("until the next start") == 1
    assert "Mirrored" not in said and steps_of(nodes[0][0] / "run") == steps_of(whole)[:8]
    for folder, _ in nodes:
        assert names(folder / "run/checkpoints")[-2:] == [
            "checkpoint_0000006",
            "checkpoint_0000008",
        ]
        assert not [*folder.rglob("*.partial")]


def test_a_checkpoint_on_one_disk_stays_until_another_is_mirrored(tmp_path, models, whole):
    """A fresh node, whose first copies fail, dies again: the run goes on from where it began."""
    nodes, given = disks(tmp_path, models["glm"], 2, 1), (*SAVES, "checkpoint.keep=1")
    finish(train_on_nodes(nodes, *given, "train.max_steps=4"))
    replace_disk(nodes[0])
    full = Fault("write", "*.partial", fails(errno.ENOSPC), rank=2, times=ALWAYS)
    done = train_on_nodes(nodes, *given, "train.max_steps=10", work=partial(run_with, [full]))
    assert "checkpoint_0000004 has parts on one disk alone" in finish(done) + done.stderr
    replace_disk(nodes[0])
    said = finish(train_on_nodes(nodes, *given, "train.max_steps=10"))
    assert "Resumed from checkpoint_0000004" in said
    assert steps_of(nodes[0][0] / "run") == steps_of(whole)[4:]


def test_nodes_that_change_places_lose_no_steps_of_their_metrics(tmp_path, models, whole):
    """Steps 5 to 8 are on one disk alone, and the other one becomes node 0."""
    nodes = disks(tmp_path, models["glm"], 1, 2)
    for last, more, order in ((4, [], 1), (8, ["checkpoint.mirror=false"], 1), (10, [], -1)):
        finish(train_on_nodes(nodes[::order], *SAVES, *more, f"train.max_steps={last}"))
    assert steps_of(nodes[0][0] / "run") == steps_of(whole)


def train_with_little_room(arguments: list[str]) -> None:
    """As much is free as a copy takes, and less than the saves to come take, too."""
    durable_fs.free_bytes = lambda path: 800_000
    run_script(arguments)


def test_a_copy_leaves_room_for_the_saves_to_come(tmp_path, models):
    nodes = disks(tmp_path, models["glm"], 2, 1)
    work = train_with_little_room
    done = train_on_nodes(nodes, *SAVES, "train.max_steps=4", work=work)
    said = finish(done) + done.stderr
    assert "Not mirrored: checkpoint_0000002: " in said and "with the saves to come, takes" in said
    assert "Saved checkpoint_0000004" in said and "Mirrored" not in said


def train_in_a_small_disk(arguments: list[str]) -> None:
    """It holds both parts of two checkpoints and a third part; each save awaits earlier copies."""
    durable_fs.free_bytes = lambda path: 2_450_000 - durable_fs.size(Path("run"))
    agree = Mirror.agree_to_start

    def agree_in_time(mirror: Mirror, name: str) -> bool:
        if mirror._thread:
            mirror._thread.join()
        return agree(mirror, name)

    Mirror.agree_to_start = agree_in_time  # type: ignore[method-assign]
    run_script(arguments)


@pytest.mark.parametrize("keep", [2, pytest.param(1, marks=pytest.mark.full)])
def test_disks_for_two_checkpoints_and_a_part_take_all_copies(keep, tmp_path, models):
    """Also when one of them is new: the other deletes what the newer ones replace."""
    nodes, work = disks(tmp_path, models["glm"], 1, 1), train_in_a_small_disk
    given = (*SAVES, f"checkpoint.keep={keep}")
    said = finish(train_on_nodes(nodes, *given, "train.max_steps=6", work=work))
    assert [int(step) for step in re.findall(MIRRORED, said)] == [2, 4, 6], said
    replace_disk(nodes[1])
    said = finish(train_on_nodes(nodes, *given, "train.max_steps=12", work=work))
    assert [int(step) for step in re.findall(MIRRORED, said)] == [8, 10, 12], said
    assert names(nodes[0][0] / "run/checkpoints")[-1] == "checkpoint_0000012"


def train_on_a_disk_that_fills(arguments: list[str]) -> None:
    """As if saves that come during the copy of the first took the room of the next one."""
    late = Path("run/checkpoints/checkpoint_0000004")
    durable_fs.free_bytes = lambda path: 400_000 if late.exists() else 10**9
    waits = waits_until(late.exists)
    run_with([Fault("open", "*/checkpoint_0000002/*.partial", waits)], arguments)


def test_a_copy_ends_where_it_takes_the_room_of_the_next_save(tmp_path, models):
    nodes, work = disks(tmp_path, models["glm"], 1, 1), train_on_a_disk_that_fills
    done = train_on_nodes(nodes, *SAVES, "train.max_steps=6", work=work)
    said = finish(done) + done.stderr
    assert "Not mirrored: checkpoint_0000002: " in said and "more than it has free" in said, said
    assert "Saved checkpoint_0000006" in said and "Mirrored" not in said
    assert not [path for folder, _ in nodes for path in folder.rglob("*.partial")]


def damage(file: Path) -> bool:
    flip_bit(file)
    return True


def test_a_part_that_was_damaged_before_it_was_sent_is_found_by_its_digest(tmp_path, models):
    nodes = disks(tmp_path, models["glm"], 1, 1)
    own = nodes[0][0] / "run/checkpoints/checkpoint_0000002/rank_00000.safetensors"
    renamed = then(waits_until(partial(damage, own)))
    of_save = Fault("rename", "*/.checkpoint_0000002.*", renamed, rank=0)
    done = train_on_nodes(nodes, *SAVES, "train.max_steps=2", work=partial(run_with, [of_save]))
    assert "rank_00000.safetensors arrived damaged" in done.stdout + done.stderr, done.stdout
    assert names(checkpoint(nodes[1][0] / "run", 2)) == [
        *("COMPLETE", "huggingface", "manifest.json", "rank_00001.safetensors")
    ]


def test_a_late_copy_is_skipped_once_and_the_mirrored_checkpoint_stays(tmp_path, models):
    """Beyond checkpoint.keep; the last save waits for its copy."""
    nodes = disks(tmp_path, models["glm"], 1, 1)
    slow = Fault(
        "open",
        "*/checkpoint_0000002/*.partial",
        waits_until((nodes[1][0] / "run/checkpoints/checkpoint_0000006").exists),
        rank=1,
    )
    given = (*SAVES, "checkpoint.keep=1", "train.max_steps=8")
    said = finish(train_on_nodes(nodes, *given, work=partial(run_with, [slow])))
    assert said.count("Not mirrored: checkpoint_0000004: ") == 1 == said.count("Not mirrored")
    assert "Mirrored checkpoint_0000002" in said and "Mirrored checkpoint_0000008" in said
    kept = ["checkpoint_0000002", "checkpoint_0000008"]
    assert [names(folder / "run/checkpoints") for folder, _ in nodes] == [kept, kept]
    one, other = (digests(checkpoint(folder / "run", 8), "rank*") for folder, _ in nodes)
    assert one == other and len(one) == 2


def test_one_disk_has_no_neighbour(tmp_path, models):
    done = train_on_nodes(disks(tmp_path, models["glm"], 2), *SAVES, "checkpoint.mirror=true")
    assert done.returncode == 2
    assert re.fullmatch(r"ERROR: checkpoint\.mirror=true: .* - use auto\n", done.stderr)
