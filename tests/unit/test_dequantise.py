"""Boxes of quantised tensors against transformers' own dequantisation, and what is refused."""

import ctypes
import itertools
import json
from pathlib import Path

import pytest
import torch
from helpers.commands import finish
from helpers.planned import configured
from helpers.quantised_models import edit_config, require_boxes
from helpers.ranks import on_ranks
from helpers.usage import Usage
from safetensors.torch import save_file
from transformers import LlamaConfig, Mistral3Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardtune.errors import UserError
from shardtune.model.facts import of_config as config_json
from shardtune.model.source import files, load_weights, quantised
from shardtune.model.source.weight_files import list_tensors

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Tensors, **quantization: object) -> Path:
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "model.safetensors"


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 20).to(torch.float8_e4m3fn)


EXPONENTS = torch.randint(115, 130, (3, 4), dtype=torch.uint8)
# Values, scales and the block of config.json; transformers derives a block from the shapes.
EVEN: dict[str, tuple[torch.Tensor, torch.Tensor, list[int] | None]] = {
    "float32 scales": (fp8(12, 20), torch.rand(3, 4), [4, 5]),
    "bfloat16 scales": (fp8(12, 20), torch.rand(3, 4).bfloat16(), [4, 5]),
    "exponents in bytes": (fp8(12, 20), EXPONENTS, [4, 5]),
    "exponents": (fp8(12, 20), EXPONENTS.view(torch.float8_e8m0fnu), [4, 5]),
    "other blocks than config.json has": (fp8(12, 20), torch.rand(3, 4), [128, 128]),
    "blocks of other rows": (fp8(12, 20), torch.rand(3, 4), [128, 5]),
    "blocks of other columns": (fp8(12, 20), torch.rand(3, 4), [4, 128]),
    "stacked experts": (fp8(3, 12, 20), torch.rand(3, 3, 4), [4, 5]),
    "one scale": (fp8(12, 20), torch.rand(1)[0], None),
    "one scale for each expert": (fp8(3, 12, 20), torch.rand(3, 1, 1), None),
}


def compare_boxes(path: Path, dtype: torch.dtype, expected: torch.Tensor) -> None:
    with load_weights.open_tensors([path], dtype) as tensors:
        assert tensors.keys() == {"a.weight"}
        require_boxes(tensors["a.weight"], expected)


