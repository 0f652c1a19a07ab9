"""The steps that are there, with what says how long they stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _steps, _storage, errors, formats, policies
from flaxckpt._run import metrics as run_metrics
from flaxckpt.formats import _native


class Found(NamedTuple):
    """A step that is there.

    Attributes:
        path: Its directory.
        marks: What is said there of how long it stays.
        ranked: It, as policies see it.
    """

    path: Path
    marks: _steps.markers.Marks
    ranked: run_metrics.Ranked


class Inventory:
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
        """The committed steps, ascending, without what is merely called like one."""
        if _storage.of(self._directory).costs_requests:  # one listing, no stamps
            with _storage.paths.looking(self._directory):
                listed = _steps.names.listed(self._directory, self._format)
                return {s: path for s, path in listed.items() if _was_step(path)}
        known: dict[Path, _storage.local.Stamp] = {}
        found = {}
        for step, path in _steps.names.listed(self._directory, self._format).items():
            stamp = _storage.local.stamp(path)
            if self._known.get(path) == stamp or _was_step(path):
                known[path], found[step] = stamp, path
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

    def ranked(self) -> dict[int, run_metrics.Ranked]:
        """The steps as policies see them."""
        return {step: found.ranked for step, found in self.found().items()}

    def has_changed(self, path: Path) -> bool:
        """Whether the metrics of the step `path` are others than were read of it."""
        return self._metrics.has_changed(path)

    def found(self) -> dict[int, Found]:
        """The steps as they are now, without those that cannot be recognised."""
        with (
            _storage.permissions.explained(self._directory),
            _storage.paths.looking(self._directory),
        ):
            return self._looked_at()

    def _looked_at(self) -> dict[int, Found]:
        elsewhere: run_metrics.MetricsByStep = {}
        if self._metrics_from is not None:
            elsewhere = run_metrics.by_step(self._metrics_from())
        found = {}
        listed = self.listed()
        for remembered in (self._metrics, self._created):
            remembered.forget(all_but=set(listed.values()))
        for step, path in listed.items():
            if not is_step(path):
                continue
            marks = _steps.markers.of(path, dataset=_native.checkpoint.DATASET)
            ranked = run_metrics.Ranked(
                step,
                temporary=marks.temporary,
                elsewhere=elsewhere.get(step, {}),
                metrics=functools.partial(self._metrics, path),
                created=functools.partial(self._created, path),
            )
            found[step] = Found(path, marks, ranked)
        return found


def _was_step(path: Path) -> bool:
    """Whether a checkpoint is, or was, at `path`: a damaged one is to be told of."""
    try:
        return _steps.scan.sign(path) is not None or bool(formats.recognises(path))
    except (errors.CheckpointError, OSError):
        return True


def is_step(path: Path) -> bool:
    """Whether `path` is a checkpoint, and not merely called like one.

    One that must be loaded item by item is one, too; one that cannot be read is not.
    """
    try:
        return formats.recognises(path)
    except errors.CheckpointFormatError:
        return True
    except errors.DamagedCheckpointError:
        return False
