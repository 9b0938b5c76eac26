"""`model.new_tokens`: runs with tokens that the source lacks equal a plain loop over a model that
transformers has resized, whose rows were made by hand; beside adapters with peft's own layers."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers.commands import finish, read_metrics
from helpers.exact import RATE, Mesh
from helpers.plain_lora import (
    TARGETS,
    initial_factors,
    loss_of,
    peft_model,
    plain_lora_training,
)
from helpers.plain_training import (
    assert_same_steps,
    assert_same_weights,
    encode,
    on_uneven_chats,
    plain_training,
    uneven_chats,
)
from helpers.ranks import train
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardtune.ask import Model
from shardtune.config import DataConfig, LoraConfig, ModelConfig
from shardtune.data.dataset import build_encoder
from shardtune.errors import UserError
from shardtune.new_tokens import NewTokens, add_new_tokens

FULL = pytest.mark.full
TOKENS = ["<call>", "</call>", "rank of ranks"]
KNOWN = "<|im_end|>"  # to the source; beside adapters its row trains, too
GIVEN = f"model.new_tokens={{special: [<call>, </call>], plain: [rank of ranks, {KNOWN}]}}"


def resized(source: Path, folder: Path, rows: int) -> Path:
    """The model with the tokens, made by hand: each row is the mean of its pieces' rows."""
    old, new = (AutoTokenizer.from_pretrained(source) for _ in range(2))
    new.add_tokens(TOKENS[:2], special_tokens=True)
    new.add_tokens(TOKENS[2:])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ends = ("get_input_embeddings", "get_output_embeddings")
    pieces = [old(text, add_special_tokens=False)["input_ids"] for text in TOKENS]
    means = [[getattr(model, end)().weight[ids].mean(0) for ids in pieces] for end in ends]
    before, known = model.config.vocab_size, old.convert_tokens_to_ids(KNOWN)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for end, rows_of_end in zip(ends, means, strict=True):
            weight = getattr(model, end)().weight
            weight[before:] = torch.stack([*rows_of_end, weight[known].detach()]).mean(0)
            weight[new.convert_tokens_to_ids(TOKENS)] = torch.stack(rows_of_end)
    model.save_pretrained(folder)
    new.save_pretrained(folder)
    return folder


def new_ids(tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(text) for text in TOKENS]


