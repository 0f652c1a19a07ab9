"""What is measured: samples, and the series that they make."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Unit: TypeAlias = Literal["s", "bytes", "x"]
"""Seconds, bytes, or a plain ratio."""


class Series(NamedTuple):
    """What one contender does in one figure of one case.

    Attributes:
        case: `train_state`.
        figure: `commit`.
        contender: `flaxckpt`.
    """

    case: str
    figure: str
    contender: str


class Sample(NamedTuple):
    """One measurement.

    Attributes:
        series: What was measured.
        value: The result.
        unit: Of the value.
    """

    series: Series
    value: float
    unit: Unit = "s"


class Skip(NamedTuple):
    """Something that was not measured.

    Attributes:
        case: Where.
        what: A contender, or `all`.
        reason: Why not.
    """

    case: str
    what: str
    reason: str


Rows: TypeAlias = "Iterator[Sample | Skip]"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        directory: An empty directory on the disk to measure.
        rounds: How often everything is measured.
        quick: Whether states are tiny, to see that all works.
        contenders: Names of those that take part; empty for all.
    """

    directory: Path
    rounds: int = 5
    quick: bool = False
    contenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of a series.

    Attributes:
        values: In the order in which they were measured.
        unit: Of the values.
    """

    values: tuple[float, ...]
    unit: Unit

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The least value."""
        return min(self.values)


Results: TypeAlias = dict[Series, Result]


def collect(samples: Iterable[Sample]) -> Results:
    """Puts the samples of each series together, in order of appearance."""
    values: dict[Series, list[Sample]] = {}
    for sample in samples:
        values.setdefault(sample.series, []).append(sample)
    return {
        series: Result(tuple(s.value for s in found), found[0].unit)
        for series, found in values.items()
    }


def distinct(names: Iterable[str]) -> Sequence[str]:
    """`names` without repetitions, in order of appearance."""
    return list(dict.fromkeys(names))
