"""What many tests need: tiny models of real architectures with a real tokenizer, chats, and the real command."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distTest.rehearse import namespaces

REPOSITORY = Path(__file__).resolve().parent.parent
WORDS = [
    "rank",
    "node",
    "shard",
    "mesh",
    "step",
    "token",
    "loss",
    "norm",
    "gloo",
    "store",
    "port",
    "epoch",
    "batch",
    "layer",
    "expert",
    "router",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Odd, so that no number of ranks above one divides it: only then does a tied weight that lost its twin show.
VOCABULARY = 331


needs_namespaces = pytest.mark.skipif(
    namespaces.why_not() is not None,
    reason=f"network namespaces cannot be made: {namespaces.why_not()}",
)

# A suite that runs in the background is started with Ctrl-C ignored, and so would be all that it starts.
for _number, _action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    signal.signal(_number, _action)


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["SHARDTUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def a_free_port() -> str:
    """One that the system does not choose for anybody's connections meanwhile (`net.ipv4.ip_local_port_range`)."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", random.randrange(20_000, 29_000)))
            return str(listener.getsockname()[1])


def sentence(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


def chats(count: int, seed: int = 0, longest_answer: int = 30) -> list[dict[str, Any]]:
    """Conversations of one to three turns, with questions and answers of very different lengths."""
    source = random.Random(seed)
    return [
        {
            "messages": [
                message
                for _ in range(source.randint(1, 3))
                for message in (
                    {"role": "user", "content": sentence(source, source.randint(1, 20))},
                    {
                        "role": "assistant",
                        "content": sentence(source, source.randint(1, longest_answer)),
                    },
                )
            ]
        }
        for _ in range(count)
    ]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template, trained on the words of `chats`."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    source = random.Random(0)
    backend.train_from_iterator(
        [sentence(source, 30) for _ in range(200)],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """Directories with random weights: `llama` (tied), `qwen3` (untied) and `glm` (mixture of experts)."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    built = {
        "llama": LlamaForCausalLM(
            LlamaConfig(**_SMALL, num_hidden_layers=2, tie_word_embeddings=True)
        ),
        "qwen3": Qwen3ForCausalLM(
            Qwen3Config(**_SMALL, num_hidden_layers=2, head_dim=8, tie_word_embeddings=False)
        ),
        "glm": Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **_SMALL,
                num_hidden_layers=3,
                head_dim=8,
                moe_intermediate_size=16,
                n_routed_experts=6,
                n_group=1,
                topk_group=1,
                n_shared_experts=1,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                tie_word_embeddings=False,
            )
        ),
    }
    for name, buffer in built["glm"].named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    for name, model in built.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in built}


def small_opt(**settings: Any) -> OPTForCausalLM:
    """With random weights. Its positions count along the whole row, so packed documents would mix."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    }
    return OPTForCausalLM(OPTConfig(**small | settings))


def launch(
    processes: int,
    *arguments: Any,
    cwd: Path,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run train_fsdp.py as a user would: under torchrun, or plainly for one process (`processes=0`)."""
    script = [str(REPOSITORY / "train_fsdp.py"), *map(str, arguments)]
    runner = (
        []
        if processes == 0
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    )
    return subprocess.run(
        [sys.executable, *runner, *script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | (env or {}),
        check=False,
    )


def read_metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The objects of this kind, without their time, which has to be in UTC."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
    times = [datetime.datetime.fromisoformat(entry.pop("time")) for entry in entries]
    assert all(time.utcoffset() == datetime.timedelta(0) for time in times)
    return entries
