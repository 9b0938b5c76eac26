"""Experts spread over ranks, few or many, train as plain PyTorch trains them, whatever the mesh."""

import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from helpers import packing_families
from helpers.commands import finish
from helpers.configs import configured
from helpers.documented import require_error_line
from helpers.exact import (
    APART,
    BFLOAT16,
    COMPILED,
    EIGHT_BITS,
    FULL,
    SELECTIVE,
    STEPS,
    Mesh,
)
from helpers.plain_training import (
    assert_same_steps,
    encode,
    on_uneven_chats,
    plain_training,
    save_new_model,
    sharpen,
    uneven_chats,
)
from helpers.ranks import on_ranks, run_script, train, train_each
from helpers.small_runs import assert_same_tensors, steps_of
from torch._dynamo.utils import counters

from shardtune.distributed.join import join_world
from shardtune.model.moe.token_exchange import ExpertExchange
from shardtune.training.states.reshard import ReshardPolicy

# A family, the mesh that saves after two steps, the mesh that resumes, and settings.
CASES: list[tuple[str, Mesh, Mesh, list[str]]] = [
    # One rank has each expert, so FSDP2 gathers none, in the forward alone nor computed again.
    ("glm4_moe", Mesh(4, 4), Mesh(4, 2, 2), [SELECTIVE]),
    ("deepseek_v3", Mesh(2, 1), Mesh(2, 2), []),
]
MATRIX = [  # each family, each mesh and each way to compute again once
    ("gemma4_text", Mesh(2, 2), Mesh(4, 4), []),
    ("gpt_oss", Mesh(4, 1, 2), Mesh(4, 2), [APART]),
    ("qwen3_moe", Mesh(8, 2, 2), Mesh(8, 4, 2), [APART, FULL]),
    # Six experts in slices of one leave two ranks without.
    ("gpt_oss_of_6", Mesh(8), Mesh(4, 1, 2), [APART, SELECTIVE]),
]


@pytest.mark.parametrize(
    ("family", "saved", "resumed", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MATRIX)],
)
def test_each_architecture_trains_on_one_mesh_and_resumes_on_another(
    family, saved, resumed, more, check_exact
):
    check_exact(family, [saved, resumed], more)


@pytest.mark.full
def test_a_resume_on_the_same_mesh_repeats_every_bit_and_random_weights_know_no_mesh(
    sharp, tmp_path
):
    """The best weights, gathered from uneven slices, are the final ones."""
    mesh = Mesh(4, 2)  # twelve experts in slices of three

    def given(run: str, mesh: Mesh, *more: str) -> tuple[int, list[str]]:
        more = (f"train.epochs={STEPS}", *mesh.assignments(), BFLOAT16, EIGHT_BITS, *more)
        return mesh.ranks, on_uneven_chats(sharp["glm4_moe"], tmp_path, *more, run=run)

    evaluation = [f"data.eval={tmp_path}/train.jsonl", "eval.baseline=false", "eval.keep_best=true"]
    drawn = ["model.init=random", "optimizer.lr=0", "train.max_steps=1"]
    runs = [
        given("whole", mesh, *evaluation),
        given("run", mesh, "train.max_steps=2"),
        given("run", mesh),
        given("spread", mesh, *drawn),
        given("one", Mesh(1), *drawn),
    ]
    train_each(runs, tmp_path)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    for one, other in (("whole/model", "run/model"), ("whole/model", "whole/best")):
        assert_same_tensors(tmp_path / one, tmp_path / other)
    assert_same_tensors(tmp_path / "spread/model", tmp_path / "one/model")


def test_degrees_that_cannot_be_are_refused_with_those_that_can(sharp, tmp_path):
    def refusal(ranks: int, *more: str) -> list[str]:
        refused = train(ranks, *on_uneven_chats(sharp["mixtral"], tmp_path, *more), cwd=tmp_path)
        assert refused.returncode == 2, refused.stderr
        lines = [line for line in refused.stderr.splitlines() if line.startswith("ERROR: ")]
        for line in lines:
            require_error_line(line)
        return lines

    lines = refusal(2, "parallel.replicate=4", "parallel.expert=3")
    for line, key in zip(lines, ("parallel.replicate=4", "parallel.expert=3"), strict=True):
        assert line.startswith(f"ERROR: {key} ") and line.endswith(" - use one of 1, 2")
    (line,) = refusal(3, "parallel.expert=3")
    assert " 4 experts of mixtral - use one of 1, 2, 4 " in line


