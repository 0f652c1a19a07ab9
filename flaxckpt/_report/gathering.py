"""Gathers the data of a report, without changing anything.

Data that cannot be read is left out, with a note on the reason: reports are also made
of damaged runs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from flaxckpt import _formats, _inspect, _run, _steps, _storage, errors
from flaxckpt._arrays.leaf_sample import LeafSample
from flaxckpt._formats import locate
from flaxckpt._formats.reader import CheckpointMetadata
from flaxckpt._inspect.dataset_positions import Position
from flaxckpt._inspect.history import SavedStep, Verdict
from flaxckpt._inspect.listing import Listing, Step
from flaxckpt._report import flight_recorder, integrity, parts
from flaxckpt._report.data import Integrity, LeafHistory, MetricValue, Report
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._steps.event import Event
from flaxckpt._types import LeafPath, PathLike
from flaxckpt._util import humanize
from flaxckpt.policies import BestN, PreservationPolicy

if TYPE_CHECKING:  # it imports numpy, which only a comparison needs
    from flaxckpt._inspect.diff import CheckpointDiff

_COMPARED_BYTES = 2**31
"""Larger steps are compared only on request."""

_MOST_TRIED = 3
"""Steps that are tried for the sizes, as all may be unreadable."""

_MOST_VERDICTS = 60

_MOST_RIDGES = 12
"""Steps of which the histograms are kept, from the first to the last."""

_MOST_POSITIONS = 200
_MOST_POSITIONS_IN_STORES = 10

_UNREADABLE = (errors.CheckpointError, OSError)


class ReportOptions(NamedTuple):
    """The options of a report; see `flaxckpt.report`."""

    keep: Sequence[PreservationPolicy] | None = None
    step_a: int | None = None
    step_b: int | None = None
    diff: bool | None = None
    verify: bool = False
    step_format: str | None = None
    known: Sequence[Integrity] = ()


def gather(path: PathLike, options: ReportOptions) -> Report:
    """Reads the report data of a run or a checkpoint.

    Raises:
        CheckpointNotFoundError: The path or a requested step does not exist.
        CheckpointFormatError: The path is neither a run nor a checkpoint, or its steps
            have several formats.
        OptionError: The options are inconsistent.
    """
    root = _storage.paths.resolve(path)
    with _storage.paths.listing_cache(root):
        listing = _inspect.listing.listing(
            root, keep=options.keep, step_format=options.step_format
        )
    notes: dict[str, str] = {}
    checks = integrity.check_steps(
        root, listing.steps, every=options.verify, known=options.known
    )
    checked = zip(listing.steps, checks, strict=True)
    good = [s for s, check in checked if s.damage is None and not check.is_bad]
    metadata = _read_metadata(listing, good, notes)
    torn: list[bytes] = []
    journal = root / _steps.journal.NAME
    events = _steps.journal.read(journal, torn) if listing.is_run else []
    if not events:
        notes["saves"] = _no_journal_note(listing, notes)
    elif torn:
        notes["journal"] = (
            f"{humanize.count(len(torn), 'line')} of its journal cannot be read"
        )
    ranked: dict[str, list[BestN]] = {}
    for policy in listing.keep or ():
        if isinstance(policy, BestN):
            ranked.setdefault(policy.metric, []).append(policy)
    history = _inspect.history.of_events(events, listing)
    infos = {} if metadata is None else metadata.leaves
    trees = _inspect.subtrees.subtrees(infos) if infos else []
    repeated = parts.find(trees) if trees else ()
    rest = parts.without(trees, repeated)
    report = Report(
        path=listing.path,
        is_run=listing.is_run,
        made=time.time(),
        version=importlib.metadata.version("flaxckpt"),
        tags=_read_tags(root) if listing.is_run else {},
        formats=tuple(sorted({step.format for step in listing.steps} - {"unknown"})),
        bytes=listing.bytes,
        policies=None if listing.keep is None else tuple(map(str, listing.keep)),
        steps=listing.steps,
        history=tuple(history),
        verdicts=_verdicts(history, events, listing),
        saves=tuple(_inspect.history.saves(events)),
        happened=tuple(event for event in events if event.kind in _HAPPENED),
        metrics=_metrics(listing, history, ranked),
        modes={name: [each.mode for each in best] for name, best in ranked.items()},
        shown=None if metadata is None else metadata.path,
        total_bytes=0 if metadata is None else metadata.total_bytes,
        leaves=trees[0].leaves if trees else 0,
        copies=repeated,
        parts=parts.divide(rest) if rest else (),
        tree=tuple(rest),
        change=None,
        compared=None,
        leaf_histories=_leaf_histories(root, repeated, infos) if listing.is_run else (),
        positions=_dataset_positions(root, listing.steps, notes),
        lineage=() if metadata is None else metadata.lineage,
        source_outcome=_source_outcome(events),
        integrity=checks,
        notes=notes,
    )
    report = report.with_integrity(checks)
    change, compared = _compare_steps(root, report, options, notes) or (None, None)
    return dataclasses.replace(report, change=change, compared=compared)


def _read_tags(root: Path) -> Mapping[str, str]:
    """Returns the strings, numbers and booleans in the metadata of a run, as text."""
    try:
        given = _formats.native_metadata.read_run_metadata(root)
    except _UNREADABLE:
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
        if isinstance(value, str | int | float)
    }


def _read_metadata(
    listing: Listing, good: Sequence[Step], notes: dict[str, str]
) -> CheckpointMetadata | None:
    """Returns the metadata of the newest checkpoint that can be read, or None."""
    notes["sizes"] = "No step can be read." if listing.steps else "There are no steps."
    for step in good[: -_MOST_TRIED - 1 : -1]:
        try:
            metadata = locate.read_metadata(_storage.paths.from_text(step.path))
        except _UNREADABLE as error:
            why = integrity.explain(error)
            notes["sizes"] = f"The newest step cannot be read: {why}"
        else:
            del notes["sizes"]
            return metadata
    return None


def _no_journal_note(listing: Listing, notes: dict[str, str]) -> str:
    if not listing.is_run:
        return "A single checkpoint has no journal of saves."
    path = _storage.paths.from_text(listing.path) / _steps.journal.NAME
    storage = _storage.of(path)
    if not storage.costs_requests and storage.exists(path):
        notes["journal"] = "its journal cannot be read"
        return f"The journal of saves ({path.name}) has no event that can be read."
    return f"The run has no journal of saves ({path.name})."


_HAPPENED = frozenset(
    ("restored", "fell_back", "found_damaged", "found_good", "preempted", "deleted")
)


def _source_outcome(events: Sequence[Event]) -> str:
    """Returns how many leaves of its source a run loaded; empty if unknown."""
    outcomes = (e.details.get("outcome") for e in events if e.kind == "restored")
    first = next((each for each in outcomes if isinstance(each, str)), "")
    return first.replace(" init", " initialized")


def _verdicts(
    history: Sequence[SavedStep], events: Sequence[Event], listing: Listing
) -> Mapping[int, tuple[Verdict, ...]]:
    """Returns what the policies kept when they deleted each of the last steps."""
    deleted = [step.step for step in history if not step.exists]
    found = _inspect.history.explain_deletions(events, listing)
    return {n: found[n] for n in deleted[-_MOST_VERDICTS:] if found.get(n)}


# ---- metrics ----------------------------------------------------------------------


def _metrics(
    listing: Listing,
    history: Sequence[SavedStep],
    ranked: Mapping[str, Sequence[BestN]],
) -> Mapping[str, tuple[MetricValue, ...]]:
    """Returns each metric's values by step, for steps with a number.

    Metrics with policies, `ranked`, come first: pages show only the first of many.
    """
    existing = {step.step: step for step in listing.steps if step.step is not None}
    staying = {n for n, step in existing.items() if step.why}
    names = dict.fromkeys(itertools.chain.from_iterable(s.metrics for s in history))
    series = {}
    for name in sorted(names, key=[*ranked, *names].index):
        values = {s.step: s.metrics[name] for s in history if name in s.metrics}
        deciding = {*map(str, ranked.get(name, ()))}
        kept = [n for n in values.keys() & existing if deciding & {*existing[n].why}]
        if not kept and listing.best.get(name) in values:  # those kept are damaged
            kept = [listing.best[name]]
        kept = kept if deciding else []
        series[name] = tuple(
            MetricValue(n, value, n in staying, n not in existing, n in kept)
            for n, value in values.items()
        )
    return series


# ---- changes ----------------------------------------------------------------------


def _compare_steps(
    root: Path, report: Report, options: ReportOptions, notes: dict[str, str]
) -> tuple[CheckpointDiff, tuple[int, int]] | None:
    """Returns the differences between two steps, and these; None if not compared."""
    is_requested = options.diff or (options.step_a, options.step_b) != (None, None)
    if options.diff is False and is_requested:
        raise errors.OptionError(
            "--no-diff compares nothing: leave out --no-diff, or --step-a and --step-b"
        )
    if options.diff is False:
        notes["change"] = "Not compared, because of --no-diff."
        return None
    try:
        pair = _choose_steps(report, options)
        if pair is None:
            notes["change"] = "There are no two good steps to compare."
            return None
        a, b = (
            locate.locate(root, step, step_format=options.step_format).path
            for step in pair
        )
        size = locate.read_metadata(b).total_bytes
        if size > _COMPARED_BYTES and not is_requested:
            notes["change"] = (
                f"A comparison reads both steps, {humanize.size(size)} each: --diff"
                " compares them."
            )
            return None
        return _inspect.diff.diff(a, b), pair
    except _UNREADABLE as error:
        is_damaged = isinstance(error, errors.DamagedCheckpointError)
        if is_requested and not is_damaged:
            raise
        notes["change"] = f"The steps could not be compared: {integrity.explain(error)}"
        return None


def _choose_steps(report: Report, options: ReportOptions) -> tuple[int, int] | None:
    """Returns steps to compare, or None; raises OptionError if they are the same."""
    given = options.step_a, options.step_b
    if not report.is_run and given != (None, None):
        raise errors.OptionError(
            f"{report.path} is a single checkpoint without steps: to compare it with"
            " another, use flaxckpt diff"
        )
    a, b = flight_recorder.choose_pair(report, *given)
    if a is not None and a == b:
        raise errors.OptionError(
            f"step {a} would be compared with itself: pass two different steps"
        )
    return None if a is None or b is None or not report.good_steps else (a, b)


def _leaf_histories(
    root: Path, repeated: Sequence[parts.Copy], infos: Mapping[LeafPath, LeafInfo]
) -> tuple[LeafHistory, ...]:
    """Returns the recorded statistics of leaves; a step saved again counts once.

    `repeated` and `infos` are of the newest step that can be read.
    """
    recorded = {samples.step: samples for samples in _run.sample_log.read(root)}
    steps = sorted(recorded)
    norms: dict[LeafPath, dict[int, float]] = {}
    sampled: dict[LeafPath, dict[int, int]] = {}
    drawn: dict[LeafPath, dict[int, LeafSample]] = {}
    last: dict[LeafPath, LeafSample] = {}
    places = [n / _MOST_RIDGES for n in range(_MOST_RIDGES + 1)] if steps else []
    chosen = {steps[round(place * (len(steps) - 1))] for place in places}
    for step in steps:
        for path, leaf in recorded[step].leaves.items():
            norms.setdefault(path, {})[step] = math.nan if leaf.nonfinite else leaf.norm
            sampled.setdefault(path, {})[step] = leaf.sampled
            if not any(leaf.histogram):  # without a finite value
                leaf = leaf._replace(mean=math.nan, min=math.nan, max=math.nan)
            last[path] = leaf
            if step in chosen:
                drawn.setdefault(path, {})[step] = leaf
    histories = [
        LeafHistory(
            path,
            parts.group_of(path, repeated),
            _kind(path, repeated, infos.get(path)),
            norms[path],
            sampled[path],
            leaf,
            drawn.get(path, {}),
        )
        for path, leaf in last.items()
    ]
    return tuple(sorted(histories, key=lambda leaf: parts.rank(leaf.group)))


def _kind(
    path: LeafPath, repeated: Sequence[parts.Copy], info: LeafInfo | None
) -> Literal["layer", "optimizer", "other"]:
    """Returns the kind of a leaf, by its name if no step has it any more."""
    if info is None:
        is_other = path.rpartition("/")[2] in ("step", "count")
    else:
        is_other = info.kind == "prng_key" or info.dtype in _COUNTED
    if is_other:
        return "other"
    is_copy = any(path.startswith(f"{copy.path}/") for copy in repeated)
    has_role = info is not None and info.role is not None
    return "optimizer" if is_copy or has_role or parts.is_optimizer(path) else "layer"


_COUNTED = frozenset(("int32", "int64", "uint32", "uint64", "bool"))
"""The types of counters and raw random keys; narrower integers may be weights."""


# ---- the dataset ------------------------------------------------------------------


def _dataset_positions(
    root: Path, steps: Sequence[Step], notes: dict[str, str]
) -> tuple[Position, ...]:
    costs_requests = _storage.of(root).costs_requests
    most = _MOST_POSITIONS_IN_STORES if costs_requests else _MOST_POSITIONS
    found: list[Position] = []
    for step in steps[-most:]:
        path = _storage.paths.from_text(step.path)
        try:
            position = _inspect.dataset_positions.read(path, step.step)
            found += [] if position is None else [position]
        except _UNREADABLE as error:
            of = "" if step.step is None else f" of step {step.step}"
            why = integrity.explain(error)
            notes["dataset"] = f"The state{of} cannot be read: {why}"
    if found and len(steps) > most:
        notes["dataset"] = f"Only the {most} newest steps were read."
    return tuple(found)
