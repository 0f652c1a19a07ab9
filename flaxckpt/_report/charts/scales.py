"""Axes: maps numbers to coordinates, with ticks at round numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Scale(NamedTuple):
    """Maps numbers from `low` to `high` to coordinates from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Returns the coordinate of `value`; the middle for an empty range."""
        span = self.high / 2 - self.low / 2  # halved: the difference may overflow
        if not span:
            return (self.start + self.stop) / 2
        part = (value / 2 - self.low / 2) / span
        return self.start + part * (self.stop - self.start)


class Axis(NamedTuple):
    """The vertical axis of a plot.

    Attributes:
        scale: Maps values, or their decimal logarithms, to pixels.
        is_log: True for a logarithmic axis.
        ticks: The values to label, with their texts, all different.
    """

    scale: Scale
    is_log: bool
    ticks: Sequence[tuple[float, str]]

    def __call__(self, value: float) -> float:
        """Returns the vertical coordinate of `value`, in pixels from the top."""
        return self.scale(math.log10(value) if self.is_log else value)


def linear_axis(values: Sequence[float], bottom: float, top: float) -> Axis:
    """Returns an axis for finite values with some room around them."""
    low, high = min(values), max(values)
    room = high / 6 - low / 6 if low < high else abs(low) / 10 or 1.0
    low, high = max(low - room, -_LARGEST), min(high + room, _LARGEST)
    found = ticks(low, high, 5)
    return Axis(
        Scale(low, high, bottom, top),
        False,
        list(zip(found, labels(found), strict=True)),
    )


def log_axis(values: Sequence[float], bottom: float, top: float) -> Axis | None:
    """Returns a logarithmic axis; None unless values are positive and differ enough."""
    low, high = min(values), max(values)
    if not 0 < low * _LEAST_RATIO <= high:
        return None
    first, last = math.log10(low), math.log10(high)
    room = (last - first) / 6
    scale = Scale(first - room, last + room, bottom, top)
    lowest, highest = max(scale.low, _POWERS.start), min(scale.high, _POWERS.stop)
    decades = range(math.ceil(lowest), math.floor(highest) + 1)
    every = max(1, -(-len(decades) // 6))
    found = [10.0**power for power in decades[::every]]
    if len(found) < _FEW:
        powers = range(math.floor(lowest), math.floor(highest) + 1)
        found = [m * 10.0**power for power in powers for m in (1, 2, 5)]
        found = [v for v in found if scale.low <= math.log10(v) <= scale.high]
    if len(found) < 2:
        found = [v for v in ticks(low, high, 4) if v > 0]
    return Axis(scale, True, list(zip(found, labels(found), strict=True)))


_LARGEST = sys.float_info.max

_LEAST_RATIO = 1.5
"""Of the largest to the smallest value: below, both axes look the same."""

_FEW = 3

_POWERS = range(-306, 306)
"""Decades whose ticks are normal floats."""


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, or fewer."""
    span = high - low
    if not 0 < span / count < math.inf:
        return [low] if low == high else [low, high]
    power = 10.0 ** math.floor(math.log10(span / count))
    if not power:
        return [low, high]
    step = next((m * power for m in (1, 2, 5) if span / (m * power) <= count), 0)
    step = step or 10 * power
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [n * step for n in range(first, last + 1)]
    return list(dict.fromkeys(found))  # between adjacent floats, some are equal


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


def labels(values: Sequence[float]) -> list[str]:
    """Formats ticks with as few digits as tell them apart."""
    largest = max(map(abs, values), default=0.0)
    rounded = [0.0 if abs(value) < largest * 1e-12 else value for value in values]
    texts: list[str] = []
    for digits in range(3, 18):
        texts = [f"{value:.{digits}g}" for value in rounded]
        if len(set(texts)) == len(texts):
            break
    return texts


def step_labels(steps: Sequence[int]) -> list[str]:
    """Formats steps in few characters, if these tell them apart, else in full."""
    texts = [short(step) for step in steps]
    if len(set(texts)) == len(set(steps)):
        return texts
    return [f"{step:,}" for step in steps]


def short(step: float) -> str:
    """Formats a step number in few characters: `250k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if step >= size:
            return f"{step / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{step:.10g}"
