"""What an older PyTorch or transformers lacks is given to each process that uses it."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import import_module
from typing import Any

import grimp
import pytest
import torch
from helpers.commands import REPOSITORY, completed, finish
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.distributed import older_torch

_ADAPTED = (
    r"\b(all_gather_single|reduce_scatter_single|varlen_attn\(|_fsdp_param_groups|torch\.compile\()"
)
_MODULE = "shardtune.distributed.older_torch"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, "-c", code], cwd=REPOSITORY)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this PyTorch is adapted")
def test_this_pytorch_is_left_as_it_is():
    """In a process of its own: a test may have changed a name of this one's."""
    names = ("torch.compile", "varlen.varlen_attn", "dist.all_gather_single", "guards.format_frame")
    state = f"[id(x) for x in ({', '.join(names)})] + [sorted(vars(FSDPState))]"
    code = (
        "import torch, torch.distributed as dist, torch._guards as guards\n"
        "from torch.nn.attention import varlen\n"
        "from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState\n"
        f"before = {state}\nimport {_MODULE}\nassert before == {state}\n"
    )
    finish(run(code))


def test_every_module_that_uses_an_adapted_name_imports_the_adaptation():
    graph = grimp.build_graph("shardtune")
    using = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted(REPOSITORY.glob("shardtune/**/*.py"))
        if re.search(_ADAPTED, path.read_text(encoding="utf-8"))
    ]
    assert len(using) > 4
    lacking = [m for m in using if m != _MODULE and not graph.chain_exists(m, _MODULE)]
    assert lacking == [], f"import {_MODULE} there"


def test_the_limit_of_compiled_graphs_is_only_raised():
    config: Any = importlib.import_module("torch._dynamo.config")
    compile_all = older_torch._raising_limit(lambda function, dynamic: (function, dynamic))
    with config.patch(recompile_limit=8):
        for limit in (64, 16):
            assert compile_all(abs, dynamic=True, recompile_limit=limit) == (abs, True)
        assert compile_all(abs, dynamic=True) == (abs, True) and config.recompile_limit == 64


def test_the_library_takes_the_versions_that_were_tried_and_pins_one_of_them(monkeypatch):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    for name, (oldest, newest) in older_torch.TRIED.items():
        major, minor = newest.split(".")
        assert f"{name}>={oldest},<{major}.{int(minor) + 1}" in project["dependencies"]
        (pin,) = re.findall(rf"^{name}==(\S+)", pins, re.MULTILINE)
        monkeypatch.setattr(older_torch, "TRIED", {name: (oldest, newest)})
        for version in (pin, f"{oldest}.0a0+1f2", f"{newest}.9"):
            monkeypatch.setattr(importlib.metadata, "version", {name: version}.get)
            assert list(older_torch.untried_versions()) == []
        for version in (f"{major}.{int(minor) + 1}.0", f"{int(major) - 1}.99.0"):
            monkeypatch.setattr(importlib.metadata, "version", {name: version}.get)
            (line,) = older_torch.untried_versions()
            assert line.startswith(f"{name} {version} was not tried ")


def test_hooks_of_a_checkpointed_layer_run_once_and_its_forward_twice():
    """FSDP2 gathers and frees weights in such hooks. Older versions need the adaptation for it."""
    import_module("shardtune.model.recomputation")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **shape, vocab_size=32, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = Counter[str]()
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: calls.update(["layer"]))
    layer.mlp.register_forward_pre_hook(lambda *_: calls.update(["within"]))
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    assert calls == {"layer": 1, "within": 2}
