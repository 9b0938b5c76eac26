"""`shardtune ask` and examples/ask.py answer as the models would, with the run's options."""

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.commands import REPOSITORY, completed
from helpers.plain_training import sharpen, with_weights
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from distTest.workloads.small_models import CHATML
from shardtune.__main__ import run
from shardtune.ask import Model
from shardtune.checkpoint.assets import LISTING, listing_json
from shardtune.distributed.join import native_dtype
from shardtune.distributed.tensors import DTYPES

QUESTION = "which rank ?"
SILENT = CHATML + "{% if not enable_thinking|default(true) %}silently {% endif %}"
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "the reference"},
]


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: Any) -> str:
    """Run examples/ask.py, and return what it said."""
    monkeypatch.setattr(sys, "argv", ["ask.py", *map(str, given)])
    runpy.run_path(str(REPOSITORY / "examples/ask.py"), run_name="__main__")
    return capsys.readouterr().out


def greedy(folder: Path, prompt: str, most: int) -> str:
    """The most likely token after another, by plain forward passes."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + most and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip()


def test_both_models_answer_the_question(models, tmp_path, capsys, monkeypatch):
    """The one behind the system's turn."""
    before = shutil.copytree(models["llama"], tmp_path / "before")
    after = with_weights(models["llama"], tmp_path / "run/model", sharpen)
    for folder in (before, after):
        (folder / "chat_template.jinja").write_text(SILENT)
    (tmp_path / "run/config.yaml").write_text(
        f"model: {{path: {before}}}\ndata: {{template_options: {{enable_thinking: false}}}}\n"
    )
    prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES[:2])
    prompt += "<|im_start|>assistant\nsilently "
    short = write_jsonl(tmp_path / "s.jsonl", [{"messages": MESSAGES}] * 2)
    tokenizer: Any = AutoTokenizer.from_pretrained(before)
    room = len(tokenizer("the reference")["input_ids"]) + 2
    answers = [greedy(folder, prompt, room) for folder in (before, after)]
    assert answers[0] != answers[1]
    minutes = [datetime.fromisoformat(f"2026-01-01T00:{n:02}:00+00:00") for n in (0, 9, 10)]
    starts = [{"kind": "start", "time": minutes[n].isoformat()} for n in (0, 2)]
    write_jsonl(tmp_path / "run/metrics.jsonl", starts)
    began = int(minutes[1].timestamp())
    arguments = ["--run", tmp_path / "run", "--short", short]
    said = asked(monkeypatch, capsys, *arguments, "--times", began - 30, began)
    row = next(line for line in said.splitlines() if line.startswith("which rank ?"))
    words = ("".join(filter(str.isprintable, " ".join(answer.split()))) for answer in answers)
    shown = [re.escape(text[:12]) for text in words]
    assert re.fullmatch(rf"which rank \? +- {shown[0]}.* - {shown[1]}.* the ref.*", row)
    assert "\nExact match on 2 short answers to reworded questions: 0 before, 0 after\n" in said
    assert re.search(r"^Time: set-up 30 s, data 60 s, training \d+ s, answers \d+ s$", said, re.M)
    assert str(tmp_path / "run/metrics.jsonl") in said
    said = asked(monkeypatch, capsys, *arguments, "--times", began + 3600, began + 3600)
    assert re.search(r"^Time: set-up 0 s, .*finished \d+ s, answers \d+ s$", said, re.M)


def test_a_model_is_scored_in_a_line_of_json(models, tmp_path, capsys, monkeypatch):
    short = write_jsonl(tmp_path / "s.jsonl", [{"messages": MESSAGES}] * 2)
    said = asked(monkeypatch, capsys, "--score", models["llama"], "--short", short)
    *_, last = said.splitlines()
    assert json.loads(last) == {"exact_matches": 0, "questions": 2}


@pytest.fixture(scope="module")
def scoring() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "examples/ask.py"))


