"""A plan in words and tables, for a terminal and for the log of a run."""

from collections.abc import Iterator, Mapping, Sequence

from shardtune.cards import CARDS
from shardtune.config_io import bare
from shardtune.distributed.measured import MIRROR_SHARE
from shardtune.planner.arithmetic.figures import EXPERT_IMBALANCE, Cause
from shardtune.planner.arithmetic.machine import DISK_BYTES_PER_S, Machine
from shardtune.planner.arithmetic.run_length import RunLength
from shardtune.planner.arithmetic.storage import Storage
from shardtune.planner.command.options import OF_CARD
from shardtune.planner.mesh import as_arguments
from shardtune.planner.plan import TIGHT_BYTES, Estimate, Plan
from shardtune.units import duration, gb

TIGHT = f"less than {TIGHT_BYTES / 1e9:g} GB are left, and published runs took up to 9% more"
_COMPARED = ("H100", "H200", "A100")  # cards of published runs


def by_arithmetic(run: Estimate) -> str:
    """Return the line that comes before the seconds of a simulation."""
    share = run.peak_bytes / run.machine.memory_bytes
    fits = "fits" if share < 0.9 and run.host_fits else "does not fit" if share > 1.3 else "may fit"
    bound_by = f", {run.bound_by}" if run.bound_by else ""
    memory = f"{gb(run.peak_bytes)} of {gb(run.machine.memory_bytes)} GB"
    return (
        f"By arithmetic the run {fits}: about {memory}, and at "
        f"least {run.floor_s:.3g} s a step{bound_by}; a simulated step follows"
    )


def describe(plan: Plan, length: RunLength | str = "", price: float | None = None) -> Iterator[str]:
    """Yield the lines of a plan.

    `length`: the length of the run, or why it is not known. `price`: money for an hour of a GPU.
    """
    states = plan.states
    is_whole = plan.trained_parameters == plan.parameters
    trained = "all" if is_whole else f"{plan.trained_parameters:,}"
    yield f"Parameters: {plan.parameters:,} | Trained: {trained}"
    yield (
        f"States: {gb(states.total)} GB = {gb(states.parameters)} GB parameters + "
        f"{gb(states.gradients)} GB gradients + {gb(states.optimizer)} GB optimizer"
    )
    yield from _assumptions(plan)
    yield ""
    yield "Memory of a rank by phase, GB:"
    causes = [c for c in Cause if any(gb(p.by_cause[c]) != "0.0" for p in plan.peaks.values())]
    rows = [
        [phase, gb(peak.n_bytes), *(gb(peak.by_cause[cause]) for cause in causes)]
        for phase, peak in plan.peaks.items()
    ]
    yield from table(["", "total", *causes], rows)
    yield ""
    between, inside = plan.received
    if plan.needed_bytes < plan.peak_bytes:
        numbers = " and ".join(map(str, plan.kept_groups))
        yield (
            f"Gathered once a step, since memory is left: {numbers} groups of parameters; without "
            f"that the peak is {gb(plan.needed_bytes)} GB"
        )
        yield ""
    yield f"Received in a step, GB (as {plan.machine.backend} moves it):"
    rows = [[kind, gb(between[kind]), gb(inside[kind])] for kind in sorted(between)]
    yield from table(["", "by a node from others", "by a rank in its node"], rows)
    yield ""
    bubble = f" (a bubble of {plan.layout.bubble:.0%} in it)" if plan.layout.bubble else ""
    floors = ", ".join(
        f"{seconds:.3g} s {part}{bubble if part.startswith('arithmetic') else ''}"
        for part, seconds in plan.floors_s.items()
    )
    if plan.about_s is not None:
        yield f"A step takes about {number_text(plan.about_s)} s, {spread(plan)}"
    yield f"A step takes at least: {floors}"
    yield from _host_link(plan)
    yield _hours(plan, length)
    if price:
        yield _cost(plan, length, price)
    yield from _storage(plan)
    yield assumed(plan.machine)


def spread(plan: Plan) -> str:
    """Say how an estimate of seconds is made, and how far others' runs were from it."""
    name = plan.machine.card.name if plan.machine.card else ""
    kind, least = ("models with experts", "0.6") if plan.has_experts else ("dense models", "0.8")
    compared = f"published runs of {kind} took {least} to 1.3 times that"
    if not name.startswith(_COMPARED):
        compared = "no published run of this card was compared"
    return f"as eager kernels on {name} do, or the slowest link; {compared}"


def assumed(machine: Machine) -> str:
    """Return the rates of a plan's machine, and which ones differ from the card's."""
    card = machine.card or CARDS["H100"]
    inside, between = (8e-9 * n for n in (machine.rank_bytes_per_s, machine.node_bytes_per_s))
    line = (
        f"Assumed: {card.name} of {machine.memory_bytes / 1e9:g} GB, with "
        f"{machine.flops_per_s / 1e12:,.4g} TFLOP/s, {inside:,.4g} Gb/s inside and {between:,.4g} "
        f"Gb/s between nodes, {machine.host_bytes / 1e9:,.4g} GB of host memory a node"
    )
    own = CARDS[card.name]
    differ = [
        f"{name} {getattr(card, field) / unit:g} holds, {card.name} has {value / unit:g}"
        for name, (field, unit, _) in OF_CARD.items()
        if getattr(card, field) != (value := getattr(own, field))
    ]
    if machine.measured_in:
        line += f"; some of these rates were measured, by the preflight of {machine.measured_in}"
    return "; ".join([line, *differ])


