"""The steps of a directory with markers, metrics and times, as policies rank them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _formats, _steps, _storage, errors, policies
from flaxckpt._formats import locate
from flaxckpt._run import metrics as run_metrics

_IDENTITY_BYTES = 2**24

_Entry: TypeAlias = "_steps.index.Entry[_formats.Detected]"


class RunStep(NamedTuple):
    """An existing step.

    Attributes:
        path: The directory of the step.
        markers: The markers of the step.
        ranked: The step as seen by policies.
        stamps: The files that policies have read, as they were then.
        damage: Why it is no checkpoint any more, or hides its names; None for others.
    """

    path: Path
    markers: _steps.markers.Status
    ranked: run_metrics.RankedStep
    stamps: Mapping[str, _storage.Stamp]
    damage: str | None = None

    def is_outdated(self) -> bool:
        """Returns True if a file has changed since a policy read it."""
        return any(not stamp.is_current() for stamp in self.stamps.values())


class RankedSteps:
    """The steps of a directory, with cached metrics and times.

    Args:
        directory: The run directory or the staging directory.
        step_format: Format of the names of steps.
        metrics_from: Returns metrics of steps measured elsewhere; None for none.
    """

    def __init__(
        self,
        directory: Path,
        step_format: _steps.names.StepFormat,
        metrics_from: Callable[[], run_metrics.MetricsByStep] | None,
    ) -> None:
        self._directory = directory
        self._format = step_format
        self._metrics_from = metrics_from
        self._stamps: dict[Path, _storage.Stamp] = {}  # recognised steps
        self._metrics = run_metrics.FileCache(
            run_metrics.METRICS_FILE,
            lambda path: run_metrics.read_metrics(path, step_format.step(path.name)),
        )
        self._created = run_metrics.FileCache(
            _formats.items.CHECKPOINT, _formats.native_metadata.read_created
        )

    def paths(self) -> dict[int, Path]:
        """Returns the steps without damage markers, ascending."""
        return {entry.step: entry.path for entry in self._entries()}

    def damaged_paths(self) -> dict[int, Path]:
        """Returns the steps marked as damaged, ascending."""
        return _steps.index.list_damaged(self._directory, self._format)

    def _entries(self) -> list[_Entry]:
        """Returns undamaged entries with the content, not only the name, of a step."""
        with _storage.paths.listing_cache(self._directory):
            entries = [
                entry
                for entry in _steps.index.list_committed(
                    self._directory, self._format, _formats.identify
                )
                if not entry.is_damaged
            ]
            if _storage.of(self._directory).costs_requests:
                # Looking at a step costs less than a stamp there.
                return [entry for entry in entries if entry.was_step]
        # An unchanged directory that was a step still is.
        stamps = {entry.path: _storage.stamp(entry.path) for entry in entries}
        steps = [
            entry
            for entry in entries
            if self._stamps.get(entry.path) == stamps[entry.path] or entry.was_step
        ]
        self._stamps = {entry.path: stamps[entry.path] for entry in steps}
        return steps

    def metrics(self, path: Path) -> Mapping[str, float]:
        """Returns the metrics stored with the step `path`; empty if unreadable."""
        return self._metrics(path) or {}

    def forget(self) -> None:
        """Forgets all values read until now."""
        self._metrics.forget()
        self._created.forget()

    def best_steps(self, policy: policies.BestN) -> set[int]:
        """Returns the steps that `policy` preserves."""
        return policy.preserved(list(self.ranked_steps().values()))

    def ranked_steps(self) -> dict[int, run_metrics.RankedStep]:
        """Returns the steps as seen by policies."""
        return {number: step.ranked for number, step in self.steps().items()}

    def steps(self) -> dict[int, RunStep]:
        """Returns the current steps, also those that are damaged beyond recognition.

        A step that cannot be read at present counts as a checkpoint.
        """
        with (
            _storage.permissions.explain_errors(self._directory),
            _storage.paths.listing_cache(self._directory),
        ):
            elsewhere: run_metrics.MetricsByStep = {}
            if self._metrics_from is not None:
                elsewhere = run_metrics.parse_by_step(self._metrics_from())
            entries = self._entries()
            paths = {entry.path for entry in entries}
            for cache in (self._metrics, self._created):
                cache.forget(all_but=paths)
            return {
                entry.step: self._read_step(entry, elsewhere.get(entry.step, {}))
                for entry in entries
            }

    def _read_step(self, entry: _Entry, elsewhere: Mapping[str, float]) -> RunStep:
        markers = _steps.markers.status(entry.path, entry.files)
        stamps: dict[str, _storage.Stamp] = {}

        def read_metrics() -> Mapping[str, float] | None:
            stamp, metrics = self._metrics.read(entry.path)
            stamps.setdefault("metrics", stamp)
            return metrics

        def read_created() -> float:
            stamp, created = self._created.read(entry.path)
            stamps.setdefault("created", stamp)
            return created

        ranked = run_metrics.RankedStep(
            entry.step,
            temporary=markers.temporary,
            elsewhere=elsewhere,
            metrics=read_metrics,
            created=read_created,
        )
        damage = None
        if _is_unread(entry):
            # Markers are unknown where not even names can be read: the step stays.
            damage = None if entry.files else entry.why
        elif not entry.is_step:
            damage = locate.find_damage(entry.path, entry.why)
        return RunStep(entry.path, markers, ranked, stamps, damage)


def identify_save(path: Path) -> str | None:
    """Returns a text that no other save of the step has; None if unknown.

    The file holds the times of the save, by the nanosecond.
    """
    file = path / _formats.items.CHECKPOINT
    try:
        return _storage.of(file).digest_file(file, max_bytes=_IDENTITY_BYTES)
    except (errors.CheckpointError, OSError):
        return None


def _is_unread(entry: _Entry) -> bool:
    return entry.error is not None and _storage.permissions.is_unread(entry.error)