def rows_with_tokens(source: Path) -> int:
    rows = AutoConfig.from_pretrained(source).vocab_size
    needed = len(AutoTokenizer.from_pretrained(source)) + len(TOKENS)
    return rows if needed <= rows else -(-needed // 64) * 64


def named_by_head(source: Path, folder: Path) -> Path:
    """A tied model whose file has the shared weight under the name of the head alone."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def chats_with_tokens() -> list[dict[str, Any]]:
    records = uneven_chats()
    for i, record in enumerate(records):
        record["messages"][1]["content"] = f"<call>{i}</call> rank of ranks"
    return records


@pytest.mark.parametrize(
    ("family", "meshes", "more"),
    [
        ("qwen3", [Mesh(2)], []),
        ("tied_llama", [Mesh(2), Mesh(4, stages=2)], []),
        pytest.param("glm", [Mesh(4, 2), Mesh(1)], [], marks=FULL),
        pytest.param("llama", [Mesh(1), Mesh(2, tensor=2)], [], marks=FULL),
    ],
)
def test_new_tokens_train_as_in_a_resized_model(family, meshes, more, sharp, tmp_path):
    """On a mesh, and resumed on another one; and the export has the tokens and their rows."""
    source, records = sharp[family], chats_with_tokens()
    if family == "tied_llama":
        source = named_by_head(source, tmp_path / "source")
    rows = rows_with_tokens(source)
    expected_folder = resized(source, tmp_path / "resized", rows)
    for number, mesh in enumerate(meshes, 1):
        given = [GIVEN, "train.epochs=4", f"train.max_steps={4 * number // len(meshes)}"]
        given += mesh.assignments(*more)
        given = on_uneven_chats(source, tmp_path, *given, records=records)
        finish(train(mesh.ranks, *given, cwd=tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    encoded = [encode(tokenizer, record) for record in records]
    assert all(tokenizer.convert_tokens_to_ids(TOKENS[0]) in ids for ids, _ in encoded)
    expected = plain_training(expected_folder, encoded, (RATE,) * 4)
    assert_same_steps(tmp_path / "run", expected, rel=1e-6)
    assert_same_weights(tmp_path / "run", expected)
    assert len(read_metrics(tmp_path / "run", "step")) == 4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert exported.config.vocab_size == rows == exported.lm_head.weight.shape[0]
    files = [folder / "tokenizer_config.json" for folder in (source, tmp_path / "run/model")]
    before, after = (json.loads(file.read_bytes()) for file in files)
    assert after.pop("added_tokens_decoder").keys() >= {str(i) for i in new_ids(tokenizer)}
    assert after == {key: value for key, value in before.items() if key != "added_tokens_decoder"}
    again = AutoTokenizer.from_pretrained(expected_folder)
    for text in (*TOKENS, f"a{TOKENS[0]}b", records[3]["messages"][1]["content"]):
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"]


BOTH = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("family", "meshes", "keys"),
    [
        ("tied_llama", [Mesh(2), Mesh(4, stages=2)], {}),
        ("glm", [Mesh(4, 2)], {"whole": ["lm_head"]}),
        pytest.param("llama", [Mesh(1), Mesh(2, tensor=2)], {}, marks=FULL),
        pytest.param("llama", [Mesh(2)], {"rows": "none"}, marks=FULL),
        pytest.param("qwen3", [Mesh(4, stages=2), Mesh(2)], {"whole": BOTH[:1]}, marks=FULL),
        pytest.param("tied_llama", [Mesh(4, stages=2), Mesh(1)], {"whole": BOTH[1:]}, marks=FULL),
        pytest.param("glm", [Mesh(1), Mesh(4, 2, stages=2)], {}, marks=FULL),
    ],
)
def test_rows_and_whole_ends_train_beside_adapters_as_in_peft(
    family, meshes, keys, sharp, tmp_path
):
    source, records = sharp[family], chats_with_tokens()
    if family == "tied_llama":
        source = named_by_head(source, tmp_path / "source")
    folder = tmp_path / "resized"
    rows = rows_with_tokens(source)
    tokenizer = AutoTokenizer.from_pretrained(resized(source, folder, rows))
    ids, is_tied = tokenizer.convert_tokens_to_ids([*TOKENS, KNOWN]), family == "tied_llama"
    ends, whole = BOTH[: 1 if is_tied else 2], keys.get("whole", [])
    saved = [end for end in ends if end in whole or (is_tied and whole)]
    of_rows = {end: ids for end in ends if end not in saved and "rows" not in keys}
    targets = TARGETS["glm" if family == "glm" else "llama"]
    model = peft_model(
        folder,
        initial_factors(source, LoraConfig(rank=3, alpha=12)),
        3,
        12,
        **targets,
        trainable_token_indices=of_rows or None,
        modules_to_save=saved or None,
        ensure_weight_tying=is_tied,
    )
    encoded = [encode(tokenizer, record) for record in records]
    losses, norms = plain_lora_training(model, encoded, [RATE] * 4)
    for number, mesh in enumerate(meshes, 1):
        given = [GIVEN, "train.epochs=4", f"train.max_steps={4 * number // len(meshes)}"]
        given += ["lora.rank=3", "lora.alpha=12", *mesh.assignments()]
        given += [f"lora.{key}={value}" for key, value in keys.items()]
        given = on_uneven_chats(source, tmp_path, *given, records=records)
        said = finish(train(mesh.ranks, *given, cwd=tmp_path))
    assert f"{len(ids)} rows of" in said or not of_rows
    steps = read_metrics(tmp_path / "run", "step")
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-6)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run/adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    assert loss_of(adapted, encoded) == pytest.approx(loss_of(model, encoded), rel=1e-6)
    assert loss_of(merged, encoded) == pytest.approx(loss_of(model, encoded), rel=1e-6)
    assert rows > AutoConfig.from_pretrained(source).vocab_size
    question = records[0]["messages"][:1]
    assert Model(str(tmp_path / "run/adapter"), torch.float32).answer([question], 4) != [""]
    trained, plain = adapted.merge_and_unload(), model.merge_and_unload()
    for end in ("get_input_embeddings", "get_output_embeddings"):
        expected = getattr(plain, end)().weight[ids]
        for opened in (trained, merged):
            torch.testing.assert_close(
                getattr(opened, end)().weight[ids], expected, rtol=1e-5, atol=1e-6
            )


def test_a_resume_with_other_tokens_is_refused(sharp, tmp_path):
    given = ["train.epochs=1", "export.final=false"]
    given = on_uneven_chats(sharp["llama"], tmp_path, GIVEN, *given, records=chats_with_tokens())
    finish(train(1, *given, cwd=tmp_path))
    done = train(1, *given, "model.new_tokens=[<other>]", cwd=tmp_path)
    assert done.returncode == 2 and "model.new_tokens" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (["<a>", "<a>"], "'<a>' stands there 2 times"),
        (["<|im_start|>assistant"], "has the token '<|im_start|>' in it"),
        (["é"], "is how the tokenizer writes other bytes"),
        ({"special": ["<a>"], "plain": ["<a>"]}, "'<a>' stands there 2 times"),
    ],
)
def test_texts_that_become_no_token_are_refused(tokens, problem, models):
    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    with pytest.raises(UserError) as refused:
        add_new_tokens(tokenizer, ModelConfig(path="m", new_tokens=tokens))
    assert any(problem in line for line in refused.value.problems)


def test_tokens_of_the_source_without_a_row_are_refused():
    assert NewTokens({64: [1, 63], 65: [2]}, []).vocabulary(64) == 128
    with pytest.raises(UserError, match="has token 64, the model 64 rows"):
        NewTokens({64: [64]}, []).vocabulary(64)


def test_a_special_token_with_which_the_template_ends_answers_is_a_stop(models, tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>\n{% endfor %}"
    (tmp_path / "new.jinja").write_text(template)
    data = DataConfig(train="t", chat_template=str(tmp_path / "new.jinja"))
    tokens: Any = {"special": ["<begin>", "<end>"]}
    model = ModelConfig(path=str(models["llama"]), new_tokens=tokens)
    encoder = build_encoder(model, data, date.today())
    assert encoder.tokenizer.decode(encoder.stop_token_ids[-1]) == "<end>"
    assert "<begin>" not in encoder.tokenizer.decode(encoder.stop_token_ids)


def test_a_token_that_exists_is_said_and_left(models):
    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    before = len(tokenizer)
    given = ["<|im_end|>", "<new>", "<|IM_START|>"]
    new = add_new_tokens(tokenizer, ModelConfig(path="m", new_tokens=given))
    assert list(new.pieces)[1:] == [before, before + 1] and len(tokenizer) == before + 2
    assert new.notes == [
        "model.new_tokens: '<|im_end|>' is a token already, and keeps its row",
        "model.new_tokens: '<|IM_START|>' is the token '<|im_start|>' but for its case",
    ]
