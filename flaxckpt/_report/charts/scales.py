"""Axes: maps numbers to coordinates, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Scale(NamedTuple):
    """Maps numbers from `low` to `high` to coordinates from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Returns the coordinate of `value`; the middle for an empty range."""
        if self.high == self.low:
            return (self.start + self.stop) / 2
        part = value / 2 - self.low / 2  # halved, because the difference may overflow
        return self.start + part / (self.high / 2 - self.low / 2) * (
            self.stop - self.start
        )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, or fewer."""
    span = high - low
    if not 0 < span < math.inf:
        return [low] if low == high else [low, high]
    power = 10.0 ** math.floor(math.log10(span / count))
    if not power:
        return [low, high]
    step = next((m * power for m in (1, 2, 5) if span / (m * power) <= count), 0)
    step = step or 10 * power
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int) -> list[int]:
    """Returns the integers among the ticks."""
    whole = [int(t) for t in ticks(low, high, count) if t == int(t)]
    return whole or [int(low)]


def top(value: float) -> float:
    """Returns the next round number from `value` on, for the end of an axis."""
    if not 0 < value < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    if not power:
        return value
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
    return next((m * power for m in steps if m * power >= value), 10 * power)


def seconds(largest: float) -> tuple[str, Callable[[float], str]]:
    """Returns the unit for times up to `largest`, and a function to format them."""
    units = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0))
    name, size = next(
        (unit for unit in units if largest < 900 * unit[1]), ("h", 3600.0)
    )
    return name, lambda value: f"{value / size:.3g}"


def short(step: float) -> str:
    """Formats a step number in few characters: `250k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if step >= size:
            return f"{step / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{step:.10g}"
