"""Statistics of arrays from samples, in a small share of the time of a save."""

from __future__ import annotations

import collections
import functools
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flaxckpt import _state
from flaxckpt._arrays.leaf_sample import BINS, LeafSample
from flaxckpt._arrays.to_host import HostArray
from flaxckpt._zarr.metadata import Array, extent

SHARE = 0.02
"""Fraction of the time of a save that samples may take."""

MAX_LEAVES = 512
"""So many arrays of a state are sampled; fewer if the save is short."""

_MIN_LEAVES = 64
_DEEPEST = 5
"""Further keys of a name tell no layers apart: each costs time at every save."""

_SECS_PER_VALUE = 1e-7
"""First guess of the time for a value; later, the time that was measured."""

_SECS_PER_LEAF = 2e-5
"""Time for an array with the fewest values."""

_LEAST, _MOST = 64, 2**18
"""Limits on the values of an array in a sample."""

_RUN = 256
"""Adjacent values that are sampled together: fewer parts of memory are read."""


class Sampler:
    """Samples arrays of a save, for the fraction `share` of the time it has taken."""

    def __init__(
        self, share: float = SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.secs = 0.0
        self._share = share
        self._clock = clock
        self._began = clock()
        self._values = 0
        self._names: list[str] = []
        self._samples: dict[str, LeafSample] = {}

    def choose(self, arrays: Iterable[HostArray]) -> None:
        """Chooses the arrays to sample; call once, with all arrays of the save."""
        sizes = {a.name: a.nbytes for a in arrays if a.nbytes and _is_number(a)}
        self._names = _rank(tuple(sizes.items()))[:MAX_LEAVES]
        self._began = self._clock()

    def add(self, arrays: Iterable[HostArray], prefix: str = "") -> None:
        """Samples the chosen arrays in host memory; `prefix` begins their names."""
        began = self._clock()
        free = (began - self._began) * self._share - self.secs
        count = max(int(free / _SECS_PER_LEAF), _MIN_LEAVES)
        names = frozenset(self._names[:count])
        chosen = [array for array in arrays if prefix + array.name in names]
        if not chosen:
            return
        free -= _SECS_PER_LEAF * len(chosen)
        each = free / self._secs_per_value() / len(chosen)
        # Few sizes, so that most saves sample the same values, and can be compared.
        most = 2 ** int(math.log2(min(max(each, _LEAST), _MOST)))
        parts = [_sample(array, most) for array in chosen]
        summaries = _summarize(parts, [_size(array) for array in chosen])
        for array, summary in zip(chosen, summaries, strict=True):
            self._samples[prefix + array.name] = summary
        self._values += sum(map(len, parts))
        self.secs += self._clock() - began

    def _secs_per_value(self) -> float:
        if not self._values:
            return _SECS_PER_VALUE
        return max(self.secs / self._values, _SECS_PER_VALUE / 10)

    def result(self, paths: Mapping[str, str]) -> dict[str, LeafSample]:
        """Returns the samples by leaf path; `paths` has that of each array's name."""
        return {paths[name]: sample for name, sample in self._samples.items()}


@functools.lru_cache(maxsize=4)  # the saves of a run have the same arrays
def _rank(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Returns the names of arrays in the order in which they are sampled.

    The layers of a model take turns, and in each turn the parts of a layer; the largest
    array of each comes first. The optimizer is last.
    """
    largest = sorted(sizes, key=lambda each: -each[1])
    ranked = [(name, re.split("[./]", name)[:_DEEPEST]) for name, _ in largest]
    for depth in range(_DEEPEST, 0, -1):  # the arrays of the innermost layers first
        seen: collections.Counter[tuple[str, ...]] = collections.Counter()
        turns = []
        for each in ranked:
            layer = tuple(each[1][:depth])
            turns.append((seen[layer], each))
            seen[layer] += 1
        turns.sort(key=operator.itemgetter(0))
        ranked = [each for _, each in turns]
    ranked.sort(key=lambda each: not _OPTIMIZER.isdisjoint(each[1]))
    return [name for name, _ in ranked]


_OPTIMIZER = _state.optimizer_roles.NAMES


def _is_number(array: HostArray) -> bool:
    return _state.dtypes.stored_name(array.dtype) == array.dtype


def _size(array: HostArray) -> int:
    return sum([math.prod(extent(shard.region)) for shard in array.shards])


def _sample(array: HostArray, most: int) -> Array:
    """Returns at most about `most` values of an array, as float64."""
    # In the order of the memory, to copy nothing.
    parts = [np.asarray(shard.data).ravel(order="K") for shard in array.shards]
    total = _size(array)
    taken = [_spread(part, math.ceil(most * part.size / total)) for part in parts]
    return np.concatenate([_to_float(part) for part in taken])


def _spread(values: Array, most: int) -> Array:
    """Returns runs of adjacent values, one from each of equal parts of the array.

    The place of a run in its part is random, as equal distances could be multiples of a
    row's length, and the same at each save.
    """
    if len(values) <= most:
        return values
    runs = max(most // _RUN, 1)
    length = math.ceil(most / runs)
    edges = np.linspace(0, len(values) - length + 1, runs + 1).astype(np.int64)
    generator = np.random.default_rng(len(values))
    starts = generator.integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))
    places: Array = starts[:, np.newaxis] + np.arange(length)
    return values[places.reshape(-1)]


def _to_float(values: Array) -> Array:
    if np.iscomplexobj(values):
        values = np.abs(values.astype(np.complex128))
    return values.astype(np.float64)


def _summarize(parts: Sequence[Array], counts: Sequence[int]) -> list[LeafSample]:
    """Returns the statistics of all parts; `counts` are the sizes of their arrays."""
    sizes = np.array([len(part) for part in parts])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    values = np.concatenate(parts)
    finite = np.isfinite(values)
    clean = np.where(finite, values, 0.0)

    def each(ufunc: np.ufunc, of: Array) -> Array:
        return ufunc.reduceat(of, starts)

    usable = each(np.add, finite.astype(np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = each(np.add, clean * clean)
        total = each(np.add, clean)
    low = each(np.minimum, np.where(finite, values, np.inf))
    high = each(np.maximum, np.where(finite, values, -np.inf))
    histograms = _histograms(clean, finite, sizes, low, high)
    return [
        LeafSample(
            count,
            int(size),
            math.sqrt(square / n * count) if n else 0.0,
            float(sum_ / n) if n else 0.0,
            float(least) if n else 0.0,
            float(most) if n else 0.0,
            int(size - n),
            tuple(bins),
        )
        for count, size, n, square, sum_, least, most, bins in zip(
            counts, sizes, usable, squares, total, low, high, histograms, strict=True
        )
    ]


def _histograms(
    values: Array, finite: Array, sizes: Array, low: Array, high: Array
) -> list[list[int]]:
    group = np.repeat(np.arange(len(sizes)), sizes)[finite]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        place = (values[finite] / 2 - low[group] / 2) / (
            high[group] / 2 - low[group] / 2
        )
    place = np.nan_to_num(place * BINS)  # a single value has no width
    bins = np.clip(place.astype(np.int64), 0, BINS - 1)
    counts: Any = np.bincount(group * BINS + bins, minlength=len(sizes) * BINS)
    rows: list[list[int]] = counts.reshape(-1, BINS).tolist()
    return rows
