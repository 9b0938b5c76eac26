"""`make gpu-check` ends whatever a check or an environment does, and passes on a pretended GPU."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.commands import REPOSITORY, wait_until
from helpers.documented import require_error_line
from helpers.forked import ForkedPopen
from helpers.pinned import on_path
from helpers.pretended import needs_compiler
from helpers.ranks import on_ranks
from pretend_gpu.__main__ import environment

from distTest.gone import GONE
from distTest.gpu_check import __main__ as gpu_check
from distTest.gpu_check import check_process, device, speed
from distTest.gpu_check.checks import CHECKS, LIMIT_S, Check, Skipped
from shardtune.model.flops import published_peak
from shardtune.planner.make_plan import make_plan
from shardtune.planner.run_plan import as_prediction
from shardtune.planner.simulation.at_once import at_once

PRETENDED = REPOSITORY / "docs/gpu_cards/pretended.yaml"
SPEEDS = "speed-glm-4.5-air", "speed-llama3-8b-lora"


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A process that is forked later would not end by a signal that this one handles."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_crash_is_a_failure_by_name_and_the_other_checks_go_on(tmp_path, monkeypatch, capsys):
    checks = [Check("gone", "nowhere.at_all", 9), CHECKS[0], Check("long", "nowhere.at_all", 999)]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="ERROR: gone failed - see the logs in "):
        gpu_check.main()
    gone, device, late = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))[
        "checks"
    ]
    assert gone["verdict"] == "failed" and gone["summary"] == "ended with 1: StopIteration"
    assert device["verdict"] == "skipped" and device["summary"].endswith(" sees no GPU")
    assert late["verdict"] == "skipped" and late["summary"].startswith("it takes about 999 s, and")
    assert late["summary"].endswith(" - python -m distTest.gpu_check --only long")
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| gone | FAILED | " in table and table.strip() in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "CHECKS", checks[1:2])
    with pytest.raises(SystemExit, match="ERROR: no check could be made - "):
        gpu_check.main()


@pytest.mark.parametrize("word", GONE["gpu-check"])
def test_a_check_or_an_option_that_is_gone_is_refused_by_what_to_do(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", word])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    require_error_line(capsys.readouterr().err.rstrip("\n"))


def test_an_environment_that_is_too_old_or_lacks_a_package_is_skipped_by_name(monkeypatch):
    versions = {"torch": "2.5.1+cu124", "transformers": "4.57.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions[name])
    with pytest.raises(Skipped) as skipped:
        check_process.require_environment()
    old = "needs torch 2.11, and this is 2.5.1+cu124, needs transformers 5.17, and this is 4.57.1"
    assert str(skipped.value) == old
    versions |= {"torch": "2.13.0", "transformers": "5.23.0"}
    monkeypatch.setitem(sys.modules, "train_fsdp", None)
    with pytest.raises(Skipped, match=r"lacks a package: .*train_fsdp"):
        check_process.require_environment()


def test_the_limit_holds_all_nine_checks_and_shapes_with_experts_come_first():
    assert sum(check.seconds for check in CHECKS) <= LIMIT_S < 9 * 60
    names = [check.name for check in CHECKS]
    assert [check.name for check in CHECKS if check.is_timed] == names[-2:]
    assert names[-2:] == list(SPEEDS) and len(names) == 9
    page = (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")
    assert [n for n in names if f"`{n}`" not in page] == [], "not in the table of the docs"


def test_a_signal_ends_the_check_that_runs(tmp_path):
    """A check has a session of its own, and would go on holding the GPU."""
    names = tmp_path / "checks.py"
    names.write_text(
        "import sys, time\n"
        "from distTest.gpu_check import __main__ as gpu_check\n"
        "from distTest.gpu_check.checks import Check\n"
        "gpu_check.CHECKS = [Check('slow', 'device.device', 9)]\n"
        f"gpu_check.sys.executable = {str(tmp_path / 'slow.sh')!r}\n"
        f"sys.argv = ['gpu_check', '--out', {str(tmp_path)!r}]\n"
        "gpu_check.main()\n",
        encoding="utf-8",
    )
    (tmp_path / "slow.sh").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid\n"
        "exec sleep 300\n"
    )
    (tmp_path / "slow.sh").chmod(0o755)
    with subprocess.Popen(
        [sys.executable, str(names)],
        env=os.environ | on_path(REPOSITORY),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until((tmp_path / "pid").is_file)
        check = int((tmp_path / "pid").read_text())
        process.terminate()
        assert "ERROR: ended by SIGTERM" in process.communicate(timeout=240)[1]
    with pytest.raises(ProcessLookupError):
        os.kill(check, 0)


def test_a_slow_gpu_fails_by_name_and_no_speed_of_it_is_measured(tmp_path, monkeypatch):
    published = published_peak("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert published == 989e12 and device.slowness(0.71 * published, published) is None
    assert device.slowness(1.0, published_peak("a GPU", torch.bfloat16)) is None
    said = device.slowness(0.69 * published, published)
    assert said and re.match(r".* 69% .* 989 TFLOP/s, below 70% - ", said)

    def run(check: Check, *_: Any) -> dict[str, Any]:
        verdict = "failed" if check.name == "device" else "ok"
        return {"verdict": verdict, "summary": "", "figures": {}, "seconds": 1.0}

    monkeypatch.setattr(gpu_check, "run", run)
    only = ["speed-glm-4.5-air", "losses"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--only", *only])
    with pytest.raises(SystemExit, match="ERROR: device failed - "):
        gpu_check.main()
    card = yaml.safe_load((tmp_path / "card.json").read_text(encoding="utf-8"))
    verdicts = {"device": "failed", "losses": "ok", "speed-glm-4.5-air": "skipped"}
    assert card["checks"] == verdicts
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert re.search(r"^\| speed-glm-4.5-air \| skipped \| 0 \| .*: device failed \|", text, re.M)


def test_memory_of_other_processes_is_named_beside_a_context_of_this_one():
    assert device.held_by_others(int(1e9)) is None
    said = device.held_by_others(int(20e9))
    assert said and " 20.0 GB of the GPU - " in said


def test_results_stay_beside_those_of_other_checks_and_a_limit_holds_for_chosen_ones(
    tmp_path, monkeypatch
):
    def run(check: Check, *_: Any) -> dict[str, Any]:
        if check.name == "losses":
            raise KeyboardInterrupt
        return {"verdict": "ok", "summary": "", "figures": {}, "seconds": 1.0}

    (tmp_path / "results.json").write_text('{"checks": []}', encoding="utf-8")  # of an older run
    command = ["gpu_check", "--out", str(tmp_path), "--commit", "c0ffee", "--only"]
    monkeypatch.setattr(gpu_check, "commit", lambda: "")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "run", run)
        for names in (
            ["smoke", "attention"],
            ["experts", "losses"],
        ):  # the last never ends
            patch.setattr(sys, "argv", [*command, *names])
            with contextlib.suppress(KeyboardInterrupt):
                gpu_check.main()
    rows = yaml.safe_load((tmp_path / "results.json").read_text(encoding="utf-8"))["checks"]
    assert [row["check"] for row in rows] == ["smoke", "attention", "experts"]
    card = yaml.safe_load((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert card["versions"]["shardtune"] == "c0ffee"
    monkeypatch.setattr(sys, "argv", [*command, "attention", "loss-head", "--limit-s", "1"])
    with pytest.raises(SystemExit, match="ERROR: no check could be made - see why in the table"):
        gpu_check.main()
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| loss-head | skipped | 0 | it takes about 15 s, and 1 s are left - " in table
    assert "| smoke | ok |" in table and "| attention | ok |" in table
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "results.md")])
    with pytest.raises(SystemExit, match=r"ERROR: .* - name another folder with --out"):
        gpu_check.main()


def test_the_settings_whose_speed_is_measured_are_those_of_config_yaml():
    shipped = yaml.safe_load((REPOSITORY / "config.yaml").read_text(encoding="utf-8"))
    for assignment in speed.SETTINGS:
        key, _, value = assignment.partition("=")
        section, _, name = key.partition(".")
        assert shipped[section][name] == value


@needs_compiler
def test_a_check_of_each_kind_passes_on_a_pretended_gpu(tmp_path):
    """Tests on pretended GPUs hold what the others check."""
    names = ["device", "losses"]
    on_ranks(1, check_in_forks, tmp_path, names, cwd=tmp_path, timeout_s=400)
    rows = results_of(tmp_path)
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(names, "ok")


@pytest.mark.full
@pytest.mark.timeout(900)
@needs_compiler
def test_every_check_passes_on_a_pretended_gpu(tmp_path):
    """The CPU build lacks Triton, so nothing is compiled.

    Each process of a check is a fork, which spares the seconds of its imports.
    """
    names = [check.name for check in CHECKS]
    on_ranks(1, check_in_forks, tmp_path, names, cwd=tmp_path, timeout_s=800)
    rows = results_of(tmp_path)
    assert list(rows) == names
    not_ok = {name: row["summary"] for name, row in rows.items() if row["verdict"] != "ok"}
    assert not not_ok, not_ok
    for name in ("optimizer", *SPEEDS):
        assert "compiled: skipped, since nothing is compiled here" in rows[name]["summary"]
    assert not list((tmp_path / "out").glob("*/")), "models and checkpoints are removed"
    card, committed = (
        yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (tmp_path / "out/card.json", PRETENDED)
    )
    assert card.keys() == committed.keys()
    for name in SPEEDS:
        memory, eager = card[name]["memory"], card[name]["eager"]
        assert memory["reserved_bytes"] >= memory["measured_bytes"] > 0
        assert (tmp_path / f"out/{name}.eager.trace.json.gz").is_file()
        assert "Self CPU" in (tmp_path / f"out/{name}.log").read_text(encoding="utf-8")
        # Losses are near those of another time: bfloat16 sends tokens to other experts.
        assert eager["losses"] == pytest.approx(committed[name]["eager"]["losses"], rel=2e-3)


def check_in_forks(folder: Path, names: list[str]) -> None:
    """Make these checks on one pretended GPU, with forks for processes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    os.environ |= environment(1)
    subprocess.Popen = ForkedPopen  # type: ignore[misc, assignment]
    speed.make_plan, speed.as_prediction = plan_in_fork, attrgetter("prediction")
    sys.argv = ["gpu_check", "--tiny", "--only", *names, "--out", str(folder / "out")]
    gpu_check.main()


def plan_in_fork(*given: Any) -> Any:
    """Return what a check asks of a plan. Its runs are forked from the check's process, in which no
    backward may have run before.
    """

    def of_plan() -> Any:
        plan = make_plan(*given)
        names = "is_simulated", "reason", "fits", "peak_bytes", "pools_bytes", "peaks", "parameters"
        values = {name: getattr(plan, name) for name in names}
        return SimpleNamespace(**values, prediction=as_prediction(plan))

    return at_once([of_plan, lambda: None])[0]


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    results = json.loads((folder / "out/results.json").read_text(encoding="utf-8"))
    return {row["check"]: row for row in results["checks"]}
