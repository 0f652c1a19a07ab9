"""`flaxckpt verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._checkpoint.verify_report import VerifyReport

_ROWS = 20


@_app.verb
def verify(
    path: _app.PathArgument,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all steps of a run directory.")
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    """Verifies every byte of a checkpoint against the checksums.

    Data without checksums is read and decoded.
    Exits with 1 if anything is damaged or unreadable, or if --all skipped a step
    without arrays.

    Example:
      flaxckpt verify runs/7 --all
    """
    from flaxckpt import _checkpoint, _inspect

    if every and step is not None:
        raise errors.OptionError("--all verifies all steps: leave --step out")
    steps = _inspect.run_view.numbers(path, step_format) if every else [step]
    reports: list[VerifyReport] = []
    passed_over: dict[str, str] = {}
    for number in steps:
        try:
            one, at = _app.checkpoint(path, number, step_format)
            reports.append(_checkpoint.verify.verify(one, step=at))
        except errors.CheckpointFormatError as error:
            if not every:
                raise
            passed_over[str(number)] = str(error)
            if not json:
                _output.line(f"step {number}: not verified: {error}")
            continue
        if not json:
            _show(reports[-1])
    is_good = all(report.ok for report in reports) and not passed_over
    if json:
        found = [
            {"ok": report.ok, "summary": report.summary, **_output.fields(report)}
            for report in reports
        ]
        document = {"ok": is_good, "reports": found}
        if passed_over:
            document["not_verified"] = passed_over
        _output.document(document)
    elif not steps:
        _output.line(f"{path} has no steps yet")
    return _app.FINE if is_good else _app.FOUND


def _show(found: VerifyReport) -> None:
    verdict = "good" if found.ok else "DAMAGED"
    if found.unread and not found.problems:
        verdict = "could not be read"
    name = _output.short(found.path)
    if found.step is not None and not name.endswith(str(found.step)):
        name += f", step {found.step}"  # the path does not name the step
    told = [verdict]
    if found.bytes_checked:
        size = _output.size(found.bytes_checked)
        told.append(f"{size} checked in {_output.secs(found.secs)}")
    _output.line(f"{name}: {', '.join(told)}")
    if found.summary:
        _output.line(f"  {found.summary}")
    rows: list[list[str | Cell]] = []
    for style, what, faults in (
        ("red", "", found.problems),
        ("yellow", "could not be read: ", found.unread),
    ):
        rows += [[name, Cell(what + why, style)] for name, why in faults.items()]
    _output.table([TextColumn("where"), TextColumn("what is wrong")], rows[:_ROWS])
    if len(rows) > _ROWS:
        _output.line(f"… and {len(rows) - _ROWS} more: --json lists them all")
    if found.unchecked:
        _output.line(f"  {len(found.unchecked)} without checksums: only read")
    if found.extra:
        _output.line(f"  not part of the checkpoint: {', '.join(found.extra[:_ROWS])}")
