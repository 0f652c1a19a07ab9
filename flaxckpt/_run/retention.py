"""Retention: decides which steps of a run directory stay, and deletes the rest."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt import _checkpoint, _formats, _steps, _storage, errors, policies
from flaxckpt._formats.items import Items
from flaxckpt._run import metrics, ranked_steps
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

_DELETING_SECS = 2.0
"""Seconds that a save may spend on deletions while a caller waits."""

_LEAST_DELETED = 2
"""Deletions after each save, regardless of their duration."""


DAMAGED = "damaged: "
"""Begins the reason of a step that does not count, and is not deleted."""


_MANY_STEPS = 3
"""As many steps without any metrics are worth a warning, if a policy needs one."""


class Rules(NamedTuple):
    """Rules of retention.

    Attributes:
        keep: Policies for steps; a step stays if any policy keeps it.
        keep_items: Item -> policies for the item in the steps that stay; items without
            policies stay.
        metrics_from: Returns metrics of steps measured elsewhere; None for none.
        items: The items with arrays, and the item of the dataset.
    """

    keep: tuple[PreservationPolicy, ...] = ()
    keep_items: Mapping[str, tuple[PreservationPolicy, ...]] = MappingProxyType({})
    metrics_from: Callable[[], metrics.MetricsByStep] | None = None
    items: Items = Items()

    @classmethod
    def of(
        cls,
        keep: object,
        keep_dataset: object,
        keep_items: object,
        metrics_from: object,
        items: Items,
    ) -> Rules:
        """Returns the rules for the options of these names.

        Raises:
            OptionError: An option has the wrong type, no item can have a name, or
                policies for all items with arrays would leave steps without any.
        """
        if metrics_from is not None and not callable(metrics_from):
            raise errors.OptionError(
                "metrics_from must be a function that returns step -> name -> number,"
                f" got {metrics_from!r:.80}: write metrics_from=lambda: measured"
            )
        if not isinstance(keep_items, Mapping):
            raise errors.OptionError(
                "keep_items must be a dict, item -> policies, got"
                f" {keep_items!r:.80}: write keep_items={{'optimizer': [LatestN(2)]}}"
            )
        if set(items.trees) <= keep_items.keys():
            raise errors.OptionError(
                f"keep_items has policies for all items with arrays, {items.trees}, so"
                " a step could lose them all: leave one out, and use keep= for steps"
            )
        by_item = {items.dataset: policies.check(keep_dataset, "keep_dataset")}
        for item, some in keep_items.items():
            if item == items.dataset and keep_dataset:
                raise errors.OptionError(
                    f"keep_items has policies for {item!r}, the dataset's item, and so"
                    " has keep_dataset: pass one of both"
                )
            if fault := _formats.native_names.find_fault(item):
                raise errors.OptionError(
                    f"keep_items has policies for {item!r:.80}, which cannot be an"
                    f" item: {fault}"
                )
            by_item[item] = policies.check(some, f"keep_items[{item!r}]")
        return cls(
            policies.check(keep, "keep"),
            {item: some for item, some in by_item.items() if some},
            metrics_from,
            items,
        )


class _Decision(NamedTuple):
    """A decision of retention.

    Attributes:
        steps: All steps.
        damage: Steps that policies would keep -> what their files lack.
        doomed: The steps to delete.
        items: The items to delete from steps that stay: step and item.
        saves: The identity of the save of each step to delete, or with an item to
            delete: another job may replace the step meanwhile.
    """

    steps: Mapping[int, ranked_steps.RunStep]
    damage: Mapping[int, str]
    doomed: Sequence[int]
    items: Sequence[tuple[int, str]]
    saves: Mapping[int, str | None]

    def is_unchanged(self, step: int, now: Path) -> bool:
        """Returns True if the step, now at the path `now`, is the one decided about."""
        return ranked_steps.identify_save(now) == self.saves[step]

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be deleted."""
        return not (self.doomed or self.items)


