"""HTML card of a run for notebooks: a table of its newest steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import _storage, _util, policies
from flaxckpt._run import disk_usage, judge
from flaxckpt._util.html import Markup

if TYPE_CHECKING:
    from flaxckpt._run.checkpointer import Checkpointer

_log = logging.getLogger(__name__)

_ROWS = 8
_MOST_METRICS = 3


def of_run(
    run: Checkpointer, rules: Callable[[], judge.Rules], path_of: Callable[[int], Path]
) -> str:
    """Returns an HTML card of the current steps of a run; never raises."""
    try:
        with _storage.paths.listing_cache(run.directory):
            return _card(run, rules, path_of)
    except Exception as error:  # a notebook would show a traceback instead
        _log.warning("cannot show %s: %s", run.directory, error)
        text = f"cannot be read: {error}"
        message = _util.html.element("div", text, style=_util.card.SOFT)
        return _frame(run, message)


def _card(
    run: Checkpointer, rules: Callable[[], judge.Rules], path_of: Callable[[int], Path]
) -> str:
    steps = run.steps()
    reasons = run.explain()
    shown = sorted(reasons)[-_ROWS:]
    metrics = {step: run.metrics(step) for step in shown}
    bests = [policy for policy in rules().keep if isinstance(policy, policies.BestN)]
    names = dict.fromkeys(name for step in metrics.values() for name in step)
    ranking = dict.fromkeys(p.metric for p in bests if p.metric in names)
    columns = list(ranking | names)[:_MOST_METRICS]
    sizes = {step: disk_usage.on_disk(path_of(step), set()) for step in shown}
    best = {str(policy) for policy in bests}
    titles = ["step", *columns, "size", "kept by"]
    numbers = range(len(columns) + 2)
    rows = [_util.card.row(titles, numbers, tag="th")]
    for step in reversed(shown):
        usage = sizes[step]
        cells = [
            str(step),
            *[_number(metrics[step], name) for name in columns],
            "" if usage is None else _util.humanize.size(usage.bytes),
            ", ".join(reasons[step]) or "none: to be deleted",
        ]
        is_best = not best.isdisjoint(reasons[step])
        rows.append(_util.card.row(cells, numbers, is_bold=is_best, data_step=step))
    summary = [_util.humanize.count(len(steps), "step")]
    if steps:
        summary.append(f"newest {max(steps)}")
    summary += _best_steps(run, reasons, bests)
    if len(reasons) > len(shown):
        summary.append(f"the newest {len(shown)} are shown")
    line = _util.html.element("div", ", ".join(summary), style=_util.card.SOFT)
    return _frame(run, line, *([_util.card.table(*rows)] if shown else []))


def _best_steps(
    run: Checkpointer,
    reasons: Mapping[int, Sequence[str]],
    bests: Sequence[policies.BestN],
) -> list[str]:
    """Returns the best step of each policy, with its metric if there are several."""
    found = {}
    for policy in bests:
        kept = [step for step, why in reasons.items() if str(policy) in why]
        values = {step: run.metrics(step).get(policy.metric) for step in kept}
        if ranked := policies.rank(values, policy.mode):
            found[policy] = ranked[0]
    has_one = len({policy.metric for policy in found}) == 1
    return [
        f"best {step}" if has_one else f"best {policy.metric} {step}"
        for policy, step in found.items()
    ]


def _frame(run: Checkpointer, *parts: Markup) -> str:
    name = run.directory.name or str(run.directory)
    return _util.card.frame(f"Checkpointer {name}", run.directory, *parts)


def _number(metrics: Mapping[str, float], name: str) -> str:
    return _util.humanize.number(metrics[name], 4) if name in metrics else ""
