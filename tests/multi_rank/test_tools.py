"""`verify` and `export`: a checkpoint is enough by itself."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import REPOSITORY
from helpers.faults import DiskOs, Fault, fails
from helpers.ranks import on_ranks, run_script, train, type_command
from helpers.small_runs import CONSTANT, SETTINGS, checkpoint, digests, names, write_inputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs as disk
from shardtune.checkpoint import export, open_checkpoint, verify_checkpoint
from shardtune.checkpoint.load import read_chunk
from shardtune.checkpoint.manifest import DamagedCheckpoint

Runs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Runs:
    """run.dir of two steps of that model on so many ranks, for reading only."""
    finished: dict[tuple[str, int], Path] = {}

    def run_of(name: str, ranks: int) -> Path:
        if (name, ranks) not in finished:
            folder = write_inputs(tmp_path_factory.mktemp(name), models[name])
            done = train(ranks, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder)
            assert done.returncode == 0, done.stderr
            finished[name, ranks] = folder / "run"
        return finished[name, ranks]

    return run_of


@pytest.fixture
def copied(tmp_path: Path, runs: Runs) -> Path:
    """A checkpoint of two ranks that may be damaged."""
    return Path(shutil.copytree(checkpoint(runs("glm", 2), 2), tmp_path / "copied"))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def in_its_header(directory: Path) -> str:
    flip(directory / "rank_00000.safetensors", 40)
    return r"\S+/rank_00000.safetensors: is damaged"


def in_its_last_tensor(directory: Path) -> str:
    flip(directory / "rank_00001.safetensors", -1)
    last = max(
        (chunk["begin"], name)
        for name, tensor in json.loads((directory / "manifest.json").read_text(encoding="utf-8"))[
            "tensors"
        ].items()
        for chunk in tensor["chunks"]
        if chunk["file"] == "rank_00001.safetensors"
    )[1]
    return rf"\S+/rank_00001.safetensors: is damaged, first in tensor {last}"


def in_the_tokenizer(directory: Path) -> str:
    flip(directory / "huggingface/tokenizer.json", 100)
    return r"\S+/huggingface/tokenizer.json: is damaged"


def in_the_manifest(directory: Path) -> str:
    flip(directory / "manifest.json", 1000)
    return r"\S+/manifest.json: does not match the digest in COMPLETE"


def without_the_manifest(directory: Path) -> str:
    (directory / "manifest.json").unlink()
    return r"\S+/manifest.json: cannot be read \(No such file or directory\)"


def cut_short(directory: Path) -> str:
    file = directory / "rank_00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    return rf"\S+/rank_00001.safetensors: .* \(its length is not {file.stat().st_size + 1}\).*"


def grown(directory: Path) -> str:
    with (directory / "rank_00001.safetensors").open("ab") as file:
        file.write(b"\0")
    return r"\S+/rank_00001.safetensors: .* \(its length is not \d+\)"


def missing(directory: Path) -> str:
    (directory / "rank_00001.safetensors").unlink()
    return rf"rank_00001.safetensors, written on node 0 \(\S+\), is missing in {directory}"


def swapped(directory: Path) -> str:
    one, other = directory / "rank_00000.safetensors", directory / "rank_00001.safetensors"
    one.rename(directory / "between")
    other.rename(one)
    (directory / "between").rename(other)
    return r"\S+/rank_00000.safetensors: is damaged.*"


@pytest.mark.parametrize(
    "damage",
    [
        in_its_header,
        in_its_last_tensor,
        in_the_tokenizer,
        in_the_manifest,
        without_the_manifest,
        cut_short,
        grown,
        missing,
        swapped,
    ],
)
def test_verify_names_the_first_bad_file(
    damage: Callable[[Path], str], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = damage(copied)
    assert run(["verify", str(copied)]) == 1
    errors = capsys.readouterr().err.splitlines()
    remedy = (
        "name all parts of the checkpoint, or restore it from a copy"
        if damage is missing
        else "restore it from a copy, or use another .*"
    )
    assert re.fullmatch(f"ERROR: {named} - {remedy}", errors[0]), errors[0]
    assert len(errors) == (2 if damage is swapped else 1)


def test_verify_of_what_is_sound_and_of_what_is_no_checkpoint(copied: Path, tmp_path: Path) -> None:
    """The command as it is typed: exit codes, and a progress bar nowhere but on a terminal."""
    command = [sys.executable, "-m", "shardtune", "verify", str(copied)]
    sound = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert (sound.returncode, sound.stderr) == (0, "")
    assert re.fullmatch(r"checkpoint_0000002: intact, \d+ files, 0\.00 GB\n", sound.stdout)
    (copied / "COMPLETE").unlink()
    torn = type_command("verify", copied, cwd=tmp_path)
    assert torn.returncode == 1 and torn.stdout == ""
    assert (
        torn.stderr.startswith(f"ERROR: {copied}/COMPLETE: cannot be read")
        and torn.stderr.count("\n") == 1
    )
    (copied / "manifest.json").unlink()
    no_checkpoint = type_command("verify", copied, cwd=tmp_path)
    assert no_checkpoint.returncode == 2 and "not a complete checkpoint" in no_checkpoint.stderr
    assert run(["verify", str(copied / "nowhere")]) == 2


def test_verify_shows_its_progress_on_a_terminal(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, stream = pty.openpty()
    termios.tcsetwinsize(stream, (24, 80))
    with os.fdopen(stream, "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        assert verify_checkpoint([copied]) == []
        screen.flush()
        shown = ""
        while "\rcheckpoint_0000002: 100%" not in shown:
            assert select.select([terminal], [], [], 10)[0], shown
            shown += os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "\r" not in capsys.readouterr().out


def test_verify_reads_each_byte_once(copied: Path) -> None:
    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text(encoding="utf-8"))[1])

    before = bytes_read()
    bytes_read_by_asking = bytes_read() - before
    before = bytes_read()
    assert verify_checkpoint([copied]) == []
    read = bytes_read() - before - bytes_read_by_asking
    assert (
        0 <= read - sum(path.stat().st_size for path in copied.rglob("*") if path.is_file()) < 500
    )


def exported(checkpoint_dir: Path, out: Path, *options: str) -> Path:
    assert run(["export", str(checkpoint_dir), str(out), *options]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) in ordinary else pytest.mark.full)
        for ordinary in [{("llama", 3), ("qwen3", 1), ("glm", 2)}]
        for name in ("llama", "qwen3", "glm")
        for ranks in (1, 2, 3)
    ],
)
def test_export_makes_the_runs_own_model(
    name: str, ranks: int, runs: Runs, tmp_path: Path, models: dict[str, Path]
) -> None:
    out = exported(checkpoint(runs(name, ranks), 2), tmp_path / "out")
    assert digests(out) == digests(runs(name, ranks) / "model")
    written, source = (load_file(folder / "model.safetensors") for folder in (out, models[name]))
    assert {key: tensor.shape for key, tensor in written.items()} == {
        key: tensor.shape for key, tensor in source.items()
    }
    assert ("lm_head.weight" in written) == (name != "llama")
    assert ("model.layers.2.mlp.experts.5.down_proj.weight" in written) == (name == "glm")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_export_in_another_dtype(dtype: str, runs: Runs, tmp_path: Path) -> None:
    source = checkpoint(runs("glm", 2), 2)
    plain, converted = (
        exported(source, tmp_path / "plain"),
        exported(source, tmp_path / "other", "--dtype", dtype),
    )
    expected = load_file(plain / "model.safetensors")
    for key, tensor in load_file(converted / "model.safetensors").items():
        exact = key.endswith(
            "e_score_correction_bias"
        )  # of which transformers says that it must be float32
        assert tensor.dtype == (torch.float32 if exact else getattr(torch, dtype)), key
        assert torch.equal(tensor, expected[key].to(tensor.dtype)), key
    assert AutoModelForCausalLM.from_pretrained(converted, dtype="auto").dtype == getattr(
        torch, dtype
    )


def test_a_checkpoint_is_enough_by_itself(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = write_inputs(tmp_path / "run_folder", models["glm"])
    assert train(2, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder).returncode == 0
    kept = digests(folder / "run/model")
    shutil.move(checkpoint(folder / "run", 2), tmp_path / "kept")
    shutil.rmtree(folder)
    out = exported(tmp_path / "kept", tmp_path / "deep/down/out")
    assert digests(out) == kept
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert sorted(path.name for path in (tmp_path / "deep/down").iterdir()) == ["out"]


@pytest.mark.parametrize("file", ["rank_00001.safetensors", "huggingface/tokenizer.json"])
def test_export_refuses_what_was_not_saved(
    file: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = json.loads((copied / "manifest.json").read_text(encoding="utf-8"))["tensors"]
    name = "model.model.layers.1.mlp.experts.down_proj"
    chunk = next(
        chunk for chunk in tensors[name]["chunks"] if chunk["file"] == "rank_00001.safetensors"
    )
    flip(copied / file, chunk["begin"] if file.startswith("rank") else 100)
    assert run(["export", str(copied), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ERROR: ") and error.count("\n") == 1
    assert file in error and (name in error or not file.startswith("rank"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied"]


def test_a_chunk_is_what_was_saved_or_an_error(copied: Path) -> None:
    """However long ago it was checked."""
    saved = open_checkpoint(copied)
    chunk = saved.chunks["model.model.layers.1.mlp.experts.down_proj"][1]
    file = copied / chunk.file
    content = file.read_bytes()
    rows = read_chunk(saved, chunk, [slice(1, 2), *(slice(0, n) for n in chunk.sizes[1:])])
    assert torch.equal(rows, load_file(file)[chunk.tensor][1:2])

    flip(file, chunk.end - 1)
    for length in (len(content), chunk.end - 1, chunk.begin, 0):
        os.truncate(file, length)
        with pytest.raises(
            DamagedCheckpoint,
            match=re.escape(f"{file}: tensor {chunk.tensor} is damaged"),
        ):
            read_chunk(saved, chunk)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # whose first pages cannot be read: EIO
    with pytest.raises(OSError, match="Input/output error"):
        read_chunk(saved, chunk)


@pytest.mark.parametrize("out", ["file/out", "file/deep/out", "/proc/out", "x" * 300])
def test_export_refuses_what_cannot_be_made(
    out: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(["export", str(copied), str(tmp_path / out)]) == 2
    assert re.fullmatch(
        rf"ERROR: {tmp_path / out} cannot be created: .+ - name another .+\n",
        capsys.readouterr().err,
    )
    assert names(tmp_path) == ["copied", "file"]


def test_export_to_a_full_disk(
    copied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = DiskOs(Fault("write", "*/model.safetensors", fails(errno.ENOSPC), nth=9))
    monkeypatch.setattr(disk, "os", full)
    assert run(["export", str(copied), str(tmp_path / "out")]) == 1
    line = rf"ERROR: {tmp_path / 'out'} was not written: .*{os.strerror(errno.ENOSPC)} - make room .+\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert names(tmp_path) == ["copied"]


@pytest.mark.parametrize("argument", ["copied/manifest.json", "nothing", "x" * 300, "", ".."])
def test_verify_refuses_what_is_no_checkpoint(
    argument: str, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copied.parent)
    assert run(["verify", argument]) == 2
    error = rf"ERROR: {Path(argument)}: not a complete checkpoint \(.+\) - use another one\n"
    assert re.fullmatch(error, capsys.readouterr().err)


def export_and_die(source: str, out: str, after_writes: int) -> None:
    write_file, written = disk.write_file, []

    def die(path: Path, parts: Any) -> Any:
        def until_then() -> Any:
            for part in parts:
                written.append(path)
                if len(written) == after_writes:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        return write_file(path, until_then())

    disk.write_file = die
    sys.exit(run(["export", source, out]))


@pytest.mark.parametrize("after_writes", [1, 20, pytest.param(61, marks=pytest.mark.full)])
def test_export_is_whole_or_not_there(
    after_writes: int, copied: Path, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    killed = on_ranks(1, export_and_die, str(copied), str(out), after_writes, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".out.writing").is_dir() and not out.exists()
    assert digests(exported(copied, out)) == digests(runs("glm", 2) / "model")
    assert not (tmp_path / ".out.writing").exists()

    (out / "config.json").write_text("of the user", encoding="utf-8")
    before = digests(out)
    assert run(["export", str(copied), str(out)]) == 2
    assert capsys.readouterr().err == f"ERROR: {out} exists - name a directory that does not\n"
    assert digests(out) == before


def test_two_exports_to_one_place(
    copied: Path,
    tmp_path: Path,
    runs: Runs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second, which comes while the first writes, is refused and disturbs nothing."""
    out, write_file, codes = tmp_path / "out", disk.write_file, []

    def write_and_export(path: Path, parts: Any) -> Any:
        written = write_file(path, parts)
        codes.append(run(["export", str(copied), str(out)]))
        return written

    monkeypatch.setattr(disk, "write_file", write_and_export)
    exported(copied, out)
    assert len(codes) > 5 and set(codes) == {2}
    line = f"ERROR: another export writes {out} - wait for it, or name another directory\n"
    assert capsys.readouterr().err == line * len(codes)
    assert digests(out) == digests(runs("glm", 2) / "model")


