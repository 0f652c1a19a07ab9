"""Gathers the data of a report, without changing anything.

Data that cannot be read is left out, with a note on the reason: reports are also made
of damaged runs.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _inspect, _run, _steps, _storage, _util, errors
from flaxckpt._inspect.diff import CheckpointDiff
from flaxckpt._inspect.listing import Listing, Step
from flaxckpt._report import dataset_positions, integrity, save_history, size_groups
from flaxckpt._report.data import Change, Changed, Measured, Position, Report
from flaxckpt._types import PathLike
from flaxckpt.formats import _locate
from flaxckpt.formats._reader import CheckpointMetadata
from flaxckpt.policies import BestN, PreservationPolicy

_COMPARED_BYTES = 2**31
"""Larger steps are compared only on request."""

_MOST_POSITIONS = 200
_MOST_POSITIONS_IN_STORES = 10

_UNREADABLE = (errors.CheckpointError, OSError)


class ReportOptions(NamedTuple):
    """The options of a report.

    Attributes:
        keep: The policies of the run.
        step_a: The first step to compare; None for the step before `step_b`.
        step_b: The second step to compare; None for the newest.
        diff: True to compare values; None to compare unless large.
        verify: True to read every byte of all steps.
        step_format: The format of step names; None to detect it.
    """

    keep: Sequence[PreservationPolicy] = ()
    step_a: int | None = None
    step_b: int | None = None
    diff: bool | None = None
    verify: bool = False
    step_format: str | None = None


def gather(path: PathLike, options: ReportOptions) -> Report:
    """Reads the report data of a run or a checkpoint.

    Raises:
        CheckpointNotFoundError: The path or a requested step does not exist.
        CheckpointFormatError: The path is neither a run nor a checkpoint, or its steps
            have several formats.
        OptionError: The options are inconsistent.
    """
    root = _storage.paths.resolve(path)
    if options.diff is False and (options.step_a, options.step_b) != (None, None):
        raise errors.OptionError(
            "--no-diff compares nothing: leave out --step-a and --step-b, or that"
        )
    with _storage.paths.listing_cache(root):
        found = _inspect.listing.listing(
            root, keep=options.keep, step_format=options.step_format
        )
    notes: dict[str, str] = {}
    described = _described(root, found, options.step_format, notes)
    change = _change(root, found, options, notes)
    events = _steps.journal.read(root / _steps.journal.NAME) if found.is_run else []
    if not events:
        notes["saves"] = _why_no_journal(found)
    trees = [] if described is None else _run.disk_usage.subtrees(described.leaves)
    return Report(
        path=found.path,
        is_run=found.is_run,
        made=time.time(),
        version=importlib.metadata.version("flaxckpt"),
        formats=tuple(sorted({step.format for step in found.steps} - {"unknown"})),
        bytes=found.bytes,
        policies=tuple(str(policy) for policy in options.keep),
        steps=found.steps,
        saves=save_history.saves(events),
        happened=save_history.happened(events),
        metrics=_metrics(found.steps, options.keep),
        shown=None if described is None else described.path,
        total_bytes=0 if described is None else described.total_bytes,
        leaves=0 if described is None else len(described.leaves),
        parts=size_groups.parts(trees) if trees else (),
        change=change,
        positions=_dataset_positions(root, found.steps, notes),
        lineage=() if described is None else described.lineage,
        integrity=integrity.integrity(root, found.steps, every=options.verify),
        notes=notes,
    )


def _described(
    root: Path, found: Listing, step_format: str | None, notes: dict[str, str]
) -> CheckpointMetadata | None:
    """Returns the newest good checkpoint, or None."""
    if not found.steps:
        notes["sizes"] = "There are no steps yet."
        return None
    try:
        return _locate.open_checkpoint(root, step_format=step_format).metadata
    except _UNREADABLE as error:
        notes["sizes"] = (
            f"The newest step cannot be read: {_steps.event.first_lines(error, 1)}"
        )
        return None


def _why_no_journal(found: Listing) -> str:
    if not found.is_run:
        return "This is one checkpoint, which has no journal of saves."
    return f"There is no {_steps.journal.NAME} beside the steps, which tells of saves."


# ---- metrics ----------------------------------------------------------------------


def _metrics(
    steps: Sequence[Step], keep: Sequence[PreservationPolicy]
) -> Mapping[str, tuple[Measured, ...]]:
    """Returns each metric's values by step, for steps with a number.

    Metrics used by policies come first: pages show only the first of many.
    """
    bests = [policy for policy in keep if isinstance(policy, BestN)]
    names = dict.fromkeys(itertools.chain.from_iterable(s.metrics for s in steps))
    asked_for = dict.fromkeys(p.metric for p in bests if p.metric in names)
    found = {}
    for name in asked_for | names:
        values = {
            step.step: step.metrics[name]
            for step in steps
            if step.step is not None and name in step.metrics
        }
        if not values:
            continue
        of_this = [policy for policy in bests if policy.metric == name]
        marks = _best(steps, values, of_this) if of_this else _extremes(values)
        found[name] = tuple(
            Measured(step.step, values[step.step], bool(step.why), marks.get(step.step))
            for step in steps
            if step.step in values and step.step is not None
        )
    return found


def _best(
    steps: Sequence[Step], values: Mapping[int, float], keep: Sequence[BestN]
) -> Mapping[int, str]:
    """Returns the steps that policies name as best, and the best of each policy."""
    found: dict[int, str] = {}
    for policy in keep:
        named = [s.step for s in steps if s.step in values and str(policy) in s.why]
        found = (
            dict.fromkeys((s for s in named if s is not None), "among the best") | found
        )
        if named:
            sign = 1 if policy.mode == "max" else -1
            found[max(found, key=lambda s: (sign * values[s], s))] = "best"
    return found


def _extremes(values: Mapping[int, float]) -> Mapping[int, str]:
    """Returns the lowest and highest; only a policy can tell the best."""
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    if len(set(finite.values())) < 2:
        return {}
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    return {low: "lowest", high: "highest"}


# ---- changes ----------------------------------------------------------------------


def _change(
    root: Path, found: Listing, options: ReportOptions, notes: dict[str, str]
) -> Change | None:
    """Returns the differences between two steps; None if not compared."""
    is_asked_for = options.diff or (options.step_a, options.step_b) != (None, None)
    if options.diff is False:
        notes["change"] = "It was asked for without a comparison (--no-diff)."
        return None
    try:
        pair = _pair(found, options)
        if pair is None:
            notes["change"] = "There are no two good steps to compare."
            return None
        a, b = (
            _locate.locate(root, step, step_format=options.step_format) for step in pair
        )
        size = b.open().metadata.total_bytes
        if size > _COMPARED_BYTES and not is_asked_for:
            notes["change"] = (
                f"To compare two steps takes reading both, {_util.humanize.size(size)}"
                " each:"
                " --diff does so."
            )
            return None
        return _compared((a.path, b.path), pair)
    except _UNREADABLE as error:
        is_damaged = isinstance(error, errors.DamagedCheckpointError)
        if is_asked_for and not is_damaged:
            raise
        notes["change"] = (
            f"The steps could not be compared: {_steps.event.first_lines(error, 1)}"
        )
        return None


def _pair(found: Listing, options: ReportOptions) -> tuple[int, int] | None:
    """Returns the two steps to compare, or None.

    Raises:
        OptionError: Both are the same step.
    """
    if not found.is_run and (options.step_a, options.step_b) != (None, None):
        raise errors.OptionError(
            f"{found.path} is one checkpoint, without steps: flaxckpt diff compares it"
            " with another"
        )
    good = [s.step for s in found.steps if s.step is not None and s.damage is None]
    b = options.step_b
    if b is None:
        b = max(good, default=None)
    if b is None:
        return None
    a = options.step_a
    if a is None:
        a = max((step for step in good if step < b), default=None)
    if a == b:
        raise errors.OptionError(f"step {a} is compared with itself: pass two steps")
    return None if a is None else (a, b)


def _compared(paths: Sequence[Path], steps: tuple[int, int]) -> Change:
    found = _inspect.diff.diff(*paths)
    a, b = steps
    return Change(a, b, _changed(found, a, b), len(found.same), found.bytes_compared)


def _changed(found: CheckpointDiff, a: int, b: int) -> tuple[Changed, ...]:
    rows = []
    for path, leaf in found.changed.items():
        shown = str(leaf.b) if str(leaf.a) == str(leaf.b) else f"{leaf.a} → {leaf.b}"
        rows.append(
            Changed(path, leaf.kind, shown, leaf.different, leaf.max_abs, leaf.rel_norm)
        )
    for step, paths in ((a, found.only_in_a), (b, found.only_in_b)):
        rows += [Changed(path, f"only in {step}", "", 0, 0.0, 0.0) for path in paths]
    return tuple(rows)


# ---- the dataset ------------------------------------------------------------------


def _dataset_positions(
    root: Path, steps: Sequence[Step], notes: dict[str, str]
) -> tuple[Position, ...]:
    costs_requests = _storage.of(root).costs_requests
    most = _MOST_POSITIONS_IN_STORES if costs_requests else _MOST_POSITIONS
    if len(steps) > most:
        notes["dataset"] = f"Only the {most} newest steps were looked at."
    found = []
    for step in steps[-most:]:
        path = _storage.paths.from_text(step.path)
        try:
            found.append(dataset_positions.position(path, step.step))
        except _UNREADABLE as error:
            told = "" if step.step is None else f" of step {step.step}"
            notes["dataset"] = (
                f"The state{told} cannot be read: {_steps.event.first_lines(error, 1)}"
            )
    return tuple(position for position in found if position is not None)
