"""The steps of a directory, as one table that all readers of a run share.

Retention, restores, lists and reports read the same rows, so they cannot disagree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from flaxckpt import _formats, _steps, _storage, errors
from flaxckpt._formats import locate
from flaxckpt._run import metrics as run_metrics

_IDENTITY_BYTES = 2**24

_Entry: TypeAlias = "_steps.index.Entry[_formats.DetectedFormat]"


class RunStep:
    """A present or former step, as it was listed; its files are read on demand.

    Policies read its `step`, `metrics`, `created` and `temporary`. Metrics `elsewhere`
    were measured outside of its files; `stamps` are of the files that policies read.
    """

    def __init__(
        self, entry: _Entry, values: _Values, elsewhere: Mapping[str, float]
    ) -> None:
        self.step = entry.step
        self.path = entry.path
        self.is_marked = entry.is_damaged
        self.is_doubtful = False
        self.stamps: dict[str, _storage.Stamp] = {}
        self._entry = entry
        self._values = values
        self._elsewhere = elsewhere

    def with_metrics(self, elsewhere: Mapping[str, float]) -> RunStep:
        """Returns the step with further metrics, measured outside of its files."""
        return RunStep(self._entry, self._values, {**elsewhere, **self._elsewhere})

    @functools.cached_property
    def markers(self) -> _steps.markers.Status:
        return _steps.markers.status(self.path, self._entry.files)

    @functools.cached_property
    def damage(self) -> str | None:
        """The damage known without a look at arrays; None for a whole step.

        For an unrecognised step, it is the reason: the step may be unreadable now.
        """
        if self.is_marked:
            return _steps.markers.damage_reason(self.path)
        if self._entry.is_step:
            return None
        return locate.find_damage(self.path, self._entry.why)

    @property
    def is_counted(self) -> bool:
        """True if policies count the step, also if it cannot be read at present."""
        if self.is_marked:
            return False
        error = self._entry.error
        if error is not None and _storage.read_errors.is_unread(error):
            # Markers are unknown where not even names can be read.
            return bool(self._entry.files)
        return self.damage is None

    @property
    def temporary(self) -> bool:
        return self.markers.temporary

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the step, stored or measured elsewhere."""
        stamp, stored = self._values.metrics.read(self.path)
        self.stamps.setdefault("metrics", stamp)
        self.is_doubtful = stored is None
        return {**self._elsewhere, **(stored or {})}

    @property
    def created(self) -> float:
        """Start of the save, in seconds since 1970; NaN if unknown."""
        stamp, created = self._values.created.read(self.path)
        self.stamps.setdefault("created", stamp)
        return created

    def find_created(self) -> float | None:
        """Returns the start of the save; None if it cannot be read."""
        try:
            created = self.created
        except (OSError, ValueError):  # deleted, or damaged
            return None
        return None if math.isnan(created) else created

    def is_outdated(self) -> bool:
        """Returns True if a file has changed since a policy read it."""
        return any(not stamp.is_current() for stamp in self.stamps.values())


class _Values:
    """Caches metrics and times until files change; `number` is the step of a name."""

    def __init__(self, number: _steps.names.Number) -> None:
        self.metrics = run_metrics.FileCache(
            run_metrics.METRICS_FILE,
            lambda path: run_metrics.read_metrics(path, number(path.name)),
        )
        self.created = run_metrics.FileCache(_formats.items.CHECKPOINT, _read_created)

    def forget(self, *, all_but: Collection[Path] = ()) -> None:
        for cache in (self.metrics, self.created):
            cache.forget(all_but=all_but)


def _read_created(path: Path) -> float:
    try:
        return _formats.native_metadata.read_created(path)
    except NotADirectoryError:  # a step of another program may be a file
        return path.stat().st_mtime


class RunIndex:
    """Lists the steps of a directory; remembers their metrics and times."""

    def __init__(
        self,
        directory: Path,
        step_format: _steps.names.StepFormat,
        metrics_from: Callable[[], run_metrics.MetricsByStep] | None = None,
    ) -> None:
        self._directory = directory
        self._format = step_format
        self._metrics_from = metrics_from
        self._stamps: dict[Path, _storage.Stamp] = {}  # recognised steps
        self._values = _Values(step_format.step)

    def read(self) -> dict[int, RunStep]:
        elsewhere: run_metrics.MetricsByStep = {}
        if self._metrics_from is not None:
            elsewhere = run_metrics.parse_by_step(self._metrics_from())
        entries = self._entries()
        self._values.forget(all_but={entry.path for entry in entries})
        return {
            entry.step: RunStep(entry, self._values, elsewhere.get(entry.step, {}))
            for entry in entries
        }

    def _entries(self) -> list[_Entry]:
        """Returns the entries with the content, not only the name, of a step."""
        with (
            _storage.read_errors.explain_errors(self._directory),
            _storage.paths.listing_cache(self._directory),
        ):
            return self._select_entries()

    def _select_entries(self) -> list[_Entry]:
        entries = _steps.index.list_committed(
            self._directory, self._format, _formats.identify
        )
        if _storage.of(self._directory).costs_requests:
            # Looking at a step costs less than a stamp there.
            return [e for e in entries if e.is_damaged or e.was_step]
        # An unchanged directory that was a step still is.
        stamps = {entry.path: _storage.stamp(entry.path) for entry in entries}
        steps = [
            entry
            for entry in entries
            if entry.is_damaged
            or self._stamps.get(entry.path) == stamps[entry.path]
            or entry.was_step
        ]
        self._stamps = {entry.path: stamps[entry.path] for entry in steps}
        return steps

    def listed(self) -> dict[int, RunStep]:
        return {n: step for n, step in self.read().items() if not step.is_marked}

    def paths(self) -> dict[int, Path]:
        """Returns the steps without the marker of damage, ascending."""
        return {e.step: e.path for e in self._entries() if not e.is_damaged}

    def damaged_paths(self) -> dict[int, Path]:
        return {e.step: e.path for e in self._entries() if e.is_damaged}

    def metrics(self, path: Path) -> Mapping[str, float]:
        """Returns the metrics stored with the step `path`; empty if unreadable."""
        return self._values.metrics(path) or {}

    def forget(self) -> None:
        self._values.forget()


def read(directory: Path, step_format: str | None = None) -> dict[int, RunStep]:
    """Returns the steps and former steps of a run of any program, ascending.

    The names are by default the usual ones, or those that the run's journal has. Raises
    CheckpointFormatError if two checkpoints are the same step.
    """
    number = locate.step_parser(step_format)
    with _storage.read_errors.explain_errors(directory):
        entries = _steps.index.StepIndex(directory, _formats.identify, number).entries
    values = _Values(number or _steps.names.number)
    return {entry.step: RunStep(entry, values, {}) for entry in entries}


def read_alone(path: Path) -> RunStep:
    """Returns a checkpoint outside of a run like a step; its number means nothing."""
    entry = _steps.index.Entry(0, path, _formats.identify)
    return RunStep(entry, _Values(lambda name: None), {})


def identify_save(path: Path) -> str | None:
    """Returns a text that no other save has, by its times in ns; None if unknown."""
    file = path / _formats.items.CHECKPOINT
    try:
        return _storage.of(file).digest_file(file, max_bytes=_IDENTITY_BYTES)
    except (errors.CheckpointError, OSError):
        return None
