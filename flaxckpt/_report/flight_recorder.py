"""The first screen of a page: the verdict on a run, and the data of its charts.

The data are numbers and short texts, which the script of the page draws. Nothing in
them is markup; `templates.to_json` fits them into a page.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from flaxckpt import errors
from flaxckpt._report import copies, templates
from flaxckpt._report.data import LeafHistory, MetricValue, Report, last_good
from flaxckpt._types import JSON
from flaxckpt._util import html, humanize

MOST_METRICS = 12
"""Further metrics are in the tables only."""

_MOST_POINTS = 1200
"""Points of a metric; of more, each part of the steps keeps its extremes."""

_MOST_LAYERS, _MOST_COLUMNS = 64, 150
"""The size of the heat map."""

_MOST_RIDGES = 64
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LEAST_CHANGE, _DECADES = 1e-5, 6
"""The range of the heat map's colours: relative changes from 1e-5 to 10."""


# ---- the verdict ------------------------------------------------------------------


class RunVerdict(NamedTuple):
    """A judgement of a run.

    Attributes:
        state: `good`, `bad`, or `idle` for a run without steps.
        text: A sentence.
    """

    state: Literal["good", "bad", "idle"]
    text: str


class Resume(NamedTuple):
    """A restart of a run.

    Attributes:
        stopped: The last step that was saved before, or None.
        step: The step that training went on from.
        time: When it was restored, in seconds since 1970.
    """

    stopped: int | None
    step: int
    time: float


def judge(report: Report) -> RunVerdict:
    """Returns the verdict on a run or a checkpoint: the worst news first."""
    if not report.steps and not report.history:
        return RunVerdict("idle", "No steps yet.")
    found = [*_describe_damage(report), *_describe_failure(report)]
    if (diverged := find_divergence(report)) is not None:
        found.insert(0, _describe_divergence(report, diverged))
    state: Literal["good", "bad"] = "bad" if found else "good"
    found = found or ["healthy" if report.is_run else "no damage is known"]
    count = len(find_resumes(report))
    if count:
        times = {1: "once", 2: "twice"}.get(count, f"{count:,} times")
        found.append(f"resumed {times}")
    best = _find_best(report)
    if best is not None:
        what, name, point = best
        found.append(f"{what} {point.value:.4g} at step {point.step:,} ({name})")
    text = ", ".join(found[:1] if state == "bad" else found)
    if state == "bad" and len(found) > 1:
        text += "; " + "; ".join(found[1:])
    return RunVerdict(state, f"{text[:1].upper()}{text[1:]}.")


def find_resumes(report: Report) -> list[Resume]:
    """Returns the restarts of a run: restores after which it saved again."""
    saves = [save for save in report.saves if save.step is not None]
    resumes: list[Resume] = []
    for event in report.happened:
        if event.kind != "restored" or event.step is None:
            continue
        before = [save.step for save in saves if save.began < event.time]
        goes_on = any(save.began > event.time for save in saves)
        if not before or not goes_on:  # the source of a run, or an evaluation
            continue
        resume = Resume(before[-1], event.step, event.time)
        is_again = resumes and resumes[-1][:2] == resume[:2]
        resumes[-1:] = [resume] if is_again else [*resumes[-1:], resume]
    return resumes


class Divergence(NamedTuple):
    """The end of a metric's finite values.

    Attributes:
        metric: The metric.
        step: The first step of those at the end without a finite value.
        value: Its value: NaN, or an infinity.
        last_finite: The last step with a finite value, or None.
        is_kept: True if that step exists.
    """

    metric: str
    step: int
    value: float
    last_finite: int | None
    is_kept: bool


def find_divergence(report: Report) -> Divergence | None:
    """Returns where a metric stopped being finite; of several, the first such step."""
    found = []
    for name, points in report.metrics.items():
        finite = [n for n, point in enumerate(points) if math.isfinite(point.value)]
        at = finite[-1] + 1 if finite else 0
        if at < len(points):
            last = points[at - 1] if at else None
            step, kept = (
                (None, False) if last is None else (last.step, not last.is_deleted)
            )
            found.append(
                Divergence(name, points[at].step, points[at].value, step, kept)
            )
    return min(found, key=lambda each: each.step, default=None)


def _describe_divergence(report: Report, found: Divergence) -> str:
    value = "NaN" if math.isnan(found.value) else "infinite"
    text = f"diverged at {found.step:,}: {value} since"
    if found.metric != next(iter(report.metrics)):
        text += f" in {found.metric}"
    if found.last_finite is None:
        return f"{text}; no step has a finite value"
    is_kept = "is kept" if found.is_kept else "was deleted"
    text += f"; last finite step {found.last_finite:,} {is_kept}"
    if (jump := find_jump(report)) is not None:
        text += f"; {errors.printable(jump[0])} jumped first, at {jump[1]:,}"
    return text


