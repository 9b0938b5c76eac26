"""The environment of a launch: its defaults, the problems of a node, NCCL's flight recorder."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest
from helpers.configs import load
from helpers.documented import require_error_line
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from shardtune.cluster.environment import Environment, banner, read_environment, set_defaults
from shardtune.cluster.node_ranks import NodeRanks

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GPUS_PER_NODE": "2"}


def problem(environment: Environment, start: str) -> str:
    """The one problem that begins so."""
    (line,) = [line for line in environment.problems if line.startswith(start)]
    require_error_line(f"ERROR: {line}")
    return line


@pytest.mark.parametrize(
    ("changed", "start"),
    [
        ({"MASTER_ADDR": "no.such.name.invalid"}, "MASTER_ADDR is 'no.such.name.invalid', which d"),
        ({"MASTER_ADDR": "192.0.2.1"}, "MASTER_ADDR 192.0.2.1 is not an address of node 0, which"),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, "NCCL_SOCKET_IFNAME is 'eth7', and this node has no such"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is '0' - set it to a whole number from 1 to 9999"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS is '-1' - set it to a whole number from 0 to 9999"),
        ({"NODE_RANK": "one"}, "NODE_RANK is 'one' - set it to a whole number from 0 to 99998"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2 and NNODES 2 - "),
    ],
)
def test_a_wrong_variable_is_named(changed, start):
    problem(read_environment(LOOPBACK | changed, []), start)


@pytest.mark.parametrize(
    ("argument", "start"),
    [
        ("data.train=train.jsonl", "data.train=train.jsonl: no such file or directory"),
        ("model.path=/nowhere/model", "model.path=/nowhere/model: no such file or directory"),
        ("run.dir=/dev/null/run", "run.dir=/dev/null/run: /dev/null cannot be written - "),
        ("optimizer.rate=7", "optimizer.rate (command line) is not known"),
    ],
)
def test_a_wrong_argument_is_named(argument, start):
    problem(read_environment(LOOPBACK, [argument]), start)


def test_every_problem_is_named_at_once():
    changed = {"NNODES": "two", "NCCL_SOCKET_IFNAME": "eth7"}
    environment = read_environment(LOOPBACK | changed, ["model.path=/nowhere/model"])
    for start in ("NNODES is 'two'", "NCCL_SOCKET_IFNAME is 'eth7'", "model.path=/nowhere/model"):
        problem(environment, start)


@pytest.mark.parametrize(
    "changed",
    [{}, {"MASTER_ADDR": "no.such.name.invalid", "NCCL_SOCKET_IFNAME": "eth7"}],
)
def test_one_node_needs_no_interface_address_or_port(changed):
    with socket.create_server(("", 0)) as taken:  # another run's port
        environment = read_environment({"NNODES": "1"} | changed, ["model.path=org/name"])
        assert not [line for line in environment.problems if not line.startswith("data.")]
        assert (environment.master_ip, environment.interface) == ("127.0.0.1", "lo")
        assert environment.store_port not in (None, 29600, taken.getsockname()[1])
    port = {"MASTER_PORT": "29777"}
    assert read_environment({"NNODES": "1"} | changed | port, []).store_port == 29777


def test_an_interface_that_is_down_is_named(monkeypatch):
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"lo": SimpleNamespace(isup=False)})
    line = problem(read_environment(LOOPBACK, []), "NCCL_SOCKET_IFNAME is 'lo', and that inter")
    assert " - `ip link set lo up` as root" in line


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