def run_script_with_small_files(arguments: list[str]) -> None:
    export._FILE_BYTES = 50_000
    run_script(arguments)


def test_a_large_model_is_in_several_files(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run, in which two ranks share them, and the command, write the same."""
    write_inputs(tmp_path, models["glm"])
    arguments = ["--config", "config.yaml", *SETTINGS, *CONSTANT, "train.max_steps=1"]
    done = on_ranks(2, run_script_with_small_files, arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(export, "_FILE_BYTES", 50_000)
    out = exported(checkpoint(tmp_path / "run", 1), tmp_path / "out")
    assert digests(out) == digests(tmp_path / "run/model")

    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert len(files) > 3 and all(
        re.fullmatch(rf"model-\d{{5}}-of-{len(files):05d}.safetensors", name) for name in files
    )
    assert index["weight_map"] == {key: name for name, tensors in files.items() for key in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes) and max(sizes) <= 50_000
    monkeypatch.undo()
    single = load_file(
        exported(checkpoint(tmp_path / "run", 1), tmp_path / "single") / "model.safetensors"
    )
    assert all(
        torch.equal(tensor, single[key])
        for tensors in files.values()
        for key, tensor in tensors.items()
    )
    opened, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("out", "single")
    )
    assert opened.keys() == expected.keys() and all(
        torch.equal(opened[key], expected[key]) for key in expected
    )


def export_until_a_signal(source: str, out: str) -> None:
    def read(*_: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    export.read_tensor = read
    sys.argv = ["shardtune", "export", source, out]
    runpy.run_module("shardtune.__main__", run_name="__main__")


def test_an_export_that_is_ended_says_so_and_leaves_nothing(copied: Path, tmp_path: Path) -> None:
    (exports := tmp_path / "exports").mkdir()
    ended = on_ranks(1, export_until_a_signal, str(copied), str(exports / "out"), cwd=tmp_path)
    line = "ERROR: ended by SIGTERM before it was done - run the same command again\n"
    assert ended.returncode == 1 and ended.stderr.endswith(line), (
        ended.stderr
    )  # runpy may warn before it
    assert ended.stderr.count("ERROR") == 1 and "Traceback" not in ended.stderr
    assert names(exports) == []


def export_and_measure(source: str, out: str) -> None:
    """Print how much more memory of its own the process had, at most, when it wrote."""
    peak, real = 0, os.write

    def own_bytes() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

    def measured_write(handle: int, data: memoryview) -> int:
        nonlocal peak
        peak = max(peak, own_bytes())
        return real(handle, data)

    class MeasuredOs:
        write = staticmethod(measured_write)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    before = own_bytes()
    disk.os = MeasuredOs()
    code = run(["export", source, out])
    print(peak - before)
    sys.exit(code)


def test_export_needs_memory_for_one_tensor(tmp_path: Path, models: dict[str, Path]) -> None:
    """Of 48 layers of seven tensors of at most half a MiB, in halves on two ranks."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(**shape, vocab_size=331, num_hidden_layers=48, tie_word_embeddings=True)
    write_inputs(tmp_path, models["llama"])
    config.save_pretrained(tmp_path / "model")
    settings = (
        *SETTINGS,
        *CONSTANT,
        "model.init=random",
        "train.max_steps=1",
        "export.final=false",
    )
    done = train(2, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = on_ranks(
        1,
        export_and_measure,
        str(checkpoint(tmp_path / "run", 1)),
        str(tmp_path / "out"),
        cwd=tmp_path,
    )
    assert measured.returncode == 0, measured.stderr
    whole = (tmp_path / "out/model.safetensors").stat().st_size
    assert int(measured.stdout.splitlines()[-1]) < whole / 6, whole
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), LlamaForCausalLM)
