"""Statistics of a leaf's values, computed in pieces with little memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxckpt import _arrays, _checkpoint, _util, errors
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath, PathLike
from flaxckpt._zarr.metadata import Array
from flaxckpt.errors import Mismatch

_PIECE_BYTES = 16 * 2**20
_AT_ONCE = 64 * 2**20
_VALUES_SHOWN = 16


@dataclasses.dataclass(frozen=True, slots=True)
class LeafStatistics:
    """Statistics of a leaf's values; `min` to `norm` of the finite ones, or None.

    Complex numbers count by their absolute values, PRNG keys by their words.

    Attributes:
        std: The standard deviation of the population, and not of a sample.
        edges: The edges of the bins of the histogram, one more than there are bins.
        values: All elements, if few; the text of a string.
        files: The files with the elements -> the first byte and the end of what is
            theirs, which may have other bytes between; empty if unknown.
    """

    info: LeafInfo
    count: int
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    values: Any = None
    files: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def leaf_statistics(
    path: PathLike, leaf_path: LeafPath, *, step: int | None = None, bins: int = 16
) -> LeafStatistics:
    """Reads a leaf twice for its statistics; raises RestoreMismatchError if missing."""
    return statistics_of(
        locate.open_checkpoint(path, step, types=None), leaf_path, bins=bins
    )


def statistics_of(
    stored: Stored, leaf_path: LeafPath, *, bins: int = 16
) -> LeafStatistics:
    """Reads a leaf of an open checkpoint; see `leaf_statistics`."""
    stored.check_leaf(leaf_path)
    leaf = stored.table.get(leaf_path)
    if leaf is None:
        raise errors.RestoreMismatchError(
            stored.metadata.path,
            [Mismatch(leaf_path, "a leaf", "nothing")],
            "metadata(path).leaves lists them all.",
        )
    if leaf.info.dtype is None:
        source = leaf.source
        value = source.value if isinstance(source, StoredLeaf) else source
        return LeafStatistics(leaf.info, int(value is not None), values=value)
    _arrays.read.check_supported([leaf], stored.metadata.path)
    counter = _util.progress.Counter(f"reading {leaf_path}")
    counter.total = 2 * leaf.info.stored_bytes
    path = Path(stored.metadata.path)
    with _util.progress.bar(counter), _checkpoint.completeness.explain_parts(path):
        return _statistics_of(leaf, bins, counter)


def _statistics_of(
    leaf: Leaf, bins: int, counter: _util.progress.Counter
) -> LeafStatistics:
    count = math.prod(leaf.info.stored_shape)
    sums = _RunningSums()
    few: list[Any] = []
    for values in _read(leaf, counter):
        sums.add(values)
        few += values.ravel().tolist() if count <= _VALUES_SHOWN else []
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    if sums.min is not None and sums.max is not None:
        edges = _edges(float(sums.min), float(sums.max), bins)
        counts = np.zeros(len(edges) - 1, np.int64)
        for values in _read(leaf, counter):
            finite = values[np.isfinite(values)].astype(np.float64)
            counts += np.histogram(finite, np.array(edges))[0]
        histogram = tuple(counts.tolist())
    return LeafStatistics(
        leaf.info,
        count,
        sums.min,
        sums.max,
        sums.mean if sums.count else None,
        math.sqrt(sums.spread / sums.count) if sums.count else None,
        math.sqrt(sums.squares) if sums.count else None,
        sums.zeros,
        sums.nans,
        sums.infs,
        edges,
        histogram,
        few if count <= _VALUES_SHOWN else None,
        _find_files(leaf),
    )


def _find_files(leaf: Leaf) -> Mapping[str, tuple[int, int]]:
    source = leaf.source
    if isinstance(source, StoredLeaf) and source.find_files is not None:
        return source.find_files()
    return {}


def _read(leaf: Leaf, counter: _util.progress.Counter) -> Any:
    """Yields the values of a leaf in pieces, in types that numpy can add."""
    pieces = _arrays.blockwise.cut(leaf, chunk_shape=None, max_bytes=_PIECE_BYTES)
    for batch in _arrays.blockwise.batches(pieces, _AT_ONCE):
        read = _arrays.blockwise.read(batch, max_bytes=_AT_ONCE)
        for piece, values in zip(batch, read, strict=True):
            yield _to_numeric(values)
            counter.add(piece.nbytes)


def _to_numeric(values: Array) -> Array:
    if np.iscomplexobj(values):
        values = np.abs(values)
    if values.dtype.kind in "iu":
        return values
    if values.dtype.kind == "b":
        return values.astype(np.int8)
    # Also types of other packages: bfloat16, float8 and int4.
    return np.asarray(values.astype(np.float64))


def _edges(least: float, largest: float, bins: int) -> tuple[float, ...]:
    """Returns the edges of `bins` equal bins; of a single bin for equal bounds."""
    if not largest > least:
        return (least, math.nextafter(least, math.inf))
    width = largest / bins - least / bins  # the difference may overflow
    inner = [least + width * n for n in range(1, bins)]
    edges = [least, *inner, largest]
    # Leave out bins narrower than the floating-point precision.
    return tuple([edge for n, edge in enumerate(edges) if not n or edge > edges[n - 1]])


class _RunningSums:
    """Running sums over the values.

    Merging means and spreads keeps the digits that squares would lose (Chan, Golub and
    LeVeque).
    """

    def __init__(self) -> None:
        self.count = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self.mean = 0.0
        self.spread = 0.0
        self.squares = 0.0
        self.zeros = self.nans = self.infs = 0

    def add(self, values: Array) -> None:
        self.zeros += int(np.count_nonzero(values == 0))
        self.nans += int(np.count_nonzero(np.isnan(values)))
        self.infs += int(np.count_nonzero(np.isinf(values)))
        kept = values[np.isfinite(values)]
        if not kept.size:
            return
        least, largest = kept.min().item(), kept.max().item()
        self.min = least if self.min is None else min(self.min, least)
        self.max = largest if self.max is None else max(self.max, largest)
        part = kept.astype(np.float64)
        with np.errstate(all="ignore"):
            mean, total = float(part.mean()), self.count + part.size
            distance = mean - self.mean
            self.spread += float(np.square(part - mean).sum())
            self.spread += distance * distance * self.count * part.size / total
            self.mean += distance * part.size / total
            self.squares += float(np.square(part).sum())
            self.count = total
