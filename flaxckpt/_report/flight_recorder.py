"""The verdict on a run: how it goes, where it failed, which step to go on from."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from flaxckpt import errors
from flaxckpt._report.data import LeafHistory, MetricValue, Report, last_good
from flaxckpt._util import humanize

# ---- the verdict ------------------------------------------------------------------


class RunVerdict(NamedTuple):
    """A judgement of a run in a sentence.

    Its state is `good` only if every byte was read; `idle` without steps.
    """

    state: Literal["good", "unverified", "bad", "idle"]
    text: str


class Resume(NamedTuple):
    """A restart of a run at `step`; `stopped` is the last step saved before, if any."""

    stopped: int | None
    step: int
    time: float


def judge(report: Report) -> RunVerdict:
    """Returns the verdict on a run or a checkpoint: the worst news first."""
    found = [*_describe_damage(report), *_describe_failure(report)]
    if (diverged := find_divergence(report)) is not None:
        found.insert(0, _describe_divergence(report, diverged))
    is_verified = report.states["verified"] == len(report.integrity)
    is_bad = bool(found)
    if not report.steps:
        found.insert(0, "no step is left" if report.history else "no steps yet")
    good = "healthy" if is_verified else "healthy so far"
    found = found or [good if report.is_run else "no damage is known"]
    found += filter(None, [report.notes.get("journal")])
    if count := len(find_resumes(report)):
        times = {1: "once", 2: "twice"}.get(count, f"{count:,} times")
        found.append(f"resumed {times}")
    if (best := _find_best(report)) is not None:
        what, name, point = best
        found.append(f"{what} {point.value:.4g} at step {point.step:,} ({_name(name)})")
    text = ("; " if is_bad else ", ").join(found)
    text = f"{text[:1].upper()}{text[1:]}."
    if not (is_bad or report.steps):
        return RunVerdict("idle", text)
    return RunVerdict(
        "bad" if is_bad else "good" if is_verified else "unverified", text
    )


def describe_state(report: Report) -> str:
    """Returns the verdict in few words: `healthy`, or `diverged at 110`."""
    diverged, faults = find_divergence(report), report.faults
    texts = [] if diverged is None else [f"diverged at {diverged.step:,}"]
    for why, count in collections.Counter(faults.values()).items():
        texts.append(humanize.count(count, f"{why} step") if report.is_run else why)
    if faults and report.is_run:
        newest = [f"{n:,}" for n in sorted(n for n in faults if n is not None)[::-1]]
        none = "no step can be used"
        texts[-1] += f": {errors.first_few(newest, 3) if report.good else none}"
    texts += _describe_failure(report)
    return ", ".join(texts) or ("healthy" if report.steps else "no steps")


def _name(name: str) -> str:
    """Returns the name of a metric or a layer, as a sentence has room for it."""
    return errors.printable(name if len(name) <= 60 else f"{name[:59]}…")


def find_resumes(report: Report) -> list[Resume]:
    """Returns the restarts of a run: restores after which it saved again."""
    resumes: list[Resume] = []
    for event in report.happened:
        if event.kind != "restored" or event.step is None:
            continue
        before = [save.step for save in report.saves if save.began < event.time]
        goes_on = any(save.began > event.time for save in report.saves)
        if not before or not goes_on:  # the source of a run, or an evaluation
            continue
        resume = Resume(before[-1], event.step, event.time)
        is_again = resumes and resumes[-1][:2] == resume[:2]
        resumes[-1:] = [resume] if is_again else [*resumes[-1:], resume]
    return resumes


class Divergence(NamedTuple):
    """The end of a metric's finite values.

    Attributes:
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
    """Returns where a metric stopped being finite; of several, the first such step.

    Deleted steps above the newest save do not count: the run went back to before them.
    """
    found = []
    newest = report.saves[-1].step if report.saves else math.inf
    for name, every in report.metrics.items():
        points = [each for each in every if each.step <= newest or not each.is_deleted]
        finite = [n for n, point in enumerate(points) if math.isfinite(point.value)]
        at = finite[-1] + 1 if finite else 0
        if at < len(points):
            last = points[at - 1] if at else None
            is_kept = last is not None and not last.is_deleted
            step, first = last and last.step, points[at]
            found.append(Divergence(name, first.step, first.value, step, is_kept))
    return min(found, key=lambda each: each.step, default=None)


