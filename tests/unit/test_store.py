"""Values left for others, in the launcher's store and in run.dir, and ranks that divide or not."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from shardtune.distributed.layout import Layout
from shardtune.distributed.measured import read_measured, write_measured
from shardtune.distributed.store import delete_value, get_value, set_value


def test_a_value_larger_than_the_store_takes_comes_back_whole():
    store = dist.HashStore()
    value = random.Random(0).randbytes(6 << 20).hex()  # of which half cannot be packed
    set_value(store, "key", value)
    assert int(store.get("key")) > 1 and get_value(store, "key") == value
    delete_value(store, "key")
    assert not any(store.check([key]) for key in ("key", "key/0", "key/1"))


@pytest.mark.parametrize(
    ("size", "replicate", "expert", "named"),
    [
        (16, 2, 8, []),
        (16, 2, 16, ["parallel.expert=16"]),
        (16, 3, 2, ["parallel.replicate=3"]),
        (16, 3, 3, ["parallel.replicate=3", "parallel.expert=3"]),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused_by_each_key(size, replicate, expert, named):
    problems = Layout(size, replicate=replicate, expert=expert).problems()
    assert [problem.split()[0] for problem in problems] == named


def test_measured_figures_are_read_for_the_ranks_that_measured_them(tmp_path):
    figure = {"between": 2e10, "inside": 3e11, "flops": [7e14, 6e14]}
    measured = write_measured(tmp_path, [4, 4], [figure, figure | {"between": 1e10}])
    assert (measured.node_bytes_per_s, measured.flops_per_s) == (1e10, 6e14)
    assert read_measured(tmp_path, nodes=2, ranks_per_node=4) == measured
    for nodes, ranks_per_node in ((2, 8), (1, 4), (1, 8)):
        assert read_measured(tmp_path, nodes, ranks_per_node).ranks == []
