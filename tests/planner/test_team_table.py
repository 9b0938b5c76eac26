"""`shardtune plan` as advice: what a team could train, and what it refuses before torch is read."""

import json
import re
import sys
from dataclasses import replace

import pytest
from helpers.commands import REPOSITORY, completed
from helpers.pinned import on_path
from helpers.planned import LLAMA, MACHINE, configured
from transformers import LlamaConfig

import shardtune
from shardtune.__main__ import COMMANDS, run
from shardtune.planner.make_plan import bound_plan
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.units import gb

# Each command line, and what is refused; for none the command's help.
REFUSED = {
    "--config /dev/null model.path=MODEL data.train=a parallel.replicate=3": (
        "parallel.replicate=3 does not divide the world size, 16"
    ),
    "MODEL parallel.expert=8": "parallel.expert=8 does not divide the 12 experts of own",
    "MODEL parallel.context=8": "parallel.context=8 does not divide the 12 heads of own",
    "MODEL data.max_length=8192": "data.max_length=8192 is beyond the 4096 positions of MODEL",
    "MODEL parallel.stages=4 --nodes 4": "parallel.stages=4: own has 2 layers",
    "MODEL --gpu-memory 0": "--gpu-memory 0: no such machine",
    "MODEL --nodes 1,x": "argument --nodes: 1,x is not a number of nodes - write a whole number",
    "MODEL --nodes 0": "argument --nodes: 0 is not a number of nodes",
    "MODEL QUANTISED": "its weights are quantised by awq",
    "MODEL --gpu MI300X": "--gpu MI300X: the rates of this card are not known - use one of B300",
    "MODEL --gpu h100 --price 0": "--price 0: no such price - give more than 0",
    "./absent": "model.path=./absent does not exist",
    "/absent/model": "model.path=/absent/model does not exist (the directory /absent does not",
    "NAMELESS": "model.path=NAMELESS: its config.json has no model_type - name a hub id or a dir",
    "QUANTISED": "its weights are quantised by awq",
    ".": "its config.json cannot be read",
    "": "neither a configuration nor one model is given",
    "model.path=MODEL": "neither a configuration nor one model is given",
}
WIDE = LlamaConfig(
    **LLAMA.to_dict() | {"hidden_size": 2048, "head_dim": 256, "num_hidden_layers": 24}
)
ONE_GPU = ["--nodes", "1", "--gpus-per-node", "1", "--host-memory", "0.1", "--gpu-memory"]
COST = ["--tokens", "1e9", "--price", "2", "--gpus-per-node", "2"]
SCRIPT = """
import json, sys
from shardtune.__main__ import run
for arguments in json.loads(sys.argv[1]):
    try:
        print(run(arguments), file=sys.stderr)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_a_command_line_is_refused_or_explained_before_torch_is_imported(tmp_path):
    """That takes seconds."""
    model = {
        "model_type": "own",
        "text_config": {"num_experts": 12, "num_attention_heads": 12, "num_hidden_layers": 2},
        "max_position_embeddings": 4096,
    }
    models = {
        "MODEL": model,
        "QUANTISED": model | {"quantization_config": {"quant_method": "awq"}},
        "NAMELESS": {},
    }
    for name, given in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(given), encoding="utf-8")
    lines = [["plan", *line.split()] for line in REFUSED]
    commands = json.dumps([*lines, *([name, "--help"] for name in COMMANDS)])
    done = completed(
        [sys.executable, "-c", SCRIPT, commands], cwd=tmp_path, env=on_path(REPOSITORY)
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2 * len(REFUSED) + len(COMMANDS)
    for line, code, expected in zip(said[::2], said[1::2], REFUSED.values(), strict=False):
        assert line.startswith("ERROR: ") and expected in line and code == "2"
    assert set(said[2 * len(REFUSED) :]) == {"0"}


def test_a_team_sees_what_fits_and_on_how_many_nodes_the_rest_does(tmp_path, capsys):
    """1.3 GB of a GPU are allowed for the device's own; frozen weights fit into the rest."""
    WIDE.save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), *ONE_GPU, "3.3", "data.max_length=64", *COST]) == 0
    title, head, *rough, _, simulated, again, whole, adapters, more, tight, _, _, _, _, _ = (
        capsys.readouterr().out.splitlines()
    )
    assert (title, simulated) == ("By arithmetic, roughly:", "Simulated:")
    assert "hours, at least  price, at least  settings" in head and tight.startswith("tight: ")
    _, _, _, _, _, _, _, at_least, *_ = rough[1].split()
    assert float(at_least.replace(",", "")) > 0
    assert [line.split()[2:4] for line in rough] == [["weights", "no"], ["tight", "2.9"]]
    assert head.split()[:3] == ["nodes", "trains", "fits"]
    assert whole.split() == ["1", "all", "weights", "no", *"-------"]
    assert "hours, about  price, about  settings" in again
    _, _, _, peak, about, _, _, hours, price, *settings = adapters.split()
    assert float(price.replace(",", "")) == pytest.approx(2 * 2 * float(hours), rel=0.01)
    assert float(hours) == pytest.approx(1e9 / float(about.replace(",", "")) / 3600, rel=0.01)
    assert adapters.split()[:3] == ["1", "LoRA", "tight"] and 1.3 < float(peak) <= 3.3
    assert {"train.gradient_accumulation_steps=32", "lora.rank=16"} <= {*settings}
    given = {"model.path": str(tmp_path), "model.init": "random", "data.train": "-"}
    machine = {"nodes": 1, "gpus_per_node": 2, "gpu_memory": 3.3, "host_memory": 0.1}
    copied = shardtune.plan(given, "data.max_length=64", *settings, **machine)
    assert copied.fits and gb(copied.peak_bytes) == peak
    assert re.match(r"All weights: from \d+ nodes, by arithmetic", more)


@pytest.mark.parametrize(("flops_per_s", "is_kept"), [(1e11, True), (1e15, False)])
def test_a_row_keeps_more_activations_where_that_is_faster_and_fits(flops_per_s, is_kept):
    config = configured("model.activation_checkpointing=full", "data.max_length=2048")
    machine = replace(MACHINE, nodes=1, flops_per_s=flops_per_s)
    search = Search(bound_plan(config, LLAMA, machine), Simulations(LLAMA))
    plan = search.fastest()
    assert plan and plan.fits
    assert (plan.layout.checkpointing == "selective") is is_kept


@pytest.mark.full
def test_a_team_to_which_nothing_fits_is_refused_with_a_row_of_each_model(tmp_path, capsys):
    for name in ("one", "other"):
        WIDE.save_pretrained(tmp_path / name)
    models = [str(tmp_path / name) for name in ("one", "other")]
    assert run(["plan", *models, *ONE_GPU, "1.4", "data.max_length=64"]) == 3
    printed = capsys.readouterr()
    _, _, *rows = printed.out.partition("Simulated:")[0].splitlines()
    assert [row.split()[0] for row in rows if row] == ["one"] * 2 + ["other"] * 2
    assert printed.err.splitlines()[-1].startswith("ERROR: nothing of ")
