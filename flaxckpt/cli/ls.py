"""`flaxckpt ls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.listing import Listing, Step
    from flaxckpt.policies import PreservationPolicy

_STYLES = {"damaged": "red", "latest": "green", "best": "green", "pinned": "cyan"}
_MOST_METRICS = 4
"""Metrics shown per step, so that each step fits one line."""


@_app.verb
def ls(
    path: _app.PathArgument,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Lists the steps of a run with sizes, metrics and marks.

    With --keep or --config, also shows the best steps and the reasons to keep each
    step. If there are many metrics, shows the first.
    Exits with 1 if a step is known to be damaged; verify checks for damage.

    Example:
      flaxckpt ls runs/7 --keep latest:3 --keep best:1:eval/loss:min
    """
    from flaxckpt import _inspect

    policies = _policies.parse_policies(keep, config, group)
    listing = _inspect.listing.listing(path, keep=policies, step_format=step_format)
    if json:
        _output.print_document(listing)
    else:
        _show(listing, policies)
    return _app.FINDING if listing.has_damage else _app.SUCCESS


def _show(listing: Listing, policies: Sequence[PreservationPolicy]) -> None:
    if not listing.steps:
        _output.print_line(f"{_output.shorten_path(listing.path)} has no steps yet")
        return
    formats = sorted({step.format for step in listing.steps} - {"unknown"})
    columns = [
        TextColumn("step", is_number=True),
        TextColumn("saved", is_whole=True),
        TextColumn("size", is_number=True),
        TextColumn("format", is_whole=True),
        TextColumn("metrics"),
        TextColumn("marks"),
        TextColumn("kept by"),
    ]
    rows = [_row(step, len(formats) > 1, policies) for step in listing.steps]
    _output.print_table(columns, rows)
    for step in listing.steps:
        if step.damage is not None:
            _output.print_line(f"step {step.step} is damaged: {step.damage}")
    count = _output.count(len(listing.steps), "step")
    summary = [count if listing.is_run else "1 checkpoint"]
    summary += formats if len(formats) == 1 else []
    if listing.bytes is not None:
        summary.append(_output.size(listing.bytes))
    _output.print_line(", ".join(summary))


def _row(
    step: Step, with_format: bool, policies: Sequence[PreservationPolicy]
) -> list[str | Cell]:
    from flaxckpt.policies import BestN

    ranked = [policy.metric for policy in policies if isinstance(policy, BestN)]
    style = next((s for mark, s in _STYLES.items() if mark in step.marks), "")
    why = ", ".join(step.why) or "nothing"
    deleted = [f"{item} deleted" for item in step.deleted_items]
    return [
        "" if step.step is None else str(step.step),
        _output.when(step.created),
        _output.size(step.bytes) if step.bytes is not None else "",
        step.format if with_format else "",
        _output.format_metrics(step.metrics, _MOST_METRICS, ranked),
        Cell(", ".join((*step.marks, *deleted)), style),
        why if policies and step.damage is None else "",
    ]