def _host_link(plan: Plan) -> Iterator[str]:
    link, machine = plan.host_link, plan.machine
    if not plan.layout.offloads:
        return
    yield (
        f"Between a rank and host memory: {gb(link.gradients.to_host)} GB of gradients beside the "
        f"backwards, {link.gradients.seconds(machine):.3g} s; {gb(link.update.from_host)} GB to it "
        f"and {gb(link.update.to_host)} GB back in the update, {link.update.seconds(machine):.3g} "
        f"s (assumed: {gb(machine.host_bytes_per_s)} GB/s each way, and "
        f"{gb(machine.host_memory_bytes_per_s)} GB/s of a node's memory)"
    )


def _assumptions(plan: Plan) -> Iterator[str]:
    if not plan.is_simulated:
        yield f"A bound from shapes alone, since {plan.reason}"
        return
    yield f"Attention: {plan.attention}"
    if plan.tiles > 1:
        yield (
            f"Tiles: experts and MLPs run on a row's tokens in {plan.tiles} parts, since memory is "
            "short; that part of each layer is computed once more"
        )
    if plan.layout.expert > 1:
        yield (
            f"Experts: the most loaded rank is taken to have {EXPERT_IMBALANCE:g} times the tokens "
            "of the mean"
        )


def _hours(plan: Plan, length: RunLength | str) -> str:
    least = f"at least {number_text(hours(plan.floor_s, plan, length))} h"
    if plan.about_s:
        least += f", about {number_text(hours(plan.about_s, plan, length))} h"
    if isinstance(length, str):
        line = f"1e9 tokens take {least}, in steps of {plan.step_tokens:,} tokens"
        return f"{line}; hours for the run are not known, since {length}" if length else line
    about = "" if length.is_counted else "about "
    return f"The run takes {least}: {about}{length.steps:,} steps, {about}{length.tokens:,} tokens"


def hours(step_s: float, run: Estimate, length: RunLength | str) -> float:
    """Return the hours of a run, or of 1e9 tokens where its length is not known."""
    steps = 1e9 / run.step_tokens if isinstance(length, str) else length.steps
    return steps * step_s / 3600


def _cost(plan: Plan, length: RunLength | str, price: float) -> str:
    gpu_hours = plan.machine.ranks * hours(plan.about_s or plan.floor_s, plan, length)
    word = "about" if plan.about_s else "at least"
    cost = f"{word} {number_text(price * gpu_hours)}, for {number_text(gpu_hours)} GPU hours"
    return f"At {price:g} a GPU hour that costs {cost}"


