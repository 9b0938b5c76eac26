"""Windows, sinks and states on pretended GPUs: the CPU's numbers within bfloat16's rounding."""

import re

import pytest
from helpers.chats import chats, write_jsonl
from helpers.packing_families import build
from helpers.plain_training import save_new_model
from helpers.pretended import assert_close, needs_compiler, train_on_gpus
from helpers.ranks import train_each
from helpers.small_runs import SETTINGS, write_inputs

pytestmark = needs_compiler

RUN = (
    *SETTINGS,
    "model.compute_dtype=bfloat16",
    # AdamW makes a full step of the rounding of a small gradient: with 1e-3 the runs would part,
    # by as much as the CPU's own bfloat16 differs from one kind of CPU to another.
    "optimizer.lr=1e-4",
    "data.eval=eval.jsonl",
    "train.max_steps=3",
    "export.final=false",
)
# Of the packages `fla` and `causal_conv1d`: each document by transformers' own code.
DELTA = """
import torch
from itertools import pairwise

def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False,
                           initial_state=None, output_final_state=False):
    from transformers.models.qwen3_next import modeling_qwen3_next as reference
    rule = reference.torch_chunk_gated_delta_rule.__wrapped__
    ends = [0, q.shape[1]]
    if cu_seqlens is not None:
        assert cu_seqlens.is_cuda and cu_seqlens.dtype == torch.int32
        ends = cu_seqlens.cpu().tolist()
        open("calls", "a").write(f"{len(ends) - 1}\\n")
    parts = [
        rule(*(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b],
             use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        for a, b in pairwise(ends)
    ]
    return torch.cat(parts, 1), None

fused_recurrent_gated_delta_rule = None
"""
CONVOLUTION = """
import torch

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    from transformers.models.qwen3_next import modeling_qwen3_next as reference
    convolve = reference.causal_conv1d_fn.__wrapped__
    lengths = [x.shape[-1]]
    if seq_idx is not None:
        assert x.stride(1) == 1 and seq_idx.shape == (1, x.shape[-1])
        lengths = torch.bincount(seq_idx[0].cpu()).tolist()
    parts = [convolve(part, weight, bias, activation) for part in x.split(lengths, 2)]
    return torch.cat(parts, 2)

causal_conv1d_update = None
"""


@pytest.mark.parametrize(
    ("family", "has_kernels"),
    [
        ("qwen3_next", True),
        pytest.param("gpt_oss", False, marks=pytest.mark.full),
        pytest.param("qwen3_next", False, marks=pytest.mark.full),
        pytest.param("jamba", False, marks=pytest.mark.full),
    ],
)
def test_numbers_are_those_of_a_cpu(family, has_kernels, tokenizer, tmp_path):
    model = save_new_model(lambda: build(family), tokenizer, tmp_path / "saved")
    folder = write_inputs(tmp_path / "runs", model)
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    train_each([(2, [*RUN, "run.dir=cpu"])], folder)
    if has_kernels:
        (folder / "fla.py").write_text(DELTA, encoding="utf-8")
        (folder / "causal_conv1d.py").write_text(CONVOLUTION, encoding="utf-8")
    output = train_on_gpus(2, *RUN, "run.dir=gpu", cwd=folder)
    assert_close(folder / "gpu", folder / "cpu")
    assert re.search(r"^Attention: within .*varlen attention by FlashAttention 2", output, re.M)
    states = re.findall(r"^Layers with a state: (.*)", output, re.M)
    if has_kernels:
        assert states == ["1, all documents at once"]
        assert max(map(int, (folder / "calls").read_text().split())) > 1
    elif family == "qwen3_next":
        (line,) = states
        assert line.startswith("1, one call per document; without flash-linear-attention and ")
