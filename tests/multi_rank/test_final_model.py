"""The final model of a run, and what `export` makes of its checkpoints."""

import json
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.documented import refused
from helpers.plain_lora import loss_of
from helpers.plain_training import encode, on_uneven_chats, uneven_chats
from helpers.quantised_models import save_deepseek_v3, save_gpt_oss
from helpers.ranks import on_ranks, run_script, train
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    assert_same_tensors,
    checkpoint,
    digests,
    names,
    tensors_of,
    write_inputs,
)
from helpers.usage import Usage
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import read_listing
from shardtune.checkpoint.export import model_files, write

Runs = Callable[[str, int], Path]
# Sampling settings that contradict greedy decoding, which transformers itself refuses to write.
GENERATION = (
    '{\n  "do_sample": false,\n  "temperature": 0.6,\n  "top_p": 0.9,\n  "eos_token_id": [1, 2]\n}'
)
TEMPLATE = (
    "{#- kept to the letter -#}\n{%- for message in messages %}{{ '<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "\n\n{%- if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{%- endif %}\n\n"
)
STILL = (*SETTINGS, "optimizer.lr=0", "train.max_steps=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(6))
    return tmp_path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """Models as they are published: in bfloat16, the router's correction in float32."""
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
def test_a_run_that_learns_nothing_exports_its_source(name, ranks, folder, sources):
    source, out = sources[name], folder / "runs/config/model"
    finish(train(ranks, *STILL, f"model.path={source}", cwd=folder))
    before, after = tensors_of(source), tensors_of(out)
    assert_same_tensors(source, out)
    assert [after[key].dtype for key in before] == [tensor.dtype for tensor in before.values()]
    assert ("lm_head.weight" in after) == (name != "llama")

    assert (out / "generation_config.json").read_text(encoding="utf-8") == GENERATION
    assert (out / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    for file in ("tokenizer.json", "config.json"):
        old, new = (json.loads((f / file).read_text(encoding="utf-8")) for f in (source, out))
        assert {key: new.get(key) for key in old} == old, file


def test_an_export_has_the_named_template_and_no_link_out_of_the_folder(folder, models):
    """Whoever linked might have meant a secret of whoever publishes the model."""
    (folder / "own.jinja").write_text(TEMPLATE.replace("T", "t") + " ", encoding="utf-8")
    source = Path(shutil.copytree(models["llama"], folder / "source"))
    (folder / "secret").write_text("a secret", encoding="utf-8")
    (source / "tokenizer_notes.txt").symlink_to(folder / "secret")
    (source / "vocab.txt").symlink_to(source / "tokenizer.json")
    out = folder / "runs/config/model"
    (source / "README.md").write_text("---\nlicense: mit\n---\nOf other weights", encoding="utf-8")
    given = [f"model.path={source}", "export.final=true", "data.chat_template=own.jinja"]
    given += ["data.eval=train.jsonl", "eval.keep_best=true"]
    said = finish(train(1, *STILL, *given, cwd=folder))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "\nlicense: mit\n" in card and "Of other weights" not in card
    _, evaluated = read_metrics(out.parent, "eval")
    for row in (
        "Data | train: 6 records, ",
        f"Held-out perplexity after | {evaluated['perplexity']:.4f} |",
        f"model.path={source} export.final=true data.chat_template=own.jinja",
    ):
        assert row in card
    assert (out.parent / "best/README.md").read_text(encoding="utf-8") == card
    assert "README.md" in read_listing(out)["files"]
    (checkpoint_dir,) = (out.parent / "checkpoints").iterdir()
    again = exported(checkpoint_dir, folder / "again")
    assert (again / "README.md").read_text(encoding="utf-8") == card
    assert (out / "chat_template.jinja").read_bytes() == (folder / "own.jinja").read_bytes()
    assert f"{source}/tokenizer_notes.txt leads out of its folder" in said
    assert (out / "vocab.txt").is_file() and not (out / "tokenizer_notes.txt").exists()
    assert not [*folder.glob("runs/**/tokenizer_notes.txt")]


@pytest.mark.parametrize("is_given", [True, False])
def test_an_export_stops_and_speaks_as_it_was_trained(is_given, folder, models):
    """As others open it: transformers, and llama.cpp's converter.

    The template is given, or lies beside others that transformers does not read.
    """
    source = Path(shutil.copytree(models["llama"], folder / "source"))
    old = {"chat_template": (source / "chat_template.jinja").read_text(encoding="utf-8")}
    (source / "chat_template.jinja").unlink()
    for name, values in (
        ("tokenizer_config.json", old),
        ("chat_template.json", old),
        ("generation_config.json", {"eos_token_id": 0}),
        ("config.json", {"eos_token_id": 0}),
    ):
        file = source / name
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(before | values), encoding="utf-8")
    own = old["chat_template"] + "{# our own #}"
    given = ["model.path=source", "export.final=true"]
    given += ["data.chat_template=own.jinja"] * is_given
    file = folder / "own.jinja" if is_given else source / "chat_template.jinja"
    file.write_text(own, encoding="utf-8")
    said = finish(train(1, *STILL, *given, cwd=folder))
    assert said.count("Stop tokens: generation_config.json of exported models names [1, 0]") == 1
    out = folder / "runs/config/model"
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [1, 0]
    vocabulary = gguf.SpecialVocab(out)
    assert vocabulary.special_token_ids["eos"] == 1 and vocabulary.chat_template == own
    assert AutoTokenizer.from_pretrained(out).chat_template == own
    for name in ("tokenizer_config.json", "chat_template.json"):
        assert json.loads((out / name).read_text(encoding="utf-8"))["chat_template"] == own


def test_templates_in_a_folder_of_their_own_are_left_out_and_said(folder, models):
    source = Path(shutil.copytree(models["llama"], folder / "source"))
    (source / "additional_chat_templates").mkdir()
    named = source / "additional_chat_templates/tool_use.jinja"
    named.write_text(TEMPLATE, encoding="utf-8")
    said = finish(train(1, *STILL, "model.path=source", cwd=folder))
    assert re.search(r"^WARNING: additional_chat_templates/ .* tool_use$", said, re.M)
    own = ("model.path=source", f"data.chat_template={named}", "run.dir=own")
    finish(train(1, *STILL, *own, cwd=folder))
    assert AutoTokenizer.from_pretrained(folder / "own/model").chat_template == TEMPLATE


def test_a_model_without_a_generation_config_is_exported_without_one(folder, models):
    source = Path(shutil.copytree(models["llama"], folder / "source"))
    (source / "generation_config.json").unlink()
    finish(train(1, *STILL, "model.path=source", cwd=folder))
    out = folder / "runs/config/model"
    assert not (out / "generation_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == 1


def test_an_earlier_model_is_set_aside_with_all_that_is_in_it(tmp_path, models):
    """And of an export that was interrupted nothing stays."""
    write_inputs(tmp_path, models["llama"])
    finish(train(1, *SETTINGS, *CONSTANT, "train.max_steps=1", cwd=tmp_path))
    run_dir = tmp_path / "run"
    (run_dir / "model/of_the_earlier").write_text("", encoding="utf-8")
    (run_dir / ".model.writing").mkdir()
    (run_dir / ".model.writing/half").write_text("", encoding="utf-8")
    earlier = digests(run_dir / "model")
    said = finish(train(1, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=tmp_path))
    assert re.search(r"moved aside: run/model.aside1 \(.* GB", said)
    assert digests(run_dir / "model.aside1") == earlier
    assert not {"of_the_earlier", "half"} & {*names(run_dir / "model")}
    assert digests(run_dir / "model")["model.safetensors"] != earlier["model.safetensors"]
    assert names(run_dir) == [
        *(".lock", "checkpoints", "config.yaml", "metrics.jsonl"),
        *("model", "model.aside1", "origins.json"),
    ]


LORA = ("lora.rank=2", "lora.targets=all-linear")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", LORA),
        ("glm", ("parallel.expert=2",)),
        pytest.param("glm", LORA, marks=pytest.mark.full),
        pytest.param("fp8", ("export.dtype=float32",), marks=pytest.mark.full),
        pytest.param("mxfp4", (*LORA, "export.dtype=float32"), marks=pytest.mark.full),
    ],
)
def test_an_export_has_the_loss_of_the_runs_last_evaluation(
    name, more, models, tokenizer, tmp_path
):
    """Opened by transformers alone, or by peft."""
    save = {"fp8": save_deepseek_v3, "mxfp4": save_gpt_oss}.get(name)
    source = save(tmp_path / "source", tokenizer) if save else models[name]
    more = ("train.epochs=2", f"data.eval={tmp_path}/train.jsonl", *more)
    finish(train(2, *on_uneven_chats(source, tmp_path, *more), cwd=tmp_path))
    last = read_metrics(tmp_path / "run", "eval")[-1]["loss"]
    records = [encode(tokenizer, record) for record in uneven_chats()]
    exports = [AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)]
    if "lora.rank=2" in more:
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        exports.append(PeftModel.from_pretrained(base, tmp_path / "run/adapter"))
        assert AutoTokenizer.from_pretrained(tmp_path / "run/adapter").chat_template
    for model in exports:
        assert loss_of(model, records) == pytest.approx(last, rel=1e-6)


