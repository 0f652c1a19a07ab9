"""Verification of the steps of a run, and the markers of damaged steps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from flaxckpt import _checkpoint, _steps, errors
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._run.events import Stream
from flaxckpt._types import LeafPath

_log = logging.getLogger(__name__)


def update_marker(path: Path, report: VerifyReport, events: Stream) -> None:
    """Marks a step whose state is proved to be damaged; unmarks one that is good.

    Reads a damaged step once more: a disk or a network may fail for a moment. Raises
    SaveFailedError if the marker cannot be written or removed.
    """
    try:
        if report.loss is not None:
            again = _checkpoint.verify.verify_checkpoint(path, report.step)
            mark(path, report.step, again.loss, events, again.damaged_leaves)
        elif report.ok:
            unmark(path, report.step, events)
    except OSError as error:
        raise errors.SaveFailedError(
            f"step {path.name} cannot be marked: {error}; check that {path} is writable"
        ) from error


def mark(
    path: Path,
    step: int | None,
    reason: str | None,
    events: Stream,
    leaves: Collection[LeafPath] | None = None,
) -> None:
    """Marks a step, if `reason` is its damage, with the damaged `leaves` if known."""
    if reason is None:
        _log.warning("step %s may be good: it is not marked as damaged", path.name)
        return
    is_new = not _steps.markers.is_damaged(path)
    if is_new or leaves is not None:
        _steps.markers.mark_damaged(path, reason, leaves)
    if not is_new:
        return
    events.emit("found_damaged", step, path=path, reason=reason)
    _log.warning(
        "step %s is marked as damaged: it no longer counts as a step; saving the step"
        " again replaces it, and Checkpointer.delete removes it",
        path.name,
    )


def unmark(path: Path, step: int | None, events: Stream) -> None:
    if _steps.markers.is_damaged(path):
        _steps.markers.unmark_damaged(path)
        events.emit("found_good", step, path=path)
        _log.warning("step %s is good, and no longer marked as damaged", path.name)
