"""Save of a checkpoint by several processes of a job.

Each process writes the chunks on its devices. Process 0 makes the directory, and
commits when all chunks are durable. With a directory for each process, each commits
the same metadata with its own chunks: a part of the checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, Sharding

from flaxckpt import _arrays, _distributed, _formats, _steps, _storage, datasets, errors
from flaxckpt._checkpoint import commit
from flaxckpt._checkpoint.commit import Snapshot, WrittenFiles
from flaxckpt._distributed.messages import LATE, ApartError
from flaxckpt._distributed.operation import Operation
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._storage.transaction import Transaction
from flaxckpt._types import JSON, Shape

Named = tuple[str, Shape, Leaf]
"""A leaf with its name on disk and its chunk shape."""

_SYNCING_THREADS = 8


def select_own(
    operation: Operation, infos: Sequence[LeafInfo], arrays: Sequence[Named]
) -> list[Named]:
    """Returns the arrays with chunks for this process to write.

    Process 0 writes the values that each process holds completely. It also broadcasts
    the names of arrays not on its devices, the step, and a digest of the tree: another
    step or tree in this process is an error.
    """
    candidates = [leaf for leaf in arrays if operation.is_first or _is_on_devices(leaf)]
    places = {leaf.info.path: f"stored as {name}" for name, _, leaf in arrays}
    described = {
        info.path: [*_describe(info), places.get(info.path, "")] for info in infos
    }
    text = json.dumps(described, sort_keys=True)  # dicts are equal in any order
    digest = hashlib.sha256(text.encode()).hexdigest()

    def describe() -> JSON:
        elsewhere = [leaf[0] for leaf in candidates if not _is_here(leaf)]
        packed = _pack(text) if len(described) <= _MAX_DESCRIBED else None
        return [operation.what, elsewhere, digest, packed]

    what, elsewhere, first_digest, packed = operation.first("begun", describe)
    if operation.is_first:
        return candidates
    if what != operation.what:
        raise errors.SaveFailedError(
            f"process {operation.index} saves {operation.what}, and process 0 saves"
            f" {what}: all processes must save the same steps, in the same order"
        )
    if digest != first_digest:
        of_first = None if packed is None else json.loads(_unpack(packed))
        raise _tree_error(operation, described, of_first)
    absent = set(elsewhere)
    return [
        leaf
        for leaf in candidates
        if _is_here(leaf) and (leaf[0] in absent or _is_of_several(leaf))
    ]


_MAX_DESCRIBED = 10_000
"""Up to this number of leaves, their descriptions are sent, to name differences."""


def _pack(text: str) -> str:
    return _to_text(zlib.compress(text.encode(), level=1))


def _unpack(packed: str) -> str:
    return zlib.decompress(base64.b64decode(packed)).decode()


def _describe(info: LeafInfo) -> list[str]:
    """Returns the properties of a leaf that must be the same in all processes."""
    is_array = info.kind in ("array", "prng_key")
    return [
        str(info) if is_array else f"{info.kind} {info.dtype or ''}".rstrip(),
        _APART if info.sharding is None else _describe_sharding(info.sharding),
        f"chunks of {list(info.chunk_shape)}" if info.chunk_shape else "",
    ]


@functools.lru_cache(maxsize=1024)
def _describe_sharding(sharding: Sharding) -> str:
    """Returns the axes and devices of a leaf on devices of several processes."""
    if not _arrays.to_host.is_of_several(sharding):
        return _APART
    if not isinstance(sharding, NamedSharding):
        return "on devices of several processes"
    axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    ids = [device.id for device in sharding.mesh.devices.flat]
    if len(ids) > _MAX_IDS:
        ids_text = f"{ids[0]} … {ids[-1]} ({zlib.crc32(str(ids).encode()):08x})"
    else:
        ids_text = ", ".join(map(str, ids))
    return f"{tuple(sharding.spec)} over {axes} on devices {ids_text}"


_APART = "in each process"

_MAX_IDS = 16
"""Up to this number of devices, a description lists all of a mesh."""


def _tree_error(
    operation: Operation,
    described: Mapping[str, Sequence[str]],
    of_first: Mapping[str, Sequence[str]] | None,
) -> errors.SaveFailedError:
    paths = [] if of_first is None else list(dict.fromkeys((*of_first, *described)))
    both = [(path, described.get(path), (of_first or {}).get(path)) for path in paths]
    rows = [
        f"{path}: {_name_difference(here, first)}"
        for path, here, first in both
        if here != first
    ]
    return errors.SaveFailedError(
        f"in {operation.what}, the state of process {operation.index} has other leaves,"
        " shapes, types or shardings than the state of process 0"
        + (f"; leaves that differ:\n{errors.rows(rows)}" if rows else "")
        + "\nAll processes must save the same tree, on one mesh."
    )


def _name_difference(here: Sequence[str] | None, first: Sequence[str] | None) -> str:
    """Returns the differing properties of a leaf: those of process 0 are wanted."""
    if here is None or first is None:
        return f"wanted {_name(first)}, found {_name(here)}"
    differing = [pair for pair in zip(first, here, strict=True) if len({*pair}) > 1]
    wanted, found = zip(*differing, strict=True)
    return f"wanted {_name(wanted)}, found {_name(found)}"


def _name(parts: Sequence[str] | None) -> str:
    return "nothing" if parts is None else "; ".join(filter(None, parts))


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
    snapshot: Snapshot, previous: _arrays.written.Previous | None
) -> WrittenFiles:
    """Writes this process's part of a snapshot; process 0 commits the checkpoint.

    The returned size is that of the whole checkpoint, equal in all processes. Nothing
    is kept if a process could not write, is gone, or has cancelled the save.
    """
    operation = snapshot.request.operation
    assert operation is not None
    try:
        with commit.write_lock(snapshot.request.path):
            if snapshot.request.is_part:
                return _write_own(snapshot, previous, operation)
            if operation.is_first:
                return _lead(snapshot, previous, operation)
            return _follow(snapshot, previous, operation)
    except ApartError as apart:
        raise _distributed.agreement.save_error(operation, apart) from apart.__cause__


def _lead(
    snapshot: Snapshot, previous: _arrays.written.Previous | None, operation: Operation
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
        digests = _collect(reports, arrays)
        written = commit.finish_checkpoint(
            snapshot, transaction, files, digests, arrays=arrays
        )
    operation.first("committed", lambda: written.size)
    return written


def _collect(reports: Sequence[Any], arrays: commit.WrittenArrays) -> dict[str, str]:
    """Adds to `arrays` what other processes wrote; returns digests of other files."""
    digests: dict[str, str] = {}
    for report in reports[1:]:
        digests |= report["digests"]
        for item, rows in report["arrays"].items():
            arrays[item].add(_arrays.written.Written.from_json(rows))
    return digests


def _follow(
    snapshot: Snapshot, previous: _arrays.written.Previous | None, operation: Operation
) -> WrittenFiles:
    try:
        temporary = snapshot.request.path.parent / operation.first("made", str)
        report = _write_part(snapshot, temporary, previous, operation)
        snapshot.request.cancellation.close()  # process 0 may commit from now on
        operation.report("written", report)
    except BaseException as error:
        operation.fail(error)
        if isinstance(error, Exception):
            raise operation.outcome() from error
        raise
    # Patient: process 0 commits when all have written, however slow its disk is.
    size = operation.first("committed", int, is_patient=True)
    manifest = _storage.stamp(snapshot.request.path / _formats.orbax_json.MANIFEST)
    return WrittenFiles(size, commit.linkable_arrays(snapshot, manifest))


def _write_part(
    snapshot: Snapshot,
    temporary: Path,
    previous: _arrays.written.Previous | None,
    operation: Operation,
) -> dict[str, JSON]:
    """Writes this process's chunks and dataset state durably, and returns a report."""
    contents = snapshot.contents
    arrays = commit.write_arrays(snapshot, temporary, previous, operation.check)
    dataset = contents.manifest.items.dataset
    files = {
        f"{dataset}/{name}": content
        for name, content in contents.dataset.items()
        if name != datasets.DESCRIPTION
    }
    digests: JSON = {
        name: _storage.files.digest(content) for name, content in files.items()
    }
    report: dict[str, JSON] = {
        "digests": digests,
        "arrays": {item: written.to_json() for item, written in arrays.items()},
    }
    if snapshot.request.is_part:  # a directory gets the files of all iterators
        texts = {name: _to_text(content) for name, content in files.items()}
        return report | {"dataset": texts}
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
    return report


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