def test_questions_of_unequal_length_are_answered_together_as_alone(models, tmp_path):
    folder = with_weights(models["llama"], tmp_path / "model", sharpen)
    model = Model(str(folder), torch.float32)
    questions = ["which rank ?", "why does the ring stop when a node is gone ?", "what is it ?"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    alone = [model.answer([prompt], 8)[0] for prompt in prompts]
    assert len(set(alone)) == 3
    assert model.answer(prompts, 8) == alone


def test_an_answer_counts_that_is_the_reference_but_for_case_and_a_full_stop(scoring):
    given = {"75": "75", "COMPLETE": "complete.", "16": "16 bytes", "gloo": "It is gloo", "2": "3"}
    right = [scoring["is_right"](answer, reference) for reference, answer in given.items()]
    assert right == [True, True, False, False, False]


def test_the_table_has_every_eighth_of_forty_questions_in_lines_that_a_terminal_holds(
    scoring, capsys
):
    """With long questions, and answers that go on."""
    questions = [f"{number} {'why ' * 30}?" for number in range(1, 41)]
    references = [f"{number}" for number in range(1, 41)]
    scoring["show"](questions, ["long\n[words] " * 9] * 40, references, references)
    said = capsys.readouterr().out
    assert re.findall(r"^(\d+) why", said, re.M) == ["8", "16", "24", "32", "40"]
    assert re.findall(r"\+ (\d+)", said) == ["8", "16", "24", "32", "40"]
    assert said.count("- long [words]") == 5
    assert max(map(len, said.splitlines())) <= 100
    assert ": 0 before, 40 after\n" in said


def generated_ids(folder: Path, prompt: str, model: Any = None) -> list[int]:
    """What `generate()` answers behind a prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    dtype = DTYPES[native_dtype(torch.device("cpu"))]
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    room = min(1024, model.config.max_position_embeddings - length)
    ids = model.generate(**inputs, max_new_tokens=room, do_sample=False)[0, length:].tolist()
    return list(map(int, ids))


def text(folder: Path, ids: list[int]) -> str:
    """An answer as the command prints it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode(ids, skip_special_tokens=True)) + "\n"


def generated(folder: Path, prompt: str) -> str:
    return text(folder, generated_ids(folder, prompt))


