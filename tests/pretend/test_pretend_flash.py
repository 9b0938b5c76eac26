"""FlashAttention 3 on a pretended GPU, with stand-ins for its package."""

import re

import pytest
from helpers.pretended import needs_compiler, train_on_gpus
from helpers.small_runs import SETTINGS, write_inputs

pytestmark = needs_compiler

# As the package `flash_attn_interface`, whose import registers these operators.
STAND_IN = """
import torch
from pretend_gpu import stub_kernels

def fwd(q, k, v, _1, _2, _3, out, ends_q, ends_k, *more):
    longest, (scale, causal) = more[3], more[14:16]
    out, log_sums, *_ = stub_kernels._flash(
        q, k, v, ends_q, ends_k, longest, longest, 0.0, causal, False, scale=scale
    )
    return out, log_sums, None, None

def bwd(dout, q, k, v, out, sums, dq, dk, dv, ends_q, ends_k, _1, _2, longest, _3, scale, causal,
        left, right, softcap, deterministic, margin):
    with open("calls", "a") as calls:
        calls.write(f"{deterministic}\\n")
        place = calls.tell()
    made = stub_kernels._flash_backward(
        dout, q, k, v, out, sums, ends_q, ends_k, longest, longest, 0.0, causal, None, None,
        scale=scale,
    )
    for target, gradient in zip((dq, dk, dv), made):
        target.copy_(gradient)
    WRONG

torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd = fwd, bwd
"""
TRIALS = 4  # backwards before it is taken; two layers have one more in the model's trial
FLAKY_ON_RANK_1 = "torch.distributed.get_rank() and dq.mul_(1 + place / 1000)"
BROKEN_ON_RANK_1 = """
if torch.distributed.get_rank():
    raise OSError('libcudart.so.12')
"""
SECOND = "FlashAttention 2, as 3 "


@pytest.mark.parametrize(
    ("gpus", "package", "name", "calls"),
    [
        (1, None, f"{SECOND}is not there (No module named 'flash_attn_interface')", 0),
        (1, STAND_IN.replace("WRONG", ""), "FlashAttention 3", TRIALS + 2 + 4),
        pytest.param(
            2,
            STAND_IN.replace("WRONG", "") + BROKEN_ON_RANK_1,
            f"{SECOND}is not there (libcudart.so.12) on rank 1",
            0,
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            STAND_IN.replace("WRONG", FLAKY_ON_RANK_1),
            f"{SECOND}fails for heads of 8 in its trial (its gradients do not repeat to the bit) "
            "on rank 1",
            2 * TRIALS + 2,  # rank 0 takes it, until the ranks agree
            marks=pytest.mark.full,
        ),
    ],
    ids=["missing", "installed", "broken", "not-deterministic"],
)
def test_flash_attention_3_runs_where_it_is_installed_and_repeats_on_every_rank(
    gpus, package, name, calls, tmp_path, models
):
    folder = write_inputs(tmp_path, models["llama"])
    if package is not None:
        (folder / "flash_attn_interface.py").write_text(package)
    given = ["model.compute_dtype=bfloat16", "train.max_steps=2", "export.final=false"]
    output = train_on_gpus(gpus, *SETTINGS, *given, cwd=folder)
    (line,) = re.findall("^Attention: (.+)", output, re.MULTILINE)
    way = f"(varlen attention by {name}); rows have no padding"
    assert line == f"within each document, without a mask {way}"
    path = folder / "calls"
    assert (path.read_text().split() if path.exists() else []) == ["True"] * calls


def test_flash_attention_3_is_left_to_models_without_dropout(tmp_path, models):
    folder = write_inputs(tmp_path, models["llama"], dropout=0.2)
    (folder / "flash_attn_interface.py").write_text(STAND_IN.replace("WRONG", ""))
    given = ["model.compute_dtype=bfloat16", "train.max_steps=1", "export.final=false"]
    output = train_on_gpus(1, *SETTINGS, *given, cwd=folder)
    assert f"by {SECOND}has no dropout, and the model attention_dropout=0.2)" in output
    assert not (folder / "calls").exists()