def find_jump(report: Report) -> tuple[str, int] | None:
    """Returns the layer whose norm first more than doubled at a save, and the step.

    Of several, the one that changed most; None without such a layer, or statistics.
    """
    jumps = [
        (step, -change, name)
        for name, leaves in _group_layers(report).items()
        for step, change in _changes(leaves).items()
        if change > 1.0
    ]
    step, _, name = min(jumps, default=(0, 0.0, ""))
    return (name, step) if jumps else None


def _describe_damage(report: Report) -> list[str]:
    faults = report.faults
    if not faults:
        return []
    good = [step.step for step in report.steps if step.step not in faults]
    what = "damaged" if "damaged" in faults.values() else "unreadable"
    if not report.is_run:
        return [f"the checkpoint is {what}"]
    count = {1: "one", 2: "two", 3: "three"}.get(len(faults), f"{len(faults):,}")
    steps = "step" if len(faults) == 1 else "steps"
    newest = f"newest good {good[-1]:,}" if good else "no step is good"
    named = errors.first_few([f"{n:,}" for n in faults if n is not None], 5)
    return [f"{count} {what} {steps}, {newest} ({what}: {named})"]


def _describe_failure(report: Report) -> list[str]:
    """Returns a clause on the last save, if it failed."""
    ended = [save for save in report.saves if save.outcome in ("durable", "failed")]
    if not ended or ended[-1].outcome == "durable":
        return []
    step = "" if ended[-1].step is None else f" of step {ended[-1].step:,}"
    return [f"the last save{step} failed"]


def _find_best(
    report: Report,
) -> tuple[Literal["best", "last"], str, MetricValue] | None:
    """Returns the best value of a metric that ranks steps, else the last of a metric.

    None without a finite value.
    """
    for name, points in report.metrics.items():
        best = [point for point in points if point.best == "best" and not point.is_bad]
        if best:
            return "best", name, best[-1]
    for name, points in report.metrics.items():
        last = last_good(points)
        if last is not None and math.isfinite(last.value):
            return "last", name, last
    return None


def choose_step(report: Report) -> int | None:
    """Returns the step to go on from: the last finite, or newest good step; or None."""
    good = [step.step for step in report.steps if step.step not in report.faults]
    found = find_divergence(report)
    if found is not None and found.last_finite in good:
        return found.last_finite
    return good[-1] if good else None


# ---- the data of the charts -------------------------------------------------------


def chart_data(report: Report) -> dict[str, JSON]:
    """Returns what the script draws of a run.

    Returns:
        `metrics`: of each metric its name, mode, steps `x` and values `y`; None is not
        finite. `steps`: of each step that was ever saved, `x` and its `state`, a letter
        of `STATES`. `saves`: steps, seconds blocked and in the background. `events`:
        step, kind and text. `layers`: the heat map, or None.
    """
    return {
        "metrics": _metrics(report),
        "steps": _steps(report),
        "saves": _saves(report),
        "events": _events(report),
        "layers": _layers(report),
    }


STATES: Mapping[str, str] = {
    "b": "the best",
    "k": "kept",
    "g": "would be deleted",
    "d": "deleted since",
    "x": "damaged, or not readable",
}
"""Letter -> the state of a step."""


def _metrics(report: Report) -> list[JSON]:
    drawn = [
        (name, points)
        for name, points in report.metrics.items()
        if any(math.isfinite(point.value) for point in points)
    ]
    return [curve(name, points) for name, points in drawn[:MOST_METRICS]]


def curve(name: str, points: Sequence[MetricValue]) -> dict[str, JSON]:
    """Returns a metric over the steps.

    Args:
        name: The name.
        points: Its values, by ascending step.
    """
    shown = _thin(points)
    last = last_good(points) or points[-1]
    modes = [point.mode for point in points if point.mode is not None]
    return {
        "name": errors.printable(name),
        "mode": modes[-1] if modes else None,
        "x": [point.step for point in shown],
        "y": [_number(point.value) for point in shown],
        "state": "".join(map(_state, shown)),
        "facts": _facts(points, last),
    }


def _facts(points: Sequence[MetricValue], last: MetricValue) -> str:
    """Returns the best and the last value of a metric in a phrase."""
    drawn = [point for point in points if math.isfinite(point.value)]
    best = [point for point in drawn if point.best == "best"]
    facts = [_fact("best", point) for point in best[-1:]]
    facts.append(_fact("last", last))
    if deleted := sum(point.is_deleted for point in drawn):
        facts.append(f"{deleted:,} of {len(drawn):,} deleted since")
    if bad := [f"{point.step:,}" for point in drawn if point.is_bad]:
        steps = "step" if len(bad) == 1 else "steps"
        facts.append(f"{steps} {errors.first_few(bad, 3)} damaged or not readable")
    return ", ".join(facts)


