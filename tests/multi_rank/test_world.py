"""How ranks agree, and that none is left waiting when another cannot go on."""

import re
import socket
import time
from typing import Any

import pytest
from helpers.configs import configured
from helpers.ranks import on_nodes, on_ranks

import shardtune.distributed.world
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger, setup_logging

HOST = socket.gethostname()


def fail_differently(world: World) -> None:
    def work() -> None:
        raise UserError("all see this - do that", f"only rank {world.rank} sees this - do that")

    world.run_on_all_ranks(work)


def fail_on_one(world: World) -> None:
    """While another is far from its end."""
    world.run_on_all_ranks(
        lambda: {}["lost"] if world.rank == 2 else time.sleep(60 * (world.rank == 0))
    )


def refuse_on_one(world: World) -> None:
    """Likewise."""
    vars(shardtune.distributed.world)["_OTHERS_REFUSE_WITHIN_S"] = 0.5

    def work() -> None:
        if world.rank == 2:
            raise UserError("this is wrong - mend it", "that is wrong - mend it")
        time.sleep(60 * (world.rank == 0))

    world.run_on_all_ranks(work)


def refuse_on_main(world: World) -> None:
    def work() -> None:
        assert world.is_main
        raise UserError("rank 0 alone looked - mend it")

    world.on_rank0(work)


def agree(world: World) -> None:
    assert world.all_gather_json(world.rank * 10) == [0, 10, 20]
    assert world.run_on_all_ranks(lambda: world.rank) == world.rank
    assert world.on_rank0(lambda: ["of", world.rank]) == ["of", 0]
    assert world.on_local_rank0(lambda: world.rank) == 0
    logger.info(f"said by {world.rank}")


def take_part(work: Any) -> None:
    def main() -> None:
        world = join_world(configured())
        setup_logging(world.is_main, world.is_node_main)
        work(world)

    run(main)


KEY_ERROR = r"rank 2 on \S+: KeyError: 'lost', in start-up - see the traceback there; .*"
OF_EACH = [f"only rank {rank} sees this - do that" for rank in range(3)]


def errors_in(output: str) -> list[str]:
    return re.findall(r"^ERROR: (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("work", "code", "errors"),
    [
        (fail_differently, 2, ["all see this - do that", *OF_EACH]),
        (fail_on_one, 1, [KEY_ERROR]),
        (refuse_on_one, 2, ["this is wrong - mend it", "that is wrong - mend it"]),
        (refuse_on_main, 2, ["rank 0 alone looked - mend it"]),
        (agree, 0, []),
    ],
)
def test_all_ranks_end_together(work, code, errors, tmp_path):
    done = on_ranks(3, take_part, work, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    found = errors_in(done.stderr)
    assert len(found) == len(errors) and all(map(re.fullmatch, errors, found)), found
    assert done.stdout == ("said by 0\n" if work is agree else "")


def test_a_problem_that_not_all_nodes_have_names_those_that_do(tmp_path):
    nodes = [(tmp_path / "a", 2), (tmp_path / "b", 1)]
    for folder, _ in nodes:
        folder.mkdir()
    done = on_nodes(nodes, take_part, fail_differently)
    of_ranks = [f"node {rank // 2} ({HOST}): {problem}" for rank, problem in enumerate(OF_EACH)]
    assert done.returncode == 2
    assert set(errors_in(done.stderr)) == {"all see this - do that", *of_ranks}
