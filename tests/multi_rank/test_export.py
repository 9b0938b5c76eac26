"""The final model: what the source was, with other weights, and nothing that opens the source opens less of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.ranks import train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

# Sampling settings that contradict greedy decoding, which transformers itself refuses to write.
GENERATION = (
    '{\n  "do_sample": false,\n  "temperature": 0.6,\n  "top_p": 0.9,\n  "eos_token_id": [1, 2]\n}'
)
TEMPLATE = (
    "{#- kept to the letter -#}\n{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{%- endfor %}\n\n{%- if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{%- endif %}\n\n"
)
STILL = (
    "optimizer.lr=0",
    "train.max_steps=1",
    "model.compute_dtype=float32",
    "data.max_length=128",
    "data.train=train.jsonl",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(6))
    return tmp_path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """The models as they are published: in bfloat16, the router's correction in float32, with files of their own."""
    root = tmp_path_factory.mktemp("published")
    for name, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(path).save_pretrained(root / name)
        (root / name / "generation_config.json").write_text(GENERATION, encoding="utf-8")
        (root / name / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    unsaid = root / "qwen3" / "config.json"  # a configuration may leave the dtype to the weights
    values = json.loads(unsaid.read_text(encoding="utf-8"))
    del values["dtype"]
    unsaid.write_text(json.dumps(values), encoding="utf-8")
    return {name: root / name for name in models}


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("qwen3", 1), ("glm", 2)])
def test_without_learning_the_source_comes_back(
    name: str,
    ranks: int,
    folder: Path,
    sources: dict[str, Path],
) -> None:
    source, exported = sources[name], folder / "runs/config/model"
    done = train(ranks, *STILL, f"model.path={source}", cwd=folder)
    assert done.returncode == 0, done.stderr
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(exported / "model.safetensors"),
    )
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in after.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in before.items()
    }
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert ("lm_head.weight" in after) == (name != "llama")
    if name == "glm":
        assert "model.layers.1.mlp.experts.5.up_proj.weight" in after
        assert after["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32

    assert (exported / "generation_config.json").read_text(encoding="utf-8") == GENERATION
    assert (exported / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert json.loads((exported / "tokenizer.json").read_text(encoding="utf-8")) == json.loads(
        (source / "tokenizer.json").read_text(encoding="utf-8")
    )
    changed = {
        key
        for key, value in json.loads((source / "config.json").read_text(encoding="utf-8")).items()
        if json.loads((exported / "config.json").read_text(encoding="utf-8")).get(key) != value
    }
    assert not changed, changed


def answer(folder: Path) -> str:
    """What the model of this folder says, most likely token by most likely token, with the folder's own settings."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "which rank"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    return str(tokenizer.decode(model.generate(**asked, do_sample=False, max_new_tokens=12)[0]))


def test_the_final_model_answers_like_the_original_until_it_learns(
    folder: Path, sources: dict[str, Path]
) -> None:
    original = answer(sources["qwen3"])
    assert train(1, *STILL, f"model.path={sources['qwen3']}", cwd=folder).returncode == 0
    assert answer(folder / "runs/config/model") == original
    learning = [
        assignment.replace("lr=0", "lr=0.02").replace("steps=1", "steps=9") for assignment in STILL
    ]
    assert (
        train(
            1,
            *learning,
            "run.dir=runs/learned",
            "train.epochs=9",
            f"model.path={sources['qwen3']}",
            cwd=folder,
        ).returncode
        == 0
    )
    assert answer(folder / "runs/learned/model") != original


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", torch.float16), ("float32", torch.float32)]
)
def test_another_dtype(
    dtype: str, expected: torch.dtype, folder: Path, sources: dict[str, Path]
) -> None:
    done = train(1, *STILL, f"export.dtype={dtype}", f"model.path={sources['glm']}", cwd=folder)
    assert done.returncode == 0, done.stderr
    exported = folder / "runs/config/model"
    for name, tensor in load_file(exported / "model.safetensors").items():
        assert tensor.dtype == (
            torch.float32 if name.endswith("e_score_correction_bias") else expected
        ), name
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == expected


def test_the_weights_are_those_that_were_learned(folder: Path, models: dict[str, Path]) -> None:
    """Float32 through and through: the exported weights are the last checkpoint's, and not the source's."""
    done = train(
        1,
        "model.compute_dtype=float32",
        "data.max_length=128",
        "data.train=train.jsonl",
        "optimizer.lr=0.01",
        "train.max_steps=2",
        f"model.path={models['llama']}",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    learned = load_file(
        folder / "runs/config/checkpoints/checkpoint_0000002/rank_00000.safetensors"
    )
    source = load_file(models["llama"] / "model.safetensors")
    for name, tensor in load_file(folder / "runs/config/model/model.safetensors").items():
        assert torch.equal(tensor, learned[f"model.{name}"]) and not torch.equal(
            tensor, source[name]
        ), name


def test_a_source_without_a_generation_config(folder: Path, models: dict[str, Path]) -> None:
    source = Path(shutil.copytree(models["llama"], folder / "source"))
    (source / "generation_config.json").unlink()
    assert train(1, *STILL, "model.path=source", cwd=folder).returncode == 0
    assert not (folder / "runs/config/model/generation_config.json").exists()
    assert (
        AutoModelForCausalLM.from_pretrained(
            folder / "runs/config/model"
        ).generation_config.eos_token_id
        == 1
    )


def test_an_earlier_model_is_set_aside_with_all_that_is_in_it(
    folder: Path, models: dict[str, Path]
) -> None:
    """And of an export that was interrupted nothing stays."""
    moving = (
        "data.train=train.jsonl",
        "data.max_length=128",
        "model.compute_dtype=float32",
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
        f"model.path={models['llama']}",
    )
    assert train(1, *moving, "train.max_steps=1", cwd=folder).returncode == 0
    run_dir = folder / "runs/config"
    (run_dir / "model/of_the_earlier").write_text("", encoding="utf-8")
    (run_dir / ".model.writing").mkdir()
    (run_dir / ".model.writing/half").write_text("", encoding="utf-8")
    earlier = (run_dir / "model/model.safetensors").read_bytes()
    done = train(1, *moving, "train.max_steps=2", cwd=folder)
    assert (
        done.returncode == 0
        and "Moved aside, an earlier model: runs/config/model.aside1\n" in done.stdout
    )
    assert (run_dir / "model/model.safetensors").read_bytes() != earlier
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "model",
        "model.aside1",
    ]
    assert (run_dir / "model.aside1/model.safetensors").read_bytes() == earlier
    assert (run_dir / "model.aside1/of_the_earlier").exists()
    assert not (run_dir / "model/of_the_earlier").exists() and not (run_dir / "model/half").exists()
