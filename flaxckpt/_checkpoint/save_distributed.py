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

from flaxckpt import _arrays, _distributed, _formats, _storage, datasets, errors
from flaxckpt._checkpoint import commit
from flaxckpt._checkpoint.commit import Snapshot, WrittenFiles
from flaxckpt._distributed.messages import ApartError
from flaxckpt._distributed.operation import Operation
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import JSON, Shape

Named = tuple[str, Shape, Leaf]
"""A leaf with its name on disk and its chunk shape."""

_SYNCING_THREADS = 8


def select_own(
    operation: Operation, infos: Sequence[LeafInfo], arrays: Sequence[Named]
) -> list[Named]:
    """Returns the arrays with chunks for this process to write.

    Process 0 writes the values that each process holds completely: numpy arrays,
    numbers, and jax arrays on devices of a single process. Process 0 also broadcasts
    the names of arrays not on its devices, the step, and a digest of the tree: another
    step or tree in this process is an error.
    """
    candidates = [leaf for leaf in arrays if operation.is_first or _is_on_devices(leaf)]
    checksums = [_checksum(info) for info in infos]
    digest = hashlib.sha256(json.dumps(checksums).encode()).hexdigest()

    def describe() -> str:
        elsewhere = [leaf[0] for leaf in candidates if not _is_here(leaf)]
        each = checksums if len(checksums) <= _MAX_CHECKSUMS else None
        return json.dumps([operation.what, elsewhere, digest, each])

    what, elsewhere, first_digest, each = json.loads(operation.first("begun", describe))
    if operation.is_first:
        return candidates
    if what != operation.what:
        raise errors.SaveFailedError(
            f"process {operation.index} saves {operation.what}, and process 0 saves"
            f" {what}: all processes must save the same steps, in the same order"
        )
    if digest != first_digest:
        raise _tree_error(operation, infos, checksums, each)
    absent = set(elsewhere)
    return [
        leaf
        for leaf in candidates
        if _is_here(leaf) and (leaf[0] in absent or _is_of_several(leaf))
    ]


_MAX_CHECKSUMS = 10_000
"""Up to this number of leaves, checksums of each leaf are sent, to name differences."""


def _checksum(info: LeafInfo) -> int:
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


def _tree_error(
    operation: Operation,
    infos: Sequence[LeafInfo],
    checksums: Sequence[int],
    of_first: Sequence[int] | None,
) -> errors.SaveFailedError:
    expected = set(of_first or ())
    rows = [
        f"{info.path}: {info}"
        for info, checksum in zip(infos, checksums, strict=True)
        if of_first is not None and checksum not in expected
    ]
    return errors.SaveFailedError(
        f"in {operation.what}, the state of process {operation.index} has other leaves,"
        " shapes, types or shardings than the state of process 0"
        + (f"; leaves that differ:\n{errors.rows(rows)}" if rows else "")
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


def write_snapshot(
    snapshot: Snapshot, previous: _arrays.write.Previous | None
) -> WrittenFiles:
    """Writes this process's part of a snapshot; process 0 commits the checkpoint.

    Returns the size of the whole checkpoint, equal in all processes. Nothing is kept if
    a process could not write, is gone, or has cancelled the save.
    """
    operation = snapshot.request.operation
    assert operation is not None
    try:
        with commit.write_lock(snapshot.request.path):
            if operation.is_first:
                return _lead(snapshot, previous, operation)
            return _follow(snapshot, previous, operation)
    except ApartError as apart:
        raise _distributed.agreement.save_error(operation, apart) from apart.__cause__


def _lead(
    snapshot: Snapshot, previous: _arrays.write.Previous | None, operation: Operation
) -> WrittenFiles:
    with commit.begin(snapshot) as transaction:
        try:
            operation.first("made", lambda: transaction.directory.name)
            files, arrays = commit.write_files(snapshot, transaction, previous)
            reports = operation.gather("written")
        except BaseException as error:
            # Remove the directory only after the other processes stop writing to it.
            operation.fail(error, stage="written")
            if isinstance(error, Exception):
                raise operation.outcome() from error
            raise
        digests: dict[str, str] = {}
        for report in map(json.loads, reports[1:]):
            digests |= report["digests"]
            for item, rows in report["arrays"].items():
                arrays[item].add(_arrays.write.Written.from_json(rows))
        written = commit.finish_checkpoint(
            snapshot, transaction, files, digests, arrays=arrays
        )
    operation.first("committed", lambda: str(written.size))
    return written


def _follow(
    snapshot: Snapshot, previous: _arrays.write.Previous | None, operation: Operation
) -> WrittenFiles:
    try:
        temporary = snapshot.request.path.parent / operation.first("made", str)
        report = _write_part(snapshot, temporary, previous, operation)
        snapshot.request.cancellation.close()  # process 0 may commit from now on
        operation.report("written", json.dumps(report))
    except BaseException as error:
        operation.fail(error)
        if isinstance(error, Exception):
            raise operation.outcome() from error
        raise
    # Patient: process 0 commits when all have written, however slow its disk is.
    size = int(operation.first("committed", str, is_patient=True))
    manifest = _storage.stamp(snapshot.request.path / _formats.orbax_json.MANIFEST)
    return WrittenFiles(size, commit.linkable_arrays(snapshot, manifest))


def _write_part(
    snapshot: Snapshot,
    temporary: Path,
    previous: _arrays.write.Previous | None,
    operation: Operation,
) -> dict[str, JSON]:
    """Writes the chunks and the dataset state of this process, durably.

    Returns the report to process 0: digests of the files of dataset iterators, and the
    written arrays.
    """
    contents = snapshot.contents
    arrays = commit.write_arrays(snapshot, temporary, previous, operation.check)
    dataset = contents.manifest.items.dataset
    files = {
        f"{dataset}/{name}": content
        for name, content in contents.dataset.items()
        if name != datasets.DESCRIPTION
    }
    storage = _storage.of(temporary)
    storage.write_files(temporary, files)
    if files:
        storage.sync_files(map(temporary.joinpath, (*files, dataset)), _SYNCING_THREADS)
    for item, written in arrays.items():
        values = written.values.values()
        names = {value.file for value in values if not isinstance(value, bytes)}
        directories = {str(Path(name).parent) for name in names}
        paths = [temporary / item / name for name in (*names, *directories)]
        storage.sync_files(paths, _SYNCING_THREADS)
        storage.sync_directory(temporary / item)
    digests: JSON = {
        name: _storage.files.digest(content) for name, content in files.items()
    }
    return {
        "digests": digests,
        "arrays": {item: written.to_json() for item, written in arrays.items()},
    }
