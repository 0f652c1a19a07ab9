"""Verification of the steps of a run, and the markers of damaged steps."""

from __future__ import annotations

import logging
from pathlib import Path

from flaxckpt import _checkpoint, _steps, errors
from flaxckpt._checkpoint import verify_report
from flaxckpt._checkpoint.verify_report import VerifyReport

_log = logging.getLogger(__name__)


def update_marker(path: Path, report: VerifyReport) -> None:
    """Marks a step whose state is proved to be damaged; unmarks one that is good.

    A step whose state can be read gets no marker: its metrics may be damaged. Reads a
    damaged step once more: a disk or a network may fail for a moment.

    Args:
        path: The step.
        report: A report on the step.

    Raises:
        SaveFailedError: The marker cannot be written or removed.
    """
    try:
        if _find_loss(report) is not None:
            again = _checkpoint.verify.verify_checkpoint(path, report.step)
            _mark(path, _find_loss(again))
        elif report.ok:
            unmark(path)
    except OSError as error:
        raise errors.SaveFailedError(
            f"step {path.name} cannot be marked: {error}; check that {path} is writable"
        ) from error


def _find_loss(report: VerifyReport) -> str | None:
    """Returns a proved fault that keeps a restore from reading the state, or None."""
    for name, why in report.problems.items():
        if name == verify_report.HERE:
            return why
        of_file = (f"{name} is damaged", f"{name} is missing")
        if report.unreadable.get(name) == why or any(
            text in of_file for text in report.unreadable.values()
        ):
            return f"{name}: {why}"
    return None


def mark(path: Path, step: int | None) -> None:
    """Marks a step that could not be restored, if damage is proved.

    Reads the step once more: a disk or a network may fail for a moment.
    """
    _mark(path, _checkpoint.verify.find_damage(path, step))


def _mark(path: Path, reason: str | None) -> None:
    if reason is None:
        _log.warning("step %s may be good: it is not marked as damaged", path.name)
        return
    _steps.markers.mark_damaged(path, reason)
    _log.warning(
        "step %s is marked as damaged: it no longer counts as a step, and is replaced"
        " when the run reaches it",
        path.name,
    )


def unmark(path: Path) -> None:
    """Removes the marker of a step that is good."""
    if _steps.markers.is_damaged(path):
        _steps.markers.unmark_damaged(path)
        _log.warning("step %s is good, and no longer marked as damaged", path.name)