def _describe_divergence(report: Report, found: Divergence) -> str:
    value = "NaN" if math.isnan(found.value) else "infinite"
    text = f"diverged at {found.step:,}: {value} since"
    if found.metric != next(iter(report.metrics)):
        text += f" in {_name(found.metric)}"
    if found.last_finite is None:
        return f"{text}; no step has a finite value"
    is_kept = "is kept" if found.is_kept else "was deleted"
    text += f"; last finite step {found.last_finite:,} {is_kept}"
    if not found.is_kept and (left := _find_finite(report)):
        text += f", {left[-1]:,} is left"
    if (jump := find_jump(report.layers)) is not None:
        count, most, at = len(jump.names), _name(jump.names[0]), jump.step
        how = "became non-finite at once" if jump.is_lost else f"jumped, {most} most"
        what = f"{count:,} layers {how}" if count > 1 else f"{most} jumped first"
        text += f"; {what}, at {at:,}"
        step = choose_step(report)
        if found.is_kept and at == found.last_finite and step not in (None, at):
            text += f", so that {step:,} is offered to go on from"
    return text


def _describe_damage(report: Report) -> list[str]:
    faults = report.faults
    if not faults:
        return []
    good = report.good
    what = "damaged" if "damaged" in faults.values() else "unreadable"
    if not report.is_run:
        return [f"the checkpoint is {what}"]
    named = errors.first_few([f"{n:,}" for n in faults if n is not None], 5)
    count = {2: "two", 3: "three"}.get(len(faults), f"{len(faults):,}")
    text = f"{count} {what} steps ({named})"
    text = f"step {named} is {what}" if len(faults) == 1 else text
    newest = "no step is good"
    if good:
        states = {check.step: check.state for check in report.integrity}
        state = states.get(good[-1].step, "unknown")
        newest = _NEWEST[state].format(f"{good[-1].step:,}")
    return [f"{text}, {newest}"]


_NEWEST = {
    "verified": "newest good {}",
    "whole": "newest other {} (files complete, not read)",
    "unknown": "newest other {} (not looked at)",
}
"""What is known of the newest step that is not known to be damaged."""


def _describe_failure(report: Report) -> list[str]:
    """Returns a clause on the last save, if it failed."""
    ended = [save for save in report.saves if save.outcome in ("durable", "failed")]
    if not ended or ended[-1].outcome == "durable":
        return []
    return [f"the last save of step {ended[-1].step:,} failed"]


def _find_best(
    report: Report,
) -> tuple[Literal["best", "last"], str, MetricValue] | None:
    """Returns the best value of a metric that ranks steps, else the last finite one."""
    if report.bests:
        return "best", *report.bests[0]
    for name, points in report.metrics.items():
        last = last_good(points)
        if last is not None and math.isfinite(last.value):
            return "last", name, last
    return None


def choose_step(report: Report) -> int | None:
    """Returns the step to go on from: the newest good one, if finite; or None.

    Of a run that diverged, it is the last good step with a finite value that is left,
    but not one at which a layer has jumped.
    """
    finite = _find_finite(report)
    if len(finite) > 1 and (jump := find_jump(report.layers)) is not None:
        finite = finite[: -1 if finite[-1] == jump.step else None]
    return max(finite or report.good_steps, default=None)


def _find_finite(report: Report) -> list[int]:
    """Returns the good steps of a run that diverged that were still finite."""
    found = find_divergence(report)
    if found is None:
        return []
    return [
        point.step
        for point in report.metrics[found.metric]
        if point.step < found.step
        and math.isfinite(point.value)
        and not (point.is_deleted or point.is_bad)
    ]


def choose_pair(
    report: Report, a: int | None = None, b: int | None = None
) -> tuple[int | None, int | None]:
    """Returns two steps of a run to compare, of which one or both may be given.

    By default they are the newest step that can be used and the one before. Of a run
    that diverged, they are the last finite step that exists and the first one after it;
    without these, the two newest steps before the divergence. None is a step that the
    run lacks.
    """
    found, steps = find_divergence(report), report.usable
    if found is not None and a is None and b is None:
        before = [step for step in report.good_steps if step < found.step]
        after = [step for step in report.good_steps if step >= found.step]
        if before and after:
            return before[-1], after[0]
        steps = before if len(before) > 1 else steps
    b = max(steps, default=None) if b is None else b
    if a is None and b is not None:
        earlier = [step for step in steps if step < b]
        a = max(earlier or [step for step in steps if step > b][:1], default=None)
    return a, b


