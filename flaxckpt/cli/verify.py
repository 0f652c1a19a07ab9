"""`flaxckpt verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.verify_report import VerifyReport

_FAULTS = 20


@_app.verb
def verify(
    path: _app.PathArgument,
    steps: Annotated[
        list[int] | None,
        Argument(
            metavar="STEP",
            is_step=True,
            help="Steps of a run directory; by default the newest.",
        ),
    ] = None,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    every: Annotated[
        bool, Option("--all", help="Verify all steps of a run directory.")
    ] = False,
    mark: Annotated[
        bool,
        Option(
            "--mark",
            help="Mark damaged steps: restores and retention leave them out. Unmark"
            " good steps.",
        ),
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    """Verifies every byte of a checkpoint against the checksums.

    Data without checksums is read and decoded. --all shows the steps with faults, and
    a summary. Without steps and --all, verifies the newest step, and says how many
    others were not read. Only --mark changes anything.
    Exits with 1 if anything is damaged or unreadable, or if --all skipped a step
    without arrays.

    Example:
      flaxckpt verify runs/7
      flaxckpt verify runs/7 800
      flaxckpt verify runs/7 --all --mark
    """
    from flaxckpt import _inspect

    chosen = [*dict.fromkeys([*(steps or ()), *([] if step is None else [step])])]
    if every and chosen:
        raise errors.OptionError("--all verifies all steps: leave the steps out")
    if every:
        numbers = _inspect.run_view.numbers(path, step_format)
        verified = _verify_all(path, numbers, step_format, quiet=json)
    else:
        verified = _verify_some(path, chosen, step_format, quiet=json)
    if mark:
        _mark(verified.reports, step_format, quiet=json)
    elif not json:
        _advise_to_mark(verified.reports)
    if json:
        _print_document(verified)
    return _app.SUCCESS if verified.is_good else _app.FINDING


class _Verified(NamedTuple):
    """The result of a verification.

    Attributes:
        skipped: Steps without arrays -> the reason to skip them.
        others: The other steps of the run, which were not read.
    """

    reports: list[VerifyReport]
    skipped: dict[str, str]
    others: Sequence[int] = ()

    @property
    def is_good(self) -> bool:
        return all(report.ok for report in self.reports) and not self.skipped


def _verify_step(path: str, step: int | None, step_format: str | None) -> VerifyReport:
    from flaxckpt import _checkpoint

    step_path, number = _app.locate_step(path, step, step_format)
    return _checkpoint.verify.verify(step_path, step=number)


def _is_unmarked(report: VerifyReport) -> bool:
    """Returns True for a damaged step of a run that is not marked."""
    return report.step is not None and bool(report.problems) and not _has_mark(report)


def _has_mark(report: VerifyReport) -> bool:
    """Returns True for a step of a run that is marked as damaged."""
    from flaxckpt import _steps, _storage

    if report.step is None:
        return False
    return _steps.markers.is_damaged(_storage.paths.resolve(report.path))


def _advise_to_mark(reports: Sequence[VerifyReport]) -> None:
    """Prints which damaged steps have no mark, which good ones have one, and --mark."""
    unmarked = [str(report.step) for report in reports if _is_unmarked(report)]
    marked = [str(report.step) for report in reports if report.ok and _has_mark(report)]
    if unmarked:
        steps, it = ("step", "it") if len(unmarked) == 1 else ("steps", "them")
        names = errors.first_few(unmarked, 5)
        _output.print_paragraph(
            f"not marked as damaged: policies count {steps} {names}, and restores may"
            f" try {it}"
        )
    if marked:
        steps = "step" if len(marked) == 1 else "steps"
        names = errors.first_few(marked, 5)
        _output.print_paragraph(
            f"still marked as damaged: policies do not count {steps} {names}, and"
            " restores do not try them"
        )
    if unmarked or marked:
        _output.print_command("To update the marks", _app.command_line(mark=True))


def _mark(
    reports: Sequence[VerifyReport], step_format: str | None, *, quiet: bool
) -> None:
    """Marks damaged steps, unmarks good ones, and shows which were marked before."""
    from flaxckpt import _inspect

    for report in reports:
        if report.step is None and step_format is None:
            raise errors.OptionError(
                f"{report.path} is not a step of a run: --mark needs the run directory"
            )
        was_marked = _has_mark(report)
        _inspect.run_view.update_marker(report)
        if was_marked and _has_mark(report) and not quiet:
            _output.print_line(f"step {report.step} was already marked as damaged")


def _verify_some(
    path: str, steps: Sequence[int], step_format: str | None, *, quiet: bool
) -> _Verified:
    """Verifies some steps, or the newest or only one, and shows each result."""
    reports = []
    wanted: Sequence[int | None] = steps or [None]
    for step in wanted:
        reports.append(_verify_step(path, step, step_format))
        if not quiet:
            _show(reports[-1])
    if steps:
        return _Verified(reports, {})
    others = _find_others(path, reports[0], step_format)
    if others and not quiet:
        _show_others(others)
    return _Verified(reports, {}, [*others])


def _show_others(others: Mapping[int, Path]) -> None:
    """Prints which steps were not read, and which of them are marked as damaged."""
    from flaxckpt import _steps

    names = errors.first_few([str(step) for step in [*others][::-1]], 5)
    were = "step was" if len(others) == 1 else "steps were"
    text = f"{len(others):,} other {were} not read ({names}): --all reads all"
    marked = [str(step) for step, at in others.items() if _steps.markers.is_damaged(at)]
    if marked:
        text += f"; marked as damaged: {errors.first_few(marked[::-1], 5)}"
    _output.print_paragraph(text)


def _find_others(
    path: str, report: VerifyReport, step_format: str | None
) -> Mapping[int, Path]:
    """Returns the other steps of the run in a report; none of a single checkpoint."""
    from flaxckpt import _inspect, _storage

    root = _storage.paths.resolve(path)
    if report.step is None or report.path == str(root):
        return {}
    view = _inspect.run_view.survey(root, step_format)
    return {step: at for step, at in view.paths.items() if step != report.step}


def _verify_all(
    path: str, steps: Sequence[int], step_format: str | None, *, quiet: bool
) -> _Verified:
    """Verifies all steps and shows the faults, also of an interrupted verification."""
    from flaxckpt import _util

    verified = _Verified([], {})
    counter = _util.progress.Counter(
        f"verifying {_output.shorten_path(path)}", of_bytes=False, total=len(steps)
    )
    try:
        with _util.progress.bar(counter):
            for step in steps:
                try:
                    verified.reports.append(_verify_step(path, step, step_format))
                except errors.CheckpointFormatError as error:
                    verified.skipped[str(step)] = str(error)
                counter.add(1)
    finally:
        if not quiet:
            _show_all(verified, path, len(steps))
    return verified


def _print_document(verified: _Verified) -> None:
    summaries = [
        {"ok": report.ok, "summary": report.summary, **_output.fields_of(report)}
        for report in verified.reports
    ]
    document: dict[str, Any] = {"ok": verified.is_good, "reports": summaries}
    if verified.skipped:
        document["not_verified"] = verified.skipped
    if verified.others:
        document["not_read"] = verified.others
    _output.print_document(document)


def _show_all(verified: _Verified, path: str, total: int) -> None:
    """Prints the faults of the steps, and a summary line."""
    if not total:
        _output.print_line(f"{path} has no steps yet")
        return
    for report in verified.reports:
        if not report.ok or report.extra:
            _show(report)
    for name, why in verified.skipped.items():
        _output.print_paragraph(f"step {name}: not verified: {why}")
    damaged = [str(report.step) for report in verified.reports if report.problems]
    unread = [
        str(report.step)
        for report in verified.reports
        if report.unread and not report.problems
    ]
    good = sum(report.ok for report in verified.reports)
    size = sum(report.bytes_checked for report in verified.reports)
    parts = [f"{good:,} of {_output.count(total, 'step')} good"]
    for what, names in (
        ("DAMAGED", damaged),
        ("could not be read", unread),
        ("not verified", list(verified.skipped)),
    ):
        if names:
            parts.append(f"{len(names):,} {what}: {errors.first_few(names, 8)}")
    if rest := total - len(verified.reports) - len(verified.skipped):
        parts.append(f"{rest:,} not reached")
    unchecked = sum(len(report.unchecked) for report in verified.reports)
    if unchecked:
        arrays = _output.count(unchecked, "array")
        parts.append(f"{arrays} without checksums: only read")
    secs = sum(report.secs for report in verified.reports)
    checked = f"{_output.size(size)} checked in {_output.secs(secs)}"
    _output.print_paragraph("; ".join([*parts, checked]))


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
    _output.print_paragraph(f"{name}: {', '.join(parts)}")
    if report.summary:
        _output.print_paragraph(f"  {report.summary}")
    _show_faults(report)
    if report.unchecked:
        _output.print_line(f"  {len(report.unchecked)} without checksums: only read")
    if report.extra:
        extra = ", ".join(report.extra[:_FAULTS])
        _output.print_paragraph(f"  not part of the checkpoint: {extra}")


def _show_faults(report: VerifyReport) -> None:
    """Prints the file, the values in it and the fault, for the first faults."""
    faults = [(name, why, "red") for name, why in report.problems.items()]
    faults += [
        (name, f"could not be read: {why}", "yellow")
        for name, why in report.unread.items()
    ]
    for name, why, style in faults[:_FAULTS]:
        place = errors.printable(report.places.get(name, name))
        print(f"  {_output.style_text(Cell(place, style))}")
        print("\n".join(_output.wrap(f"    {why}")))
    _output.print_more(len(faults), _FAULTS, "--json lists them all")