# The command `export`


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Runs:
    """run.dir of two steps of that model on so many ranks, for reading only."""
    finished: dict[tuple[str, int], Path] = {}

    def run_of(name: str, ranks: int) -> Path:
        if (name, ranks) not in finished:
            folder = write_inputs(tmp_path_factory.mktemp(name), models[name])
            finish(train(ranks, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder))
            finished[name, ranks] = folder / "run"
        return finished[name, ranks]

    return run_of


def exported(checkpoint_dir: Path, out: Path, *options: str) -> Path:
    assert run(["export", str(checkpoint_dir), str(out), *options]) == 0
    return out


@pytest.mark.parametrize(("name", "ranks"), [("llama", 3), ("qwen3", 1), ("glm", 2)])
def test_export_makes_the_runs_own_model(name, ranks, runs, tmp_path, models):
    out = exported(checkpoint(runs(name, ranks), 2), tmp_path / "out")
    assert digests(out) == digests(runs(name, ranks) / "model")
    written, source = (
        {key: tensor.shape for key, tensor in tensors_of(folder).items()}
        for folder in (out, models[name])
    )
    assert written == source


def test_a_checkpoint_is_enough_by_itself(tmp_path, models):
    folder = write_inputs(tmp_path / "run_folder", models["glm"])
    finish(train(2, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder))
    kept = digests(folder / "run/model")
    shutil.move(checkpoint(folder / "run", 2), tmp_path / "kept")
    shutil.rmtree(folder)
    out = exported(tmp_path / "kept", tmp_path / "deep/down/out")
    assert digests(out) == kept
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert names(tmp_path / "deep/down") == ["out"]


