"""Checks the integrity of steps by their markers, files, or every byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, errors
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._inspect.listing import Step
from flaxckpt._report.data import Integrity, State
from flaxckpt._util import humanize
from flaxckpt._util.progress import Counter
from flaxckpt.formats import _locate

_CHECKED = 10
"""The number of newest steps that are checked by default."""

_NO_LIST = "no list of its files to check"

_CHECKED_IN_STORES = 1
"""In stores, checking a file takes a request."""


def check_steps(
    root: Path,
    steps: Sequence[Step],
    *,
    every: bool,
    known: Sequence[Integrity] = (),
) -> tuple[Integrity, ...]:
    """Returns the integrity of each of `steps`, in order, the newest last.

    Args:
        root: The run directory.
        steps: The steps as listed.
        every: True to read every byte of the steps.
        known: The integrity of steps that were checked before; whole ones are not
            checked again.
    """
    if every:
        return tuple(verify_step(step).integrity for step in steps)
    costs_requests = _storage.of(root).costs_requests
    newest = steps[-(_CHECKED_IN_STORES if costs_requests else _CHECKED) :]
    checked = {step.path for step in newest}
    if not costs_requests:
        checked |= {step.path for step in steps if "best" in step.marks}
    whole = {check.step: check for check in known if check.state == "whole"}
    return tuple(
        whole[step.step]
        if step.step in whole and step.damage is None
        else _check(step, step.path in checked)
        for step in steps
    )


def _check(step: Step, is_new: bool) -> Integrity:
    if step.damage is not None:
        return Integrity(step.step, "damaged", step.damage, 0)
    is_ours = step.format == "flaxckpt"
    if not is_new:
        detail = "not checked" if is_ours else _NO_LIST
        return Integrity(step.step, "unknown", detail, 0)
    path = _storage.paths.from_text(step.path)
    try:
        if is_ours:
            _checkpoint.file_sizes.check(path)
        else:  # may be a native checkpoint without its manifest
            stored = _locate.read_stored(path, None)
            stored.check_items(stored.metadata.damaged_items)
    except (errors.CheckpointError, OSError) as error:
        if is_ours or isinstance(error, errors.DamagedCheckpointError | OSError):
            return _of_error(step, error)
        return Integrity(step.step, "unknown", explain(error), 0)
    if is_ours:
        return Integrity(
            step.step, "whole", "all files exist, with the recorded sizes", 0
        )
    return Integrity(step.step, "unknown", _NO_LIST, 0)


def _of_error(step: Step, error: Exception) -> Integrity:
    path = _storage.paths.from_text(step.path)
    if not _storage.of(path).exists(path):
        return _deleted(step)
    state: State = "unread" if _storage.permissions.is_unread(error) else "damaged"
    return Integrity(step.step, state, explain(error), 0)


def _deleted(step: Step) -> Integrity:
    return Integrity(step.step, "unknown", "deleted in the meantime", 0)


def explain(error: Exception) -> str:
    """Returns the message of an error as one line, with the files that it lists."""
    return errors.join_rows(_steps.event.first_lines(error, 2 + errors.ROWS_SHOWN))


class Verification(NamedTuple):
    """The result of reading every byte of a step.

    Attributes:
        integrity: The integrity of the step.
        report: The faults; None if the step could not be opened.
    """

    integrity: Integrity
    report: VerifyReport | None


def verify_step(step: Step, counter: Counter | None = None) -> Verification:
    """Reads every byte of a step, and compares the data with checksums.

    Args:
        step: The step as listed.
        counter: Counts the bytes read. An error of its `add` ends the verification.
    """
    path = _storage.paths.from_text(step.path)
    try:
        try:
            report = _checkpoint.verify.verify_checkpoint(
                path, step.step, counter=counter
            )
        except errors.DamagedCheckpointError as error:
            report = _checkpoint.verify.report_lost(path, step.step, error)
    except (errors.CheckpointError, OSError) as error:
        return Verification(_of_error(step, error), None)
    if not report.ok and not _storage.of(path).exists(path):
        return Verification(_deleted(step), None)
    return Verification(_of_report(step, report), report)


def _of_report(step: Step, report: VerifyReport) -> Integrity:
    faults = {**report.problems, **report.unread}
    if not report.ok:
        state: State = "damaged" if report.problems else "unread"
        where, why = next(iter(faults.items()))
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        detail = f"{report.summary or where}: {why}{more}"
        return Integrity(step.step, state, detail, report.bytes_checked)
    detail = f"{humanize.size(report.bytes_checked)} read"
    if report.unchecked:
        leaves = humanize.count(len(report.unchecked), "leaf", "leaves")
        detail += f"; {leaves} without checksums"
    return Integrity(step.step, "verified", detail, report.bytes_checked)