def in_chatml(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few positions, so that its answers are short."""
    folder = with_weights(models["llama"], tmp_path_factory.mktemp("sharp") / "model", sharpen)
    edited("config.json", max_position_embeddings=64)(folder)
    return folder


@pytest.fixture
def folder(sharp: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharp, tmp_path / "model"))


def a_run(path: Path, options: str = "{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").touch()
    (path / "config.yaml").write_text(f"data: {{template_options: {options}}}\n")
    return path


def test_the_command_answers_as_generate_does(sharp):
    """In a process of its own, as a user calls it."""
    command = [sys.executable, "-m", "shardtune", "ask", str(sharp), QUESTION]
    answered = completed(command, cwd=REPOSITORY)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout == generated(sharp, in_chatml(QUESTION))
    assert len(answered.stdout) > 9


@pytest.mark.parametrize("named", [".", "model"])
def test_a_run_answers_with_its_own_model_and_options(named, folder, tmp_path, capsys):
    (folder / "chat_template.jinja").write_text(SILENT)
    run_dir = a_run(tmp_path, "{enable_thinking: false}")
    assert run(["ask", str(run_dir / named), QUESTION]) == 0
    assert capsys.readouterr().out == generated(folder, in_chatml(QUESTION) + "silently ")


def test_each_line_of_the_input_is_a_question_of_its_own(sharp, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("which rank ?\n\n  what is it ? \n"))
    assert run(["ask", str(sharp)]) == 0
    asked = ["which rank ?", "what is it ?"]
    assert capsys.readouterr().out == "".join(generated(sharp, in_chatml(q)) for q in asked)


def test_a_refused_question_and_ctrl_c_end_an_answer_and_not_the_loop(sharp, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"what is it ?\n{'long ' * 64}\nwhich rank ?\n"))
    taken: list[Any] = []
    put = TextStreamer.put

    def interrupted(streamer: TextStreamer, tokens: Any) -> None:
        taken.append(tokens)
        if len(taken) == 20:
            raise KeyboardInterrupt
        put(streamer, tokens)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    assert run(["ask", str(sharp)]) == 2, "as every piped question is answered or refused"
    said = capsys.readouterr()
    begun, _, rest = said.out.partition("\n")
    assert generated(sharp, in_chatml("what is it ?")).startswith(begun)
    assert rest == generated(sharp, in_chatml("which rank ?"))
    assert "tokens, the model 64 positions - shorten it" in said.err


def test_the_newest_final_model_of_a_run_answers(folder, tmp_path, capsys):
    def write_step(name: str, step: int) -> None:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / LISTING).write_bytes(listing_json({"step": step, "files": {}}))

    a_run(tmp_path)
    write_step("model", 5)
    write_step("models/step_0000004", 4)
    assert run(["ask", str(tmp_path), QUESTION]) == 0
    assert "is newer" not in capsys.readouterr().err
    write_step("models/step_0000050", 50)
    write_step("models/step_0000099.aside1", 99)  # an earlier run's
    assert run(["ask", str(tmp_path), QUESTION]) == 0
    newer = f"WARNING: {tmp_path}/models/step_0000050 is newer than {folder}, which answers"
    assert newer in capsys.readouterr().err
    write_step("adapter", 60)
    edited("adapter_config.json", base_model_name_or_path="nowhere")(tmp_path / "adapter")
    assert "nowhere: neither a directory here" in refused(tmp_path, capsys)


def test_an_answer_ends_where_the_export_says(folder, capsys):
    """As with transformers alone. The tokenizer may name another token."""
    ids = generated_ids(folder, in_chatml(QUESTION))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    edited("tokenizer_config.json", eos_token=tokenizer.decode([ids[0]]))(folder)
    assert run(["ask", str(folder), QUESTION]) == 0
    assert capsys.readouterr().out == text(folder, ids)
    end = max(map(ids.index, ids))
    edited("generation_config.json", eos_token_id=[ids[end]])(folder)
    assert run(["ask", str(folder), QUESTION]) == 0
    assert capsys.readouterr().out == text(folder, ids[: end + 1])


def test_without_a_template_the_model_continues_the_text(folder, capsys):
    (folder / "chat_template.jinja").unlink()
    assert run(["ask", str(folder), QUESTION]) == 0
    said = capsys.readouterr()
    assert said.out == generated(folder, QUESTION)
    assert f"WARNING: {folder} has no chat template: it continues your text" in said.err


@pytest.mark.parametrize("is_peft_alone", [False, True])
def test_an_adapter_answers_on_its_base(is_peft_alone, folder, tmp_path, capsys):
    """With the tokens, the template and the stop tokens beside it, else with those of the base."""
    adapter = a_run(tmp_path / "run") / "adapter"
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    get_peft_model(base, config).save_pretrained(adapter)
    prompt = in_chatml(QUESTION) + "silently " * (not is_peft_alone)
    dtype = DTYPES[native_dtype(torch.device("cpu"))]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = generated_ids(folder, prompt, PeftModel.from_pretrained(base, adapter))
    if not is_peft_alone:
        for path in folder.glob("tokenizer*"):
            shutil.copy(path, adapter)
        (adapter / "chat_template.jinja").write_text(SILENT.replace("true", "false"))
        end = max(map(ids.index, ids))
        edited("generation_config.json", eos_token_id=ids[end])(adapter)
        ids = ids[: end + 1]
    assert run(["ask", str(adapter.parent), QUESTION]) == 0
    assert capsys.readouterr().out == text(folder, ids)


def refused(path: Path, capsys: pytest.CaptureFixture[str], question: str = QUESTION) -> str:
    capsys.readouterr()
    assert run(["ask", str(path), question]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ERROR: ") and said.err.count("\n") == 1 and " - " in said.err
    return said.err


def test_a_run_without_a_model_is_told_what_to_ask_instead(tmp_path, capsys):
    run_dir = a_run(tmp_path / "run")
    problem = "no model in it, which a run writes at its end - name "
    export = ", or `shardtune export` a checkpoint and ask that"
    assert f"{problem}another{export}" in refused(run_dir, capsys)
    for name in ("best", "models/step_0000002", "models/step_0000004"):
        (run_dir / name).mkdir(parents=True)
    others = f"{run_dir}/best or {run_dir}/models/step_0000004"
    assert f"{problem}{others}{export}" in refused(run_dir, capsys)


def test_a_folder_that_is_no_model_is_named(tmp_path, capsys):
    assert f"{tmp_path}: no model in it" in refused(tmp_path, capsys)
    assert "nothing: neither a directory here nor in the hub's cache" in refused(
        tmp_path / "nothing", capsys
    )


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_the_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def with_template(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return write


def edited(file: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | values))

    return edit


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "it cannot be opened (SafetensorError"),
        (lose_a_tensor, "no model.layers.1.mlp.up_proj.weight, 1 tensors in all"),
        (lose_the_tokenizer, "it cannot be opened (ValueError: Couldn't instantiate"),
        (edited("config.json", model_type="nobody"), "does not know the architecture nobody"),
        (
            edited("adapter_config.json", base_model_name_or_path=None),
            "a base that was drawn at random: neither",
        ),
        (
            with_template("{{ raise_exception('no') }}"),
            "model refuses the question (TemplateError: no) - mend chat_template.jinja there",
        ),
        (
            edited("config.json", max_position_embeddings=4),
            "tokens, the model 4 positions - shorten",
        ),
    ],
)
def test_a_model_that_cannot_be_opened_or_asked_is_refused(damage, said, folder, capsys):
    damage(folder)
    assert said in refused(folder, capsys)


def test_no_code_of_a_model_is_run(folder, tmp_path, capsys):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    (folder / "own.py").write_text(code + "class A: pass\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(code + "def generate(*a, **b): pass\n")
    own = {"auto_map": {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.A"}}
    edited("config.json", **own)(folder)
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.A", None]})(folder)
    assert run(["ask", str(folder), QUESTION]) == 0  # by the classes of transformers
    edited("config.json", model_type="nobody")(folder)
    assert "its model is code of its own, which is not run here" in refused(folder, capsys)
    assert not ran.exists()
