"""Samples, and the series that they form."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Unit: TypeAlias = Literal["s", "bytes", "x"]
"""Seconds, bytes, or a plain ratio."""


class Series(NamedTuple):
    """One figure of one case for one contender.

    Attributes:
        case: For example `train_state`.
        figure: For example `commit`.
        contender: For example `flaxckpt`.
    """

    case: str
    figure: str
    contender: str


class Sample(NamedTuple):
    """One measurement.

    Attributes:
        series: The series of the sample.
        value: The result.
        unit: The unit of the value.
    """

    series: Series
    value: float
    unit: Unit = "s"


class Skip(NamedTuple):
    """A measurement that was skipped.

    Attributes:
        case: The case.
        what: A contender, or `all`.
        reason: The reason.
    """

    case: str
    what: str
    reason: str


Rows: TypeAlias = "Iterator[Sample | Skip]"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run.

    Attributes:
        directory: An empty directory on the disk to measure.
        rounds: The number of measurements of each figure.
        quick: True for tiny states, which only test the benchmarks.
        contenders: The names of the contenders to measure; empty for all.
        platform: The platform of jax that the case `gpu` measures.
    """

    directory: Path
    rounds: int = 5
    quick: bool = False
    contenders: tuple[str, ...] = ()
    platform: str = "gpu"


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of a series.

    Attributes:
        values: The values, in the order of measurement.
        unit: The unit of the values.
    """

    values: tuple[float, ...]
    unit: Unit

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return min(self.values)


Results: TypeAlias = dict[Series, Result]


def collect(samples: Iterable[Sample]) -> Results:
    """Groups samples by series, in order of appearance."""
    groups: dict[Series, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.series, []).append(sample)
    return {
        series: Result(tuple(sample.value for sample in group), group[0].unit)
        for series, group in groups.items()
    }


def distinct(names: Iterable[str]) -> Sequence[str]:
    """Returns `names` without duplicates, in order of appearance."""
    return list(dict.fromkeys(names))
