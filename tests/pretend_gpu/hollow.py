"""The memory that one rank of a real model takes in two steps, without the model:

python -m tests.pretend_gpu.hollow --config FILE --model DIR --nodes 2 --gpus-per-node 8 [k=v ...]

Runs the project's own steps as rank 0 of a world whose other ranks do not exist, on a pretended GPU
whose large tensors have no contents. `DIR` needs a config.json. GLM-4.5-Air takes half a minute on
one core. `hollow_peaks` is the same in a process of its own.

What is measured is what PyTorch allocates. A real GPU also holds the CUDA context and NCCL's
buffers, and its allocator's blocks fit less tightly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NO_GROUPS = (0, True, True)  # a policy: all that has room stays, but for groups


class Peaks(NamedTuple):
    """Bytes of one rank.

    `allocated`: the most in each phase: load, trial (a first small forward), evaluate, forward,
    backward, norm, optimizer. `pools`: the most of each stream. One stream's blocks are not given
    to another, so that their sum is what the GPU reserves.
    """

    allocated: dict[str, int]
    pools: list[int]
    parameters: int  # elements of the whole model, or of its stage

    @property
    def peak_bytes(self) -> int:
        return max(self.allocated.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(self.pools)


def hollow_peaks(
    config: Path,
    model: Path,
    nodes: int,
    gpus_per_node: int,
    *assignments: str,
    gb: float = 80.0,
    stage: int = 0,
    planned: Sequence[int] = NO_GROUPS,
    tiles: int = 1,
    timeout_s: float = 580,
) -> Peaks:
    """Measure a stage's first rank, with this configuration and `section.key=value`.

    `gb` of a GPU, in 1e9 bytes, and the fields of the plan's policy, `planned`, decide what is
    kept, and limit nothing. `tiles`: the plan's, too.
    """
    options = [f"--config={config}", f"--model={model}", f"--nodes={nodes}"]
    options += [f"--gpus-per-node={gpus_per_node}", f"--gpu-memory={gb}"]
    options += [f"--stage={stage}", f"--planned={json.dumps(planned)}", f"--tiles={tiles}"]
    lines = in_process("tests.pretend_gpu.hollow", *options, *assignments, timeout_s=timeout_s)
    return Peaks(**json.loads(lines[-1]))


def in_process(module: str, *options: str, timeout_s: float) -> list[str]:
    """Return the lines that a module says in a process of its own."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout.splitlines()