@pytest.mark.parametrize("piece", [30, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", EVEN)
def test_a_box_in_fp8_is_as_transformers_dequantises_it(case, dtype, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "_PIECE", piece)
    values, scales, block = EVEN[case]
    tensors = {
        "a.weight": values,
        "a.weight_scale_inv": scales,
        "a.activation_scale": torch.ones(()),
    }
    path = write(tmp_path, tensors, quant_method="fp8", weight_block_size=block)
    assert quantised.quantised_problems(tmp_path) == []
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
    compare_boxes(path, dtype, expected)


@pytest.mark.parametrize("block", [(5, 7), (12, 3), (16, 32)])
def test_the_last_blocks_may_be_smaller(block, tmp_path):
    """DeepSeek V3 has 576 rows in blocks of 128."""
    values = fp8(12, 20)
    scales = torch.rand(-(-12 // block[0]), -(-20 // block[1]))
    tensors = {"a.weight": values, "a.weight_scale_inv": scales}
    path = write(tmp_path, tensors, quant_method="fp8", weight_block_size=block)
    expected = values.float()
    for row, column in itertools.product(range(12), range(20)):
        expected[row, column] *= scales[row // block[0], column // block[1]]
    compare_boxes(path, torch.float32, expected)
    compare_boxes(path, torch.bfloat16, expected.bfloat16())


@pytest.mark.parametrize("piece", [100, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_box_in_mxfp4_is_as_transformers_dequantises_it(dtype, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "_PIECE", piece)
    blocks = torch.randint(256, (2, 5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 5, 3), dtype=torch.uint8)
    tensors = {"a.weight_blocks": blocks, "a.weight_scales": scales}
    path = write(tmp_path, tensors, quant_method="mxfp4")
    assert quantised.quantised_problems(tmp_path) == []
    assert list_tensors(tmp_path)["a.weight"][:2] == ["BF16", [2, 96, 5]]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    compare_boxes(path, dtype, expected)


BYTES = torch.ones(1, 2, 3, 16, dtype=torch.uint8)


def scaled(values: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {"a.weight": values, "a.weight_scale_inv": scales}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"a.weight": fp8(4, 4)}, "a.weight is quantised as F8_E4M3 without scales"),
        (scaled(fp8(4, 4), torch.ones(3, 1)), "a.weight is quantised as [3, 1] scales for [4, 4]"),
        (scaled(fp8(4, 4), torch.ones(1, 3)), "a.weight is quantised as [1, 3] scales for [4, 4]"),
        (
            scaled(fp8(4, 4), torch.ones(2, 1, dtype=torch.int32)),
            "a.weight is quantised as F8_E4M3 with scales in I32",
        ),
        (
            scaled(torch.ones(4, 2, dtype=torch.int8), torch.ones(4, 1)),
            "a.weight is quantised as I8 with scales in F32",
        ),
        (
            {"a.w_blocks": BYTES[..., :8].clone(), "a.w_scales": BYTES[..., 0].clone()},
            "a.w is quantised as [1, 2, 3] scales for [1, 2, 3, 8] bytes",
        ),
        ({"a.w_blocks": BYTES}, "a.w_blocks is quantised as U8 without scales"),
    ],
)
def test_files_that_are_quantised_in_another_way_are_named(tensors, problem, tmp_path):
    write(tmp_path, tensors | {"b": torch.ones(1)}, quant_method="fp8")
    (line,) = quantised.quantised_problems(tmp_path)
    assert line.startswith(f"{tmp_path}: {problem}") and "(1 tensors in all)" in line


OWN, MODELOPT = "config.json", "hf_quant_config.json"  # which says it beside one that does not
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("name", "file", "values", "words"),
    [
        ("model", OWN, {"quant_method": "gptq", "bits": 4}, "quantised by gptq, "),
        ("model", OWN, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "by NVFP4, "),
        ("model", OWN, {"bits": 4, "group": 64}, "quantised by a method with bits, group, "),
        ("model", OWN, {"quant_method": "fp8", "expert_dtype": "fp4"}, "by fp8 (FP4 experts)"),
        ("Kimi-K2-Thinking", OWN, PACKED, "use unsloth/Kimi-K2-Thinking-BF16"),
        ("model", MODELOPT, {"quantization": {"quant_algo": "FP8"}}, "are quantised by FP8, "),
        ("model", MODELOPT, {"quantization": {"quant_algo": "MIXED_PRECISION"}}, "MIXED_PRECISION"),
        ("model", MODELOPT, {}, "by an unreadable hf_quant_config.json, "),
        ("model", MODELOPT, {"quantization": {"kv_cache_quant_algo": "FP8"}}, None),
    ],
)
def test_other_ways_are_refused_by_name(name, file, values, words, tmp_path, models):
    """By a run, and by a plan and the preflight, which read config.json alone."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / OWN).write_bytes((models["llama"] / OWN).read_bytes())
    if file == OWN:
        edit_config(folder, quantization_config=values)
    else:
        (folder / MODELOPT).write_text(json.dumps(values), encoding="utf-8")
    config = configured(f"model.path={folder}", "model.init=random", "data.max_length=64")
    (problem,) = config_json.problems_of_model(config, ranks=1) or [""]
    if words is None:
        assert not problem and files.read_model_config(config.model)
        return
    assert words in problem
    with pytest.raises(UserError) as refused:
        files.read_model_config(config.model)
    assert refused.value.problems == [problem]


def test_a_scale_of_a_whole_tensor_is_read(tmp_path, models):
    values, scale = fp8(12, 20), torch.rand(())
    tensors = {"a.weight": values, "a.weight_scale": scale, "a.input_scale": torch.ones(())}
    path = write(tmp_path, tensors)
    (tmp_path / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert quantised.quantised_problems(tmp_path) == []
    assert list_tensors(tmp_path)["a.weight"][:2] == ["BF16", [12, 20]]
    compare_boxes(path, torch.float32, values.float() * scale)


def test_quantisation_in_a_section_is_taken(tmp_path):
    """As in the files of a model that sees, whose text alone is quantised."""
    text = LlamaConfig(quantization_config={"quant_method": "fp8"})
    whole = Mistral3Config(text_config=text)
    assert quantised.take_quantization(whole, tmp_path, "unread")
    assert not hasattr(whole.text_config, "quantization_config")
    assert whole.dtype == whole.text_config.dtype == torch.bfloat16


def _return_freed_memory() -> None:
    """Let glibc give large blocks back at once: else what it keeps hangs on the threads' timing."""
    m_mmap_threshold = -3  # see mallopt(3)
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16) == 1


def read_within(path: Path, piece_bytes: int) -> None:
    """Read a tensor in a process of its own, whose memory nothing else changes."""
    _return_freed_memory()
    with load_weights.open_tensors([path], torch.bfloat16) as opened:
        (tensor,) = opened.values()
        with Usage() as usage:
            whole = tensor[...]
    assert 10e6 < usage.growth - whole.nbytes < piece_bytes + 10e6, usage.growth - whole.nbytes


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_the_plan_counts_the_piece_that_is_dequantised_at_a_time(method, tmp_path):
    """The slice has 16 million values, 34 MB of bfloat16; all in float32 would be 67 MB more."""
    if method == "fp8":
        tensors = {"a.weight": fp8(4096, 4096), "a.weight_scale_inv": torch.rand(32, 32)}
    else:
        blocks = torch.randint(256, (4, 2048, 64, 16), dtype=torch.uint8)
        tensors = {"a_blocks": blocks, "a_scales": blocks[..., 0] // 4 + 100}
    path = write(tmp_path, tensors, quant_method=method)
    piece = quantised.piece_bytes(tmp_path)
    finish(on_ranks(1, read_within, path, piece, cwd=tmp_path))
    assert piece < 110e6 and not quantised.piece_bytes(tmp_path / "none")
