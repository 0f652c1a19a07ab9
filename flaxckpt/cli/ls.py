"""`flaxckpt ls`."""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _policies, _run_table, _step_table
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._inspect.listing import Listing, Step

_List: TypeAlias = Callable[..., "Listing"]
"""Lists the steps, or the `newest` ones only."""

_RECENT = 20
"""Steps listed again by each look for new ones."""

_LINES_AROUND = 3
"""Lines of a screen that show no steps: the titles, the summary and the cursor."""


@_app.verb
def ls(
    path: Annotated[
        str,
        Argument(
            metavar="PATH",
            help="A run directory, a checkpoint, or a directory of runs.",
        ),
    ],
    newest: Annotated[
        int | None,
        Option("-n", "--newest", min=1, metavar="N", help="Show the N newest steps."),
    ] = None,
    sort: Annotated[
        str | None,
        Option(
            "--sort",
            metavar="KEY",
            help="step, saved, size or the name of a metric: the largest comes last."
            " Of runs, saved, size, METRIC, min:METRIC or max:METRIC: the best in the"
            " metric comes first.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        Option("--watch", "-w", help="Show new steps as they are saved, until Ctrl-C."),
    ] = False,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Lists the steps of a run, or the runs below a directory.

    The marks say which step is the latest and the best, and what keeps each step. On a
    terminal, shows as many metrics as fit, first those that rank steps.
    Checks the names and sizes of the files of the newest and the best steps; verify
    checks all.
    Exits with 1 if a step is known to be damaged.

    Example:
      flaxckpt ls runs --sort eval/loss
      flaxckpt ls runs/7 -n 10
      flaxckpt ls runs/7 --keep latest:3 --keep best:1:eval/loss:min
    """
    from flaxckpt import _inspect

    if watch and json:
        raise errors.OptionError("--watch prints text: leave --json out")
    policies = _policies.parse_policies(keep, config, group)
    list_steps = functools.partial(
        _inspect.listing.listing, path, keep=policies, step_format=step_format
    )
    if watch:
        return _watch(list_steps, newest, sort or "step")
    try:
        listing = list_steps(newest=newest)
    except errors.CheckpointFormatError:
        found = _run_table.find_runs(path)
        if not found:
            raise
        if newest is not None or sort == "step":
            option = "--newest" if newest is not None else "--sort step"
            raise errors.OptionError(
                f"{path} is a directory of runs: {option} needs one of them, such as"
                f" {found[0].path}"
            ) from None
        return _run_table.show(path, found, policies, step_format, sort=sort, json=json)
    if json:
        _output.print_document(listing)
    else:
        print("\n".join(_lines(listing, sort or "step")))
    return _app.FINDING if listing.has_damage else _app.SUCCESS


def _lines(listing: Listing, sort: str) -> list[str]:
    if not listing.steps:
        name = errors.printable(_output.shorten_path(listing.path))
        return [f"{name} has no steps yet"]
    width = _output.terminal_width() if _output.is_terminal() else None
    table = _step_table.fit_table(listing, _sort(listing.steps, sort), width)
    lines = _output.table_lines(table.columns, table.rows)
    for step in listing.steps:
        if step.damage is not None:
            # Paths begin in the run, so that few lines need a second one.
            damage = step.damage.replace(f"{listing.path}/", "")
            lines += _output.wrap(f"{_name(step)} is damaged: {damage}", indent="  ")
    return [*lines, *_output.wrap(_summary(listing, table.left_out))]


def _name(step: Step) -> str:
    return "the checkpoint" if step.step is None else f"step {step.step}"


def _sort(steps: Sequence[Step], key: str) -> list[Step]:
    """Returns the steps in ascending order of `key`, steps without a value first."""
    attributes: dict[str, Callable[[Step], float | None]] = {
        "step": lambda step: step.step,
        "saved": lambda step: step.created,
        "size": lambda step: step.bytes,
    }
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    if key not in attributes and key not in names:
        raise errors.OptionError(
            f"--sort {key} is neither step, saved, size nor a metric of a step: the"
            f" metrics are {', '.join(names) or 'none'}"
        )

    def rank(step: Step) -> tuple[bool, float]:
        value = attributes[key](step) if key in attributes else step.metrics.get(key)
        is_known = value is not None and value == value  # NaN has no place
        return is_known, value if is_known and value is not None else 0.0

    return sorted(steps, key=rank)


_MOST_NAME = 60
"""Characters of the name of a metric below the table."""


def _summary(listing: Listing, left_out: Sequence[str]) -> str:
    formats = {step.format for step in listing.steps} - {"unknown"}
    if not listing.is_run:
        parts = ["1 checkpoint"]
    elif listing.older:
        total = _output.count(len(listing.steps) + listing.older, "step")
        parts = [f"the newest {len(listing.steps):,} of {total}"]
    else:
        parts = [_output.count(len(listing.steps), "step")]
        damaged = sum(step.damage is not None for step in listing.steps)
        if damaged:
            parts[0] += f" ({damaged:,} damaged)"
    parts += formats if len(formats) == 1 else []
    if listing.bytes is not None:
        parts.append(_output.size(listing.bytes))
    summary = ", ".join(parts)
    ends = _step_table.describe_rankings(listing)
    if ends and any("best" in step.marks for step in listing.steps):
        summary += f"; best: {', '.join(ends)}"
    if left_out:
        metrics = "metric" if len(left_out) == 1 else "metrics"
        names = [_output.shorten_name(name, _MOST_NAME) for name in left_out]
        summary += f"; +{len(left_out)} more {metrics}: {errors.first_few(names, 3)}"
    return summary


# ---- watching -------------------------------------------------------------------


def _watch(list_steps: _List, newest: int | None, sort: str) -> int:
    """Shows the steps as they come, until Ctrl-C."""
    view: _Screen | _Log = _Log(newest)
    if _output.is_terminal():
        view = _Screen(newest, sort)
    with contextlib.suppress(KeyboardInterrupt):
        _app.repeat(lambda: view.show(list_steps(newest=view.most())))
    return _app.SUCCESS


class _Screen:
    """Draws the newest steps again and again in the same place of a terminal."""

    def __init__(self, newest: int | None, sort: str) -> None:
        self._newest = newest
        self._sort = sort
        self._drawn = 0  # rows of the terminal

    def most(self) -> int:
        """Returns the number of the newest steps to list: as many as fit."""
        fitting = max(1, shutil.get_terminal_size().lines - _LINES_AROUND)
        return min(self._newest or fitting, fitting)

    def show(self, listing: Listing) -> None:
        height = shutil.get_terminal_size().lines - 1
        lines = _lines(listing, self._sort)
        while len(lines) > 1 and _output.count_rows(lines) > height:
            del lines[0]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        print(f"{up}\x1b[J" + "\n".join(lines), flush=True)
        self._drawn = _output.count_rows(lines)


class _Log:
    """Prints a line for each new step."""

    def __init__(self, newest: int | None) -> None:
        self._newest = newest
        self._seen: set[int | None] = set()

    def most(self) -> int | None:
        """Returns the number of the newest steps to list."""
        return _RECENT if self._seen else None

    def show(self, listing: Listing) -> None:
        new = [step for step in listing.steps if step.step not in self._seen]
        is_first = not self._seen
        self._seen.update(step.step for step in new)
        for step in new[-self._newest :] if is_first and self._newest else new:
            _output.print_line(_describe(step, listing))
        sys.stdout.flush()


def _describe(step: Step, listing: Listing) -> str:
    size = "" if step.bytes is None else _output.size(step.bytes)
    metrics = [
        f"{name}={_output.number(value)}" for name, value in step.metrics.items()
    ]
    marks = _step_table.list_marks(step, listing)
    parts = [
        "" if step.step is None else str(step.step),
        _output.when(step.created),
        size,
        " ".join(metrics),
        ", ".join(marks),
    ]
    return "  ".join(filter(None, parts))
