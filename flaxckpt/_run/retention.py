"""Retention: decides which steps of a run directory stay, and deletes the rest."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, errors, policies
from flaxckpt._run import index, metrics
from flaxckpt.formats import _native
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

_DELETING_SECS = 2.0
"""Seconds that a save may spend on deletions while a caller waits."""

_LEAST_DELETED = 2
"""Deletions after each save, regardless of their duration."""


class Rules(NamedTuple):
    """Rules of retention.

    Attributes:
        keep: Policies for steps; a step stays if any policy keeps it.
        keep_dataset: Policies for the dataset states of the steps that stay; without
            policies, all dataset states stay.
        metrics_from: Returns metrics of steps measured elsewhere; None for none.
    """

    keep: tuple[PreservationPolicy, ...] = ()
    keep_dataset: tuple[PreservationPolicy, ...] = ()
    metrics_from: Callable[[], metrics.MetricsByStep] | None = None

    @classmethod
    def of(cls, keep: object, keep_dataset: object, metrics_from: object) -> Rules:
        """Returns the rules for the options of these names.

        Raises:
            OptionError: An option has the wrong type.
        """
        if metrics_from is not None and not callable(metrics_from):
            raise errors.OptionError(
                "metrics_from must be a function that returns step -> name -> number,"
                f" got {metrics_from!r:.80}: write metrics_from=lambda: measured"
            )
        return cls(
            policies.check(keep, "keep"),
            policies.check(keep_dataset, "keep_dataset"),
            metrics_from,
        )


class _Judged(NamedTuple):
    """A decision of retention.

    Attributes:
        found: All steps.
        going: The steps to delete.
        datasets: The steps to delete the dataset state of.
    """

    found: Mapping[int, index.RunStep]
    going: Sequence[int]
    datasets: Sequence[int]


class Retention:
    """Decides which steps stay in a directory, and deletes the rest.

    Args:
        directory: The run directory or the staging directory.
        step_format: Format of the names of steps.
        rules: Rules of retention.

    Attributes:
        rules: Rules of retention.
        steps: The steps in the directory.
    """

    def __init__(
        self, directory: Path, step_format: _steps.names.StepFormat, rules: Rules
    ) -> None:
        self.rules = rules
        self._directory = directory
        self._format = step_format
        self.steps = index.RunIndex(directory, step_format, rules.metrics_from)
        self._told: set[PreservationPolicy] = set()

    # ---- decisions ----------------------------------------------------------

    def would_keep(self, step: int, coming: Retention) -> bool:
        """Returns True if a step of another directory would stay here.

        Args:
            step: A step of `coming`.
            coming: The other directory; its pending uploads count as steps here.
        """
        others = {s: f for s, f in coming.steps.found().items() if f.marks.waiting}
        both = self.steps.found() | others
        return bool(self._decided(self.rules.keep, both).get(step))

    def explain(self) -> dict[int, list[str]]:
        """Returns the reasons for keeping each step, oldest first.

        Steps without reasons are to be deleted.
        """
        return self._explained(self.steps.found())

    def _decided(
        self, keep: Sequence[PreservationPolicy], found: Mapping[int, index.RunStep]
    ) -> dict[int, list[str]]:
        """Returns the reasons for keeping each step of `found`."""
        reasons = policies.decide(
            keep,
            [each.ranked for each in found.values()],
            pinned=[step for step, each in found.items() if each.marks.pinned],
            readers={step: each.marks.readers for step, each in found.items()},
        )
        for step, why in reasons.items():
            if found[step].ranked.is_doubtful:  # may be the best
                why.append("metrics damaged")
        return reasons

    def _explained(self, found: Mapping[int, index.RunStep]) -> dict[int, list[str]]:
        reasons = self._decided(self.rules.keep, found)
        for step, why in reasons.items():
            if found[step].marks.waiting:
                why.append("not uploaded")
            if why and found[step].marks.let_go:
                why.append("dataset let go")
        return reasons

    # ---- deletions -----------------------------------------------------------

    def apply(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes the steps and dataset states that no policy keeps.

        Before the first deletion, checks that the files of the step just saved are
        complete; without such a step, verifies every byte of the newest step. Failed
        deletions are logged, and tried again next time.

        Args:
            just_saved: A step that stays this time. If retention cannot decide then,
                logs the error and deletes nothing.
            is_awaited: Returns True while a caller waits for the save. Deletions then
                stop after 2 s, and the rest is left for the next time.

        Returns:
            The deleted steps.

        Raises:
            SaveFailedError: The checked step is incomplete or damaged.
        """
        with _storage.paths.listing_cache(self._directory):
            return self._apply(just_saved, is_awaited)

    def _apply(
        self, just_saved: int | None, is_awaited: Callable[[], bool]
    ) -> tuple[int, ...]:
        try:
            judged = self._judge(just_saved)
        except Exception as error:
            if just_saved is None:
                raise
            _log.error("nothing is deleted after step %d: %s", just_saved, error)
            return ()
        is_told = self._tell_of_unmeasured(judged)
        is_any_to_go = bool(judged.going or judged.datasets)
        if is_told and is_any_to_go and just_saved is not None:
            _log.warning("nothing is deleted after step %d this time", just_saved)
            return ()
        if is_any_to_go:
            if just_saved is None:
                self._check_whole(max(judged.found), _checkpoint.verify.check)
            else:
                self._check_whole(just_saved, _checkpoint.file_sizes.check)
        is_over = _out_of_time(is_awaited)
        deleted = tuple(self._delete(judged, just_saved, is_over))
        what = "the remainder of earlier deletions"
        if not is_over():
            self._attempt(what, _steps.delete.sweep, self._directory, self._format)
        return deleted

    def _judge(self, just_saved: int | None) -> _Judged:
        """Returns the current decision of retention."""
        found = self.steps.found() if self._anything_may_go() else {}
        reasons = self._explained(found)
        going = [s for s, why in reasons.items() if not why and s != just_saved]
        staying = {s: each for s, each in found.items() if s not in going}
        return _Judged(found, going, self._datasets(staying, just_saved))

    def _delete(
        self, judged: _Judged, just_saved: int | None, is_over: Callable[[], bool]
    ) -> Iterator[int]:
        """Deletes steps, then dataset states; yields the deleted steps."""
        tried: set[int] = set()
        is_new = False  # decide again once per deletion, or none would happen
        while waiting := [step for step in judged.going if step not in tried]:
            step = waiting[0]
            if not is_new and self._are_measured_anew(judged, step):
                try:
                    judged, is_new = self._judge(just_saved), True
                except Exception as error:
                    _log.error("no more steps are deleted: %s", error)
                    return
                continue
            if is_over():
                return
            is_new = False
            tried.add(step)
            path = judged.found[step].path
            if self._attempt(f"step {step}", _steps.delete.delete, path):
                yield step
        for step in judged.datasets:
            if is_over():
                return
            what = f"the dataset state of step {step}"
            path = judged.found[step].path
            self._attempt(
                what, _steps.delete.delete_dataset, path, _native.items.DATASET
            )

    def _tell_of_unmeasured(self, judged: _Judged) -> bool:
        """Warns, once per policy, if no step has the metric of a `BestN` policy.

        If no step has any metrics, warns only when steps are to be deleted: metrics may
        be added later.

        Returns:
            True if a warning was logged.
        """
        checkpoints = [found.ranked for found in judged.found.values()]
        told = len(self._told)
        for policy in (*self.rules.keep, *self.rules.keep_dataset):
            if not isinstance(policy, policies.BestN) or policy in self._told:
                continue
            if not checkpoints or policy.preserved(checkpoints):
                continue
            known = sorted({name for each in checkpoints for name in each.metrics})
            if not (known or judged.going or judged.datasets):
                continue
            self._told.add(policy)
            _log.warning(
                "no step of %s has a finite metric %r yet, so %s keeps nothing, and the"
                " best step may be deleted; the steps have %s. Pass the metric to"
                " save(…, metrics=…) or add_metrics, or set metrics_from",
                self._directory,
                policy.metric,
                policy,
                ", ".join(known) or "no metrics at all",
            )
        return len(self._told) > told

    def _are_measured_anew(self, judged: _Judged, step: int) -> bool:
        """Returns True if the metrics of `step`, or of a kept step, have changed.

        Other steps to be deleted are checked before their own deletion.
        """
        going = set(judged.going)
        return any(
            self.steps.has_changed(each.path)
            for other, each in judged.found.items()
            if other == step or other not in going
        )

    def _anything_may_go(self) -> bool:
        """Returns True if rules or temporary steps make a deletion possible."""
        if self.rules.keep or self.rules.keep_dataset:
            return True
        with _storage.permissions.explain_errors(self._directory):
            return any(map(_steps.markers.is_temporary, self.steps.listed().values()))

    def _check_whole(self, step: int, check: Callable[[Path], None]) -> None:
        path = self._directory / self._format.name(step)
        try:
            check(path)
        except (errors.CheckpointError, OSError) as error:
            raise errors.SaveFailedError(
                f"step {step} is incomplete, so no other step is deleted: {error}"
                f"\nIf this happens again, delete {path}, check the disk, and save"
                " again."
            ) from error

    def _datasets(
        self, staying: Mapping[int, index.RunStep], just_saved: int | None
    ) -> list[int]:
        """Returns the steps to delete the dataset state of."""
        states = {s: each for s, each in staying.items() if each.marks.has_dataset}
        # Finish deletions that were begun.
        going = {step for step, each in states.items() if each.marks.let_go}
        if self.rules.keep_dataset:
            reasons = self._decided(self.rules.keep_dataset, states)
            going |= {s for s, why in reasons.items() if not why and s != just_saved}
        return sorted(going)

    def _attempt(self, what: str, delete: Callable[..., None], *args: Any) -> bool:
        """Calls `delete`; logs a failure and returns False."""
        try:
            delete(*args)
        except errors.SaveFailedError as error:  # a new reader or pin
            _log.info("%s stays for now: %s", what, error)
            return False
        except FileNotFoundError as error:
            _log.info("%s was deleted by another process: %s", what, error)
            return False
        except OSError as error:
            _log.error("%s could not be deleted: %s", what, error)
            return False
        return True


def _out_of_time(is_awaited: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that returns True to stop; call before each deletion.

    Two deletions are always allowed, as each save adds a single step.
    """
    end = time.monotonic() + _DELETING_SECS
    asked = itertools.count()

    def is_over() -> bool:
        return (
            next(asked) >= _LEAST_DELETED and time.monotonic() >= end and is_awaited()
        )

    return is_over