def run_script_with_small_files(arguments: list[str]) -> None:
    model_files._FILE_BYTES = 50_000
    run_script(arguments)


@pytest.mark.parametrize("lora", [(), ("lora.rank=2",)])
def test_a_value_that_the_exports_dtype_cannot_hold_is_refused_by_tensor(lora, tmp_path, models):
    write_inputs(tmp_path, models["qwen3"])
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.norm.weight"][5] = 70144
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    given = [*SETTINGS, *CONSTANT, "train.max_steps=1", *lora]
    last = refused(train(1, *given, "export.dtype=float16", cwd=tmp_path), 1)
    assert "ERROR: model.norm.weight has a value of 70" in last
    assert not (tmp_path / "run/model").exists()
    out = exported(checkpoint(tmp_path / "run", 1), tmp_path / "out")
    assert load_file(out / "model.safetensors")["model.norm.weight"].isfinite().all()


def test_a_large_model_is_in_several_files(tmp_path, models, monkeypatch):
    """The run, in which two ranks share them, and the command, write the same."""
    write_inputs(tmp_path, models["glm"])
    given = (*SETTINGS, *CONSTANT, "train.max_steps=1")
    finish(train(2, *given, cwd=tmp_path, work=run_script_with_small_files))
    monkeypatch.setattr(model_files, "_FILE_BYTES", 50_000)
    out = exported(checkpoint(tmp_path / "run", 1), tmp_path / "out")
    assert digests(out) == digests(tmp_path / "run/model")

    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    shape = rf"model-\d{{5}}-of-{len(files):05d}.safetensors"
    assert len(files) > 3 and all(re.fullmatch(shape, name) for name in files)
    assert index["weight_map"] == {key: name for name, tensors in files.items() for key in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes) and max(sizes) <= 50_000
    monkeypatch.undo()
    single = exported(checkpoint(tmp_path / "run", 1), tmp_path / "single")
    assert_same_tensors(out, single)
    opened, expected = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (out, single))
    assert opened.keys() == expected.keys()
    assert all(torch.equal(opened[key], expected[key]) for key in expected)


