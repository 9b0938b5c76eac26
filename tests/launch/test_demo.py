"""`make demo` as it stands, with a tiny model: what it says and writes."""

import re

import pytest
from helpers.commands import REPOSITORY
from helpers.documented import run

pytestmark = pytest.mark.full
EXACT = re.compile(
    r"^Exact match on (\d+) short answers to reworded questions: (\d+) before, (\d+) after$", re.M
)


def demo(settings: str, timeout_s: float = 400) -> str:
    """The target as it stands."""
    return run(f"make demo {settings}", REPOSITORY, timeout_s)


def test_make_demo_trains_asks_and_reports(tmp_path, models):
    run_dir = tmp_path / "demo"
    two = (REPOSITORY / "examples/chats/short_eval.jsonl").read_text("utf-8").splitlines()[:2]
    (tmp_path / "two.jsonl").write_text("\n".join(two), encoding="utf-8")
    tiny = models["llama"]
    arguments = f"model.path={tiny} train.max_steps=2 data.max_length=256 eval.baseline=false"
    settings = f"MODEL={tiny} RUN={run_dir} SHORT={tmp_path / 'two.jsonl'}"
    said = demo(f"{settings} DEMO_ARGS='{arguments}'")
    assert "\r" not in said
    for text in ("Step 2/2 | Loss:", "  - ", f"{run_dir}/model"):
        assert text in said
    assert re.search(r"^Time: set-up \d+ s, data \d+ s, training \d+ s, answers \d+ s$", said, re.M)
    assert EXACT.findall(said)[0][0] == "2"
    assert f"Report: {run_dir}/report.html" in said.splitlines()[-2:]  # make may have the last word
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert {'id="loss"', 'id="perplexity"', 'id="speed"'} <= set(re.findall(r'id="\w+"', page))
