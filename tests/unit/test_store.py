"""Values left for others, in the launcher's store and in run.dir."""

import random

import torch.distributed as dist

from shardtune.distributed.measured import CPU, read_measured, write_measured
from shardtune.distributed.world import delete_value, get_value, set_value


def test_a_value_larger_than_the_store_takes_comes_back_whole():
    store = dist.HashStore()
    value = random.Random(0).randbytes(6 << 20).hex()  # of which half cannot be packed
    set_value(store, "key", value)
    assert int(store.get("key")) > 1 and get_value(store, "key") == value
    delete_value(store, "key")
    assert not any(store.check([key]) for key in ("key", "key/0", "key/1"))


def test_measured_figures_are_read_for_the_ranks_that_measured_them(tmp_path):
    figure = {"between": 2e10, "inside": 3e11, "flops": [7e14, 6e14]}
    figures = [figure, figure | {"between": 1e10}]
    measured = write_measured(tmp_path, [4, 4], "NVIDIA L4", figures)
    assert (measured.node_bytes_per_s, measured.flops_per_s) == (1e10, 6e14)
    assert read_measured(tmp_path, 2, 4, "NVIDIA L4".__eq__) == measured
    assert read_measured(tmp_path, 2, 4, CPU.__eq__).ranks == []
    for nodes, ranks_per_node in ((2, 8), (1, 4), (1, 8)):
        assert read_measured(tmp_path, nodes, ranks_per_node, "NVIDIA L4".__eq__).ranks == []


def test_ranks_of_one_node_measure_no_rate_between_nodes(tmp_path):
    figure = {"between": 2e10, "inside": 3e11, "flops": [7e14, 6e14]}
    measured = write_measured(tmp_path, [4], CPU, [figure])
    assert (measured.node_bytes_per_s, measured.rank_bytes_per_s) == (None, 3e11)


def test_figures_of_an_unknown_device_are_not_read(tmp_path):
    """An earlier version did not write it."""
    write_measured(tmp_path, [4], CPU, [{"between": 2e10, "inside": 3e11, "flops": [7e14]}])
    file = tmp_path / "preflight.json"
    file.write_text(file.read_text().replace('"device": "CPU process", ', ""))
    assert "device" not in file.read_text()
    assert read_measured(tmp_path, 1, 4, lambda _: True).ranks == []