# ---- a directory for each process -------------------------------------------------

_TEXT_BYTES = 2**20
"""Longest text of the metadata: the coordination service limits its messages."""


def _write_own(
    snapshot: Snapshot, previous: _arrays.written.Previous | None, operation: Operation
) -> WrittenFiles:
    """Writes this process's part, and commits it when all parts are durable."""
    request, save = snapshot.request, ""
    make_room = request.make_room or (lambda operation: operation.exchange("durable"))
    is_committed = False
    try:
        with commit.begin(snapshot) as transaction:
            if operation.is_first:
                last, parts = _write_first(snapshot, transaction, previous, operation)
            else:
                report = _write_part(
                    snapshot, transaction.directory, previous, operation
                )
                operation.report("written", report)
                last, parts = _receive(operation)
            marker = _steps.markers.StepParts(operation.index, parts).content()
            save = _storage.files.digest(last[_storage.transaction.MARKER])
            pin = _steps.markers.pin_of(request.path)
            written = commit.commit_files(
                snapshot,
                transaction,
                {**last, _steps.markers.PARTS: marker, **pin},
                before=lambda: make_room(operation),
            )
        is_committed = True
        sizes = operation.exchange("committed", written.size)
    except BaseException as error:
        operation.fail(error)
        if is_committed and not _is_late(error):  # others have said that they failed
            with contextlib.suppress(OSError, errors.CheckpointError):
                check = functools.partial(_check_save, save)
                _storage.transaction.delete(request.path, check)
        if isinstance(error, Exception):
            raise operation.outcome() from error
        raise
    return written._replace(size=sum(sizes))


