"""`flaxckpt verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.verify_report import VerifyReport

_ROWS = 20


@_app.verb
def verify(
    path: _app.PathArgument,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    every: Annotated[
        bool, Option("--all", help="Verify all steps of a run directory.")
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
    skipped: dict[str, str] = {}
    for number in steps:
        try:
            step_path, step_number = _app.locate_step(path, number, step_format)
            reports.append(_checkpoint.verify.verify(step_path, step=step_number))
        except errors.CheckpointFormatError as error:
            if not every:
                raise
            skipped[str(number)] = str(error)
            if not json:
                _output.print_line(f"step {number}: not verified: {error}")
            continue
        if not json:
            _show(reports[-1])
    is_good = all(report.ok for report in reports) and not skipped
    if json:
        summaries = [
            {"ok": report.ok, "summary": report.summary, **_output.fields_of(report)}
            for report in reports
        ]
        document = {"ok": is_good, "reports": summaries}
        if skipped:
            document["not_verified"] = skipped
        _output.print_document(document)
    elif not steps:
        _output.print_line(f"{path} has no steps yet")
    return _app.SUCCESS if is_good else _app.FINDING


def _show(report: VerifyReport) -> None:
    verdict = "good" if report.ok else "DAMAGED"
    if report.unread and not report.problems:
        verdict = "could not be read"
    name = _output.shorten_path(report.path)
    if report.step is not None and not name.endswith(str(report.step)):
        name += f", step {report.step}"  # the path does not name the step
    parts = [verdict]
    if report.bytes_checked:
        size = _output.size(report.bytes_checked)
        parts.append(f"{size} checked in {_output.secs(report.secs)}")
    _output.print_line(f"{name}: {', '.join(parts)}")
    if report.summary:
        _output.print_line(f"  {report.summary}")
    rows: list[list[str | Cell]] = []
    for style, prefix, faults in (
        ("red", "", report.problems),
        ("yellow", "could not be read: ", report.unread),
    ):
        rows += [[name, Cell(prefix + why, style)] for name, why in faults.items()]
    columns = [TextColumn("where"), TextColumn("what is wrong")]
    _output.print_table(columns, rows, most=_ROWS)
    if report.unchecked:
        _output.print_line(f"  {len(report.unchecked)} without checksums: only read")
    if report.extra:
        _output.print_line(
            f"  not part of the checkpoint: {', '.join(report.extra[:_ROWS])}"
        )
