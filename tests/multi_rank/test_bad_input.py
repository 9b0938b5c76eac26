"""A run refuses bad input at once: exit code 2, one line per problem, before it reads a weight."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import packing_families
from helpers.chats import chats, write_jsonl
from helpers.commands import launch
from helpers.documented import refused, require_error_line
from helpers.pinned import on_path
from helpers.ranks import run_script, train
from helpers.tiny_models import cut_into_files
from safetensors.torch import load_file, save_file

from shardtune.distributed import exit_code, join
from shardtune.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_")


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    """Return the folder of a run's inputs."""
    write_jsonl(tmp_path / "train.jsonl", chats(6))
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "config.yaml").write_text(
        "model: {path: model, compute_dtype: float32}\n"
        "data: {train: train.jsonl, max_length: 128}\n",
        encoding="utf-8",
    )
    return tmp_path


def refusal(folder: Path, *assignments: str, ranks: int = 1) -> list[str]:
    """Return the `ERROR:` lines of a run, which must refuse its input in time."""
    done = train(ranks, *assignments, cwd=folder)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert lines == done.stderr.splitlines()[-len(lines) :] and all(
        " - " in line for line in lines
    ), done.stderr
    assert "Parameters:" not in done.stdout  # which follows the reading of weights
    return lines


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(
        json.dumps({key: value for key, value in content.items() if value is not None}),
        encoding="utf-8",
    )


