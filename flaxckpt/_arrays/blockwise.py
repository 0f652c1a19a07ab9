"""Reads leaves piece by piece, for work on more arrays than memory holds.

A piece is a contiguous run of bytes in C order, unless chunks must stay whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage, _util
from flaxckpt._arrays import read as arrays_read
from flaxckpt._arrays.read_plan import ReadJob
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath, Shape
from flaxckpt._zarr import metadata
from flaxckpt._zarr.metadata import Array, Region


class Piece(NamedTuple):
    """A part of the values of a leaf: a region in the stored array."""

    leaf: Leaf
    region: Region

    @property
    def path(self) -> LeafPath:
        return self.leaf.info.path

    @property
    def name(self) -> str:
        """Unique name among the pieces of a checkpoint, a single line of text."""
        bounds = ",".join(f"{start}:{stop}" for start, stop in self.region)
        return (
            f"{self.path.encode('unicode_escape', 'surrogatepass').decode()} {bounds}"
        )

    @property
    def is_whole(self) -> bool:
        return self.region == metadata.whole(self.leaf.info.stored_shape)

    @property
    def nbytes(self) -> int:
        """Size of the values in memory, in bytes."""
        return math.prod(metadata.extent(self.region)) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Size of an element in memory, in bytes."""
        return _state.dtypes.item_size(self.leaf.info.dtype or "")

    @property
    def start(self) -> int:
        """Bytes of the array before the piece, in C order."""
        shape = self.leaf.info.stored_shape
        element = 0
        for (start, _), size in zip(self.region, shape, strict=True):
            element = element * size + start
        return element * self.itemsize


def cut(leaf: Leaf, *, chunk_shape: Shape | None, max_bytes: int) -> list[Piece]:
    """Cuts a leaf into pieces of at most `max_bytes`, if chunks allow.

    Pieces as read and as written count. Chunks of `chunk_shape` stay whole, if given.
    """
    shape = leaf.info.stored_shape
    whole = Piece(leaf, metadata.whole(shape))
    if leaf.fn is not None:
        return [whole]
    read_bytes, read_chunk = 0, None
    if isinstance(source := leaf.source, StoredLeaf):
        read_bytes = source.info.stored_bytes
        read_chunk = source.info.chunk_shape
    size = max(whole.nbytes, read_bytes)
    cuts = _Cuts(shape, chunk_shape, read_chunk, size, max_bytes)
    return [Piece(leaf, region) for region in _regions(cuts, ())]


class _Cuts(NamedTuple):
    """How to cut an array: `chunk_shape` stays whole, `read_chunk` is read at once."""

    shape: Shape
    chunk_shape: Shape | None
    read_chunk: Shape | None
    size: int
    max_bytes: int


