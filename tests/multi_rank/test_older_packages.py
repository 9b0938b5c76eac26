"""Runs with an older transformers, which cannot spread experts, and without the package datasets.

Each Python that a test starts finds neither.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, completed, launch, read_metrics
from helpers.pinned import on_path
from helpers.small_runs import SETTINGS, write_inputs

RUN = ("--config", "config.yaml", *SETTINGS)
WITHOUT = """
import importlib.metadata, sys
from importlib.machinery import PathFinder

version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.16.0" if name == "transformers" else version(name)
sys.modules["datasets"] = None

class WithoutImplementations:
    def find_spec(name, path=None, target=None):
        if name == "transformers.distributed.expert_parallel":
            spec = PathFinder.find_spec(name, path)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda m: (load(m), delattr(m, "EPImplementationInterface"))
            return spec

sys.meta_path.insert(0, WithoutImplementations)
"""
REFUSAL = (
    "ERROR: parallel.expert=2: transformers 5.16.0 cannot spread experts - "
    "install transformers 5.23 or newer, or use parallel.expert=1"
)


@pytest.fixture
def older(tmp_path: Path) -> dict[str, str]:
    """Return variables with which a Python lacks both."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    return on_path(tmp_path / "site", REPOSITORY)


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_inputs(tmp_path / "runs", models["glm"])


@pytest.mark.full
def test_experts_train_where_they_are_and_json_lines_need_no_datasets(folder, older):
    assignments = [*RUN, "train.max_steps=2", "checkpoint.every_steps=1"]
    for name, env in (("older", older), ("pinned", {})):
        done = launch(0, *assignments, f"run.dir={name}", cwd=folder, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        said = re.findall(r"^.*was not tried.*$", done.stdout, re.MULTILINE)
        line = "transformers 5.16.0 was not tried (5.17 is the oldest, 5.24 the newest)"
        assert said == [line] * (name == "older")
    old, new = (
        [(e["loss"], e["grad_norm"]) for e in read_metrics(folder / name, "step")]
        for name in ("older", "pinned")
    )
    assert old == new and len(old) == 2


@pytest.mark.full
def test_more_ranks_for_experts_are_refused_by_name(folder, older):
    more = [*RUN, "parallel.expert=2"]
    done = launch(2, *more, cwd=folder, env=older)
    assert [line for line in done.stderr.splitlines() if "ERROR" in line[:5]] == [REFUSAL]
    assert "exitcode  : 2" in done.stderr
    plan = ["shardtune", "plan", "--gpus-per-node=2", *more]
    for module in (plan, ["distTest.preflight", *more]):
        done = completed(
            [sys.executable, "-m", *module],
            cwd=folder,
            env=os.environ | older | {"NNODES": "1", "GPUS_PER_NODE": "2"},
        )
        assert done.returncode == 2, done.stderr
        # The preflight names the node.
        assert re.sub(r"node 0 \(\S+\): ", "", done.stderr.splitlines()[-1]) == REFUSAL


def test_data_that_needs_datasets_is_refused_by_name(folder, older):
    (folder / "saved").mkdir()
    (folder / "saved/state.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, "-m", "shardtune", "inspect-data", *RUN]
    done = completed([*command, "data.train=saved"], cwd=folder, env=os.environ | older)
    assert done.returncode == 2
    assert re.fullmatch(r"ERROR: \S+ has no datasets, which reads .+ - .+\n", done.stderr)