def number_text(number: float) -> str:
    """Return a number with three digits or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _storage(plan: Plan) -> Iterator[str]:
    storage, nodes = plan.storage, plan.machine.nodes
    keep = plan.config.checkpoint.keep
    seconds = storage.checkpoint_bytes / (nodes * DISK_BYTES_PER_S)
    yield (
        f"A checkpoint takes {gb(storage.checkpoint_bytes)} GB of disk, and "
        f"{duration(seconds)} at {gb(DISK_BYTES_PER_S)} GB/s from each of {nodes} nodes; "
        f"checkpoint.keep={keep} and the next one {gb((keep + 1) * storage.checkpoint_bytes)} GB"
    )
    if nodes > 1 and plan.config.checkpoint.mirror is not False:
        part = storage.checkpoint_bytes / nodes
        seconds = part / (MIRROR_SHARE * plan.machine.node_bytes_per_s)
        yield (
            f"Where each node has a disk of its own, it also holds its neighbour's {gb(part)} GB "
            f"of it, sent in {duration(seconds)} by {MIRROR_SHARE:.0%} of the network "
            f"(checkpoint.mirror={bare(plan.config.checkpoint.mirror)})"
        )
    yield (
        f"A node's own memory: {gb(storage.loading_bytes)} GB to load, "
        f"{gb(storage.staging_bytes)} GB for copies of what is saved "
        f"(checkpoint.mode={plan.config.checkpoint.mode})"
    )
    if storage.pinned_bytes:
        hold = "hold" if plan.host_fits else "do not hold"
        host = gb(plan.machine.host_bytes)
        yield f"Pinned: the {host} GB of a node's own memory {hold} {' and '.join(pinned(storage))}"
    if storage.staging_bytes and plan.host_fits and not plan.host_holds_copies:
        yield (
            "Its memory does not hold the copies, too: saves are synchronous, as with "
            "checkpoint.mode=sync"
        )


def pinned(storage: Storage) -> Iterator[str]:
    """Yield each part of pinned host memory, and the key that puts it there."""
    if storage.states_bytes:
        yield (
            f"{gb(storage.states_bytes)} GB of masters, moments and gradients "
            "(optimizer.offload=true)"
        )
    if storage.inputs_bytes:
        yield (
            f"{gb(storage.inputs_bytes)} GB of layers' inputs "
            "(model.activation_checkpointing=offload)"
        )


def describe_changes(plan: Plan, changes: Sequence[Plan], command: str) -> Iterator[str]:
    """Yield the fastest mesh that fits, which `command` runs, and a table of changes with a price.

    `changes`: plans that fit, the fastest first.
    """
    if any(change.price for change in changes):
        yield "What would help:"
        rows = [
            [
                " ".join(as_arguments(change.values)),
                gb(change.peak_bytes) + ", tight" * change.is_tight,
                f"{change.floor_s:.3g}",
                change.price,
            ]
            for change in changes
        ]
        yield from table(["change", "peak, GB", "step, s at least", "price"], rows)
    if changes or plan.fits:
        best = [*changes, plan][0]
        bubble = f", {best.layout.bubble:.0%} of them a bubble," if best.layout.bubble else ""
        tight = f" (tight: {TIGHT})" * best.is_tight
        yield (
            f"The fastest mesh that fits takes at least {best.floor_s:.3g} s a step{bubble} and "
            f"{gb(best.peak_bytes)} GB{tight}: {command}"
        )


def describe_room(plan: Plan, room: Mapping[str, Estimate | None]) -> Iterator[str]:
    """Yield a table of the fewest nodes for a model whose states alone exceed the memory.

    `room`: the mesh on the fewest nodes for all weights and for adapters, by these words.
    """
    states, memory = gb(plan.states.total), gb(plan.machine.memory_bytes)
    yield (
        f"The states alone are {states} GB for the {memory} GB of each GPU. By arithmetic, "
        f"roughly, a run fits on nodes of {plan.machine.ranks_per_node} such GPUs:"
    )
    rows = [
        [
            trained,
            *(f"{mesh.machine.nodes}", gb(mesh.peak_bytes), " ".join(as_arguments(mesh.values))),
        ]
        if mesh
        else [trained, "-", "-", "-"]
        for trained, mesh in room.items()
    ]
    yield from table(["trained", "from nodes", "peak, GB", "with"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))
        yield "  ".join(["", first, *others]).rstrip()


def verdict(plan: Plan) -> str:
    """Say whether the run fits, and what bounds its speed.

    A bound below the memory proves that a run fits. A bound above it proves nothing, unless the
    states alone exceed the memory.
    """
    limit, peak = f"{gb(plan.machine.memory_bytes)} GB", _peak(plan)
    if not plan.host_fits:
        both = not plan.device_fits and plan.is_simulated  # a bound may be far above the peak
        beside = f", and {limit} not the peak of {peak}" if both else ""
        return (
            f"The run does not fit, {gb(plan.machine.host_bytes)} GB of a node's own memory do not "
            f"hold {' and '.join(pinned(plan.storage))}{beside}"
        )
    if plan.fits:
        part = plan.bound_by
        bound_by = part if not part or part.startswith("arithmetic") else f"traffic {part}"
        speed = f"; bound by {bound_by}" if bound_by else ""
        tight = f", but it is tight ({TIGHT})" * plan.is_tight
        return f"The run fits{tight}, {limit} hold the peak of {peak}{speed}"
    if plan.is_simulated:
        is_less = plan.config.model.compile and plan.layout.checkpointing == "none"
        compiled = "; compiled layers keep a quarter to a third less than these" * is_less
        return f"The run does not fit, {limit} do not hold the peak of {peak}{compiled}"
    states = f"its {gb(plan.states.total)} GB of parameters, gradients and optimizer"
    if plan.cannot_fit:
        return f"The run does not fit, {limit} do not hold {states}; a bound is the peak of {peak}"
    return f"The run may not fit, {limit} hold {states}, but not a bound, the peak of {peak}"


def lacking(plan: Plan) -> str:
    """Name the hardware that would make a run fit."""
    devices = f"more or larger {'GPUs' if plan.machine.is_gpu else 'devices'}"
    if plan.host_fits:
        return devices
    # More nodes divide states further, but not the inputs of a rank's layers.
    are_divided = plan.storage.inputs_bytes <= plan.machine.host_bytes
    host = f"more host memory{' or nodes' if are_divided else ''}"
    return host if plan.device_fits else f"{host}, and {devices}"


def _peak(plan: Plan) -> str:
    """Return the peak that the device must hold, and its parts."""
    phase = max(plan.peaks, key=lambda name: plan.peaks[name].n_bytes)
    parts = [f"{gb(plan.allocated_bytes)} GB allocated in {phase}"]
    if streams := plan.pools_bytes - plan.allocated_bytes:
        parts.append(f"{gb(streams)} GB kept for streams")
    parts.append(f"{gb(plan.peak_bytes - plan.pools_bytes)} GB allowed for the device's own")
    return f"{gb(plan.peak_bytes)} GB ({' + '.join(parts)})"
