"""What an agent sets and prints before it meets the others, and NCCL's flight recorder."""

from __future__ import annotations

import os
import threading

from helpers.configs import load
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from shardtune.cluster.environment import banner, read_environment, set_defaults
from shardtune.cluster.node_ranks import NodeRanks


def test_the_defaults_of_the_launch_scripts_are_the_guides(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NODE_RANK": "1", "OMP_NUM_THREADS": "3"})
    environment = read_environment(os.environ, [])
    set_defaults(environment)
    assert "\nMaster: 10.11.7.50:29600\nTotal Nodes: 2\nGPUs per Node: 8\n" in banner(environment)
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    assert [os.environ[name] for name in names] == ["enp26s0np0", "enp26s0np0", "3"]


def test_the_flight_recorders_of_a_node_are_asked_and_named(tmp_path, monkeypatch):
    """A thread stands in for NCCL, which listens at a pipe in one of two ranks."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    rendezvous = StaticTCPRendezvous("127.0.0.1", 0, 2, 3, "attempt0", 9)
    config = load(tmp_path, f"run.dir={tmp_path}/run")
    ranks = NodeRanks(["-c", "pass"], [2, 2, 2], rendezvous, config, tmp_path)
    pipe, dump = tmp_path / "nccl_pipe_rank_5.pipe", tmp_path / "run/nccl_trace_rank_5"
    dump.parent.mkdir()
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)

    def record() -> None:
        dump.write_bytes(os.read(descriptor, 10))

    thread = threading.Thread(target=record)
    thread.start()
    assert ranks.dump_flight_recorders() == [str(dump)]
    thread.join()
    os.close(descriptor)
    ranks.end(0, 0)
    assert dump.read_bytes() == b"1\n"