class _Choice(NamedTuple):
    """What policies would keep and delete.

    Attributes:
        reasons: Step -> the reasons of the policies to keep it.
        doomed: The steps to delete.
        items: The items to delete from steps that stay: step and item.
        staying: The steps that stay.
    """

    reasons: dict[int, list[str]]
    doomed: list[int]
    items: list[tuple[int, str]]
    staying: AbstractSet[int]

    @property
    def deleted(self) -> set[object]:
        """The steps and the items to delete."""
        return {*self.doomed, *self.items}


class _Judged(NamedTuple):
    """What stays in a directory, and why.

    Attributes:
        reasons: Step -> the reasons to keep it, ascending; empty if it is to go.
        items: The items to delete from steps that stay: step and item.
        damage: Step that does not count -> what its files lack.
        newest_damage: The same of the newest step, if it keeps others from deletion.
    """

    reasons: dict[int, list[str]]
    items: list[tuple[int, str]]
    damage: dict[int, str]
    newest_damage: str


class _Foreign:
    """The files of others in steps, each looked for once."""

    def __init__(self) -> None:
        self._found: dict[Path, list[str]] = {}

    def find(self, path: Path) -> list[str]:
        if path not in self._found:
            try:
                self._found[path] = _checkpoint.overwrite.find_foreign(path)
            except FileNotFoundError:  # deleted just now
                self._found[path] = []
            except errors.StoreError:
                raise  # each further request would wait for its deadline
            except OSError as error:
                self._found[path] = [f"unknown, as {errors.one_line(error)}"]
        return self._found[path]


