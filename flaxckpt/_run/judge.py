"""Judges which steps of a run stay: by policies, and by the files of the steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt import _checkpoint, _formats, _steps, _util, errors, policies
from flaxckpt._formats.items import Items
from flaxckpt._run import metrics, run_index
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)


class Rules(NamedTuple):
    """Rules of retention: policies for steps, and for items in the steps that stay."""

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

        Raises OptionError if an option has the wrong type, no item can have a name, or
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


class _Choice(NamedTuple):
    """The reasons to keep steps, and the steps and items that policies would delete."""

    reasons: dict[int, list[str]]
    doomed: list[int]
    items: list[tuple[int, str]]

    @property
    def deleted(self) -> set[object]:
        """The steps and the items to delete."""
        return {*self.doomed, *self.items}


class Explained(NamedTuple):
    """The steps of a directory, with the reasons to keep them and their known damage.

    `best` is, for each metric that a policy ranks by, the best step that counts.
    """

    reasons: dict[int, list[str]]
    damage: dict[int, str]
    best: dict[str, int]


class Judged(NamedTuple):
    """What stays in a directory and why; `damage` is of steps that do not count.

    `newest_damage` is that of the newest step, if it keeps others from deletion.
    """

    reasons: dict[int, list[str]]
    doomed: list[int]
    items: list[tuple[int, str]]
    damage: dict[int, str]
    newest_damage: str


def _find_foreign(path: Path) -> list[str]:
    """Returns the files of others in a step."""
    try:
        return _checkpoint.overwrite.find_foreign(path)
    except FileNotFoundError:  # deleted just now
        return []
    except errors.StoreError:
        raise  # each further request would wait for its deadline
    except OSError as error:
        return [f"unknown, as {errors.one_line(error)}"]


class Judge:
    """Decides which steps stay, and remembers whole steps; changes nothing."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._warned: set[object] = set()
        # The steps found whole; None where files cannot be looked at again cheaply.
        self._whole: dict[Path, _checkpoint.completeness.Files | None] = {}

    def explain(
        self, steps: Mapping[int, run_index.RunStep], rules: Rules | None = None
    ) -> Explained:
        """Returns why each step stays (by its own rules by default), and damage."""
        rules = rules or self._rules
        listed = {n: step for n, step in steps.items() if not step.is_marked}
        judged = self.judge(listed, rules=rules)
        reasons = judged.reasons
        if judged.newest_damage:
            why = [f"nothing is deleted while step {max(listed)} is damaged"]
            reasons = {step: found or why for step, found in reasons.items()}
        damage = {n: step.damage for n, step in steps.items()} | judged.damage
        best: dict[str, int] = {}
        whole = [step for n, step in listed.items() if n not in judged.damage]
        for policy in rules.keep:
            if isinstance(policy, policies.BestN):
                for number in dataclasses.replace(policy, n=1).preserved(whole):
                    best.setdefault(policy.metric, number)
        return Explained(
            reasons, {n: why for n, why in damage.items() if why is not None}, best
        )

    def find_reasons(
        self, keep: Sequence[PreservationPolicy], steps: Mapping[int, run_index.RunStep]
    ) -> dict[int, list[str]]:
        reasons = policies.decide(
            keep,
            [*steps.values()],
            pinned=[n for n, step in steps.items() if step.markers.pinned],
            readers={n: step.markers.readers for n, step in steps.items()},
        )
        for number, why in reasons.items():
            if steps[number].is_doubtful:  # may be the best
                why.append("metrics damaged")
        return reasons

    def judge(
        self,
        steps: Mapping[int, run_index.RunStep],
        *,
        just_saved: int | None = None,
        rules: Rules | None = None,
    ) -> Judged:
        """Decides what stays, by steps that are whole as far as their files show.

        A step that a policy keeps is looked at before anything is deleted; if nothing
        is, only the newest and the best steps are. A step without all files does not
        count, and stays. `just_saved` stays this time, and is looked at elsewhere;
        without it, steps that were whole before are looked at again.
        """
        rules = rules or self._rules
        damage = {
            n: step.damage or "" for n, step in steps.items() if not step.is_counted
        }
        looked = set() if just_saved is None else {just_saved}
        find_foreign = functools.cache(_find_foreign)

        def choose(absent: AbstractSet[int]) -> _Choice:
            counted = {n: step for n, step in steps.items() if n not in absent}
            reasons = self.find_reasons(rules.keep, counted)
            doomed = [n for n, why in reasons.items() if not why and n != just_saved]
            staying = {n: step for n, step in counted.items() if n not in doomed}
            items = self._items_to_delete(staying, rules, just_saved)
            return _Choice(reasons, doomed, items)

        while True:
            choice = choose(damage.keys())
            reasons, doomed, items = choice
            staying = reasons.keys() - doomed
            unseen = staying - looked
            if just_saved is not None:
                unseen = self._select(unseen, steps, choice, damage.keys(), choose)
            elif not choice.deleted:
                unseen &= self._notable(
                    rules.keep, {n: steps[n] for n in sorted(staying)}
                )
            if not unseen:
                break
            looked |= unseen
            lost = {n: self._find_loss(n, steps[n], just_saved is None) for n in unseen}
            damage |= {n: loss for n, loss in sorted(lost.items()) if loss is not None}
            if not any(lost.values()):
                break
        for number in doomed:
            if names := find_foreign(steps[number].path):
                reasons[number].append(f"files of others in it: {list_first(names)}")
                self._warn_of_foreign(steps[number].path, names)
        kept_items = []
        for number, item in items:
            names = _steps.delete.in_item(find_foreign(steps[number].path), item)
            if names:
                self._warn_of_foreign(steps[number].path / item, names)
                what = describe_item(item).removeprefix("the ")
                reasons[number].append(
                    f"files of others in {what}: {list_first(names)}"
                )
            else:
                kept_items.append((number, item))
        self._name_markers(steps, reasons)
        is_newest_good = just_saved is not None or not damage
        newest_damage = "" if is_newest_good else damage.get(max(steps), "")
        reasons = with_damage(reasons, damage)
        doomed = [n for n, why in reasons.items() if not why and n != just_saved]
        return Judged(reasons, doomed, kept_items, damage, newest_damage)

    def _notable(
        self, keep: Sequence[PreservationPolicy], steps: Mapping[int, run_index.RunStep]
    ) -> set[int]:
        """Returns the newest step, and the best steps by the policies `keep`."""
        ranked = [*steps.values()]
        best = [p.preserved(ranked) for p in keep if isinstance(p, policies.BestN)]
        return {*list(steps)[-1:]}.union(*best)

    def _name_markers(
        self, steps: Mapping[int, run_index.RunStep], reasons: Mapping[int, list[str]]
    ) -> None:
        for number, why in reasons.items():
            if steps[number].markers.waiting:
                why.append("not uploaded")
            if why and (copies := steps[number].markers.copies):
                text = _util.humanize.count(copies, "copy", "copies")
                why.append(f"{text} at other processes")
            if why:
                deleted = sorted(steps[number].markers.deleted_items)
                why += [
                    f"{describe_item(i).removeprefix('the ')} deleted" for i in deleted
                ]

    def _select(
        self,
        unseen: AbstractSet[int],
        steps: Mapping[int, run_index.RunStep],
        choice: _Choice,
        absent: AbstractSet[int],
        choose: Callable[[AbstractSet[int]], _Choice],
    ) -> set[int]:
        """Returns the steps of `unseen` to look at before the deletions of `choice`.

        A step that was whole is looked at again only if less would be deleted without
        it: to look at hundreds of kept steps would take longer than a save.
        """
        if not choice.deleted:
            return set()
        new = {n for n in unseen if steps[n].path not in self._whole}
        known = {n for n in unseen - new if self._whole[steps[n].path] is not None}

        def is_decisive(numbers: Sequence[int]) -> bool:
            return not choice.deleted <= choose({*absent, *numbers}).deleted

        return new | _find_decisive(sorted(known), is_decisive)

    def _find_loss(
        self, number: int, step: run_index.RunStep, anew: bool
    ) -> str | None:
        """Returns what a step lacks; a whole, unchanged step is compared if `anew`."""
        files = self._whole.get(step.path)
        if not anew and files is not None and files.are_unchanged(step.path):
            return None
        found = _checkpoint.completeness.look(step.path, number)
        if found.loss is None:
            self._whole[step.path] = found.files
        return found.loss

    def _items_to_delete(
        self,
        staying: Mapping[int, run_index.RunStep],
        rules: Rules,
        just_saved: int | None,
    ) -> list[tuple[int, str]]:
        # Finish deletions that were begun.
        doomed = {
            (number, item)
            for number, step in staying.items()
            for item in step.markers.deleted_items & step.markers.items
        }
        for item, keep in rules.keep_items.items():
            steps = {n: s for n, s in staying.items() if item in s.markers.items}
            reasons = self.find_reasons(keep, steps)
            doomed |= {
                (n, item) for n, why in reasons.items() if not why and n != just_saved
            }
        return sorted(doomed)

    def remember_whole(self, path: Path, step: int) -> None:
        """Remembers a step as whole, or raises DamagedCheckpointError."""
        self._whole[path] = _checkpoint.completeness.check(path, step)

    def _warn_of_foreign(self, path: Path, names: Sequence[str]) -> None:
        self.warn_once(
            path,
            "%s is not deleted: it contains files that do not belong to the checkpoint"
            " and would be lost: %s; move them elsewhere",
            path,
            list_first(names),
        )

    def warn_once(self, key: object, text: str, *values: object) -> None:
        """Logs a warning, unless one of the same key was logged before."""
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(text, *values)


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


def with_damage(
    reasons: Mapping[int, list[str]], damage: Mapping[int, str]
) -> dict[int, list[str]]:
    """Returns reasons, ascending, with those of damaged steps, which stay."""
    damaged = {step: [f"damaged: {why}"] for step, why in damage.items()}
    return dict(sorted({**reasons, **damaged}.items()))


def list_first(names: Sequence[str]) -> str:
    return errors.first_few([errors.printable(name) for name in names], 3)


def describe_item(item: str) -> str:
    return "the dataset state" if item == _formats.items.DATASET else f"the item {item}"
