"""The bytes of a plan are those that a cable between two nodes carries, by the cable's counters."""

import ctypes
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.collectives import counted_collectives
from helpers.commands import needs_namespaces
from helpers.ranks import on_nodes

from distTest.rehearse.namespaces import Node, joined_nodes
from distTest.workloads.cable import ADDRESSES, INTERFACE, PORT
from distTest.workloads.small_models import ROW_TOKENS, write_model, write_rows
from shardtune.config_io import load_config
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan

RANKS_PER_NODE = 2
ROWS = 8  # of a step
STEPS = 2  # what the second one moves is counted
LARGE_BYTES = 50_000_000
# Of a step, beside what is planned: a few numbers, barriers, and the progress of ranks.
SMALL_BYTES = 200_000


def settings(model: Path, stages: int, *more: str) -> list[str]:
    data_ranks = RANKS_PER_NODE * len(ADDRESSES) // stages
    data = f"data.train={model.parent / 'rows.jsonl'}"
    given = [
        f"model.path={model}",
        "model.compute_dtype=float32",
        data,
        f"parallel.stages={stages}",
    ]
    given += [f"data.max_length={ROW_TOKENS}", f"train.max_steps={STEPS}", f"train.epochs={STEPS}"]
    given += [f"train.gradient_accumulation_steps={ROWS // data_ranks}", "export.final=false"]
    return [*given, "checkpoint.every_steps=0", *more]


def plan_of(given: list[str]) -> Plan:
    config = load_config(Path(os.devnull), given, {})
    machine = Machine(len(ADDRESSES), RANKS_PER_NODE, 1e12, 1, 1, 1, is_gpu=False)
    return make_plan(config, read_model_config(config.model), machine)


def train_over_cable(nodes: list[Node], runs: dict[str, list[str]]) -> None:
    """On a rank: go to its node and train each run.

    Rank 0 writes what each node had received by the end of each step.
    """
    rank = int(os.environ["RANK"])
    with (Path("/run/netns") / nodes[rank // RANKS_PER_NODE].name).open(encoding="utf-8") as place:
        assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    script: Any = import_module("train_fsdp")
    train_step = script.train_step
    for number, (name, given) in enumerate(runs.items()):
        received: list[list[int]] = []

        def counting(*arguments: Any, received: list[list[int]] = received) -> Any:
            done = train_step(*arguments)
            dist.barrier()
            if rank == 0:
                received.append([node.received_bytes() for node in nodes])
            dist.barrier()
            return done

        script.train_step = counting
        os.environ["MASTER_PORT"] = str(PORT + number)
        script.sys.argv = ["train_fsdp.py", "--config", os.devnull, *given, f"run.dir={name}"]
        with counted_collectives(name):
            script.main()
        dist.destroy_process_group()
        if rank == 0:
            Path(f"{name}.json").write_text(json.dumps(received), encoding="utf-8")


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize(
    ("family", "meshes"),
    [
        (
            "glm",
            [
                [2, "parallel.expert=2", "model.activation_checkpointing=full"],
                [1, "parallel.replicate=2", "parallel.expert=2"],
            ],
        ),
        ("tied llama", [[4], [1, "lora.rank=4"]]),
    ],
)
def test_a_cable_carries_the_planned_bytes(family, meshes, tmp_path):
    write_model(family, tmp_path / family)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    runs = {f"run{i}": settings(tmp_path / family, *mesh) for i, mesh in enumerate(meshes)}
    with joined_nodes(ADDRESSES, INTERFACE) as nodes:
        for node in nodes:
            node.limit(0)
        folders = [(tmp_path, RANKS_PER_NODE) for _ in nodes]
        done = on_nodes(folders, train_over_cable, nodes, runs, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, given in runs.items():
        plan = plan_of(given)
        planned = sum(plan.received[0].values())
        first, second = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for before, after in zip(first, second, strict=True):
            received = after - before
            if planned > LARGE_BYTES:
                assert received == pytest.approx(planned, rel=0.02), given
            else:
                assert 0.98 * planned <= received <= 1.02 * planned + SMALL_BYTES, given
        for stage, traffic in enumerate(plan.traffic):  # of the first rank of each stage
            rank = stage * RANKS_PER_NODE * len(nodes) // len(plan.traffic)
            counts = json.loads((tmp_path / f"{name}.{rank}.json").read_text(encoding="utf-8"))
            messages = sum(size for (kind, _), size in traffic.items() if kind == "send")
            assert counts.get("recv", {"bytes": 0})["bytes"] == STEPS * messages, given
