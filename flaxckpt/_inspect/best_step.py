"""The best good step by a metric, and better steps that are damaged or deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from flaxckpt import policies
from flaxckpt._util import humanize


class BestStep(NamedTuple):
    """The best step of a run by a metric.

    Attributes:
        good: The best of the good steps; the newest of several. None without any.
        damaged: The best of the damaged steps, if it is better than `good`.
        deleted: The best of the deleted steps, if it is better than `good`, or without
            any than `damaged`.
    """

    good: int | None
    damaged: int | None
    deleted: int | None

    def describe_better(
        self,
        values: Mapping[int, float],
        faults: Mapping[int | None, str],
        counted: Collection[int | None],
        form: str = "{}",
    ) -> list[str]:
        """Returns clauses on the better steps, that are damaged or deleted."""
        clauses = []
        if self.good is not None and self.damaged is not None:
            step, fault = self.damaged, faults.get(self.damaged, "damaged")
            lost = (form.format(step), values[step], fault)
            clauses.append(describe_damaged(*lost, is_counted=step in counted))
        if self.deleted is not None:
            step = self.deleted
            clauses.append(describe_deleted(form.format(step), values[step]))
        return clauses


def find(
    values: Mapping[int, float],
    damaged: Collection[int | None],
    mode: Literal["min", "max"],
    deleted: Collection[int] = (),
) -> BestStep:
    """Returns the best good step by finite values, and better ones that are not."""
    ranked = policies.rank(values, mode)
    there = [step for step in ranked if step not in deleted]

    def first(steps: Iterable[int]) -> int | None:
        return next(iter(steps), None)

    def better(step: int | None, than: int | None) -> int | None:
        """Returns `step` if its value is better; anything is better than no step."""
        if step is None or than is None:
            return step
        is_better = ranked.index(step) < ranked.index(than)
        return step if is_better and values[step] != values[than] else None

    good = first(step for step in there if step not in damaged)
    lost = better(first(step for step in there if step in damaged), good)
    gone = first(step for step in ranked if step in deleted)
    return BestStep(good, lost, better(gone, lost if good is None else good))


def end(mode: Literal["min", "max"]) -> Literal["lowest", "highest"]:
    return "highest" if mode == "max" else "lowest"


def describe_damaged(
    step: int | str, value: float, fault: str = "damaged", *, is_counted: bool
) -> str:
    """Returns a clause on a step that would be better, if it were good.

    `fault` is `damaged` or `not readable`; `is_counted` is True if policies count the
    step.
    """
    text = f"step {step} with {humanize.number(value)} would be better, but is {fault}"
    if is_counted and fault == "damaged":
        text += "; policies count it until flaxckpt verify --mark marks it"
    return text


def describe_deleted(step: int | str, value: float) -> str:
    """Returns a clause on a step that was better, but does not exist any more."""
    return f"step {step} with {humanize.number(value)} was better, but is gone"
