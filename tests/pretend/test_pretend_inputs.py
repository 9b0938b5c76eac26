"""Layers' inputs in host memory: the same bits as without, and less memory on the GPU."""

from typing import Any

import pytest
import torch
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus, train_on_gpus
from helpers.small_runs import SETTINGS, digests, steps_of, with_settings, write_inputs
from pretend_gpu.waits import host_waits
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.model.recomputation import PinnedCopies, keep_inputs_on_host

pytestmark = needs_compiler

RUN = (
    *SETTINGS,
    "model.init=random",
    "model.compute_dtype=bfloat16",
    "train.gradient_accumulation_steps=2",
    "train.max_steps=3",
    "checkpoint.every_steps=3",
)
LAYERS = 6


def test_gradients_and_memory_of_rows_of_several_lengths(tmp_path):
    finish(on_gpus(1, _pass_rows, cwd=tmp_path))


def _pass_rows() -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=99,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).cuda().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [torch.randint(99, (1, n)).cuda() for n in (128, 32, 256, 256)]
    expected = [_kept_and_gradients(model, row) for row in rows]
    copies = _Watched(torch.device("cuda"))
    keep_inputs_on_host(model, copies)
    # The host reads none of them meanwhile, so that copies of a row may meet those of the next.
    with host_waits() as waits:
        passed = [_kept_and_gradients(model, row) for row in rows]
    assert len(waits) == LAYERS, "one for each copy that a longer one takes the place of"
    for row, (kept, gradients), (kept_with_copies, with_copies) in zip(
        rows, expected, passed, strict=True
    ):
        assert all(map(torch.equal, with_copies, gradients))
        # The last one of all inputs has not left the GPU.
        assert kept - kept_with_copies == (LAYERS - 1) * row.numel() * 64 * 4
    # Those of the first row, and of the longest.
    assert len(copies.buffers) <= 2 * LAYERS


class _Watched(PinnedCopies):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffers: set[int] = set()

    def to_host(self, tensor: torch.Tensor) -> Any:
        copy = super().to_host(tensor)
        self.buffers.add(copy.buffer.data_ptr())
        return copy


def _kept_and_gradients(model: LlamaForCausalLM, row: torch.Tensor) -> tuple[int, list[Any]]:
    """Return the bytes that a forward keeps, and the gradients."""
    model.zero_grad()
    mask = torch.ones(1, 1, *2 * row.shape[1:], dtype=torch.bool, device="cuda").tril()
    before = torch.cuda.memory_allocated()
    hidden = model.model(row, attention_mask=mask).last_hidden_state
    kept = torch.cuda.memory_allocated() - before
    hidden.pow(2).sum().backward()
    return kept, [p.grad.clone() for p in model.model.parameters() if p.grad is not None]


@pytest.mark.full
@pytest.mark.parametrize(
    ("gpus", "name", "assignments"),
    [
        (2, "glm", ["parallel.expert=2", "lora.rank=4"]),
        (2, "llama", ["parallel.stages=2", "data.packing=false"]),
        (2, "llama", ["parallel.replicate=2", "optimizer.name=adamw8bit"]),
    ],
)
def test_inputs_in_host_memory_change_no_bit_of_a_run(gpus, name, assignments, tmp_path, models):
    deep = with_settings(models[name], tmp_path / "deep", num_hidden_layers=LAYERS)
    folder = write_inputs(tmp_path / "runs", deep)
    for kind in ("full", "offload"):
        run = [*RUN, *assignments, f"model.activation_checkpointing={kind}", f"run.dir={kind}"]
        output = train_on_gpus(gpus, *run, cwd=folder)
    assert "with the layers' inputs in pinned host memory" in output
    assert steps_of(folder / "offload") == steps_of(folder / "full") != []
    of_full, of_offload = (digests(folder / run, "*.safetensors") for run in ("full", "offload"))
    assert of_full == of_offload
