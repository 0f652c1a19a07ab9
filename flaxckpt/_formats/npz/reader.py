"""Reader of numpy's archives of arrays (`.npz`), as written by big_vision and others.

Names are split at `/`. Only the requested rows of an uncompressed array are read.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from flaxckpt import _arrays, _state, _storage, _util, errors
from flaxckpt._formats import array_names, plain
from flaxckpt._formats.msgpack import leaves
from flaxckpt._formats.npz import members as npz_members
from flaxckpt._formats.npz.members import Member, NpyHeader
from flaxckpt._formats.reader import Stored
from flaxckpt._types import Shape
from flaxckpt._zarr.metadata import Array


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    stamp = _storage.stamp(path)
    headers: dict[Member, NpyHeader] = {}
    faults: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    try:
        with _storage.of(path).open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            members, faults = npz_members.read_members(file, stamp, size)
            for member in members:
                try:
                    headers[member] = npz_members.read_header(file, member)
                except npz_members.UnsupportedError as error:
                    unsupported[member.name] = str(error)
                except ValueError as error:
                    faults[member.name] = str(error)
    except ValueError as error:
        raise npz_members.damaged_error(path, error) from None
    if faults:
        raise _unreadable(path, faults)
    if unsupported:
        raise _refused(path, unsupported)
    # A member is compared with its checksum once, even if read in several parts.
    check = functools.lru_cache(maxsize=None)(npz_members.check_member)
    arrays = {m.name: _array(m, h, check) for m, h in headers.items()}
    return leaves.make_stored(
        path,
        path,
        leaves.walk(_nest(array_names.split(arrays, "/", path), arrays)),
        format_name="npz",
        step=step,
        stamp=stamp,
    )


def _unreadable(path: Path, faults: Mapping[str, str]) -> errors.CheckpointError:
    count = f"{len(faults)} members" if len(faults) > 1 else "1 member"
    return errors.DamagedCheckpointError(
        f"{count} of {path} cannot be read:\n"
        + errors.rows(f"{name[:200]}: {why}" for name, why in faults.items())
        + "\nGet another copy, or save it again with numpy.savez."
    )


def _refused(path: Path, unsupported: Mapping[str, str]) -> errors.CheckpointError:
    count = _util.humanize.count(len(unsupported), "array")
    return errors.CheckpointFormatError(
        f"{count} of {path} cannot be read:\n"
        + errors.rows(f"{name[:200]}: {why}" for name, why in unsupported.items())
        + "\nOnly arrays of numbers are read. Pickles run code when they are opened, so"
        " they never are: save the archive again with numpy.savez, without these arrays"
        " or with numbers instead of them."
    )


def _nest(
    keys: Mapping[str, Sequence[_state.tree.Key]], arrays: Mapping[str, plain.Opened]
) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        conflict = leaves.put(tree, [str(key.name) for key in keys[name]], array)
        assert conflict is None, (name, conflict)
    return tree


def _array(
    member: Member, header: NpyHeader, check: Callable[[Member], None]
) -> plain.Opened:
    shape = header.shape
    if member.is_deflated:
        chunk_shape = tuple([max(size, 1) for size in shape])
        # Expansion includes the comparison with the checksum.
        return plain.Opened(
            shape,
            header.dtype,
            chunk_shape,
            functools.partial(_open_deflated, member, header),
            _skip_check,
        )
    # Single rows can be read along the slowest axis.
    slowest = len(shape) - 1 if header.is_fortran else 0
    chunk_shape = tuple(
        [1 if axis == slowest else max(size, 1) for axis, size in enumerate(shape)]
    )
    return plain.Opened(
        shape,
        header.dtype,
        chunk_shape,
        functools.partial(_open_stored, member, header),
        functools.partial(check, member),
    )


def _skip_check() -> None:
    """Does nothing: every read of the array includes the comparison."""


def _c_shape(header: NpyHeader) -> Shape:
    """Returns the shape of the stored bytes in C order; reversed for Fortran order."""
    return header.shape[::-1] if header.is_fortran else header.shape


def _open_stored(
    member: Member, header: NpyHeader, context: ts.Context
) -> ts.Future[ts.TensorStore]:
    span = _arrays.read_plan.Span(
        member.archive.path,
        member.offset + header.nbytes,
        _c_shape(header),
        header.dtype,
        identity=member.archive.identity,
        is_big_endian=header.is_big_endian,
    )
    store = _arrays.read.open_span(span, context).result()
    return _arrays.read.completed_future(store.T if header.is_fortran else store)


def _open_deflated(
    member: Member, header: NpyHeader, context: ts.Context
) -> ts.Future[ts.TensorStore]:
    shape = _c_shape(header)
    dtype = _state.numpy_dtypes.to_numpy(header.dtype)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        rows = domain[0] if shape else ts.Dim(size=1)
        start = header.nbytes + rows.inclusive_min * row_bytes
        stop = header.nbytes + rows.exclusive_max * row_bytes
        values = npz_members.expand(member, start, stop).view(dtype)
        if header.is_big_endian:
            values.byteswap(inplace=True)
        _state.numpy_dtypes.check_bools(values)
        values = values.reshape((-1, *shape[1:]) if shape else ())
        inner = domain.index_exp[1:]
        target[...] = values[(slice(None), *inner)] if shape else values

    store = ts.virtual_chunked(
        read,
        dtype=ts.dtype(header.dtype),
        shape=shape,
        chunk_layout=ts.ChunkLayout(
            read_chunk_shape=tuple([max(size, 1) for size in shape])
        ),
        context=context,
    )
    return _arrays.read.completed_future(store.T if header.is_fortran else store)
