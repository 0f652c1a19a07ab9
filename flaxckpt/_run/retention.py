"""Which steps of a run directory stay, and the end of those that do not."""

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
"""For so long, a save may delete while somebody waits for it."""

_LEAST_DELETED = 2
"""What is deleted after each save, however long that takes."""


class Rules(NamedTuple):
    """What is to stay.

    Attributes:
        keep: A step stays if any of them keeps it.
        keep_dataset: Of the steps that stay, the state of the dataset does if any of
            these keeps it; without any, all do.
        metrics_from: Gives metrics of steps that were measured elsewhere.
    """

    keep: tuple[PreservationPolicy, ...] = ()
    keep_dataset: tuple[PreservationPolicy, ...] = ()
    metrics_from: Callable[[], metrics.MetricsByStep] | None = None

    @classmethod
    def of(cls, keep: object, keep_dataset: object, metrics_from: object) -> Rules:
        """The rules that options of these names mean.

        Raises:
            OptionError: One of them is something else.
        """
        if metrics_from is not None and not callable(metrics_from):
            raise errors.OptionError(
                "metrics_from wants a function that returns step -> name -> number, got"
                f" {metrics_from!r:.80}: write metrics_from=lambda: measured"
            )
        return cls(
            policies.checked(keep, "keep"),
            policies.checked(keep_dataset, "keep_dataset"),
            metrics_from,
        )


class _Judged(NamedTuple):
    """What is to go.

    Attributes:
        found: The steps that are there.
        going: Those to delete.
        datasets: Those of which the dataset's state is to be deleted.
    """

    found: Mapping[int, index.RunStep]
    going: Sequence[int]
    datasets: Sequence[int]


