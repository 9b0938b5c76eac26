"""Sum up a run: the card at the top of its page, and the rows of `shardtune watch`."""

import json
import math
from collections.abc import Mapping

import numpy as np

from shardtune.errors import counted
from shardtune.report.read_run import ENDED_EARLY, Entry, FloatArray, RunRecord
from shardtune.units import gb

_RANKS = {"cuda": "GPU", "cpu": "CPU process"}
_EVALUATION = {"data.eval": "null", "data.eval_fraction": "0"}  # values without evaluation data
NO_MFU = "MFU (the peak of this device is not known)"
OF_CONFIG = ("model", "data", "batch")  # figures that config.yaml gives
NOT_WRITTEN = "(not written by its version)"
PHASE_NAMES = {"waiting": "waiting in collectives"}  # other phases have the names of `Phase`
_SMOOTHED_FROM = 100  # steps


def card(run: RunRecord) -> str:
    """Return a run's figures as lines of text, to paste into a message."""
    lines = [f"{name}: {figure}" for name, figure in figures(run).items()]
    return "\n".join([f"shardtune run {run.name}", *lines])


def figures(run: RunRecord) -> dict[str, str]:
    setting = {key: value for key, (value, _) in run.settings.items()}
    return {
        "model": _model(setting),
        "data": _data(setting),
        "batch": _batch(run, setting),
        "steps": _steps(run),
        "loss": _loss(run),
        "perplexity": _perplexity(run, setting),
        "time": _time(run),
        "speed": _speed(run),
        "waiting": _waiting(run),
        "memory": _memory(run),
        "on": _machine(run),
        "starts": f"{len(run.of_kind('start'))}" if run.start else NOT_WRITTEN,
    }


def smooth(y: FloatArray, width: int) -> FloatArray:
    """Return running means of the finite values among the last `width`, NaN if none is finite."""
    sums, counts = np.nancumsum(y), np.cumsum(np.isfinite(y)).astype(float)
    for running in (sums, counts):
        running[width:] -= running[:-width].copy()
    return sums / np.where(counts > 0, counts, np.nan)


