"""Several results at the same time: each in a process of its own but the last."""

import multiprocessing
import os
import time
from functools import partial

import pytest
import torch

from shardtune.planner.simulation.at_once import at_once, in_turn

HERE = os.getpid()


def test_results_come_in_the_order_of_the_functions(capfd):
    """Libraries say what they say once."""

    def work() -> int:
        os.write(2, b"a warning\n")
        return os.getpid()

    child, second, last = at_once([work, lambda: 2, work])
    assert child != HERE and second == 2 and last == HERE
    assert at_once([]) == []
    assert capfd.readouterr().err == "a warning\n"


def test_what_fails_in_a_fork_fails_or_works_here(capfd):
    """A traceback of the fork would be the second one."""

    def refuse() -> None:
        raise KeyError("no such layer")

    def work_here_alone() -> str:
        if os.getpid() != HERE:
            os._exit(3)
        return "done"

    with pytest.raises(KeyError, match="no such layer"):
        at_once([refuse, os.getpid])
    assert at_once([work_here_alone, str]) == ["done", ""]
    assert capfd.readouterr().err == ""


def test_two_functions_run_at_a_time_and_each_result_comes_in_its_turn(tmp_path):
    """The third begins when the second has ended, while the first runs."""
    begun = tmp_path / "third"

    def wait_for_the_third() -> int:
        while not begun.exists():
            time.sleep(0.01)
        return os.getpid()

    def begin_third() -> int:
        begun.touch()
        return os.getpid()

    pids = [*in_turn([wait_for_the_third, os.getpid, begin_third, os.getpid])]
    assert len({*pids, HERE}) == 5

    def work_here_alone() -> str:
        return "done" if os.getpid() == HERE else os._exit(3)

    assert [*in_turn([str, work_here_alone, int])] == ["", "done", 0]
    assert [*in_turn([])] == []


def test_a_fork_and_a_process_of_a_pool_compute_everything_themselves():
    work = partial(at_once, [os.getpid, os.getpid])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pairs = [*in_turn([work]), pool.apply(work)]
    for first, second in pairs:
        assert first == second != HERE


@pytest.mark.timeout(60)
def test_a_fork_does_not_wait_for_threads_that_it_lacks():
    rows = torch.ones(1 << 20)
    torch.set_num_threads(2)
    try:
        rows.exp().sum()  # starts them
        assert at_once([partial(_sum, rows), int])[0] == rows.numel()
    finally:
        torch.set_num_threads(1)


def _sum(rows: torch.Tensor) -> int:
    return int((rows + 0).sum().item())
