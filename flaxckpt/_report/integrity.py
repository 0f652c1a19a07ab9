"""Checks the integrity of steps by their markers, files, or every byte."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, errors
from flaxckpt._formats import locate
from flaxckpt._inspect.listing import Step
from flaxckpt._report.data import Integrity, Report, State
from flaxckpt._util import humanize
from flaxckpt._util.progress import Counter

if TYPE_CHECKING:
    from flaxckpt._checkpoint.verify_report import VerifyReport

_CHECKED = 10
"""The number of newest steps that are checked by default."""

_MOST_FAULTS = 100
"""Faults of a step that are kept."""

_NO_LIST = "no list of its files to check"
_GONE = "deleted in the meantime"

_CHECKED_IN_STORES = 1
"""In stores, checking a file takes a request."""


def check_steps(
    root: Path, steps: Sequence[Step], *, every: bool, known: Sequence[Integrity] = ()
) -> tuple[Integrity, ...]:
    """Returns the integrity of each of `steps`, in order, the newest last.

    With `every`, all bytes are read. Steps `known` to be whole are not checked.
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
    now, path = time.time(), _storage.paths.from_text(step.path)
    if step.damage is not None:
        marked = _steps.markers.damage_time(path)
        found = now if marked is None else marked
        return Integrity(step.step, "damaged", step.damage, 0, found)
    is_ours = step.format == "flaxckpt"
    detail = "not checked" if is_ours and not is_new else _NO_LIST
    unknown = Integrity(step.step, "unknown", detail, 0)
    if not is_new:
        return unknown
    try:
        if is_ours:
            _checkpoint.completeness.check(path, step.step)
            detail = "all files exist, with the recorded sizes"
            return Integrity(step.step, "whole", detail, 0, now)
        # may be a native checkpoint without its manifest
        stored = locate.read_step(path, step.step)
        stored.check_items(stored.metadata.damaged_items)
    except (errors.CheckpointError, OSError) as error:
        if is_ours or isinstance(error, errors.DamagedCheckpointError | OSError):
            return _of_error(step, error, now)
        return unknown._replace(detail=explain(error))
    return unknown


def _of_error(step: Step, error: Exception, began: float) -> Integrity:
    path = _storage.paths.from_text(step.path)
    if not _storage.of(path).exists(path):
        return Integrity(step.step, "unknown", _GONE, 0)
    state: State = "unread" if _storage.read_errors.is_unread(error) else "damaged"
    return Integrity(step.step, state, explain(error), 0, began)


def explain(error: Exception) -> str:
    """Returns the message of an error as one line, with the files that it lists."""
    return errors.join_rows(_steps.event.first_lines(error, 2 + errors.ROWS_SHOWN))


class Verification(NamedTuple):
    """The result of reading every byte of a step.

    Attributes:
        step: The step, as listed before it was read.
        files: The stamp of its files before they were read; None if unknown.
        summary: The number of leaves that cannot be read, and the files that cause it.
        faults: The first faults: the file and the values in it, and what is wrong.
        more_faults: The number of further ones.
        unchecked: The number of leaves and files without checksums, which were only
            read.
        news: What became known of the step since, which ends the result; empty if
            nothing.
    """

    step: Step
    integrity: Integrity
    files: int | None
    secs: float
    summary: str = ""
    faults: Sequence[tuple[str, str]] = ()
    more_faults: int = 0
    unchecked: int = 0
    news: str = ""


def verify_step(step: Step, counter: Counter | None = None) -> Verification:
    """Reads every byte of a step, and compares the data with checksums.

    An error of the counter's `add` ends the verification.
    """
    path = _storage.paths.from_text(step.path)
    began, start, files = time.time(), time.monotonic(), stamp_files(path)
    report = None
    try:
        try:
            report = _checkpoint.verify.verify_checkpoint(
                path, step.step, counter=counter
            )
        except errors.DamagedCheckpointError as error:
            report = _checkpoint.verify.report_lost(path, step.step, error)
        found = _of_report(step, report, began)
    except (errors.CheckpointError, OSError) as error:
        found = _of_error(step, error, began)
    if found.is_bad and not _storage.of(path).exists(path):
        report, found = None, Integrity(step.step, "unknown", _GONE, 0)
    result = Verification(step, found, files, time.monotonic() - start)
    if report is None:
        return result
    causes = {n: f"could not be read: {why}" for n, why in report.unread.items()}
    faults = {**report.problems, **causes}
    named = [(report.places.get(n, n), why) for n, why in faults.items()]
    return result._replace(
        summary=report.summary,
        faults=named[:_MOST_FAULTS],
        more_faults=len(named[_MOST_FAULTS:]),
        unchecked=len(report.unchecked),
    )


def _of_report(step: Step, report: VerifyReport, began: float) -> Integrity:
    faults = {**report.problems, **report.unread}
    if not report.ok:
        state: State = "damaged" if report.problems else "unread"
        where, why = next(iter(faults.items()))
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        detail = f"{report.summary or where}: {why}{more}"
        return Integrity(step.step, state, detail, report.bytes_checked, began)
    detail = f"{humanize.size(report.bytes_checked)} read"
    if report.unchecked:
        leaves = humanize.count(len(report.unchecked), "leaf", "leaves")
        detail += f"; {leaves} without checksums"
    return Integrity(step.step, "verified", detail, report.bytes_checked, began)


# ---- later news -------------------------------------------------------------------


def stamp_files(path: Path) -> int | None:
    """Returns a number that changes with the files of a checkpoint, without markers.

    Returns None in object stores, where looking at each file takes a request.
    """
    storage = _storage.of(path)
    if storage.costs_requests:
        return None
    try:
        files = sorted(
            file
            for file in _storage.listing.all_files(path)
            if not _steps.markers.is_marker(file.name)
        )
    except OSError:  # not readable, or deleted
        return None
    return hash(tuple(_storage.stamp(file) for file in files))


def find_news(
    report: Report, found: Mapping[int | None, Integrity]
) -> Mapping[int | None, str]:
    """Returns what became known of steps after a verification, and contradicts it.

    Damage that was found by any means counts against a good step; only the removal of
    the marker counts against a bad one, as the sizes of files say little. Steps without
    news are missing: step -> `was marked as damaged at 13:14:05`.
    """
    kinds = ("found_damaged", "found_good")
    events = {event.step: event for event in report.happened if event.kind in kinds}
    news = {}
    for step, known in zip(report.steps, report.integrity, strict=True):
        check = found.get(step.step)
        if check is None or check.found is None:
            continue
        event = events.get(step.step)
        kind = event.kind if event is not None and event.time > check.found else ""
        when = None if event is None else event.time
        what = ""
        if check.is_bad:
            what = "was found to be good" if kind == "found_good" else ""
        elif known.is_bad and (known.found or 0.0) > check.found:
            when = known.found
            what = "was marked as damaged" if step.damage else "was found to be damaged"
            what = "could not be read" if known.state == "unread" else what
        elif kind == "found_damaged":
            what = "was marked as damaged"
        if what:
            news[step.step] = f"{what} at {humanize.clock(when)}"
    return news


def merge(step: Step, known: Integrity, found: Integrity) -> Integrity:
    """Returns the integrity of a step of which a verification is the latest news.

    A step with a marker of damage stays damaged until the marker is removed.
    """
    if step.damage is None:
        return found
    return known._replace(bytes_checked=max(known.bytes_checked, found.bytes_checked))