def _check_save(save: str, path: Path) -> None:
    """Raises SaveFailedError if another save has replaced a step."""
    marker = (path / _storage.transaction.MARKER).read_bytes()
    if _storage.files.digest(marker) != save:
        raise errors.SaveFailedError(f"another writer has replaced {path}")


def _is_late(error: BaseException) -> bool:
    """Returns True if processes may have committed, and cannot say so."""
    failures = error.failures if isinstance(error, ApartError) else ()
    return any(failure.kind == LATE for failure in failures)


def _write_first(
    snapshot: Snapshot,
    transaction: Transaction,
    previous: _arrays.written.Previous | None,
    operation: Operation,
) -> tuple[dict[str, bytes], _Parts]:
    """Writes process 0's part and sends the metadata; returns last files and parts."""
    files, arrays = commit.write_files(snapshot, transaction, previous)
    reports = operation.gather("written")
    digests = _collect(reports, arrays)
    others = {
        name: base64.b64decode(text)
        for report in reports[1:]
        for name, text in report["dataset"].items()
    }
    root = transaction.directory
    last = _formats.native_contents.seal(
        snapshot.contents, files, root, arrays, digests
    )
    parts: list[dict[str, int]] = [{} for _ in reports]
    for item, written in arrays.items():
        start = _formats.items.prefix(item)
        for name, size in _arrays.write.file_sizes(written.values).items():
            parts[_arrays.write.writer(name)][f"{start}{name}"] = size
    _send(operation, {**files, **others, **last}, tuple(parts))
    return {**others, **last}, tuple(parts)


_Parts: TypeAlias = tuple[dict[str, int], ...]
"""Process -> its files, with their sizes in bytes."""


def _send(operation: Operation, files: Mapping[str, bytes], parts: _Parts) -> None:
    pieces = pack_metadata(files, parts)
    operation.first("sealed", lambda: len(pieces))
    for n, piece in enumerate(pieces):
        operation.first(f"sealed.{n}", functools.partial(str, piece))


def pack_metadata(files: Mapping[str, bytes], parts: _Parts) -> list[str]:
    names = {name: len(content) for name, content in files.items()}
    content = b"".join([json.dumps([names, parts]).encode(), b"\n", *files.values()])
    text = _to_text(zlib.compress(content, 1))
    starts = range(0, len(text), _TEXT_BYTES)
    return [text[start : start + _TEXT_BYTES] for start in starts]


def _receive(operation: Operation) -> tuple[dict[str, bytes], _Parts]:
    count = operation.first("sealed", int)
    text = "".join([operation.first(f"sealed.{n}", str) for n in range(count)])
    head, _, rest = zlib.decompress(base64.b64decode(text)).partition(b"\n")
    names, parts = json.loads(head)
    files, start = {}, 0
    for name, size in names.items():
        files[name] = rest[start : start + size]
        start += size
    return files, tuple(parts)
