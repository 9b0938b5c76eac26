"""What stays from Python: `shardtune.read_run` and `shardtune.plan`."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import yaml
from helpers.commands import REPOSITORY
from helpers.planned import LLAMA
from test_report import write_run

import shardtune
from shardtune.planner.simulation.extrapolate import with_layers

MODEL = "models/SmolLM2-135M-Instruct"  # of the demo
SHORT = ["data.max_length=64", "train.gradient_accumulation_steps=2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the examples name it, with a run in it and a tiny model."""
    write_run(tmp_path / "runs/demo")
    with_layers(LLAMA, 2).save_pretrained(tmp_path / MODEL)
    (tmp_path / "examples").mkdir()
    text = (REPOSITORY / "examples/demo.yaml").read_text(encoding="utf-8")
    (tmp_path / "examples/demo.yaml").write_text(text.replace(": 1024", ": 64"), "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_runs_as_it_stands(folder):
    page = (REPOSITORY / "docs/python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    said, names = io.StringIO(), {}
    with contextlib.redirect_stdout(said):
        exec(example, names)
    first, *plans = said.getvalue().splitlines()
    last = shardtune.read_run(folder / "runs/demo").steps[-1]
    assert first == f"{last['loss']} 8.5"
    assert [line.split()[:2] for line in plans] == [["1", "True"], ["2", "True"]]
    assert names["frame"]["step"].tolist() == [*range(1, 61)]


def test_a_run_is_read_as_lists_that_pandas_takes(folder):
    with (folder / "runs/demo/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "plan", "step": 0, "predicted_peak_bytes": 7}\n')
        file.write('{"kind": "score", "step": 60, "scores": {"em": 0.5}}\n')
    record = shardtune.read_run("runs/demo")
    assert record.steps[6]["grad_norm"] is None and record.steps[6]["step"] == 7
    assert [entry["step"] for entry in record.evaluations[::3]] == [*range(0, 61, 10)]
    assert record.plan == [{"kind": "plan", "step": 0, "predicted_peak_bytes": 7}]
    assert [entry["scores"] for entry in record.scores] == [{"em": 0.5}]
    assert record.unread == 0
    frame = pandas.DataFrame(record.steps)
    assert frame.shape[0] == 60
    assert frame["grad_norm"].isna().tolist() == [step == 7 for step in range(1, 61)]
    with pytest.raises(shardtune.UserError, match="no run"):
        shardtune.read_run(folder)


def test_a_mapping_is_planned_as_the_file_that_has_its_keys(folder):
    by_section = yaml.safe_load(Path("examples/demo.yaml").read_text(encoding="utf-8"))
    by_section["optimizer"]["lr"] = 4e-4  # text in YAML 1.1
    del by_section["model"]
    machine = {"nodes": 1, "gpus_per_node": 2, "gpu_memory": 24}
    plan = shardtune.plan(by_section | {"model.path": Path(MODEL)}, *SHORT, **machine)
    assert plan == shardtune.plan("examples/demo.yaml", *SHORT, **machine)
    assert plan.fits and plan.text.startswith(f"{plan.verdict}\n")
    assert f"{plan.peak_bytes / 1e9:.1f} GB" in plan.verdict
    assert f"States: {sum(plan.states.values()) / 1e9:.1f} GB" in plan.text
    assert plan.about_seconds and plan.step_seconds <= plan.about_seconds
    for phase in plan.memory:
        causes = [size for cause, size in phase.items() if cause not in ("phase", "total")]
        assert sum(causes) == phase["total"] <= plan.peak_bytes
    assert {row["collective"] for row in plan.traffic} >= {"all-gather", "reduce-scatter"}
    assert not any(row["between_nodes"] for row in plan.traffic)  # of one node
    given = {"model.path": MODEL, "data.train": "unread", "lora.rank": 8}
    assert "is low for adapters" in shardtune.plan(given, *SHORT, **machine).text


@pytest.mark.parametrize(
    ("config", "machine", "said"),
    [
        ({"model.pth": "x"}, {}, r"model.pth \(file\) is not known"),
        ({"model": {"path": "x"}, "data.train": 3}, {}, "data.train = 3"),
        ("nowhere.yaml", {}, "nowhere.yaml cannot be read"),
        ({"model.path": MODEL, "data.train": "x"}, {"nodes": 0}, "nodes 0: no such machine"),
    ],
)
def test_what_cannot_be_planned_is_refused(config, machine, said):
    with pytest.raises(shardtune.UserError, match=said):
        shardtune.plan(config, **machine)  # type: ignore[arg-type]


def test_the_import_takes_nothing_heavy():
    program = "import shardtune, sys; assert {'torch', 'numpy', 'pydantic'}.isdisjoint(sys.modules)"
    program += "; shardtune.read_run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
