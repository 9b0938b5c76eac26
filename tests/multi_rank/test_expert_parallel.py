"""Experts spread over ranks train as plain PyTorch trains them, whatever the mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import finish
from helpers.configs import configured
from helpers.documented import require_error_line
from helpers.moe_families import FAMILIES, build
from helpers.plain_training import (
    assert_same_steps,
    assert_same_weights,
    encode,
    models_on_demand,
    plain_training,
    settings,
    sharpen,
    uneven_chats,
)
from helpers.ranks import on_ranks, run_script, train, train_each
from helpers.small_runs import steps_of
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import PreTrainedTokenizerFast

from shardtune.distributed.join import join_world
from shardtune.model.moe.token_exchange import ExpertExchange
from shardtune.training.states.reshard import ReshardPolicy

RATES = [3e-3] * 4
MAX_NORM = 0.5


class Mesh(NamedTuple):
    ranks: int
    expert: int
    replicate: int = 1

    def assignments(self) -> list[str]:
        return [
            f"parallel.expert={self.expert}",
            f"parallel.replicate={self.replicate}",
            f"train.gradient_accumulation_steps={16 // self.ranks}",
        ]


# The mesh that saves after two steps, the mesh that resumes, and a setting.
Case = tuple[str, Mesh, Mesh, str]
CASES: list[Case] = [
    # One rank has each expert, so FSDP2 gathers none, in the forward alone nor computed again.
    ("glm4_moe", Mesh(4, 4), Mesh(4, 2, 2), "model.activation_checkpointing=selective"),
    ("deepseek_v3", Mesh(2, 1), Mesh(2, 2), "data.packing=true"),
]
MORE_CASES: list[Case] = [
    ("gemma4_text", Mesh(2, 2), Mesh(4, 2, 2), "data.packing=true"),
    ("gpt_oss", Mesh(4, 2), Mesh(2, 2), "data.packing=false"),
    ("qwen3_moe", Mesh(2, 2), Mesh(4, 4), "model.activation_checkpointing=full"),
    ("mixtral", Mesh(4, 2), Mesh(2, 1), "model.activation_checkpointing=selective"),
]
MESHES = [
    Mesh(2, 2),
    Mesh(4, 4),
    Mesh(4, 2),
    Mesh(4, 1, 2),
    Mesh(4, 2, 2),
    Mesh(8, 4, 2),
    Mesh(8, 2, 2),
    Mesh(16, 4, 2),
    Mesh(16, 2),
]


def move_biases(model: Any) -> None:
    sharpen(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)


@pytest.fixture(scope="module")
def models(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return models_on_demand(root, tokenizer, build, lambda _: move_biases)


def check(
    cases: Sequence[Case],
    models: Callable[[str], Path],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *more: str,
) -> None:
    """Two steps on the first mesh of each case and two on the second, clipped, are the four steps
    of a plain loop, and so are the exported weights."""
    records = uneven_chats()
    data = write_jsonl(folder / "train.jsonl", records)
    runs = []
    for number, (family, saved, resumed, setting) in enumerate(cases):
        given = settings(
            models(family),
            data,
            folder / f"case{number}",
            f"train.max_grad_norm={MAX_NORM}",
            "train.epochs=4",
            setting,
            *more,
        )
        first = [*given, *saved.assignments(), "train.max_steps=2", "export.final=false"]
        runs += [
            (saved.ranks, first),
            (resumed.ranks, [*given, *resumed.assignments()]),
        ]
    train_each(runs, folder)
    encoded = [encode(tokenizer, record) for record in records]
    expected = {}
    for number, (family, *_) in enumerate(cases):
        if family not in expected:
            expected[family] = plain_training(models(family), encoded, RATES, MAX_NORM)
            assert max(expected[family].norms) > MAX_NORM
        said = (folder / f"run{2 * number + 1}.out").read_text(encoding="utf-8")
        assert "Resumed from checkpoint_0000002" in said
        assert_same_steps(folder / f"case{number}", expected[family])
        assert_same_weights(folder / f"case{number}", expected[family])


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.full)])
def test_each_architecture_trains_on_one_mesh_and_resumes_on_another(
    cases, models, tokenizer, tmp_path
):
    check(cases, models, tokenizer, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "stored",
    [
        ("model.master_dtype=bfloat16", "optimizer.name=adamw8bit"),
        ("model.master_dtype=float32",),
    ],
)
def test_a_resume_on_the_same_mesh_repeats_every_bit_and_random_weights_know_no_mesh(
    stored, models, tmp_path
):
    """The best weights, gathered from uneven slices, are the final ones."""
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    mesh = Mesh(4, 2)  # twelve experts in slices of three

    def given(name: str, mesh: Mesh, *more: str) -> list[str]:
        model, run_dir = models("glm4_moe"), tmp_path / name
        return settings(model, data, run_dir, *mesh.assignments(), "train.epochs=4", *stored, *more)

    evaluation = [f"data.eval={data}", "eval.baseline=false", "eval.keep_best=true"]
    drawn = ["model.init=random", "optimizer.lr=0", "train.max_steps=1"]
    train_each(
        [
            (4, given("whole", mesh, *evaluation)),
            (4, given("run", mesh, "train.max_steps=2")),
            (4, given("run", mesh)),
            (4, given("spread", mesh, *drawn)),
            (1, given("one", Mesh(1, 1), *drawn)),
        ],
        tmp_path,
    )
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    for one, other in (("whole/model", "run/model"), ("whole/model", "whole/best")):
        assert_same_tensors(tmp_path / one, tmp_path / other)
    assert_same_tensors(tmp_path / "spread/model", tmp_path / "one/model")


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_degrees_that_cannot_be_are_refused_with_those_that_can(models, tmp_path):
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())

    def refusal(ranks: int, *more: str) -> list[str]:
        given = settings(models("mixtral"), data, tmp_path / "run", *more)
        refused = train(ranks, *given, cwd=tmp_path)
        assert refused.returncode == 2, refused.stderr
        lines = [line for line in refused.stderr.splitlines() if line.startswith("ERROR: ")]
        for line in lines:
            require_error_line(line)
        return lines

    assert refusal(2, "parallel.replicate=4", "parallel.expert=3") == [
        "ERROR: parallel.replicate=4 does not divide the world size, 2 - use one of 1, 2",
        "ERROR: parallel.expert=3 does not divide world size / parallel.replicate, 2 - "
        "use one of 1, 2",
    ]
    assert refusal(3, "parallel.expert=3") == [
        "ERROR: parallel.expert=3 does not divide the 4 experts of mixtral - "
        "use one of 1, 2, 4 that divides world size / parallel.replicate too"
    ]


@pytest.mark.full
def test_compiled_layers_exchange_tokens(models, tokenizer, tmp_path):
    cases = [("glm4_moe", Mesh(2, 2), Mesh(2, 2), "model.activation_checkpointing=selective")]
    check(cases, models, tokenizer, tmp_path, "model.compile=true")


def train_in_graphs_and_print_breaks(arguments: list[str]) -> None:
    """Train with graphs that run as they are; print how many there are and where they end."""
    torch.compile = partial(torch.compile, backend="eager")
    before_backward = ReshardPolicy.before_backward

    def printing(*given: Any, **options: Any) -> None:
        print("Graphs:", counters["stats"]["unique_graphs"])
        for reason in counters["graph_break"]:
            print("Break:", *reason.split())
        before_backward(*given, **options)

    cast(Any, ReshardPolicy).before_backward = printing
    run_script(arguments)


@pytest.mark.full
def test_compiled_layers_break_at_attention_and_spread_experts_alone(models, tmp_path):
    """In GLM's layers these are the experts of a router and those that run while tokens travel."""
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats())
    (tmp_path / "config.yaml").touch()
    given = settings(models("glm4_moe"), data, tmp_path / "run", "parallel.expert=2")
    given += ["train.max_steps=2", "export.final=false", "model.compile=true"]
    given += ["model.activation_checkpointing=full"]
    done = on_ranks(
        2, train_in_graphs_and_print_breaks, ["--config", "config.yaml", *given], cwd=tmp_path
    )
    finish(done)
    breaks = re.findall(
        "^Break: .*? function `<?(?:function )?([\\w.]+)", done.stdout, re.MULTILINE
    )
    # FSDP2's hooks, of which experts have their own, call `disable`.
    assert set(breaks) == {"document_attention", "SharedExperts._output", "disable"}
    assert set(re.findall(r"^Graphs: (\d+)", done.stdout, re.MULTILINE)) == {"10"}


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(MESHES)))
def test_losses_are_exact_on_every_mesh_of_experts(number, models, tokenizer, tmp_path):
    """Each goes on where the mesh before it in the list has saved; families take turns."""
    family, before, mesh = [*FAMILIES][number % len(FAMILIES)], MESHES[number - 1], MESHES[number]
    is_packed = family != "gpt_oss" and max(mesh.ranks, before.ranks) < 16  # eight rows
    case = (family, before, mesh, f"data.packing={str(is_packed).lower()}")
    check([case], models, tokenizer, tmp_path)


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
