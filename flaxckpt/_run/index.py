"""The steps that are there, with what says how long they stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _steps, _storage, formats, policies
from flaxckpt._run import metrics as run_metrics
from flaxckpt.formats import _native

_Entry: TypeAlias = "_steps.index.Entry[formats.Detected]"


class RunStep(NamedTuple):
    """A step that is there.

    Attributes:
        path: Its directory.
        marks: What is said there of how long it stays.
        ranked: It, as policies see it.
    """

    path: Path
    marks: _steps.markers.Marks
    ranked: run_metrics.RankedStep


class RunIndex:
    """The steps of one directory, and what is remembered of them.

    Args:
        directory: Of the run.
        step_format: How its steps are called.
        metrics_from: Gives metrics of steps that were measured elsewhere.
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
        self._known: dict[Path, _storage.local.Stamp] = {}  # steps, as of when
        self._metrics = run_metrics.Remembered(
            run_metrics.METRICS_FILE, run_metrics.read_metrics
        )
        self._created = run_metrics.Remembered(
            _native.items.CHECKPOINT, _native.checkpoint.read_created
        )

    def listed(self) -> dict[int, Path]:
        """The steps that are not marked as damaged, ascending."""
        return {entry.step: entry.path for entry in self._entries()}

    def damaged(self) -> dict[int, Path]:
        """The steps that are marked as damaged, ascending."""
        return _steps.index.damaged(self._directory, self._format)

    def _entries(self) -> list[_Entry]:
        """The steps that are not marked as damaged, and are more than called so."""
        with _storage.paths.looking(self._directory):
            entries = [
                entry
                for entry in _steps.index.committed(
                    self._directory, self._format, formats.identify
                )
                if not entry.is_damaged
            ]
            if _storage.of(self._directory).costs_requests:
                # A look costs less than a stamp there.
                return [entry for entry in entries if entry.was_step]
        known: dict[Path, _storage.local.Stamp] = {}
        found = []
        for entry in entries:
            stamp = _storage.local.stamp(entry.path)
            if self._known.get(entry.path) == stamp or entry.was_step:
                known[entry.path] = stamp
                found.append(entry)
        self._known = known
        return found

    def metrics(self, path: Path) -> Mapping[str, float]:
        """What is stored of the step `path`; nothing if it cannot be read."""
        return self._metrics(path) or {}

    def forget(self) -> None:
        """Reads everything anew from here on."""
        self._metrics.forget()
        self._created.forget()

    def best(self, policy: policies.BestN) -> set[int]:
        """The steps that `policy` names."""
        return policy.preserved(list(self.ranked().values()))

    def ranked(self) -> dict[int, run_metrics.RankedStep]:
        """The steps as policies see them."""
        return {step: found.ranked for step, found in self.found().items()}

    def has_changed(self, path: Path) -> bool:
        """Whether the metrics of the step `path` are others than were read of it."""
        return self._metrics.has_changed(path)

    def found(self) -> dict[int, RunStep]:
        """The steps as they are now, without those that cannot be recognised."""
        with (
            _storage.permissions.explained(self._directory),
            _storage.paths.looking(self._directory),
        ):
            return self._looked_at()

    def _looked_at(self) -> dict[int, RunStep]:
        elsewhere: run_metrics.MetricsByStep = {}
        if self._metrics_from is not None:
            elsewhere = run_metrics.by_step(self._metrics_from())
        found = {}
        entries = self._entries()
        paths = {entry.path for entry in entries}
        for remembered in (self._metrics, self._created):
            remembered.forget(all_but=paths)
        for entry in entries:
            if not entry.is_step:
                continue
            marks = _steps.markers.of(
                entry.path, entry.files, dataset=_native.checkpoint.DATASET
            )
            ranked = run_metrics.RankedStep(
                entry.step,
                temporary=marks.temporary,
                elsewhere=elsewhere.get(entry.step, {}),
                metrics=functools.partial(self._metrics, entry.path),
                created=functools.partial(self._created, entry.path),
            )
            found[entry.step] = RunStep(entry.path, marks, ranked)
        return found