# ---- layers -----------------------------------------------------------------------


def find_changes(leaves: Sequence[LeafHistory]) -> dict[int, float]:
    """Returns step -> the relative change of the norm of a layer since another sample.

    A norm that is not finite is an infinite change. Each leaf is compared with itself,
    because short saves sample only some of the leaves, and with its last sample of as
    many values: norms of other samples differ by more than most changes. Several saves
    since that one share the change. Without one, a leaf counts as unchanged beside
    others; alone, its change is unknown.
    """
    squares: dict[int, tuple[float, float, int]] = {}
    for leaf in leaves:
        known: dict[int, tuple[int, float]] = {}
        pairs = itertools.pairwise(leaf.norms.items())
        for at, ((then, last), (step, norm)) in enumerate(pairs):
            known[leaf.sampled[then]] = at, last
            has_jumped = not last / 2 < norm < 2 * last  # or it is not finite
            is_known = has_jumped or leaf.sampled[step] in known
            since, before = known.get(leaf.sampled[step], (at, norm))
            before = last if has_jumped else norm + (before - norm) / (at - since + 1)
            old, new, count = squares.get(step, (0.0, 0.0, 0))
            squares[step] = old + before * before, new + norm * norm, count + is_known
    changes = {}
    for step, (*square, count) in sorted(squares.items()):
        old, new = map(math.sqrt, square)
        change = abs(new - old) / (old or 1.0)
        if count:
            changes[step] = change if math.isfinite(change) else math.inf
    return changes


class Jump(NamedTuple):
    """The layers or leaves whose norms first more than doubled, at `step`.

    The one that changed most comes first. With `is_lost`, they became non-finite there,
    and others are left out.
    """

    names: Sequence[str]
    step: int
    is_lost: bool = True


def find_jump(groups: Mapping[str, Sequence[LeafHistory]]) -> Jump | None:
    """Returns the first jump of groups of leaves, by name; None without any."""
    jumps = sorted(
        (step, -change, name)
        for name, leaves in groups.items()
        for step, change in find_changes(leaves).items()
        if change > 1.0
    )
    at = [each for each in jumps if each[0] == jumps[0][0]]
    lost = [each for each in at if math.isinf(each[1])]
    names = [name for *_, name in lost or at]
    return Jump(names, jumps[0][0], bool(lost)) if jumps else None


def choose_leaf_step(report: Report, leaf: str) -> int | None:
    """Returns the newest step at which a leaf was finite, else the newest step."""
    known = report.leaf_histories
    lost = {n for each in known if each.path == leaf for n in each.nonfinite_steps}
    steps = report.usable if known else _find_finite(report) or report.usable
    return max([n for n in steps if n not in lost] or steps, default=None)


def choose_leaf(report: Report) -> tuple[str, str] | None:
    """Returns the leaf to look at first, and what it did; None if unknown.

    The first leaf with a value that is not finite, else the one that jumped first in a
    run that diverged, else the one whose norm changed most at the last save. A leaf of
    the optimizer is returned only without parameters.
    """
    layers = itertools.chain.from_iterable(report.layers.values())
    known = [leaf for leaf in layers if len(leaf.norms) > 1]
    lost = {leaf.path: n for leaf in known for n in leaf.nonfinite_steps[:1]}
    if lost:
        at = min(lost.values())
        first = {leaf.path: [leaf] for leaf in known if lost.get(leaf.path) == at}
        jump = find_jump(first) or Jump([*first], at)
        why = f"jumped at step {jump.step:,}, and " if jump.step < at else ""
        others = ", before the others" if len(first) < len(known) else ""
        if not why and len(first) > 1:
            count = humanize.count(len(first) - 1, "other leaf", "other leaves")
            others = f", as did {count}{others}"
        return jump.names[0], f"{why}became non-finite at step {at:,}{others}"
    jumped = find_jump({leaf.path: [leaf] for leaf in known})
    if jumped is not None and find_divergence(report) is not None:
        how = "first" if len(jumped.names) == 1 else "most"
        return jumped.names[0], f"jumped {how}, at step {jumped.step:,}"
    found = {leaf.path: [*find_changes([leaf]).values()][-1:] for leaf in known}
    changes = {path: each[0] for path, each in found.items() if each}
    most = max(changes, key=changes.__getitem__, default=None)
    return None if most is None else (most, "changed most at the last save")
