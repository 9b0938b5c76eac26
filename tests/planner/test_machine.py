"""What a plan assumes of the card: its rates, the memory that it takes itself, and the money."""

import argparse
import re
from dataclasses import replace

import pytest
from helpers.planned import CONFIG, LLAMA, MACHINE, configured
from transformers import AutoModelForCausalLM

from shardtune.__main__ import run
from shardtune.cards import CARDS
from shardtune.distributed.measured import CPU, write_measured
from shardtune.planner.command.options import add_arguments
from shardtune.planner.command.plan_command import machine_of
from shardtune.planner.command.text import assumed, verdict
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.simulation.extrapolate import with_layers


def test_groups_stay_gathered_only_where_the_run_then_fits():
    """Half of the memory without activations holds all groups, but beside them it does not."""
    config = configured("model.activation_checkpointing=none", "data.max_length=4096")

    def planned(memory_bytes: float) -> Plan:
        return make_plan(config, LLAMA, replace(MACHINE, memory_bytes=memory_bytes))

    kept = planned(2.84e9)
    assert kept.fits and kept.kept_groups == [1 + LLAMA.num_hidden_layers]
    freed = planned(kept.needed_bytes - 1)
    assert freed.fits and freed.kept_groups < kept.kept_groups
    assert freed.needed_bytes < kept.needed_bytes


def test_a_verdict_says_what_is_tight_and_what_compiled_layers_save():
    config = configured("model.activation_checkpointing=none", "model.compile=true")
    plan = make_plan(config, with_layers(LLAMA, 2), MACHINE)
    tight = replace(plan, machine=replace(MACHINE, memory_bytes=plan.peak_bytes + 2.9e9))
    assert "The run fits, but it is tight (" in verdict(tight)
    assert "The run fits, 8.0 GB hold" in verdict(plan)
    small = replace(plan, machine=replace(MACHINE, memory_bytes=plan.peak_bytes - 1))
    assert verdict(small).endswith("; compiled layers keep a quarter to a third less than these")


def test_a_plan_says_what_it_assumes_of_the_card(tmp_path, capsys):
    """It needs config.json alone."""
    with_layers(LLAMA, 2).save_pretrained(tmp_path)
    given = ["plan", "--config", str(CONFIG), f"model.path={tmp_path}", f"run.dir={tmp_path}"]
    given += ["--gpus-per-node", "2", "--nodes", "3", "--tokens", "1e6", "--price", "2"]
    said = []
    for machine in (["--gpu", "rtx 4090"], ["--gpu", "h100", "--gpu-memory", "24"]):
        assert run([*given, *machine]) == 0
        said.append(capsys.readouterr().out)
    assert (
        "Assumed: RTX 4090 of 24 GB, with 165.2 TFLOP/s, 200 Gb/s inside and 100 Gb/s between "
        "nodes, 2,000 GB of host memory a node\n"
    ) in said[0]
    numel = AutoModelForCausalLM.from_config(with_layers(LLAMA, 2)).num_parameters()
    assert f"Parameters: {numel:,} |" in said[0]
    assert f"States: {16 * numel / 6 / 1e9:.1f} GB = " in said[0]
    assert re.search(r"^A step takes about \S+ s, as eager kernels on RTX 4090 do", said[0], re.M)
    assert re.search(r"^A step takes at least: .*", said[0], re.M)
    assert "989 TFLOP/s" in said[1] and "--gpu-memory 24 holds, H100 has 80\n" in said[1]
    config, cards = configured(), ("RTX 4090", "H100")
    slow, fast = (make_plan(config, LLAMA, replace(MACHINE, card=CARDS[name])) for name in cards)
    assert slow.kernels_s and fast.kernels_s and slow.kernels_s > fast.kernels_s
    assert re.search(r"The run takes at least .* steps, 1,000,000 tokens\n", said[0])
    (hours,) = re.findall(r"^The run takes at least \S+ h, about (\S+) h: ", said[0], re.M)
    (cost,) = re.findall(r"^At 2 a GPU hour that costs about (\S+), for ", said[0], re.M)
    assert float(cost) == pytest.approx(2 * 6 * float(hours), rel=0.02), "of six GPUs"
    by_arithmetic, verdict_, *_ = said[0].splitlines()
    assert by_arithmetic.startswith("By arithmetic the run fits: ") and verdict_.startswith(
        "The run fits"
    )


@pytest.mark.parametrize(
    ("device", "ranks", "gpu", "taken"),
    [
        ("NVIDIA H100 80GB HBM3", [2, 2], None, (2e9, 3e9, 4e12)),
        ("NVIDIA H100 80GB HBM3", [2, 2], "h100", (2e9, 450e9, 989e12)),
        ("NVIDIA A100-SXM4-80GB", [2, 2], "h100", (12.5e9, 450e9, 989e12)),
        (CPU, [2, 2], None, (12.5e9, 450e9, 989e12)),
        (CPU, [2], "rtx 4090", (12.5e9, 25e9, 165.2e12)),
        ("NVIDIA H100 80GB HBM3", [2], None, (12.5e9, 3e9, 4e12)),
        ("NVIDIA H100 80GB HBM3", [2], "h100", (12.5e9, 450e9, 989e12)),
    ],
)
def test_a_plan_takes_measured_rates_only_where_they_were_measured(
    device, ranks, gpu, taken, tmp_path
):
    figures = [{"between": 2e9, "inside": 3e9, "flops": [4e12]}] * len(ranks)
    write_measured(tmp_path, ranks, device, figures)
    arguments = ["--nodes", str(len(ranks)), "--gpus-per-node", "2", *(["--gpu", gpu] * bool(gpu))]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    machine = machine_of(parser.parse_args(arguments), configured(f"run.dir={tmp_path}"))
    assert (machine.node_bytes_per_s, machine.rank_bytes_per_s, machine.flops_per_s) == taken
    is_said = f"by the preflight of {tmp_path}" in assumed(machine)
    assert is_said == bool({2e9, 3e9, 4e12} & {*taken})