def export_and_die(source: str, out: str, after_parts: int) -> None:
    write_file, written = durable_fs.write_file, []

    def die(path: Path, parts: Any) -> Any:
        def until_then() -> Any:
            for part in parts:
                written.append(path)
                if len(written) == after_parts:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        return write_file(path, until_then())

    durable_fs.write_file = die
    sys.exit(run(["export", source, out]))


def test_an_export_is_whole_or_not_there(tmp_path, runs):
    source, out = checkpoint(runs("glm", 2), 2), tmp_path / "out"
    killed = on_ranks(1, export_and_die, str(source), str(out), 20, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".out.writing").is_dir() and not out.exists()
    assert digests(exported(source, out)) == digests(runs("glm", 2) / "model")
    assert not (tmp_path / ".out.writing").exists()


def export_until_a_signal(source: str, out: str) -> None:
    def read(*_: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    write.read_tensor = read
    sys.argv = ["shardtune", "export", source, out]
    runpy.run_module("shardtune.__main__", run_name="__main__")


def test_an_export_that_is_ended_says_so_and_leaves_nothing(tmp_path, runs):
    source = str(checkpoint(runs("glm", 2), 2))
    (exports := tmp_path / "exports").mkdir()
    ended = on_ranks(1, export_until_a_signal, source, str(exports / "out"), cwd=tmp_path)
    line = "ERROR: ended by SIGTERM before it was done - run the same command again\n"
    # runpy may warn before the line.
    assert ended.returncode == 1 and ended.stderr.endswith(line), ended.stderr
    assert ended.stderr.count("ERROR") == 1 and "Traceback" not in ended.stderr
    assert names(exports) == []


def export_and_measure(source: str, out: str) -> None:
    """Print the peak of the process's own memory, above that at the start."""
    with Usage() as usage:
        code = run(["export", source, out])
    print(usage.growth)
    sys.exit(code)


@pytest.mark.full
def test_export_needs_memory_for_one_tensor(tmp_path, models):
    """Of 24 layers of seven tensors of at most half a MiB, in halves on two ranks."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24}
    shape |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    config = LlamaConfig(**shape, vocab_size=331, tie_word_embeddings=True)
    write_inputs(tmp_path, models["llama"])
    config.save_pretrained(tmp_path / "model")
    more = ("model.init=random", "train.max_steps=1", "export.final=false")
    finish(train(2, *SETTINGS, *CONSTANT, *more, cwd=tmp_path))
    places = str(checkpoint(tmp_path / "run", 1)), str(tmp_path / "out")
    said = finish(on_ranks(1, export_and_measure, *places, cwd=tmp_path))
    whole = (tmp_path / "out/model.safetensors").stat().st_size
    assert int(said.splitlines()[-1]) < whole / 3, whole
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), LlamaForCausalLM)