def mean_width(steps: int) -> int:
    """Return the number of steps in a shown running mean; 0 for a short run."""
    return max(10, steps // 50) if steps >= _SMOOTHED_FROM else 0


def phase_seconds(run: RunRecord) -> list[dict[str, float]]:
    """Return the slowest rank's seconds of each phase, for each time that it was measured."""
    return [entry.get("seconds", {}) for entry in run.of_kind("ranks")]


def network_share(run: RunRecord) -> float:
    """Return the part of a step that the slowest rank waits in collectives; NaN if not known."""
    rows = phase_seconds(run)
    total = sum(sum(row.values()) for row in rows)
    return sum(row.get("waiting", 0) for row in rows) / total if total else math.nan


def no_step(run: RunRecord) -> str:
    return ENDED_EARLY if run.is_locked is False else "no step has ended yet"


def spoken(seconds: float) -> str:
    """Return a duration as people say it: "2 h 5 min"."""
    if not abs(seconds) < 1e9:
        return "years"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (s, "s")]
    first = next(i for i, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def when(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC" if time else NOT_WRITTEN


def _model(setting: Mapping[str, str]) -> str:
    if not setting:
        return "(config.yaml is missing)"
    rank = setting.get("lora.rank", "null")
    trained = "all weights" if rank == "null" else f"LoRA of rank {rank}"
    return f"{setting.get('model.path', '')}, {trained}"


def _data(setting: Mapping[str, str]) -> str:
    given = setting.get("data.train", "")
    if given.startswith("["):
        sources = [s if isinstance(s, dict) else {"path": s} for s in json.loads(given)]
        return ", ".join(str(source.get("name") or source.get("path")) for source in sources)
    return given or (NOT_WRITTEN if setting else "(config.yaml is missing)")


def _batch(run: RunRecord, setting: Mapping[str, str]) -> str:
    names = ("data_ranks", "micro_batch_size", "gradient_accumulation_steps")
    sizes = [run.start.get(name) for name in names]
    rows = math.prod(size for size in sizes if size) if all(sizes) else None
    length = setting.get("data.max_length", "?")
    parts = [f"{counted(rows, 'row')} of {length} tokens"] if rows else []
    keys = {"optimizer.name": "", "optimizer.lr": "lr "}
    parts += [word + setting[key] for key, word in keys.items() if key in setting]
    return ", ".join(parts) or NOT_WRITTEN


def _steps(run: RunRecord) -> str:
    steps, total = run.last_step, run.total_steps
    times = [entry.get("time", "") for objects in run.entries.values() for entry in objects[-1:]]
    stopped = "stopped, " if run.is_locked is False else ""
    state = "finished" if steps == total else f"{stopped}last written"
    last = when(max(times, default=""))
    saves = run.of_kind("save")
    if saves and saves[-1].get("problem"):
        last += f"; checkpoint_{saves[-1]['step']:07d} was not saved: {saves[-1]['problem']}"
    return f"{steps} of {total}, {state} {last}" if total else f"{steps}, {state} {last}"


def _loss(run: RunRecord) -> str:
    losses = run.column("step", "loss")
    if not len(losses):
        return f"({no_step(run)}{not_taken(run)})"
    first, last = (f"{loss:.4f}" if np.isfinite(loss) else "not finite" for loss in losses[[0, -1]])
    text = f"{first} at first, {last} at last"
    if width := mean_width(len(losses)):
        text += f", {smooth(losses, width)[-1]:.4f} in the mean of the last {width}"
    return text + not_taken(run)


def not_taken(run: RunRecord) -> str:
    if not run.of_kind("refused") or (entry := run.of_kind("refused")[-1])["step"] <= run.last_step:
        return ""
    what = "gradient norm" if entry.get("loss") is not None else "loss"
    return f"; step {entry['step']} was not taken: its {what} is not finite"


def _perplexity(run: RunRecord, setting: Mapping[str, str]) -> str:
    by_set: dict[str, list[Entry]] = {}
    for entry in run.of_kind("eval"):
        by_set.setdefault(entry.get("set") or "", []).append(entry)
    if not by_set:
        is_given = any(setting.get(key, unset) != unset for key, unset in _EVALUATION.items())
        return "(no evaluation yet)" if is_given or not setting else "(no evaluation data)"
    evaluations = [e for e in by_set.pop("", []) if e.get("perplexity") is not None]
    shown = [_at(entry) for entry in evaluations[:: max(1, len(evaluations) - 1)]]
    lowest = min(evaluations, key=lambda entry: entry["perplexity"], default=None)
    if lowest and lowest not in (evaluations[0], evaluations[-1]):
        shown.append(f"lowest {_at(lowest)}")
    texts = [", ".join(shown) or "(not finite)"]
    for name, entries in by_set.items():
        ends = [entry.get("perplexity") for entry in entries[:: max(1, len(entries) - 1)]]
        said = ["not finite" if end is None else f"{end:.4f}" for end in ends]
        texts.append(f"{name} {' to '.join(said)}")
    return "; ".join(texts)


def _at(entry: Entry) -> str:
    number = f"at step {entry['step']}" if entry["step"] else "before training"
    return f"{entry['perplexity']:.4f} {number}"


def _time(run: RunRecord) -> str:
    seconds = float(np.nansum(run.column("step", "seconds")))
    return f"{spoken(seconds)} of training" if seconds else f"({no_step(run)})"


def _speed(run: RunRecord) -> str:
    tokens, seconds = (float(np.nansum(run.column("step", n))) for n in ("tokens", "seconds"))
    if not seconds:
        return f"({no_step(run)})"
    mfu = run.column("step", "mfu")
    share = f"MFU {np.nanmedian(mfu):.1%}" if np.isfinite(mfu).any() else NO_MFU
    return f"{tokens / seconds:,.0f} tokens/s, {tokens:,.0f} tokens, {share}"


def _waiting(run: RunRecord) -> str:
    share = network_share(run)
    if math.isfinite(share):
        bound = ": bound by communication" if share > 1 / 3 else ""
        return f"{share:.1%} of a step in collectives{bound}"
    is_alone = run.start.get("world_size") == 1
    return f"({'one rank waits for no other' if is_alone else 'measured every ten steps'})"


def _memory(run: RunRecord) -> str:
    memory = run.column("step", "memory_bytes")
    if not np.isfinite(memory).any():
        return NOT_WRITTEN if run.of_kind("step") else f"({no_step(run)})"
    return f"{gb(np.nanmax(memory))} GB of a rank at most"


def _machine(run: RunRecord) -> str:
    size, versions = run.start.get("world_size"), run.start.get("versions", {})
    ranks = [counted(size, _RANKS.get(run.start.get("device", ""), "rank"))] if size else []
    shown = [*ranks, *(f"{name} {version}" for name, version in versions.items())]
    return ", ".join(shown) or NOT_WRITTEN