class Retention:
    """Decides what stays in a run directory, and deletes the rest.

    Args:
        directory: Of the run.
        step_format: How its steps are called.
        rules: What is to stay.

    Attributes:
        rules: The same.
        steps: Those that are there.
    """

    def __init__(
        self, directory: Path, step_format: _steps.names.StepFormat, rules: Rules
    ) -> None:
        self.rules = rules
        self._directory = directory
        self._format = step_format
        self.steps = index.RunIndex(directory, step_format, rules.metrics_from)
        self._told: set[PreservationPolicy] = set()

    # ---- what stays ----------------------------------------------------------

    def would_keep(self, step: int, coming: Retention) -> bool:
        """Whether a step of another directory would stay here.

        Args:
            step: It is one of those.
            coming: The other directory, of which all that waits comes here.
        """
        others = {s: f for s, f in coming.steps.found().items() if f.marks.waiting}
        both = self.steps.found() | others
        return bool(self._decided(self.rules.keep, both).get(step))

    def explain(self) -> dict[int, list[str]]:
        """Why each step stays, oldest first; a step without a reason would go."""
        return self._explained(self.steps.found())

    def _decided(
        self, keep: Sequence[PreservationPolicy], found: Mapping[int, index.RunStep]
    ) -> dict[int, list[str]]:
        """Why each step stays that is among `found`."""
        reasons = policies.decide(
            keep,
            [each.ranked for each in found.values()],
            pinned=[step for step, each in found.items() if each.marks.pinned],
            readers={step: each.marks.readers for step, each in found.items()},
        )
        for step, why in reasons.items():
            if found[step].ranked.is_doubtful:  # it may be the best
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

    # ---- what goes -----------------------------------------------------------

    def apply(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes what nothing keeps, one after another.

        Nothing is deleted before the step just saved is found whole on the disk, or
        else every byte of the newest is found as it was written. What cannot be deleted
        is logged, and tried again next time.

        Args:
            just_saved: A step that stays this time. If what is to go cannot be told
                then, that is logged, and nothing is deleted.
            is_awaited: Whether somebody waits for this to end. If it takes long then,
                the rest goes next time.

        Returns:
            The steps that were deleted.

        Raises:
            SaveFailedError: That step is not whole.
        """
        with _storage.paths.looking(self._directory):
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
            _log.warning("nothing is deleted after step %d, this once", just_saved)
            return ()
        if is_any_to_go:
            if just_saved is None:
                self._check_whole(max(judged.found), _checkpoint.verify.check)
            else:
                self._check_whole(just_saved, _checkpoint.file_sizes.check)
        is_over = _out_of_time(is_awaited)
        deleted = tuple(self._delete(judged, just_saved, is_over))
        what = "what deletions before have left"
        if not is_over():
            self._attempt(what, _steps.delete.sweep, self._directory, self._format)
        return deleted

    def _judge(self, just_saved: int | None) -> _Judged:
        """Says what is to go, as of now."""
        found = self.steps.found() if self._anything_may_go() else {}
        reasons = self._explained(found)
        going = [s for s, why in reasons.items() if not why and s != just_saved]
        staying = {s: each for s, each in found.items() if s not in going}
        return _Judged(found, going, self._datasets(staying, just_saved))

    def _delete(
        self, judged: _Judged, just_saved: int | None, is_over: Callable[[], bool]
    ) -> Iterator[int]:
        """Deletes steps, and then states of datasets; yields the steps."""
        tried: set[int] = set()
        is_new = False  # judged anew all the time, nothing would ever go
        while waiting := [step for step in judged.going if step not in tried]:
            step = waiting[0]
            if not is_new and self._are_measured_anew(judged, step):
                try:
                    judged, is_new = self._judge(just_saved), True
                except Exception as error:
                    _log.error("no more is deleted: %s", error)
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
                what, _steps.delete.delete_dataset, path, _native.checkpoint.DATASET
            )

    def _tell_of_unmeasured(self, judged: _Judged) -> bool:
        """Logs, once for each, of a metric to keep the best of that no step has.

        Where no step has any metric at all, they may be added later: that is logged
        when steps are to go.

        Returns:
            Whether something was logged.
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
                "no step of %s has a finite metric %r yet, so %s keeps nothing, and"
                " other policies let steps go of which one may be the best; there are"
                " %s. Give it by save(…, metrics=…), add_metrics or metrics_from",
                self._directory,
                policy.metric,
                policy,
                ", ".join(known) or "no metrics at all",
            )
        return len(self._told) > told

    def _are_measured_anew(self, judged: _Judged, step: int) -> bool:
        """Whether metrics have changed of a step that is to go, or of one that stays.

        Of others that are to go, it is asked when it is their turn.
        """
        going = set(judged.going)
        return any(
            self.steps.has_changed(each.path)
            for other, each in judged.found.items()
            if other == step or other not in going
        )

    def _anything_may_go(self) -> bool:
        """Whether it is worth a closer look at every step."""
        if self.rules.keep or self.rules.keep_dataset:
            return True
        with _storage.permissions.explained(self._directory):
            return any(map(_steps.markers.is_temporary, self.steps.listed().values()))

    def _check_whole(self, step: int, check: Callable[[Path], None]) -> None:
        path = self._directory / self._format.name(step)
        try:
            check(path)
        except (errors.CheckpointError, OSError) as error:
            raise errors.SaveFailedError(
                f"step {step} is not whole on the disk, so no other is deleted: {error}"
                f"\nDelete {path} if it stays so, see that the disk is sound, and save"
                " again."
            ) from error

    def _datasets(
        self, staying: Mapping[int, index.RunStep], just_saved: int | None
    ) -> list[int]:
        """The steps whose dataset state goes."""
        states = {s: each for s, each in staying.items() if each.marks.has_dataset}
        # What was begun is finished.
        going = {step for step, each in states.items() if each.marks.let_go}
        if self.rules.keep_dataset:
            reasons = self._decided(self.rules.keep_dataset, states)
            going |= {s for s, why in reasons.items() if not why and s != just_saved}
        return sorted(going)

    def _attempt(self, what: str, delete: Callable[..., None], *args: Any) -> bool:
        """Deletes something that nothing keeps; says so if that fails, and goes on."""
        try:
            delete(*args)
        except errors.SaveFailedError as error:  # a reader came meanwhile, or a pin
            _log.info("%s stays for now: %s", what, error)
            return False
        except FileNotFoundError as error:
            _log.info("%s was deleted by somebody else: %s", what, error)
            return False
        except OSError as error:
            _log.error("%s could not be deleted: %s", what, error)
            return False
        return True


def _out_of_time(is_awaited: Callable[[], bool]) -> Callable[[], bool]:
    """A function that says whether to stop deleting; it is asked before each deletion.

    Two are always let through, as each save adds but one step.
    """
    end = time.monotonic() + _DELETING_SECS
    asked = itertools.count()

    def is_over() -> bool:
        return (
            next(asked) >= _LEAST_DELETED and time.monotonic() >= end and is_awaited()
        )

    return is_over