def parse(arguments: Sequence[str] | None = None, doc: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB")
    parser.add_argument("--stage", type=int, default=0)
    policy_help = "the plan's policy: groups, gradients and sums that stay"
    parser.add_argument("--planned", type=json.loads, default=NO_GROUPS, help=policy_help)
    parser.add_argument("--tiles", type=int, default=1, help="as well")
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    install_for(options)
    import torch

    clock = _Phases(torch.ops.pretend)
    rank = lonely_rank(options, clock.enter)
    for _ in range(2):
        rank.take_step()
    clock.enter("end")
    numel = sum(p.numel() for p in rank.context.model.parameters())
    _, _, pools = torch.ops.pretend.memory(0)
    peaks = Peaks(clock.allocated, sorted(pools.values(), reverse=True), numel)
    print(json.dumps(peaks._asdict()))


def install_for(options: argparse.Namespace) -> None:
    """Give this process the GPUs of a node, without contents."""
    from . import install

    install(gpus=options.gpus_per_node, gb=options.gpu_memory, hollow=True)


class LonelyRank(NamedTuple):
    """A rank of a run without other ranks: what its steps use, and what takes one."""

    context: Any
    take_step: Callable[[], None]


def lonely_rank(options: argparse.Namespace, enter: Callable[[str], None]) -> LonelyRank:
    """Build the rank that `options` name, and evaluate once.

    Calls `enter` with the name of each phase as it begins, as `Peaks` has them.
    """

    import train_fsdp
    from shardtune.config_io import load_config
    from shardtune.model.build import build_model, read_facts
    from shardtune.model.fsdp_groups import forward_only
    from shardtune.model.source.files import read_model_config
    from shardtune.training import pipeline
    from shardtune.training.observers.expert_balance import ExpertBalance
    from shardtune.training.optim import build_optimizer
    from shardtune.training.states.host_states import HostStates
    from shardtune.training.states.replica_shards import OwnedParameters
    from shardtune.training.states.reshard import ReshardPolicy, choose_reshard_policy

    given = [f"model.path={options.model}", "model.init=random", *options.assignments]
    config = load_config(options.config, given, {})
    world = _fake_world(config, options.nodes, options.gpus_per_node, options.stage)
    _leave_out_contents()
    model_config = read_model_config(config.model)
    facts = read_facts(config, model_config, world.layout)
    model = build_model(config, model_config, facts, world)
    enter("trial")
    owned = OwnedParameters(model, world)
    host = HostStates(owned) if world.layout.offloads else None
    optimizer = build_optimizer(owned, config, host)
    reshard = choose_reshard_policy(model, None, ReshardPolicy(*options.planned), world)
    _prepare_forward(model, facts, options.tiles, world)
    batch = _full_batch(world)
    enter("evaluate")
    stage = pipeline.Stage(model, owned, world)
    with forward_only(model):
        stage.forward(batch)
    run = SimpleNamespace(config=config, world=world)
    unwritten: Any = SimpleNamespace()  # metrics, which two finite steps do not touch
    balance = ExpertBalance(model, model, unwritten, world)
    context: Any = SimpleNamespace(
        run=run,
        model=model,
        reshard=reshard,
        stage=stage,
        owned=owned,
        host=host,
        optimizer=optimizer,
        expert_balance=balance,
        metrics=unwritten,
    )
    enter_phases(train_fsdp, pipeline, enter)
    train_fsdp.optim.require_finite = lambda *_: None  # no number means anything
    trained = len(batch.targets) * world.size
    step: Any = SimpleNamespace(number=1, trained_tokens=trained, trained_weight=trained)
    stop: Any = SimpleNamespace(received=None)
    micro_batches = [batch] * world.layout.micro_batches
    return LonelyRank(context, lambda: train_fsdp.train_step(context, step, micro_batches, stop))


def _prepare_forward(model: Any, facts: Any, tiles: int, world: Any) -> None:
    """Let the model attend and make logits as a run of packed rows does."""
    from shardtune.model.documents.attention import DOCUMENT_ATTENTION
    from shardtune.model.loss import use_loss_head
    from shardtune.model.recomputation import tile_layers
    from shardtune.model.stages import layers_in

    model.set_attn_implementation(DOCUMENT_ATTENTION)
    use_loss_head(model, world.device)
    if tiles > 1:
        tile_layers(model, layers_in(model, facts.layer_names), tiles)


def enter_phases(train_fsdp: Any, pipeline: Any, enter: Callable[[str], None]) -> None:
    """Let the parts of a step call `enter` as they begin and end."""
    for place, name, before, after in (
        (pipeline.Stage, "forward", "forward", "backward"),
        (pipeline.Stage, "backward", "backward", "backward"),
        (train_fsdp, "all_gather_step_stats", "norm", "norm"),
        (train_fsdp, "update_weights", "optimizer", "optimizer"),
    ):
        setattr(place, name, entering(getattr(place, name), enter, before, after))


def entering(
    function: Callable[..., Any], enter: Callable[[str], None], before: str, after: str
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        enter(before)
        result = function(*arguments)
        enter(after)
        return result

    return call


class _Phases:
    """The most bytes that were allocated in each phase."""

    def __init__(self, ops: Any) -> None:
        self.allocated: dict[str, int] = {}
        self._ops, self._phase = ops, "load"

    def enter(self, phase: str) -> None:
        _, peak, _ = self._ops.memory(0)
        self.allocated[self._phase] = max(self.allocated.get(self._phase, 0), peak)
        self._ops.reset_peak(0)
        self._phase = phase


def _fake_world(config: Any, nodes: int, ranks_per_node: int, stage: int) -> Any:
    """Return a world in which only the first rank of this stage exists."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardtune.distributed.layout import Layout
    from shardtune.distributed.meshes import build_meshes
    from shardtune.distributed.progress import Progress
    from shardtune.distributed.world import World

    class LonelyWorld(World):
        def all_gather_json(self, value: Any, timeout_s: float = 0) -> list[Any]:
            return [value] * self.size

    layout = Layout.of(config, nodes * ranks_per_node, is_gpu=True)
    device, store, rank = torch.device("cuda", 0), FakeStore(), stage * layout.stage_ranks
    node, local_rank = divmod(rank, ranks_per_node)
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.ranks)
    meshes = build_meshes(device, layout)
    progress = Progress(device)
    return LonelyWorld(
        rank, layout, local_rank, ranks_per_node, node, device, meshes, store, progress
    )


def _leave_out_contents() -> None:
    """Draw no weights, and let each rank of the experts send this one as many tokens."""
    import torch
    import torch.distributed as dist

    from shardtune.model import build

    def without_contents(model: Any, seed: int, device: torch.device, *_: Any) -> None:
        model.to_empty(device=device)
        model.tie_weights(recompute_mapping=False)

    exchange = dist.all_to_all_single

    def balanced(output: torch.Tensor, given: torch.Tensor, *rest: Any, **options: Any) -> Any:
        done = exchange(output, given, *rest, **options)
        if not output.is_floating_point():  # counts of tokens
            on_host = torch.ops.pretend.on_host  # a real exchange does not wait
            bounds = torch.arange(output.numel() + 1) * int(on_host(given).sum()) // output.numel()
            on_host(output).copy_(bounds.diff().view_as(output))
        return done

    build.draw_weights, build.draw_factors = without_contents, lambda *_: None
    dist.all_to_all_single = balanced


def _full_batch(world: Any) -> Any:
    """Return rows of one document each, as long as the row, with every token trained.

    Where ranks share them, it is this rank's slice.
    """
    import torch

    from shardtune.data.batch import Batch

    rows, length = world.layout.micro_batch_size, world.layout.max_length
    predicting = torch.arange(rows * length).view(rows, length)[:, :-1].flatten()
    batch = Batch(
        torch.zeros(1, rows * length, dtype=torch.int64),
        torch.arange(length).repeat(rows)[None],
        None,
        predicting,
        torch.zeros_like(predicting),
        [length] * rows,
        torch.arange(rows + 1, dtype=torch.int32) * length,
    )
    batch = batch.slice_of(*world.share) if world.layout.row_ranks > 1 else batch
    return batch.to(world.device)


if __name__ == "__main__":
    main()