def edited_config(**changes: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", **changes)


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def cut_to(bytes_left: int, name: str = "model.safetensors") -> Callable[[Path], None]:
    return lambda model: os.truncate(model / name, bytes_left)


def in_two_files(model: Path) -> None:
    cut_into_files(model.rename(model.with_name("whole")), model)


def forget_tokens(model: Path) -> None:
    edit(model / "config.json", vocab_size=100)
    weights = load_file(model / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][:100].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


OWN_CODE = {"AutoConfig": "cfg.Own"}
GPTQ = {"quant_method": "gptq", "bits": 4}
INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00002.safetensors"
NO_CONFIG = "model.path=model: no model configuration"
BAD_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "model.path=model"),
    "no config.json": (without("config.json"), NO_CONFIG),
    "config.json cut": (cut_to(40, "config.json"), NO_CONFIG),
    "unknown type": (edited_config(model_type="strange"), "does not know the architecture strange"),
    "own code of no type": (
        edited_config(model_type=None, auto_map=OWN_CODE),
        "is code of its own",
    ),
    "own code": (edited_config(model_type="strange", auto_map=OWN_CODE), "is code of its own"),
    "config.json of a wrong type": (edited_config(hidden_size="x"), NO_CONFIG),
    "unknown activation": (
        edited_config(hidden_act="zzz"),
        "model.path=model: no model can be built from its configuration (KeyError: 'zzz')",
    ),
    "end token of a wrong type": (
        lambda model: edit(model / "generation_config.json", eos_token_id="abc"),
        "model.path=model: no tokenizer",
    ),
    "tokens that the model does not know": (forget_tokens, "vocabulary of 100"),
    "a model of images": (edited_config(model_type="vit"), "vit has no text-only class"),
    "a forward that needs an image": (
        edited_config(model_type="blip-2"),
        "blip-2 has no text-only class: Blip2ForConditionalGeneration, given tokens alone, ends",
    ),
    "an encoder with a decoder": (edited_config(model_type="t5"), "t5 has no text-only class"),
    "quantised": (edited_config(quantization_config=GPTQ), "quantised"),
    "few positions": (
        edited_config(max_position_embeddings=64),
        "data.max_length=128 is beyond the 64 positions",
    ),
    "no weights": (
        without("model.safetensors"),
        "model/model.safetensors: this file of weights is missing",
    ),
    "weights cut": (cut_to(9000), "model/model.safetensors: truncated"),
    "weights empty": (cut_to(0), "model/model.safetensors: truncated"),
    "no shard": (
        lambda model: (in_two_files(model), without(SHARD)(model)),
        f"model/{SHARD}: this file of weights is missing",
    ),
    "index cut": (
        lambda model: (in_two_files(model), cut_to(50, INDEX)(model)),
        f"model/{INDEX}: not a readable index",
    ),
    "weights of another shape": (
        edited_config(intermediate_size=48),
        "no model.layers.0.mlp.down_proj.weight of shape [32, 48] (6 tensors in all)",
    ),
    "no tokenizer": (
        lambda model: [file.unlink() for file in model.glob("token*")],
        "model.path=model: no tokenizer",
    ),
    "no chat template": (without("chat_template.jinja"), "no chat template"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_is_refused(case, folder):
    damage, named = BAD_MODELS[case]
    damage(folder / "model")
    (problem,) = refusal(folder)
    assert named in problem


def test_code_of_a_tokenizer_is_not_run(folder):
    edit(
        folder / "model/tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    (folder / "model/own.py").write_text("raise SystemExit('this code ran')", encoding="utf-8")
    done = train(1, cwd=folder)
    assert "this code ran" not in done.stderr and "[y/N]" not in done.stdout
    assert done.returncode == 2


def test_problems_that_are_known_together_are_reported_together(folder):
    problems = refusal(folder, "data.train=one.jsonl", "data.eval=other.jsonl")
    assert len(problems) == 2 and "one.jsonl" in problems[0] and "other.jsonl" in problems[1]

    cut_to(9000)(folder / "model")
    problems = refusal(folder, "data.max_length=1024")
    assert len(problems) == 2 and "512 positions" in problems[0] and "truncated" in problems[1]

    wrong = ["train.epoch=2", "optimizer.lr=fast", "logging.profile_steps=[0, 2]"]
    problems = refusal(folder, *wrong, "data.overflow=wrap")
    assert len(problems) == 4
    for word in ("train.epochs", "optimizer.lr", "profile_steps", "truncate"):
        assert word in " ".join(problems)


def test_every_broken_record_and_set_is_named_with_what_to_do(folder):
    question = {"from": "human", "value": "q"}
    weighed = {"role": "assistant", "content": "a", "weight": 1.3}
    broken = [
        {"conversations": [question, {"from": "narrator", "value": "a"}]},
        {"conversations": []},
        {"conversations": [question, {"from": "gpt"}]},
        {"messages": [{"role": "user", "content": "q"}, weighed]},
    ]
    write_jsonl(folder / "bad.jsonl", [*chats(2), *broken])
    write_jsonl(folder / "long.jsonl", [{"prompt": "q" * 999, "completion": "a"}] * 2)
    settings = [
        "data.train=[{path: train.jsonl}, {path: bad.jsonl, weight: 0.5}]",
        "data.eval={held: train.jsonl, long: long.jsonl}",
        "data.columns={tools: functions}",
    ]
    lines = [
        "bad.jsonl:3: conversations[1].from is 'narrator' - write one of human, user, gpt, ",
        "bad.jsonl:4: conversations is [] - write a list of turns, each with from and value",
        "bad.jsonl:5: conversations[1] has from - write from and value",
        "bad.jsonl:6: messages[1] (assistant): weight is 1.3 - write true or 1 to train this turn",
        "data.columns.tools=functions: no record of any source has functions - name one of ",
        "data.train.bad: 4 of 6 records broken - repair or remove them",
        "data.eval.long: no token to train in 2 records (records longer than data.max_length=128, "
        "dropped: 2 | trained turns lost: 2 | ",
    ]
    for problem, line in zip(refusal(folder, *settings), lines, strict=True):
        assert problem.startswith(f"ERROR: {line}")


def test_data_needs_a_row_per_rank(folder):
    write_jsonl(folder / "train.jsonl", chats(1, longest_answer=3))
    (problem,) = refusal(folder, ranks=2)
    assert "1 row and" in problem and "2 data ranks" in problem


def test_matrices_whose_parts_do_not_add_up_are_not_shared(folder):
    packing_families.config_of("gemma3n_text").save_pretrained(folder / "model")
    (problem,) = refusal(folder, "parallel.tensor=2", "model.init=random", ranks=2)
    assert "parallel.tensor=2: parts of the matrices of gemma3n_text do not add up" in problem


def test_run_dir_must_be_writable(folder):
    (folder / "taken").write_text("", encoding="utf-8")
    for run_dir in ("taken", "taken/below"):
        (problem,) = refusal(folder, f"run.dir={run_dir}")
        assert f"run.dir={run_dir} cannot be written" in problem


def run_in_environment(environment: dict[str, str], arguments: list[str]) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        del os.environ[name]
    os.environ.update(environment)
    run_script(arguments)


NOBODY = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
NOBODY |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "JOIN_TIMEOUT": "3"}


@pytest.mark.parametrize(
    ("environment", "arguments", "named"),
    [
        (NOBODY, [], "rank 1 of 2 did not meet the others at 127.0.0.1:1 within 3.0 s"),
        (
            {"RANK": "0"},
            [],
            "has RANK and lacks WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT - start ",
        ),
        (NOBODY | {"WORLD_SIZE": "two"}, [], "WORLD_SIZE is 'two', not a number"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["distributed.backend=nccl"], "distributed.backend is nccl"),
        ({}, ["--optimizer.lr", "1e-3"], "unrecognized arguments: --optimizer.lr"),
        ({"JOIN_TIMEOUT": "soon"}, [], "join_timeout_s"),
    ],
    ids=["nobody there", "half a launcher", "no number", "no GPU", "unknown option", "no time"],
)
def test_a_bad_command_is_refused(environment, arguments, named, folder):
    done = train(1, *arguments, cwd=folder, work=partial(run_in_environment, environment))
    assert named in refused(done) and done.stderr.count("ERROR: ") == 1


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError) as refused:
        vars(join)["_device_and_backend"]("auto", 1)
    assert str(refused.value).startswith("local rank 1 has no GPU, this node has 1 - ")
    require_error_line(f"ERROR: {refused.value}")


@pytest.mark.full
def test_under_torchrun_each_problem_is_reported_once(folder, tmp_path):
    """By whichever rank finds it first."""
    (folder / "train.jsonl").write_text("no JSON\n{}\n", encoding="utf-8")
    late = 'import os, time\ntime.sleep(4 * (os.environ.get("LOCAL_RANK") == "0"))\n'
    (tmp_path / "sitecustomize.py").write_text(late, encoding="utf-8")
    of_data = ["train.jsonl:1", "train.jsonl:2", "2 of 2 records"]
    for arguments, expected in ([], of_data), (["train.steps=1"], ["train.steps"]):
        done = launch(2, "--config", "config.yaml", *arguments, cwd=folder, env=on_path(tmp_path))
        assert done.returncode != 0
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        for line, problem in zip(errors, expected, strict=True):
            assert problem in line


def test_the_first_rank_of_a_node_says_a_problem_that_all_share(tmp_path, monkeypatch):
    """torchrun gives each rank of a node a folder beside those of the others."""
    has_another_spoken = vars(exit_code)["_another_rank_has_spoken"]
    said = []
    for attempt, rank in (0, 1), (0, 0), (0, 2), (1, 0), (1, 1):
        error_file = tmp_path / f"attempt_{attempt}/{rank}/error.json"
        error_file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        said.append(not has_another_spoken())
    assert said == [True, False, False, True, False]
