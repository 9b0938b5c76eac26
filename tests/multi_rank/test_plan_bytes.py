"""The bytes of a plan are those that real ranks hold and send."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.built import build_model
from helpers.collectives import Collectives
from helpers.commands import finish
from helpers.moe_families import FAMILIES, SMALL
from helpers.ranks import on_ranks
from transformers import AutoConfig, PreTrainedConfig

from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.data.batch import Batch
from shardtune.distributed.exchange import heads_between
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local
from shardtune.model import documents
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.training.optim import build_optimizer
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.reshard import ReshardPolicy

KINDS = {
    "allgather_base": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
}
LENGTH = 64  # tokens of a row
REPLICAS = ["parallel.replicate=2", "train.gradient_accumulation_steps=3"]
FULL, SELECTIVE = (f"model.activation_checkpointing={how}" for how in ("full", "selective"))
CASES = [
    pytest.param(2, "glm4_moe", ["parallel.expert=2", FULL], 8e9, marks=pytest.mark.full),
    # Room for the sums of a replica's gradients, but not for whole gradients.
    (4, "qwen3_moe", ["parallel.expert=2", *REPLICAS], 1.0046e8),
    (4, "llama", ["parallel.tensor=2", SELECTIVE], 8e9),
    (1, "llama", ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"], 8e9),
    *(
        pytest.param(4, *case, marks=pytest.mark.full)
        for case in (
            ("llama", ["lora.rank=4", "train.gradient_accumulation_steps=3"], 8e9),
            # Some groups stay gathered.
            ("deepseek_v3", ["parallel.expert=2", "train.gradient_accumulation_steps=3"], 1.107e8),
            ("qwen3_moe", ["parallel.context=4", "parallel.expert=2", FULL], 8e9),  # 2 key heads
            ("qwen3_moe", ["parallel.expert=2", *REPLICAS], 1e8),
            ("llama", ["parallel.replicate=4"], 8e9),
            ("llama", ["parallel.replicate=2", "model.master_dtype=bfloat16"], 8e9),
            ("deepseek_v3", ["parallel.context=4", "parallel.replicate=2"], 8e9),
            ("glm4_moe", ["parallel.tensor=2", "parallel.expert=4", FULL], 8e9),
            ("qwen3", ["parallel.tensor=2", "parallel.replicate=2", "lora.rank=4"], 8e9),
            ("gemma4_text", ["parallel.context=2", "parallel.expert=2"], 8e9),
        )
    ),
]


def small(family: str) -> PreTrainedConfig:
    settings = SMALL | FAMILIES.get(family, {})
    if family == "deepseek_v3":  # parameters take more than activations
        settings |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 512)
        settings |= {"num_hidden_layers": 3}
    return AutoConfig.for_model(family, **settings)


def configured(assignments: list[str]) -> Config:
    given = ["model.path=unread", "model.init=random", "model.compute_dtype=bfloat16"]
    given += [f"data.max_length={LENGTH}", "data.train=unread"]
    given += ["train.gradient_accumulation_steps=2"]
    return load_config(Path("/dev/null"), [*given, *assignments], {})


def take_a_step(family: str, assignments: list[str], policy: list[int]) -> None:
    """On a rank: write what it holds after a step, and what it sent in it."""
    config = configured(assignments)
    world = join_world(config)
    model = build_model(config, small(family), world)
    owned, reshard = OwnedParameters(model, world), ReshardPolicy(*policy)
    optimizer = build_optimizer(owned, config)
    model.set_attn_implementation("documents")
    use_loss_head(model, world.device)
    reshard.keep_gathered(model)
    ids = torch.randint(1, 100, (1, LENGTH))
    places = torch.arange(LENGTH)
    ends = torch.tensor([0, LENGTH], dtype=torch.int32)
    batch = Batch(ids, places[None], None, places[:-1], ids[0, 1:], [LENGTH], ends)
    heads = heads_between(world)
    batch = batch.slice_of(*world.share) if world.layout.row_ranks > 1 else batch
    micro_batches = config.train.gradient_accumulation_steps
    with Collectives() as sent:
        for number in range(micro_batches):
            reshard.before_backward(model, is_last_micro_batch=number + 1 == micro_batches)
            with documents.of(batch, heads):
                summed_loss(model, batch).backward()
        left = [p.grad for p in {*model.parameters(), *owned.by_name.values()}]
        gradients = sum(to_local(gradient).nbytes for gradient in left if gradient is not None)
        optimizer.step()  # replicas exchange their new weights in it
    state = [tensor for of in optimizer.state.values() for tensor in of.values()]
    held = {
        "parameters": sum(to_local(p).nbytes for p in model.parameters()),
        "gradients": gradients,
        "optimizer": sum(to_local(tensor).nbytes for tensor in state),
    }
    report = {"held": held, "sent": sent.totals}
    Path(f"report{world.rank}.json").write_text(json.dumps(report), "utf-8")


@pytest.mark.parametrize(("ranks", "family", "assignments", "memory_bytes"), CASES)
def test_a_rank_holds_and_sends_the_bytes_of_its_plan(
    ranks, family, assignments, memory_bytes, tmp_path
):
    config, model_config = configured(assignments), small(family)
    machine = Machine(1, ranks, memory_bytes, 1, 1, 1, is_gpu=False)
    plan = make_plan(config, model_config, machine, Simulations(model_config, imbalance=1))
    assert not plan.reason
    if family == "deepseek_v3":
        assert 1 < plan.kept_groups[0] < 1 + 3 + 2
    policy = list(vars(plan.policies[0]).values())
    finish(on_ranks(ranks, take_a_step, family, assignments, policy, cwd=tmp_path))
    reports = [json.loads((tmp_path / f"report{i}.json").read_text("utf-8")) for i in range(ranks)]
    assert reports[0]["held"] == {state: n for state, n in vars(plan.states).items() if n}
    # What the experts' exchanges carry depends on the rank; in the mean it does not.
    sent: Counter[str] = Counter()
    for report in reports:
        sent.update({KINDS[n]: each["bytes"] / ranks for n, each in report["sent"].items()})
    planned: Counter[str] = Counter()
    for (kind, _), n_bytes in plan.traffic[0].items():
        planned[kind] += n_bytes
    assert dict(planned) == pytest.approx(dict(sent), rel=0.02)
    assert bool(sent) == (ranks > 1)