def _fact(what: str, point: MetricValue) -> str:
    reservation = " (cannot be used)" if point.is_bad else ""
    value = humanize.number(point.value)
    return f"{what} {value} at step {point.step:,}{reservation}"


def _state(point: MetricValue) -> str:
    if point.is_deleted:
        return "d"
    if point.is_bad:
        return "x"
    if point.best == "best":
        return "b"
    return "k" if point.stays else "g"


def _thin(points: Sequence[MetricValue]) -> Sequence[MetricValue]:
    """Returns about `_MOST_POINTS` of many points.

    Each part of the steps keeps its lowest, highest and best values, and the first that
    is not finite.
    """
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-len(points) // (_MOST_POINTS // 3))
    kept: list[MetricValue] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [point for point in part if math.isfinite(point.value)]
        odd = [point for point in part if not math.isfinite(point.value)][:1]
        best = [point for point in part if point.best is not None]
        ends = [pick(finite, key=_value_of) for pick in (min, max) if finite]
        chosen = {point.step for point in (*ends, *odd, *best)}
        kept += [point for point in part if point.step in chosen]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _value_of(point: MetricValue) -> float:
    return point.value


def _number(value: float | None) -> float | None:
    """Returns a number of six digits for JSON; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _steps(report: Report) -> dict[str, JSON]:
    faults, marks = report.faults, report.marks
    kept = {step.step for step in report.steps if step.why or not report.policies}
    states = {
        saved.step: "d"
        if not saved.exists
        else "x"
        if saved.step in faults
        else "b"
        if any(mark.kind == "best" for mark in marks.get(saved.step, ()))
        else "k"
        if saved.step in kept
        else "g"
        for saved in report.history
    }
    return {"x": [*states], "state": "".join(states.values())}


def _saves(report: Report) -> dict[str, JSON]:
    durable = [save for save in report.saves if save.step is not None]
    durable = [save for save in durable if save.outcome == "durable"][-_MOST_POINTS:]
    return {
        "x": [save.step for save in durable],
        "blocked": [_number(save.blocked_secs) for save in durable],
        "behind": [_number(save.behind_secs) for save in durable],
    }


def _events(report: Report) -> list[JSON]:
    """Returns what happened to a run, by step, with a text for each."""
    found: list[tuple[int, str, str]] = []
    for resume in find_resumes(report):
        if resume.stopped is not None and resume.stopped >= resume.step:
            text = f"the process ended after the save of step {resume.stopped:,}"
            found.append((resume.stopped, "stopped", text))
        when = humanize.when(resume.time)
        found.append(
            (resume.step, "resumed", f"resumed from step {resume.step:,}, {when}")
        )
    for event in report.happened:
        if event.step is not None and event.kind in _HAPPENINGS:
            name = f"step {event.step:,}: {_HAPPENINGS[event.kind]}"
            text = ", ".join(filter(None, (name, errors.printable(event.why))))
            found.append((event.step, event.kind, text))
    for save in report.saves:
        if save.step is not None and save.has_failed:
            text = f"step {save.step:,}: {errors.printable(save.failure or '')}"
            found.append((save.step, "failed", text))
    if (diverged := find_divergence(report)) is not None:
        name = errors.printable(diverged.metric)
        text = f"{name} is not finite from step {diverged.step:,} on"
        found.append((diverged.step, "diverged", text))
    return [[*each] for each in sorted(found)[-_MOST_POINTS:]]


_HAPPENINGS = {
    "preempted": "preempted",
    "fell_back": "a restore fell back to an older step",
    "found_damaged": "found damaged",
    "found_good": "found good",
}

# ---- several runs -----------------------------------------------------------------


def draw_runs(
    metrics: Mapping[str, Mapping[str, Sequence[MetricValue]]],
    runs: Sequence[str],
    live: Collection[str],
) -> html.Markup:
    """Returns the section with the metrics of several runs, a line for each run.

    Args:
        metrics: Metric -> run -> its values, by ascending step.
        runs: The names of all runs; the place of a name decides its colour.
        live: The runs that are drawn strongest.
    """
    numbers = {run: number for number, run in enumerate(runs)}
    drawn = [
        {
            "name": errors.printable(name),
            "lines": [
                curve(run, values) | {"number": numbers[run], "live": run in live}
                for run, values in lines.items()
            ],
        }
        for name, lines in metrics.items()
    ]
    shown = {run for lines in metrics.values() for run in lines}
    return templates.render(
        "runs.html",
        numbers={run: number for run, number in numbers.items() if run in shown},
        data={"runs": {"metrics": drawn}},
    )


# ---- layers -----------------------------------------------------------------------


def _group_layers(report: Report) -> dict[str, list[LeafHistory]]:
    """Returns layer -> its leaves, without those of the optimizer."""
    layers: dict[str, list[LeafHistory]] = {}
    for leaf in report.leaf_histories:
        if not copies.is_optimizer(leaf.group) and leaf.path != "step":
            above, _, key = leaf.path.rpartition("/")
            layers.setdefault(above or key, []).append(leaf)
    return layers


def _layers(report: Report) -> dict[str, JSON] | None:
    """Returns the relative change of the norms of each layer at each save."""
    layers = _group_layers(report)
    leaves = itertools.chain.from_iterable(layers.values())
    steps = sorted({step for leaf in leaves for step in leaf.norms})
    if len(steps) < 2:
        return None
    changes = {name: _changes(inside) for name, inside in layers.items()}
    shown = {
        *sorted(layers, key=lambda name: -max(changes[name].values()))[:_MOST_LAYERS]
    }
    columns = _columns(steps[1:])
    ridges = [leaf for name in layers if name in shown for leaf in layers[name]]
    return {
        "x": [column[-1] for column in columns],
        "names": [errors.printable(name) for name in layers if name in shown],
        "cells": [
            "".join(_cell(changes[name], column) for column in columns)
            for name in layers
            if name in shown
        ],
        "hidden": len(layers) - len(shown),
        "ridges": [
            _ridges(leaf, leaf.path.rpartition("/")[0] or leaf.path)
            for leaf in ridges[:_MOST_RIDGES]
        ],
    }


def _changes(leaves: Sequence[LeafHistory]) -> dict[int, float]:
    """Returns step -> the relative change of the norm of a layer since the save before.

    A norm that is not finite is an infinite change.
    """
    squares: dict[int, float] = {}
    for leaf in leaves:
        for step, norm in leaf.norms.items():
            squares[step] = squares.get(step, 0.0) + norm * norm
    changes = {}
    for (_, before), (step, square) in itertools.pairwise(sorted(squares.items())):
        norms = math.sqrt(before), math.sqrt(square)
        change = abs(norms[1] - norms[0]) / (norms[0] or 1.0)
        changes[step] = change if math.isfinite(change) else math.inf
    return changes or {0: 0.0}


def find_most_changed(leaves: Sequence[LeafHistory]) -> str | None:
    """Returns the leaf whose norm changed most at the last save; None if unknown.

    The parameters come first: a leaf of the optimizer is returned only without them.
    """
    changes = {leaf.path: _changes([leaf]) for leaf in leaves if len(leaf.norms) > 1}
    ranked = sorted(
        (leaf for leaf in leaves if leaf.path in changes and leaf.path != "step"),
        key=lambda leaf: (
            not copies.is_optimizer(leaf.group),
            [*changes[leaf.path].values()][-1],
        ),
    )
    return ranked[-1].path if ranked else None


def _columns(steps: Sequence[int]) -> list[Sequence[int]]:
    size = -(-len(steps) // _MOST_COLUMNS)
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _cell(changes: Mapping[int, float], column: Iterable[int]) -> str:
    """Returns a digit of base 36 for a change, `!` if not finite, `.` for none."""
    values = [changes[step] for step in column if step in changes]
    if not values:
        return "."
    value = max(values)
    if not math.isfinite(value):
        return "!"
    decades = math.log10(max(value, _LEAST_CHANGE) / _LEAST_CHANGE)
    return _DIGITS[min(35, round(35 * decades / _DECADES))]


def _ridges(leaf: LeafHistory, layer: str) -> JSON:
    """Returns the histograms of a leaf: each bin a digit of base 36."""
    rows: list[JSON] = []
    for step, histogram in leaf.histograms.items():
        most = max(histogram.counts, default=0) or 1
        bins = "".join(_DIGITS[round(35 * n / most)] for n in histogram.counts)
        rows.append([step, _number(histogram.min), _number(histogram.max), bins])
    return {
        "path": errors.printable(leaf.path),
        "layer": errors.printable(layer),
        "rows": rows,
    }


# ---- actions ----------------------------------------------------------------------


def actions(report: Report) -> dict[str, str]:
    """Returns the actions of a run: name -> what it copies, with `{step}`."""
    if not report.is_run:
        return {}
    run, name = shlex.quote(report.path), json.dumps(report.path)
    newest = max((step.step or 0 for step in report.steps), default=0)
    load = f"flaxckpt.load({name}, state, step={{step}}"
    return {
        "Resume from here": f"state = {load})",
        "Fine-tune from here": f'state = {load}, optimizer="reinit")',
        "Compare": f"flaxckpt diff {run} {{step}} {newest}",
        "Export": f"flaxckpt convert {run} step-{{step}}.safetensors --step {{step}}",
        "Save this page": f"flaxckpt report {run} -o report.html",
    }
