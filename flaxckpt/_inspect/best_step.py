"""The best good step by a metric, and a better step that is damaged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from flaxckpt._util import humanize


class BestStep(NamedTuple):
    """The best step of a run by a metric.

    Attributes:
        good: The best of the good steps; the newest of several. None without any.
        damaged: The best of the damaged steps, if it is better than `good`, or None.
    """

    good: int | None
    damaged: int | None


def find(
    values: Mapping[int, float],
    damaged: Collection[int | None],
    mode: Literal["min", "max"],
) -> BestStep:
    """Returns the best step.

    Args:
        values: Step -> the value of the metric, which is finite, of existing steps.
        damaged: The damaged steps.
        mode: Which values are the best.
    """
    sign = 1 if mode == "max" else -1

    def first(steps: Collection[int]) -> int | None:
        return max(steps, key=lambda step: (sign * values[step], step), default=None)

    good = first([step for step in values if step not in damaged])
    lost = first([step for step in values if step in damaged])
    if lost is None or good is None:
        return BestStep(good, lost)
    return BestStep(good, lost if sign * values[lost] > sign * values[good] else None)


def end(mode: Literal["min", "max"]) -> Literal["lowest", "highest"]:
    """Returns the end of the values that is best."""
    return "highest" if mode == "max" else "lowest"


def describe_damaged(
    step: int | str, value: float, fault: str = "damaged", *, is_counted: bool
) -> str:
    """Returns a clause on a step that would be better, if it were good.

    Args:
        step: The step, or its number as a page shows it.
        value: The metric of the step.
        fault: `damaged`, or `not readable`.
        is_counted: True if policies count the step, as it is not marked as damaged.
    """
    text = f"step {step} with {humanize.number(value)} would be better, but is {fault}"
    if is_counted and fault == "damaged":
        text += "; policies count it until flaxckpt verify --mark marks it"
    return text
