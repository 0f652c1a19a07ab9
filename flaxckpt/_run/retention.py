"""Retention: deletes the steps and items of a directory that `judge` does not keep."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, errors, policies
from flaxckpt._run import judge, run_index

_log = logging.getLogger(__name__)

_DELETING_SECS = 2.0
"""Seconds that a save may spend on deletions while a caller waits."""

_LEAST_DELETED = 2
"""Deletions after each save, regardless of their duration."""


_MANY_STEPS = 3
"""As many steps without any metrics are worth a warning, if a policy needs one."""


class _Decision(NamedTuple):
    """A decision of retention: the steps and items to delete, and known damage.

    `saves` identifies the saves of these steps: another job may replace one meanwhile.
    """

    steps: Mapping[int, run_index.RunStep]
    damage: Mapping[int, str]
    doomed: Sequence[int]
    items: Sequence[tuple[int, str]]
    saves: Mapping[int, str | None]

    def is_unchanged(self, step: int, now: Path) -> bool:
        """Returns True if the step, now at the path `now`, is the one decided about."""
        return run_index.identify_save(now) == self.saves[step]

    @property
    def is_empty(self) -> bool:
        return not (self.doomed or self.items)


class Retention:
    """Deletes what the rules of a run's or a staging directory do not keep."""

    def __init__(
        self, directory: Path, step_format: _steps.names.StepFormat, rules: judge.Rules
    ) -> None:
        self.rules = rules
        self._directory = directory
        self._format = step_format
        self.index = run_index.RunIndex(directory, step_format, rules.metrics_from)
        self.judge = judge.Judge(rules)
        self._has_looked_for_items = False

    # ---- decisions ----------------------------------------------------------

    def would_keep(self, step: int, coming: Retention) -> bool:
        """Returns True if a step of `coming` would stay; its pending uploads count."""
        steps = self.index.listed()
        steps |= {s: f for s, f in coming.index.listed().items() if f.markers.waiting}
        return bool(self.judge.find_reasons(self.rules.keep, steps).get(step))

    def explain(self, rules: judge.Rules | None = None) -> dict[int, list[str]]:
        """Returns step -> the reasons to keep it, oldest first; none if it is to go."""
        return self.judge.explain(self.index.read(), rules).reasons

    # ---- deletions -----------------------------------------------------------

    def delete_unkept(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes the steps and items that no policy keeps; returns the deleted steps.

        Checks the files of `just_saved` first, and raises SaveFailedError if any are
        missing; without it, verifies every byte of the newest step. Logs failed
        deletions, and tries them again next time.

        `just_saved` stays this time: if retention cannot decide then, it logs the error
        and deletes nothing. While `is_awaited` returns True, a caller waits for the
        save: deletions then stop after 2 s, and the rest is left for the next time.
        """
        with _storage.paths.listing_cache(self._directory):
            return self._delete_unkept(just_saved, is_awaited)

    def _delete_unkept(
        self, just_saved: int | None, is_awaited: Callable[[], bool]
    ) -> tuple[int, ...]:
        try:
            decision = self.decide(just_saved)
        except Exception as error:
            if just_saved is None:
                raise
            _log.error("nothing is deleted after step %d: %s", just_saved, error)
            return ()
        self._warn_of_unknown_items(decision)
        self._warn_of_missing_metrics(decision)
        if not decision.is_empty:
            if just_saved is None:
                self._check_complete(max(decision.steps), reads_all=True)
            else:
                self._check_complete(just_saved, reads_all=False)
        is_over = _deadline(is_awaited)
        deleted = tuple(self._delete(decision, just_saved, is_over))
        what = "the remainder of earlier deletions"
        if not is_over():
            sweep = functools.partial(
                _steps.delete.sweep, self._directory, self._format
            )
            self._attempt(what, sweep)
        return deleted

    def decide(self, just_saved: int | None = None) -> _Decision:
        """Returns what to delete; raises SaveFailedError if the newest is damaged."""
        steps = self.index.listed()
        if not self._may_delete(steps):
            steps = {}
        judged = self.judge.judge(steps, just_saved=just_saved)
        for number, loss in judged.damage.items():
            self.judge.warn_once(
                (number, loss),
                "step %d is damaged, so it does not count for the policies, and stays:"
                " %s; verify it, with --mark",
                number,
                loss,
            )
        if judged.newest_damage:
            raise self._incomplete_error(max(steps), judged.newest_damage)
        affected = {*judged.doomed, *(step for step, _ in judged.items)}
        saves = {n: run_index.identify_save(steps[n].path) for n in affected}
        # A step that was replaced before its save was identified stays this time.
        replaced = {n for n in affected if steps[n].is_outdated()}
        return _Decision(
            steps,
            judged.damage,
            [step for step in judged.doomed if step not in replaced],
            [(step, item) for step, item in judged.items if step not in replaced],
            saves,
        )

    def _delete(
        self, decision: _Decision, just_saved: int | None, is_over: Callable[[], bool]
    ) -> Iterator[int]:
        """Deletes steps, then items of steps; yields the deleted steps."""
        tried: set[int] = set()
        is_new = False  # decide again once per deletion, or none would happen
        while remaining := [step for step in decision.doomed if step not in tried]:
            step = remaining[0]
            if not is_new and self._is_outdated(decision, step):
                try:
                    decision, is_new = self.decide(just_saved), True
                except Exception as error:
                    _log.error("no more steps are deleted: %s", error)
                    return
                continue
            if is_over():
                return
            is_new = False
            tried.add(step)
            path = decision.steps[step].path
            is_unchanged = functools.partial(decision.is_unchanged, step)
            delete = functools.partial(
                _steps.delete.delete,
                path,
                find_foreign=_checkpoint.overwrite.find_foreign,
                is_unchanged=is_unchanged,
            )
            if self._attempt(f"step {step}", delete):
                yield step
        for step, item in decision.items:
            if is_over():
                return
            path = decision.steps[step].path
            what = f"{judge.describe_item(item)} of step {step}"
            is_unchanged = functools.partial(decision.is_unchanged, step)
            delete = functools.partial(
                _steps.delete.delete_item,
                path,
                item,
                find_foreign=_checkpoint.overwrite.find_foreign,
                is_unchanged=is_unchanged,
            )
            self._attempt(what, delete)

    def _warn_of_missing_metrics(self, decision: _Decision) -> None:
        """Warns once per `BestN` whose metric is missing, though steps have others.

        If no step has any metrics, warns only if there are several steps: metrics may
        be added later.
        """
        ranked = [*decision.steps.values()]
        of_items = itertools.chain.from_iterable(self.rules.keep_items.values())
        for policy in (*self.rules.keep, *of_items):
            if not isinstance(policy, policies.BestN):
                continue
            if not ranked or not policies.is_undecided(policy, ranked):
                continue
            names = sorted({name for step in ranked for name in step.metrics})
            if not names and len(ranked) < _MANY_STEPS:
                continue
            self.judge.warn_once(
                policy,
                "no step of %s has a finite metric %r yet, so %s keeps all steps: any"
                " of them may be the best; the steps have %s. Pass the metric to"
                " save(…, metrics=…) or add_metrics, or set metrics_from",
                self._directory,
                policy.metric,
                policy,
                judge.list_first(names) or "no metrics at all",
            )

    def _warn_of_unknown_items(self, decision: _Decision) -> None:
        """Warns once, without an error: the items may be JSON items of later saves."""
        if self._has_looked_for_items or not decision.steps:
            return
        self._has_looked_for_items = True
        items = self.rules.items
        known = {*items.trees, items.dataset}
        for step in decision.steps.values():
            known |= step.markers.items | step.markers.deleted_items
        if unknown := sorted(self.rules.keep_items.keys() - known):
            _log.warning(
                "keep_items has policies for %s, but no step of %s has an item of this"
                " name; items= has %s. A branch of the state is an item of its own with"
                " items=(…) only",
                errors.first_few([repr(item) for item in unknown]),
                self._directory,
                items.state,
            )

    def _is_outdated(self, decision: _Decision, step: int) -> bool:
        """Returns True if files that policies read of `step` or kept steps changed."""
        doomed = set(decision.doomed)
        return any(
            other.is_outdated()
            for number, other in decision.steps.items()
            if number == step or number not in doomed
        )

    def _may_delete(self, steps: Mapping[int, run_index.RunStep]) -> bool:
        """Returns True if rules or temporary steps make a deletion possible."""
        is_ruled = bool(self.rules.keep or self.rules.keep_items)
        return is_ruled or any(step.temporary for step in steps.values())

    def _check_complete(self, step: int, *, reads_all: bool) -> None:
        path = self._directory / self._format.name(step)
        try:
            if reads_all:
                _checkpoint.verify.check(path, step)
            else:
                self.judge.remember_whole(path, step)
        except (errors.CheckpointError, OSError) as error:
            raise self._incomplete_error(step, str(error)) from error

    def _incomplete_error(self, step: int, why: str) -> errors.SaveFailedError:
        path = self._directory / self._format.name(step)
        return errors.SaveFailedError(
            f"step {step} is incomplete, so no other step is deleted: {why}"
            f"\nIf this happens again, delete {path}, check the disk, and save again."
        )

    def _attempt(self, what: str, delete: Callable[[], None]) -> bool:
        """Calls `delete`; logs a failure and returns False."""
        try:
            delete()
        except errors.SaveFailedError as error:  # a new reader, pin or save
            _log.info("%s stays for now: %s", what, error)
            return False
        except FileNotFoundError as error:
            _log.info("%s was deleted by another process: %s", what, error)
            return False
        except OSError as error:
            _log.error("%s could not be deleted: %s", what, error)
            return False
        return True


def _deadline(is_awaited: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that says when to stop; two deletions are always allowed."""
    end = time.monotonic() + _DELETING_SECS
    calls = itertools.count()

    def is_over() -> bool:
        return (
            next(calls) >= _LEAST_DELETED and time.monotonic() >= end and is_awaited()
        )

    return is_over
