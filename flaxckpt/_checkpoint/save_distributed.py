"""Save of a checkpoint by several processes of a job.

Each process writes the chunks on its devices. Process 0 makes the directory, writes
the metadata, and commits the checkpoint when all processes report durable chunks.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from flaxckpt import _arrays, _distributed, _storage, datasets, errors
from flaxckpt._checkpoint import commit
from flaxckpt._checkpoint.commit import Written
from flaxckpt._checkpoint.request import Snapshot
from flaxckpt._distributed.messages import ApartError
from flaxckpt._distributed.operation import Operation
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import Shape
from flaxckpt.formats import _native

Named = tuple[str, Shape, Leaf]
"""A leaf with its name on disk and its chunk shape."""

_SYNCING_THREADS = 8


def own(
    together: Operation, infos: Sequence[LeafInfo], arrays: Sequence[Named]
) -> list[Named]:
    """Returns the arrays with chunks for this process to write.

    Process 0 writes the values that each process holds completely: numpy arrays,
    numbers, and jax arrays on devices of a single process. Process 0 also broadcasts
    the names of arrays not on its devices, the step, and a digest of the tree.

    Raises:
        SaveFailedError: This process saves another step or another tree than process 0.
    """
    mine = [leaf for leaf in arrays if together.is_first or _is_on_devices(leaf)]
    marks = [_mark(info) for info in infos]

    def begun() -> str:
        elsewhere = [leaf[0] for leaf in mine if not _is_here(leaf)]
        each = marks if len(marks) <= _MARKS_TOLD else None
        return json.dumps([together.what, elsewhere, _all_of(marks), each])

    what, elsewhere, whole, each = json.loads(together.first("begun", begun))
    if together.is_first:
        return mine
    if what != together.what:
        raise errors.SaveFailedError(
            f"process {together.index} saves {together.what}, and process 0 {what}: all"
            " processes must save the same steps, in the same order"
        )
    if whole != _all_of(marks):
        raise _other_tree(together, infos, marks, each)
    absent = set(elsewhere)
    return [
        leaf
        for leaf in mine
        if _is_here(leaf) and (leaf[0] in absent or _is_of_several(leaf))
    ]


_MARKS_TOLD = 10_000
"""Up to this number of leaves, checksums of each leaf are sent, to name differences."""


def _mark(info: LeafInfo) -> int:
    """Returns a checksum of the leaf properties that must agree in all processes."""
    is_shared = info.sharding is not None and _arrays.to_host.is_of_several(
        info.sharding
    )
    spec = info.sharding.spec if isinstance(info.sharding, NamedSharding) else None
    text = (
        f"{info.path} {info.kind} {info.shape} {info.dtype} {info.chunk_shape}"
        f" {is_shared} {spec if is_shared else None}"
    )
    return zlib.crc32(text.encode(errors="surrogateescape"))


def _all_of(marks: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()


def _other_tree(
    together: Operation,
    infos: Sequence[LeafInfo],
    marks: Sequence[int],
    theirs: Sequence[int] | None,
) -> errors.SaveFailedError:
    known = set(theirs or ())
    rows = [
        f"{info.path}: {info}"
        for info, mark in zip(infos, marks, strict=True)
        if theirs is not None and mark not in known
    ]
    return errors.SaveFailedError(
        f"the state of process {together.index} has other leaves, shapes, types or"
        f" shardings than that of process 0, in {together.what}"
        + (f"; of process {together.index}:\n{errors.rows(rows)}" if rows else "")
        + "\nAll processes must save the same tree."
    )


def _is_on_devices(leaf: Named) -> bool:
    return isinstance(leaf[2].source, jax.Array)


def _is_here(leaf: Named) -> bool:
    """Returns True if this process has at least a part of a leaf."""
    value = leaf[2].source
    return not isinstance(value, jax.Array) or bool(value.sharding.addressable_devices)


def _is_of_several(leaf: Named) -> bool:
    value = leaf[2].source
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def execute(
    snapshot: Snapshot, previous: _arrays.write.Previous | None, together: Operation
) -> Written:
    """Writes this process's part of a snapshot; process 0 commits the checkpoint.

    Returns:
        Size of the whole checkpoint, equal in all processes, and the arrays for the
        next save.

    Raises:
        SaveFailedError: A process could not write, or is gone; nothing is kept.
    """
    try:
        with commit.alone(snapshot.request.path):
            if together.is_first:
                return _lead(snapshot, previous, together)
            return _follow(snapshot, previous, together)
    except ApartError as apart:
        raise _distributed.agreement.not_saved(together, apart) from apart.__cause__


def _lead(
    snapshot: Snapshot, previous: _arrays.write.Previous | None, together: Operation
) -> Written:
    with commit.made(snapshot) as temporary:
        try:
            together.first("made", lambda: temporary.name)
            files = commit.fill(snapshot, temporary, previous)
            told = together.gather("written")
        except BaseException as error:
            # Remove the directory only after the other processes stop writing to it.
            together.fail(error, stage="written")
            if isinstance(error, Exception):
                raise together.outcome() from error
            raise
        if snapshot.contents.ocdbt:
            _arrays.zarr.ocdbt.merge(temporary / _native.items.STATE, together.count)
        digests = {n: d for each in told[1:] for n, d in json.loads(each).items()}
        written = commit.finish(snapshot, temporary, files, digests)
    together.first("committed", lambda: str(written.size))
    return written


def _follow(
    snapshot: Snapshot, previous: _arrays.write.Previous | None, together: Operation
) -> Written:
    try:
        temporary = snapshot.request.path.parent / together.first("made", str)
        digests = _write_part(snapshot, temporary, previous, together)
        together.tell("written", json.dumps(digests))
    except BaseException as error:
        together.fail(error)
        if isinstance(error, Exception):
            raise together.outcome() from error
        raise
    size = int(together.first("committed", str))
    manifest = _storage.stamp(snapshot.request.path / _native.orbax_json.MANIFEST)
    return Written(size, commit.for_next(snapshot, manifest))


def _write_part(
    snapshot: Snapshot,
    temporary: Path,
    previous: _arrays.write.Previous | None,
    together: Operation,
) -> dict[str, str]:
    """Writes the chunks and the dataset state of this process, durably.

    Returns:
        Files of the dataset iterators: name -> digest.
    """
    root = temporary / _native.items.STATE
    commit.write_arrays(snapshot, root, previous, together.check)
    files = {
        f"{_native.items.DATASET}/{name}": content
        for name, content in snapshot.contents.dataset.items()
        if name != datasets.DESCRIPTION
    }
    commit.write_new(temporary, files)
    if files:
        _storage.of(temporary).sync_directory(temporary / _native.items.DATASET)
    if snapshot.contents.ocdbt:
        _storage.of(root).sync_tree(root / f"{_arrays.zarr.ocdbt.PART}{together.index}")
    else:
        _sync(root, snapshot)
    _storage.of(root).sync_directory(root)
    return {name: _storage.files.digest(content) for name, content in files.items()}


def _sync(root: Path, snapshot: Snapshot) -> None:
    """Syncs the array files written by this process; objects need no sync."""
    paths = [root / array.name for array in snapshot.arrays if array.shards]
    for array in snapshot.arrays:
        if _arrays.chunks_to_write.is_raw(array, snapshot.contents.encoding):
            paths += _arrays.chunks_to_write.files_of(root, array)
    _storage.of(root).sync_files(paths, _SYNCING_THREADS)
