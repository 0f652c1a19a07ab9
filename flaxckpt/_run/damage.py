"""Verification of the steps of a run, and the markers of damaged steps."""

from __future__ import annotations

import logging
from pathlib import Path

from flaxckpt import _checkpoint, _steps, errors
from flaxckpt._checkpoint.verify_report import VerifyReport

_log = logging.getLogger(__name__)


def update_marker(path: Path, report: VerifyReport) -> None:
    """Marks a step that a report proves to be damaged; unmarks one that is good.

    A step whose state can be read gets no marker: its metrics may be damaged.

    Args:
        path: The step.
        report: A report on the step.

    Raises:
        SaveFailedError: The marker cannot be written or removed.
    """
    is_lost = report.leaves is None or bool(report.unreadable)
    try:
        if report.problems and is_lost:
            mark(path, report.step)
        elif report.ok:
            unmark(path)
    except OSError as error:
        raise errors.SaveFailedError(
            f"step {path.name} cannot be marked: {error}; check that {path} is writable"
        ) from error


def mark(path: Path, step: int | None) -> None:
    """Marks a step as damaged, if damage is proved.

    Reads the step once more: a disk or a network may fail for a moment.
    """
    reason = _checkpoint.verify.find_damage(path, step)
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