def _regions(cuts: _Cuts, outer: Region) -> Iterator[Region]:
    """Yields regions in C order, within the bounds `outer` of the first axes."""
    shape, axis = cuts.shape, len(outer)
    rest = shape[axis:]
    rows = math.prod(metadata.extent(outer))
    size = cuts.size * rows // max(1, math.prod(shape[:axis]))
    if size <= cuts.max_bytes or not rest:
        yield (*outer, *metadata.whole(rest))
        return
    step = cuts.chunk_shape[axis] if cuts.chunk_shape else 1
    row_bytes = max(1, size // rest[0])
    if step * row_bytes > cuts.max_bytes and any(extent > 1 for extent in rest[1:]):
        for start in range(0, rest[0], step):
            yield from _regions(cuts, (*outer, (start, min(start + step, rest[0]))))
        return
    if cuts.read_chunk:
        # Otherwise a chunk shared by two pieces would be read twice.
        both = math.lcm(step, cuts.read_chunk[axis])
        step = both if both * row_bytes <= cuts.max_bytes else step
    step *= max(1, cuts.max_bytes // (row_bytes * step))
    for start in range(0, rest[0], step):
        bounds = (start, min(start + step, rest[0]))
        yield (*outer, bounds, *metadata.whole(rest[1:]))


def batches(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    """Yields batches of at most `max_bytes`, or of a single larger piece.

    Leaves of the same sources stay together, so that sources are read once.
    """
    groups: dict[object, list[Piece]] = {}
    for n, piece in enumerate(pieces):
        sources = tuple([id(source) for source in piece.leaf.sources])
        alone = piece.leaf.fn is None or not sources
        groups.setdefault(n if alone else sources, []).append(piece)
    sized = ((group, sum(piece.nbytes for piece in group)) for group in groups.values())
    for batch in _util.memory.batches(sized, max_bytes):
        yield [piece for group in batch for piece in group]


def read(pieces: Sequence[Piece], *, max_bytes: int) -> list[Array]:
    """Reads the values of pieces, converted to the types of their leaves.

    Raises DamagedCheckpointError with all leaves that are missing or fail checksums.
    """
    whole = [p for p in pieces if p.leaf.fn is None and p.is_whole]
    parts = [p for p in pieces if p.leaf.fn is None and not p.is_whole]
    values_of = {
        p.name: v for p, v in zip(whole, _read_whole(whole, max_bytes), strict=True)
    }
    values_of |= {p.name: v for p, v in zip(parts, _read_parts(parts), strict=True)}
    computed = [p for p in pieces if p.leaf.fn is not None]
    values = _compute([piece.leaf for piece in computed], max_bytes)
    values_of |= {p.name: v for p, v in zip(computed, values, strict=True)}
    return [values_of[piece.name] for piece in pieces]


def _read_whole(pieces: Sequence[Piece], max_bytes: int) -> list[Array]:
    jobs = {
        piece.path: ReadJob(source, _as_numpy(source.info, piece.path))
        for piece in pieces
        if isinstance(source := piece.leaf.source, StoredLeaf)
    }
    if not jobs:
        return [_given_value(piece.leaf) for piece in pieces]
    root = next(iter(jobs.values())).stored.root
    is_local = _storage.filesystem.is_local(root)
    options = arrays_read.ReadOptions(is_local, True, max_bytes)
    values = arrays_read.read(tuple(jobs.values()), options)
    return [
        _convert(values[piece.path], piece.leaf.info)
        if piece.path in values
        else _given_value(piece.leaf)
        for piece in pieces
    ]


def _as_numpy(info: LeafInfo, path: LeafPath) -> LeafInfo:
    """Returns a request for a stored leaf as a plain numpy array in storage shape."""
    return dataclasses.replace(
        info,
        path=path,
        kind="array",
        python_type="numpy.ndarray",
        shape=info.stored_shape,
        sharding=None,
        weak_type=False,
        prng_impl=None,
    )


def _read_parts(pieces: Sequence[Piece]) -> list[Array]:
    context = arrays_read.new_context()
    faults = arrays_read.Faults()
    started = _start_reads(pieces, context, faults)
    values = []
    for piece, future in zip(pieces, started, strict=True):
        try:
            if isinstance(future, ts.Future):
                source = piece.leaf.source
                assert isinstance(source, StoredLeaf), piece.path
                read = _storage.paths.result(future, source.root, piece.nbytes)
                array = _state.numpy_dtypes.from_stored(read, source.info.dtype or "")
                values.append(_convert(array, piece.leaf.info))
            elif future is not None:
                values.append(future)
        except (ValueError, OSError) as error:
            faults.add(piece.path, error)
    if faults:
        roots = [s.root for p in pieces if isinstance(s := p.leaf.source, StoredLeaf)]
        raise faults.error(roots[-1], advice="Convert another step")
    return values


def _start_reads(
    pieces: Sequence[Piece], context: ts.Context, faults: arrays_read.Faults
) -> list[Any]:
    """Returns, for each piece, values, a future, or None with a recorded fault."""
    opened: dict[LeafPath, ts.TensorStore] = {}
    begun: list[Any] = []
    for piece in pieces:
        source = piece.leaf.source
        if not isinstance(source, StoredLeaf):
            begun.append(_given_part(piece))
            continue
        try:
            if piece.path not in opened:
                opened[piece.path] = arrays_read.open_checked(source, context)
            store = opened[piece.path]
            region = tuple(slice(*bounds) for bounds in piece.region)
            begun.append(store[region].read())
        except (ValueError, OSError) as error:
            faults.add(piece.path, error)
            begun.append(None)
    return begun


def _given_part(piece: Piece) -> Array:
    shape = piece.leaf.info.stored_shape
    part: Array = _given_value(piece.leaf)[
        metadata.within(piece.region, metadata.whole(shape))
    ]
    return part


def _given_value(leaf: Leaf) -> Array:
    return _as_array(leaf.source, leaf.info)


def _convert(array: Array, info: LeafInfo) -> Array:
    return (
        array
        if info.kind == "prng_key"
        else _state.numpy_dtypes.convert(array, info.dtype or "")
    )


def _compute(leaves: Sequence[Leaf], max_bytes: int) -> list[Array]:
    if not leaves:
        return []
    from flaxckpt._arrays import evaluate  # imports jax

    wanted = [
        dataclasses.replace(
            leaf,
            info=dataclasses.replace(
                leaf.info, python_type="numpy.ndarray", sharding=None, weak_type=False
            ),
        )
        for leaf in leaves
    ]
    values = evaluate.read(
        wanted,
        arrays_read.ReadOptions(
            memory_map=False, verify=True, max_concurrent_bytes=max_bytes
        ),
    )
    return [_as_array(values[leaf.info.path], leaf.info) for leaf in leaves]


def _as_array(value: Any, info: LeafInfo) -> Array:
    if info.kind == "prng_key":
        import jax

        value = jax.random.key_data(value)
    return _convert(np.asarray(value), info)
