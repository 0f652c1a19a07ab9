"""Table of steps, one line per step, fitted to the width of the terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flaxckpt import _policy_forms
from flaxckpt.cli import _output
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.listing import Listing, Step

_STYLES = {"damaged": "red", "best": "green", "latest": "cyan", "pinned": "cyan"}
_BEST = "bold green"
_MOST_METRICS = 12
_GAP = 2
_TO_BE_DELETED = "to be deleted"

_SAME_AS_MARKS = ("newest", "temporary", "pinned", "no policy", "being read by")
"""Beginnings of reasons that the marks of a step tell."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTable:
    """A table of steps, a row for each; metrics `left_out` have no column."""

    columns: Sequence[TextColumn]
    rows: Sequence[Sequence[str | Cell]]
    left_out: Sequence[str]


class _Column:
    def __init__(self, column: TextColumn, cells: Sequence[str | Cell]) -> None:
        self.column = column
        self.cells = cells
        self.width = _output.table_width([column], [[cell] for cell in cells])
        self.is_empty = not any(map(_text, cells))


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def fit_table(listing: Listing, steps: Sequence[Step], width: int | None) -> StepTable:
    """Returns the table of `steps` with the most metrics that fits, None for no limit.

    Metrics that policies rank steps by come first. To fit more metrics, the table gives
    times without the year, then only the first mark of each step.
    """
    names = _order_metrics(listing, steps)
    metrics = [_metric_column(name, listing, steps) for name in names[:_MOST_METRICS]]
    times = [_time_column(steps, form) for form in ("%Y-%m-%d %H:%M", "%m-%d %H:%M")]
    marks = [_marks_column(listing, steps, has_all=each) for each in (True, False)]
    ends = ((times[0], marks[0]), (times[1], marks[0]), (times[1], marks[1]))
    for count, (time, mark) in itertools.product(range(len(metrics), -1, -1), ends):
        columns = [*_head_columns(steps, time), *metrics[:count], mark]
        columns = [column for column in columns if not column.is_empty]
        if width is None or sum(each.width + _GAP for each in columns) - _GAP <= width:
            break
    rows = zip(*(column.cells for column in columns), strict=True)
    return StepTable([each.column for each in columns], [*rows], names[count:])


def _order_metrics(listing: Listing, steps: Sequence[Step]) -> list[str]:
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    ranked = [name for name in listing.best if name in names]
    return [*dict.fromkeys([*ranked, *names])]


def _head_columns(steps: Sequence[Step], time: _Column) -> list[_Column]:
    formats = {step.format for step in steps} - {"unknown"}
    numbers = ["" if step.step is None else str(step.step) for step in steps]
    sizes = ["" if step.bytes is None else _output.size(step.bytes) for step in steps]
    kinds = [step.format if len(formats) > 1 else "" for step in steps]
    return [
        _Column(TextColumn("step", is_number=True), numbers),
        time,
        _Column(TextColumn("size", is_number=True), sizes),
        _Column(TextColumn("format"), kinds),
    ]


def _time_column(steps: Sequence[Step], form: str) -> _Column:
    return _Column(
        TextColumn("saved"), [_output.when(step.created, form) for step in steps]
    )


def _metric_column(name: str, listing: Listing, steps: Sequence[Step]) -> _Column:
    texts = _output.same_decimals([step.metrics.get(name) for step in steps])
    best = listing.best.get(name)
    cells = [
        Cell(text, _BEST if step.step == best else "")
        for text, step in zip(texts, steps, strict=True)
    ]
    return _Column(TextColumn(_output.shorten_name(name), is_number=True), cells)


def _marks_column(listing: Listing, steps: Sequence[Step], *, has_all: bool) -> _Column:
    cells = []
    for step in steps:
        marks = list_marks(step, listing)
        style = next((s for mark, s in _STYLES.items() if mark in step.marks), "")
        if _TO_BE_DELETED in marks:
            style = "yellow"
        if not has_all and len(marks) > 1:
            marks = [f"{marks[0]} +{len(marks) - 1}"]
        cells.append(Cell(", ".join(marks), style))
    return _Column(TextColumn("marks"), cells)


def list_marks(step: Step, listing: Listing) -> list[str]:
    """Returns the marks of a step, then other reasons to keep it, shortened."""
    best = listing.best
    marks = [mark for mark in step.marks if mark != "best"]
    first_in = [metric for metric, number in best.items() if number == step.step]
    marks += ["best" if len(best) == 1 else f"best {metric}" for metric in first_in]
    marks += [f"{item} deleted" for item in step.deleted_items]
    if step.step is None or step.damage is not None:
        return marks
    if not step.why:
        return [*marks, _TO_BE_DELETED]
    policies = {str(policy): policy for policy in listing.keep or ()}
    for reason in step.why:
        form = _policy_forms.find(policies.get(reason))
        if form is None:
            marks += [reason] * (not reason.startswith(_SAME_AS_MARKS))
            continue
        short = form.shorten(policies[reason])
        if short.endswith(tuple(f" best {metric}" for metric in first_in)):
            continue
        if len(best) == 1 and short.startswith("among"):  # the summary names it
            short = short.removesuffix(f" {next(iter(best))}")
        marks.append(short)
    return marks


def describe_rankings(listing: Listing) -> list[str]:
    """Returns what the best step of each ranking is: `lowest eval/loss`."""
    from flaxckpt.policies import BestN

    rankings = [policy for policy in listing.keep or () if isinstance(policy, BestN)]
    ends = {policy.metric: policy.mode for policy in reversed(rankings)}
    return [
        f"{'highest' if ends[metric] == 'max' else 'lowest'}"
        f" {_output.shorten_name(metric, 60)}"
        for metric in listing.best
    ]