class Retention:
    """Decides which steps stay in a directory, and deletes the rest.

    Args:
        directory: The run directory or the staging directory.
        step_format: Format of the names of steps.
        rules: Rules of retention.

    Attributes:
        rules: Rules of retention.
        index: The steps in the directory.
    """

    def __init__(
        self, directory: Path, step_format: _steps.names.StepFormat, rules: Rules
    ) -> None:
        self.rules = rules
        self._directory = directory
        self._format = step_format
        self.index = ranked_steps.RankedSteps(
            directory, step_format, rules.metrics_from
        )
        self._warned: set[object] = set()
        # The steps found whole; None where files cannot be looked at again cheaply.
        self._whole: dict[Path, _checkpoint.file_sizes.Files | None] = {}
        self._has_looked_for_items = False

    # ---- decisions ----------------------------------------------------------

    def would_keep(self, step: int, coming: Retention) -> bool:
        """Returns True if a step of another directory would stay here.

        Args:
            step: A step of `coming`.
            coming: The other directory; its pending uploads count as steps here.
        """
        pending = {s: f for s, f in coming.index.steps().items() if f.markers.waiting}
        steps = self.index.steps() | pending
        return bool(self._reasons(self.rules.keep, steps).get(step))

    def explain(self, rules: Rules | None = None) -> dict[int, list[str]]:
        """Returns the reasons for keeping each step, oldest first.

        Steps without reasons are to be deleted.

        Args:
            rules: Rules of retention; by default those of this object.
        """
        rules = rules or self.rules
        judged = self._judge(self.index.steps(), rules, just_saved=None)
        if judged.newest_damage:
            why = [f"nothing is deleted while step {max(judged.reasons)} is damaged"]
            return {step: found or why for step, found in judged.reasons.items()}
        return judged.reasons

    def to_delete(self) -> _Decision:
        """Returns what `delete_unkept` would delete now.

        Raises:
            SaveFailedError: The newest step is damaged.
        """
        return self._decide(None)

    def _reasons(
        self,
        keep: Sequence[PreservationPolicy],
        steps: Mapping[int, ranked_steps.RunStep],
    ) -> dict[int, list[str]]:
        """Returns the reasons of the policies `keep` for keeping each step."""
        reasons = policies.decide(
            keep,
            [step.ranked for step in steps.values()],
            pinned=[n for n, step in steps.items() if step.markers.pinned],
            readers={n: step.markers.readers for n, step in steps.items()},
        )
        for number, why in reasons.items():
            if steps[number].ranked.is_doubtful:  # may be the best
                why.append("metrics damaged")
        return reasons

    def _judge(
        self,
        steps: Mapping[int, ranked_steps.RunStep],
        rules: Rules,
        just_saved: int | None,
    ) -> _Judged:
        """Decides what stays, by steps that are whole as far as their files show.

        A step that a policy keeps is looked at before anything is deleted. If nothing
        is deleted, only the newest step and the best steps are. If files are missing,
        the step does not count, and stays.

        Args:
            steps: The steps.
            rules: Rules of retention.
            just_saved: A step that stays this time, and is looked at elsewhere. Without
                one, steps that were whole before are looked at again.
        """
        damage = {n: step.damage for n, step in steps.items() if step.damage}
        looked = set() if just_saved is None else {just_saved}
        foreign = _Foreign()

        def choose(absent: AbstractSet[int]) -> _Choice:
            counted = {n: step for n, step in steps.items() if n not in absent}
            reasons = self._reasons(rules.keep, counted)
            doomed = [n for n, why in reasons.items() if not why and n not in looked]
            if just_saved is not None:
                doomed = [n for n in doomed if n != just_saved]
            staying = {n: step for n, step in counted.items() if n not in doomed}
            items = self._items_to_delete(staying, rules, just_saved)
            return _Choice(reasons, doomed, items, staying.keys())

        while True:
            choice = choose(damage.keys())
            reasons, doomed, items, staying = choice
            unseen = staying - looked
            if just_saved is not None:
                unseen = self._select(unseen, steps, choice, damage.keys(), choose)
            elif not choice.deleted:
                unseen &= self._notable(rules.keep, {n: steps[n] for n in staying})
            if not unseen:
                break
            looked |= unseen
            lost = {n: self._find_loss(n, steps[n], just_saved is None) for n in unseen}
            damage |= {n: loss for n, loss in sorted(lost.items()) if loss is not None}
            if not any(lost.values()):
                break
        for number in doomed:
            if names := foreign.find(steps[number].path):
                reasons[number].append(f"files of others in it: {_first(names)}")
                self._warn_of_foreign(steps[number].path, names)
        kept_items = []
        for number, item in items:
            names = _steps.delete.in_item(foreign.find(steps[number].path), item)
            if names:
                self._warn_of_foreign(steps[number].path / item, names)
                what = _describe_item(item).removeprefix("the ")
                reasons[number].append(f"files of others in {what}: {_first(names)}")
            else:
                kept_items.append((number, item))
        self._name_markers(steps, reasons)
        for number, loss in damage.items():
            reasons[number] = [DAMAGED + loss]
        is_newest_good = just_saved is not None or not damage
        newest_damage = "" if is_newest_good else damage.get(max(steps), "")
        return _Judged(dict(sorted(reasons.items())), kept_items, damage, newest_damage)

    def _notable(
        self,
        keep: Sequence[PreservationPolicy],
        steps: Mapping[int, ranked_steps.RunStep],
    ) -> set[int]:
        """Returns the newest step, and the best steps by the policies `keep`."""
        ranked = [step.ranked for step in steps.values()]
        best = [p.preserved(ranked) for p in keep if isinstance(p, policies.BestN)]
        return {*list(steps)[-1:]}.union(*best)

    def _name_markers(
        self,
        steps: Mapping[int, ranked_steps.RunStep],
        reasons: Mapping[int, list[str]],
    ) -> None:
        for number, why in reasons.items():
            if steps[number].markers.waiting:
                why.append("not uploaded")
            if why:
                deleted = sorted(steps[number].markers.deleted_items)
                why += [
                    f"{_describe_item(i).removeprefix('the ')} deleted" for i in deleted
                ]

    def _select(
        self,
        unseen: AbstractSet[int],
        steps: Mapping[int, ranked_steps.RunStep],
        choice: _Choice,
        absent: AbstractSet[int],
        choose: Callable[[AbstractSet[int]], _Choice],
    ) -> set[int]:
        """Returns the steps of `unseen` to look at before the deletions of `choice`.

        A step that was whole is looked at again if less would be deleted without it:
        to look again at hundreds of kept steps would take longer than a save.

        Args:
            unseen: The steps that stay, not looked at for this decision.
            steps: All steps.
            choice: The decision.
            absent: The steps that did not count.
            choose: Decides without some steps.
        """
        if not choice.deleted:
            return set()
        new = {n for n in unseen if steps[n].path not in self._whole}
        known = {n for n in unseen - new if self._whole[steps[n].path] is not None}

        def is_decisive(numbers: Sequence[int]) -> bool:
            return not choice.deleted <= choose({*absent, *numbers}).deleted

        return new | _find_decisive(sorted(known), is_decisive)

    def _find_loss(
        self, number: int, step: ranked_steps.RunStep, anew: bool
    ) -> str | None:
        """Returns what the files of a step lack; remembers steps that are whole.

        Args:
            number: The step.
            step: The same, as seen by policies.
            anew: Whether to compare also unchanged files of a step that was whole.
        """
        files = self._whole.get(step.path)
        if not anew and files is not None and files.are_unchanged(step.path):
            return None
        found = _checkpoint.file_sizes.look(step.path, number)
        if found.loss is None:
            self._whole[step.path] = found.files
        return found.loss

    def _warn_of_foreign(self, path: Path, names: Sequence[str]) -> None:
        self._warn_once(
            path,
            "%s is not deleted: it contains files that do not belong to the checkpoint"
            " and would be lost: %s; move them elsewhere",
            path,
            _first(names),
        )

    def _warn_once(self, key: object, text: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(text, *values)

    # ---- deletions -----------------------------------------------------------

    def delete_unkept(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes the steps and items that no policy keeps.

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
            return self._delete_unkept(just_saved, is_awaited)

    def _delete_unkept(
        self, just_saved: int | None, is_awaited: Callable[[], bool]
    ) -> tuple[int, ...]:
        try:
            decision = self._decide(just_saved)
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

    def _decide(self, just_saved: int | None) -> _Decision:
        """Returns the current decision of retention."""
        steps = self.index.steps() if self._may_delete() else {}
        judged = self._judge(steps, self.rules, just_saved)
        for number, loss in judged.damage.items():
            self._warn_once(
                (number, loss),
                "step %d is damaged, so it does not count for the policies, and stays:"
                " %s; verify it, with --mark",
                number,
                loss,
            )
        if judged.newest_damage:
            raise self._incomplete_error(max(steps), judged.newest_damage)
        doomed = [n for n, why in judged.reasons.items() if not why and n != just_saved]
        items = judged.items
        affected = {*doomed, *(step for step, _ in items)}
        saves = {n: ranked_steps.identify_save(steps[n].path) for n in affected}
        # A step that was replaced before its save was identified stays this time.
        replaced = {n for n in affected if steps[n].is_outdated()}
        return _Decision(
            steps,
            judged.damage,
            [step for step in doomed if step not in replaced],
            [(step, item) for step, item in items if step not in replaced],
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
                    decision, is_new = self._decide(just_saved), True
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
            what = f"{_describe_item(item)} of step {step}"
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
        """Warns, once per policy, if no step has the metric of a `BestN` policy.

        If no step has any metrics, warns only if there are several steps: metrics may
        be added later.
        """
        ranked = [step.ranked for step in decision.steps.values()]
        of_items = itertools.chain.from_iterable(self.rules.keep_items.values())
        for policy in (*self.rules.keep, *of_items):
            if not isinstance(policy, policies.BestN):
                continue
            if not ranked or not policies.is_undecided(policy, ranked):
                continue
            names = sorted({name for step in ranked for name in step.metrics})
            if not names and len(ranked) < _MANY_STEPS:
                continue
            self._warn_once(
                policy,
                "no step of %s has a finite metric %r yet, so %s keeps all steps: any"
                " of them may be the best; the steps have %s. Pass the metric to"
                " save(…, metrics=…) or add_metrics, or set metrics_from",
                self._directory,
                policy.metric,
                policy,
                _first(names) or "no metrics at all",
            )

    def _warn_of_unknown_items(self, decision: _Decision) -> None:
        """Warns, once, of policies for items that no step has.

        The items may be JSON items of later saves, so this is no error.
        """
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
        """Returns True if files that policies read of `step` or a kept step changed.

        Other steps to be deleted are checked before their own deletion.
        """
        doomed = set(decision.doomed)
        return any(
            other.is_outdated()
            for number, other in decision.steps.items()
            if number == step or number not in doomed
        )

    def _may_delete(self) -> bool:
        """Returns True if rules or temporary steps make a deletion possible."""
        if self.rules.keep or self.rules.keep_items:
            return True
        with _storage.permissions.explain_errors(self._directory):
            return any(map(_steps.markers.is_temporary, self.index.paths().values()))

    def _check_complete(self, step: int, *, reads_all: bool) -> None:
        path = self._directory / self._format.name(step)
        try:
            if reads_all:
                _checkpoint.verify.check(path, step)
            else:
                self._whole[path] = _checkpoint.file_sizes.check(path, step)
        except (errors.CheckpointError, OSError) as error:
            raise self._incomplete_error(step, str(error)) from error

    def _incomplete_error(self, step: int, why: str) -> errors.SaveFailedError:
        path = self._directory / self._format.name(step)
        return errors.SaveFailedError(
            f"step {step} is incomplete, so no other step is deleted: {why}"
            f"\nIf this happens again, delete {path}, check the disk, and save again."
        )

    def _items_to_delete(
        self,
        staying: Mapping[int, ranked_steps.RunStep],
        rules: Rules,
        just_saved: int | None,
    ) -> list[tuple[int, str]]:
        """Returns the items to delete from the steps that stay: step and item."""
        # Finish deletions that were begun.
        doomed = {
            (number, item)
            for number, step in staying.items()
            for item in step.markers.deleted_items & step.markers.items
        }
        for item, keep in rules.keep_items.items():
            steps = {n: s for n, s in staying.items() if item in s.markers.items}
            reasons = self._reasons(keep, steps)
            doomed |= {
                (n, item) for n, why in reasons.items() if not why and n != just_saved
            }
        return sorted(doomed)

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


def _find_decisive(
    numbers: Sequence[int], is_decisive: Callable[[Sequence[int]], bool]
) -> set[int]:
    """Returns those of `numbers` that are decisive, by halves: most groups are not."""
    if not numbers or not is_decisive(numbers):
        return set()
    middle = len(numbers) // 2
    if not middle:
        return set(numbers)
    found = _find_decisive(numbers[:middle], is_decisive)
    found |= _find_decisive(numbers[middle:], is_decisive)
    return found or set(numbers)  # decisive together


def _first(names: Sequence[str]) -> str:
    return errors.first_few([errors.printable(name) for name in names], 3)


def _describe_item(item: str) -> str:
    return "the dataset state" if item == _formats.items.DATASET else f"the item {item}"


def _deadline(is_awaited: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that returns True to stop; call before each deletion.

    Two deletions are always allowed, as each save adds a single step.
    """
    end = time.monotonic() + _DELETING_SECS
    calls = itertools.count()

    def is_over() -> bool:
        return (
            next(calls) >= _LEAST_DELETED and time.monotonic() >= end and is_awaited()
        )

    return is_over
