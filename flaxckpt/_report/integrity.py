"""Checks the integrity of steps by their markers, files, or every byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _checkpoint, _steps, _storage, _util, errors
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._inspect.listing import Step
from flaxckpt._report.data import Integrity, State
from flaxckpt.formats import _locate

LOOKED_AT = 10
"""The number of newest steps that are checked by default."""

_NO_LIST = "has no list of its files"

_LOOKED_AT_IN_STORES = 1
"""In stores, checking a file takes a request."""


def integrity(
    root: Path, steps: Sequence[Step], *, every: bool
) -> tuple[Integrity, ...]:
    """Returns the integrity of each of `steps`, in order, the newest last.

    Args:
        root: The run directory.
        steps: As listed.
        every: True to read every byte of the steps.
    """
    if every:
        return tuple(_verified(step) for step in steps)
    count = _LOOKED_AT_IN_STORES if _storage.of(root).costs_requests else LOOKED_AT
    newest = {step.path for step in steps[-count:]}
    return tuple(_looked_at(step, step.path in newest) for step in steps)


def _looked_at(step: Step, is_new: bool) -> Integrity:
    if step.damage is not None:
        return Integrity(step.step, "damaged", step.damage, 0)
    is_ours = step.format == "flaxckpt"
    if not is_new:
        told = "not looked at" if is_ours else _NO_LIST
        return Integrity(step.step, "unknown", told, 0)
    path = _storage.paths.from_text(step.path)
    try:
        if is_ours:
            _checkpoint.file_sizes.check(path)
        else:  # may be a native checkpoint without its manifest
            _locate.read_stored(path, None)
    except (errors.CheckpointError, OSError) as error:
        if is_ours or isinstance(error, errors.DamagedCheckpointError | OSError):
            return _of_error(step, error)
        return Integrity(step.step, "unknown", _steps.event.first_lines(error, 1), 0)
    if is_ours:
        return Integrity(step.step, "whole", "files and sizes are as recorded", 0)
    return Integrity(step.step, "unknown", _NO_LIST, 0)


def _of_error(step: Step, error: Exception) -> Integrity:
    path = _storage.paths.from_text(step.path)
    if not _storage.of(path).exists(path):
        return Integrity(step.step, "unknown", "deleted meanwhile", 0)
    state: State = "unread" if _storage.permissions.is_unread(error) else "damaged"
    return Integrity(step.step, state, _steps.event.first_lines(error, 1), 0)


def _verified(step: Step) -> Integrity:
    path = _storage.paths.from_text(step.path)
    try:
        try:
            found = _checkpoint.verify.verify_checkpoint(path, step.step)
        except errors.DamagedCheckpointError as error:
            found = _checkpoint.verify.report_lost(path, step.step, error)
    except (errors.CheckpointError, OSError) as error:
        return _of_error(step, error)
    told = {**found.problems, **found.unread}
    if not found.ok:
        state: State = "damaged" if found.problems else "unread"
        where, why = next(iter(told.items()))
        more = f", and {len(told) - 1} more" if len(told) > 1 else ""
        detail = f"{found.summary or where}: {why}{more}"
        return Integrity(step.step, state, detail, found.bytes_checked)
    return Integrity(step.step, "verified", _good(found), found.bytes_checked)


def _good(found: VerifyReport) -> str:
    told = f"{_util.humanize.size(found.bytes_checked)} read"
    if found.unchecked:
        leaves = _util.humanize.count(len(found.unchecked), "leaf", "leaves")
        told += f"; {leaves} without checksums"
    return told
