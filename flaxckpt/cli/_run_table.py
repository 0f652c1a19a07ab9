"""Table of the runs below a directory, one line per run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.listing import Listing
    from flaxckpt._report.ui.places import Location
    from flaxckpt.policies import PreservationPolicy

_COLUMNS = (
    TextColumn("run"),
    TextColumn("steps", is_number=True),
    TextColumn("newest", is_number=True),
    TextColumn("saved"),
    TextColumn("best"),
    TextColumn("damaged"),
    TextColumn("size", is_number=True),
)
_BEST = 4
_TIMES = ("%Y-%m-%d %H:%M", "%m-%d %H:%M")
"""How times are written; the shorter way on narrow terminals."""
_MOST_DAMAGED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Best:
    step: int
    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A run or a checkpoint below a directory.

    Attributes:
        name: The path relative to the directory.
        is_run: True for a run directory.
        steps: The number of steps, damaged ones among them; None of a checkpoint.
        newest: The newest undamaged step, or None.
        created: The start of its save, in seconds since 1970, or None.
        best: Metric that policies rank steps by -> the best undamaged step.
        damaged: The damaged steps; None for a checkpoint.
        bytes: The size of all files; None in object stores.
        error: The reason why it could not be listed; empty without one.
    """

    name: str
    path: str
    is_run: bool
    steps: int | None = None
    newest: int | None = None
    created: float | None = None
    best: Mapping[str, _Best] = dataclasses.field(default_factory=dict)
    damaged: Sequence[int | None] = ()
    bytes: int | None = None
    error: str = ""


def find_runs(path: str) -> list[Location]:
    """Returns the runs and checkpoints below a directory; empty without any."""
    from flaxckpt._report.ui import places as ui_places

    try:
        places = ui_places.find_places(path)
    except errors.CheckpointError:
        return []
    return [] if places.is_single else [*places.runs.values()]


def show(
    path: str,
    places: Sequence[Location],
    keep: Sequence[PreservationPolicy] | None,
    step_format: str | None,
    *,
    json: bool,
) -> int:
    """Prints the runs, and returns the exit code: 1 if one is damaged or unreadable."""
    runs = [_describe(place, keep, step_format) for place in places]
    is_bad = any(run.damaged or run.error for run in runs)
    if json:
        _output.print_document({"path": path, "runs": runs})
    else:
        columns, metrics = [*_COLUMNS], {metric for run in runs for metric in run.best}
        [metric] = metrics if len(metrics) == 1 else [""]
        if metric:
            columns[_BEST] = TextColumn(f"best {_output.shorten_name(metric)}")
        long, short = ([_row(run, metric, form) for run in runs] for form in _TIMES)
        is_wide = _output.table_width(columns, long) > _output.terminal_width()
        is_short = is_wide and _output.is_terminal()
        _output.print_table(columns, short if is_short else long)
        for run in runs:
            if run.error:
                _output.print_paragraph(f"{run.name} cannot be listed: {run.error}")
        total = [run.bytes for run in runs if run.bytes is not None]
        size = f", {_output.size(sum(total))}" if total else ""
        count = sum(run.is_run for run in runs)
        parts = [_output.count(count, "run")] if count else []
        if others := len(runs) - count:
            parts.append(_output.count(others, "checkpoint"))
        _output.print_line(f"{' and '.join(parts)}{size}")
    return _app.FINDING if is_bad else _app.SUCCESS


def _describe(
    place: Location, keep: Sequence[PreservationPolicy] | None, step_format: str | None
) -> _Run:
    from flaxckpt import _inspect

    name, path, is_run = place.name, str(place.path), place.is_run
    try:
        listing = _inspect.listing.listing(
            place.path, keep=keep, step_format=step_format if is_run else None
        )
    except (errors.CheckpointError, OSError) as error:
        return _Run(name, path, is_run, error=errors.one_line(error))
    good = [step for step in listing.steps if step.damage is None]
    return _Run(
        name,
        path,
        is_run,
        steps=len(listing.steps) if is_run else None,
        newest=good[-1].step if good else None,
        created=good[-1].created if good else None,
        best=_find_best(listing),
        damaged=[step.step for step in listing.steps if step.damage is not None],
        bytes=listing.bytes,
    )


def _find_best(listing: Listing) -> dict[str, _Best]:
    metrics = {step.step: step.metrics for step in listing.steps}
    return {
        metric: _Best(step, metrics[step][metric])
        for metric, step in listing.best.items()
    }


def _row(run: _Run, metric: str, form: str) -> list[str | Cell]:
    """Returns the cells of a run; `metric` is the only one, whose name is above.

    `form` is that of times.
    """
    best = [
        f"{'' if name == metric else f'{_output.shorten_name(name)} '}"
        f"{_output.number(found.value, 4)} at {found.step}"
        for name, found in run.best.items()
    ]
    damaged = errors.first_few(
        ["yes" if step is None else str(step) for step in run.damaged], _MOST_DAMAGED
    )
    if len(run.damaged) > _MOST_DAMAGED:
        damaged = f"{len(run.damaged):,} steps"
    return [
        run.name,
        "" if run.steps is None else f"{run.steps:,}",
        "" if run.newest is None else str(run.newest),
        _output.when(run.created, form),
        ", ".join(best),
        Cell("unreadable" if run.error else damaged, "red"),
        "" if run.bytes is None else _output.size(run.bytes),
    ]