def train_and_count_operations(arguments: list[str]) -> None:
    torch.compile = partial(torch.compile, backend="eager")  # kernels would take minutes
    before_backward = ReshardPolicy.before_backward

    def counting(*given: Any, **options: Any) -> None:
        print("Compiled operations:", counters["stats"]["calls_captured"], flush=True)
        before_backward(*given, **options)

    cast(Any, ReshardPolicy).before_backward = counting
    run_script(arguments)


@pytest.mark.full
def test_compiled_layers_exchange_tokens(check_exact):
    how = {"work": train_and_count_operations, "timeout_s": 900}
    (said,) = check_exact("glm4_moe", [Mesh(2, 2)], [COMPILED, SELECTIVE], **how)
    assert int(re.findall("^Compiled operations: (.+)", said, re.MULTILINE)[-1]) > 50


@pytest.mark.parametrize("how", [[], [FULL]])
def test_a_rank_that_reaches_no_expert_reduces_with_those_that_do(how, tokenizer, tmp_path):
    records = uneven_chats()[:2]
    encoded = [encode(tokenizer, record) for record in records]

    def part(model: Any) -> None:
        """Bias the router so that tokens of the first record alone reach an expert."""
        sharpen(model)
        router, seen = model.model.layers[0].mlp.router, []
        router.register_forward_hook(
            lambda module, inputs, output: seen.append(output[0].softmax(-1))
        )
        for ids, _ in encoded:
            model(input_ids=torch.tensor([ids]))
        margins = [(scores[:, :4].amax(-1) - scores[:, 4:].amin(-1)).amax() for scores in seen]
        assert abs(margins[0] - margins[1]) > 1e-3
        router.e_score_correction_bias[:4] -= sum(margins) / 2

    build = partial(packing_families.build, "longcat_flash", num_layers=1, initializer_range=0.02)
    model = save_new_model(build, tokenizer, tmp_path / "model", part)
    given = on_uneven_chats(model, tmp_path, APART, "train.epochs=2", *how, records=records)
    finish(train(2, *given, cwd=tmp_path))
    assert_same_steps(tmp_path / "run", plain_training(model, encoded, [3e-3] * 2))


class Experts(torch.nn.Module):
    """The experts `first` to `first` + 1 of four, which multiply by a matrix of their own."""

    def __init__(self, first: int) -> None:
        super().__init__()
        whole = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(9))
        self.stack = torch.nn.Parameter(whole[first : first + 2].clone())
        self.num_experts = 2

    def forward(
        self, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return (tokens[:, None] @ self.stack[top_k_index[:, 0]])[:, 0] * top_k_weights


def routed_tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of which none chooses the experts 2 and 3; 4 stands for none."""
    source = torch.Generator().manual_seed(rank)
    choices = torch.tensor([[0, 1], [1, 4], *([[4, 4], [0, 4]], [[1, 4], [4, 4]])[rank]])
    return torch.randn(4, 3, generator=source), choices, torch.rand(4, 2, generator=source)


def exchange() -> None:
    world = join_world(configured("parallel.expert=2"))
    assert world.expert_mesh
    mesh, experts = world.expert_mesh["expert"], Experts(2 * world.rank)
    tokens, choices, weights = routed_tokens(world.rank)
    outputs = ExpertExchange(experts, [], mesh, world.progress)(
        tokens.requires_grad_(), choices, weights.requires_grad_()
    )
    outputs.square().sum().backward()

    oracle, expected = Experts(0), []
    for rank in range(2):
        x, c, w = (each.requires_grad_(each.is_floating_point()) for each in routed_tokens(rank))
        chosen = [[expert for expert in of_token if expert < 4] for of_token in c.tolist()]
        rows = [
            sum((w[i, k] * (x[i] @ oracle.stack[e]) for k, e in enumerate(of_token)), 0 * x[i])
            for i, of_token in enumerate(chosen)
        ]
        torch.stack(rows).square().sum().backward()
        expected.append((torch.stack(rows), x.grad, w.grad))
    for ours, theirs in zip(
        (outputs, tokens.grad, weights.grad), expected[world.rank], strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    of_stack = oracle.stack.grad if world.rank == 0 else torch.zeros(2, 3, 3)
    torch.testing.assert_close(experts.stack.grad, of_stack)


def test_idle_ranks_and_choices_of_no_expert_are_exchanged(tmp_path):
    """A rank without tokens takes part, and its experts have gradients of zero."""
    finish(on_ranks(2, exchange, cwd=tmp_path))
