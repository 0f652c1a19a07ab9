"""Quick check for missing files of a checkpoint, before deleting older checkpoints.

The check compares the names and sizes of array files, of which it reads at most the
headers of compressed chunks. Only the trees of databases are read, and small databases
of older releases, because the manifest has their digests.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from flaxckpt import _arrays, _formats, _state, _storage, _util, _zarr, errors
from flaxckpt._formats import locate
from flaxckpt._formats.native_manifest import Manifest
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath

_T = TypeVar("_T")

_MAX_LOSS = 300
"""The most characters of the message about lost files."""

_OUTSIDE_NODES_BYTES = 4096
"""OCDBT stores values of at least this size outside of its nodes, uncompressed.

Values of up to 100 bytes are in the nodes, which are compressed.
"""


class Files(NamedTuple):
    """The files of a local checkpoint, as they were when it was found whole.

    Attributes:
        names: The relative paths, joined by NUL; steps with equal names share the text.
        stamp: A number that changes with the files.
    """

    names: str
    stamp: int

    @classmethod
    def of(cls, path: Path, names: Iterable[str]) -> Files:
        """Returns the files `names` of the checkpoint `path`, as they are now."""
        joined = sys.intern("\0".join(names))
        return cls(joined, _stamp(path, joined))

    def are_unchanged(self, path: Path) -> bool:
        """Returns True if the files, now at `path`, are as they were."""
        return _stamp(path, self.names) == self.stamp


def _stamp(path: Path, names: str) -> int:
    return hash(tuple([_status(f"{path}/{name}") for name in names.split("\0")]))


def _status(file: str) -> tuple[int, int, int]:
    """Returns size, time and number of a file; of no regular file, zeros."""
    try:
        status = os.stat(file)  # noqa: PTH116, a third of the time of Path.stat
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0, 0
    if not stat.S_ISREG(status.st_mode):
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino


@_util.gc_pause.pause()
def check(path: Path, step: int | None) -> Files | None:
    """Checks the metadata of a flaxckpt checkpoint, and the sizes of array files.

    Args:
        path: The checkpoint.
        step: The step that it must be; None for any.

    Returns:
        The files, to notice later that one has changed; None in a store.

    Raises:
        DamagedCheckpointError: A metadata file is missing or has changed, a chunk is
            missing or has the wrong size, or another step was saved here.
    """
    storage = _storage.of(path)
    with _storage.paths.listing_cache(path):
        stored = locate.read_without_classes(path)
        locate.check_step(path, step, stored)
        stored.check_items(stored.metadata.damaged_items)
        if (manifest := stored.manifest) is None:
            raise errors.DamagedCheckpointError(
                f"{path / _formats.orbax_json.MANIFEST} is missing; restore another"
                " step"
            )
        with _storage.permissions.explain_errors(path):
            encoding = manifest.encoding
            files = None
            if not storage.costs_requests:
                files = Files.of(path, _names(path, stored, encoding, manifest))
            # Zarr 2 has a digest for each chunk: this check would read everything.
            skips_arrays = encoding is not None and (
                encoding.version == 2 or storage.costs_requests
            )
            for name, digest in digests(stored).items():
                is_of_arrays = stored.items.tree_of_file(name) is not None
                if not (skips_arrays and is_of_arrays):
                    _formats.items.check_digest(path / name, digest)
            arrays = [i for i in stored.metadata.leaves.values() if i.dtype is not None]
            if storage.costs_requests:
                _check_names(path, stored, manifest, encoding)
            elif encoding is not None:
                _check_sizes(path, stored, encoding, arrays, manifest)
            return files


class Look(NamedTuple):
    """The result of a look at a step.

    Attributes:
        loss: What `check` finds, in one line; None if it finds nothing, or cannot look.
        files: The files of a step that is whole; None if unknown.
    """

    loss: str | None = None
    files: Files | None = None


def look(
    path: Path, step: int | None, leaves: Collection[LeafPath] | None = None
) -> Look:
    """Looks at the files of a step.

    Args:
        path: A step. Of another program, only the description of its leaves is read: it
            has no sizes to compare with.
        step: The step that it must be; None for any.
        leaves: The leaves whose files are compared; by default all files are.
    """
    try:
        if not (path / _formats.orbax_json.MANIFEST).is_file():
            _check_written_by_others(path, leaves)
            return Look()
        if leaves is None:
            return Look(files=check(path, step))
        check_leaves(path, leaves)
    except (errors.CheckpointError, OSError) as error:
        is_gone = not _storage.of(path).exists(path)
        if not is_gone and not _storage.permissions.is_unread(error):
            return Look(errors.one_line(errors.join_rows(error), _MAX_LOSS))
    return Look()


def _check_written_by_others(path: Path, leaves: Collection[LeafPath] | None) -> None:
    """Checks the description of a step of another program, with that of its arrays.

    Args:
        path: The step.
        leaves: The leaves to look at; by default all.

    Raises:
        DamagedCheckpointError: The description is missing or malformed.
    """
    try:
        stored = locate.read_without_classes(path)
    except errors.CheckpointFormatError:  # whole, but not read
        return
    if leaves is None:
        stored.check_items(stored.metadata.damaged_items)
    for leaf in leaves or ():
        stored.check_leaf(leaf)


def _names(
    path: Path,
    stored: Stored,
    encoding: _zarr.metadata.Encoding | None,
    manifest: Manifest,
) -> list[str]:
    """Returns the files of a local checkpoint that a restore reads."""
    names = [_formats.orbax_json.MANIFEST, *digests(stored)]
    if manifest.files is not None:
        return [*names, *recorded_sizes(stored, manifest)]
    for item, infos in stored.items.split([*stored.metadata.leaves.values()]).items():
        if encoding is None or manifest.ocdbt:
            root = _formats.items.prefix(item)
            part = _zarr.metadata.DATABASE_PART
            values = [*path.glob(f"{root}d/*"), *path.glob(f"{root}{part}*/d/*")]
            names.append(_formats.items.database(item))
            names += [str(file.relative_to(path)) for file in values]
            continue
        for info in infos:
            if info.dtype is not None:
                root = _formats.items.prefix(stored.items.array_directory(info))
                names += [f"{root}{name}" for name in array_files(encoding, info)]
    return names


@_util.gc_pause.pause()
def check_leaves(path: Path, leaves: Collection[LeafPath]) -> None:
    """Checks the sizes of the array files of some leaves of a local checkpoint.

    Raises:
        DamagedCheckpointError: A metadata file is missing or has changed, or a chunk
            of these leaves is missing or has the wrong size.
    """
    stored = locate.read_without_classes(path)
    with _storage.permissions.explain_errors(path):
        manifest = stored.manifest
        if manifest is None or (encoding := manifest.encoding) is None:
            return
        arrays = [i for i in stored.metadata.leaves.values() if i.dtype is not None]
        wanted = [info for info in arrays if info.path in leaves]
        items: set[str] = set()
        if manifest.ocdbt:  # looked at as a whole
            items = {stored.items.item_of(info) for info in wanted}
            wanted = [info for info in arrays if stored.items.item_of(info) in items]
        _check_sizes(path, stored, encoding, wanted, manifest)
        for name, digest in digests(stored).items():
            if any(_is_of_database(name, item) for item in items):
                _formats.items.check_digest(path / name, digest)


def _is_of_database(name: str, item: str) -> bool:
    """Returns True for a file of the database of an item, without its descriptions."""
    in_values = name.startswith(f"{_formats.items.prefix(item)}d/")
    return in_values or name == _formats.items.database(item)


def _check_sizes(
    path: Path,
    stored: Stored,
    encoding: _zarr.metadata.Encoding,
    arrays: Sequence[LeafInfo],
    manifest: Manifest,
) -> None:
    """Raises DamagedCheckpointError for missing files of arrays, or wrong sizes."""
    if not manifest.ocdbt:
        for info in arrays:
            directory = path / stored.items.array_directory(info)
            _check_array(directory, encoding, info)
        return
    for item, infos in stored.items.split(arrays).items():
        if infos and manifest.files is not None:
            _check_files(path, recorded_sizes(stored, manifest, item))
        elif infos:
            _check_database(path / item, encoding, infos)


def recorded_sizes(
    stored: Stored, manifest: Manifest, item: str | None = None
) -> dict[str, int]:
    """Returns the recorded files of the databases of items -> bytes.

    Args:
        stored: The checkpoint.
        manifest: Its manifest.
        item: An item; None for all that were not deleted.
    """
    sizes = manifest.files or {}
    if item is not None:
        root = _formats.items.prefix(item)
        return {name: size for name, size in sizes.items() if name.startswith(root)}
    return _without_deleted(stored, sizes)


def _check_files(path: Path, sizes: Mapping[str, int]) -> None:
    """Raises DamagedCheckpointError for files of databases of other sizes."""
    faults = [
        f"{name}: wanted {wanted} bytes, found {found or 'none'}"
        for name, wanted in sizes.items()
        if (found := _status(f"{path}/{name}")[0]) != wanted
    ]
    if faults:
        raise errors.DamagedCheckpointError(
            f"{path} is incomplete; restore another step:\n" + errors.rows(faults)
        )


def _check_names(
    path: Path,
    stored: Stored,
    manifest: Manifest,
    encoding: _zarr.metadata.Encoding | None,
) -> None:
    """Raises DamagedCheckpointError if objects of arrays are missing in a store.

    Sizes need no check, because a store has an object completely or not at all.
    """
    items = stored.items
    wanted = {name for name in digests(stored) if items.tree_of_file(name) is not None}
    wanted |= recorded_sizes(stored, manifest).keys()
    for info in stored.metadata.leaves.values():
        if encoding is None or info.dtype is None:
            continue
        if manifest.ocdbt:
            wanted.add(_formats.items.database(items.item_of(info)))
            continue
        root = _formats.items.prefix(items.array_directory(info))
        wanted |= {f"{root}{name}" for name in array_files(encoding, info)}
    if missing := sorted(wanted.difference(_storage.of(path).files_below(path))):
        raise errors.DamagedCheckpointError(
            f"{path} is incomplete; restore another step:\n"
            + errors.rows(f"{name} is missing" for name in missing)
        )


def digests(stored: Stored) -> dict[str, str]:
    """Returns the required files of a checkpoint: name -> recorded digest."""
    return _without_deleted(stored, stored.digests)


def _without_deleted(stored: Stored, files: Mapping[str, _T]) -> dict[str, _T]:
    deleted = tuple(f"{item}/" for item in stored.metadata.deleted_items)
    return {name: v for name, v in files.items() if not name.startswith(deleted)}


def _check_database(
    root: Path, encoding: _zarr.metadata.Encoding, arrays: Sequence[LeafInfo]
) -> None:
    """Raises DamagedCheckpointError if a database cannot hold the larger arrays."""
    least = sum(
        _arrays.forms.stored_bytes(info)
        for info in arrays
        if chunk_bytes(encoding, info) >= _OUTSIDE_NODES_BYTES
    )
    directories = [root / "d", *root.glob(f"{_zarr.metadata.DATABASE_PART}*/d")]
    found = sum(sum(_sizes(directory).values()) for directory in directories)
    if not _sizes(root).get(_zarr.metadata.DATABASE) or found < max(1, least):
        raise errors.DamagedCheckpointError(
            f"{root} is incomplete: wanted a database of at least {least} bytes,"
            f" found {found}; restore another step"
        )


def chunk_bytes(encoding: _zarr.metadata.Encoding, info: LeafInfo) -> int:
    """Returns the bytes of each chunk file, with checksum; 0 if the size varies."""
    shape, dtype = _arrays.forms.stored_form(info)
    codec = _zarr.metadata.choose_codec(encoding, shape, dtype)
    if codec != "none" or info.chunk_shape is None:
        return 0
    size = math.prod(info.chunk_shape) * _state.dtypes.item_size(dtype)
    return size + _checksum_bytes(encoding)


def _checksum_bytes(encoding: _zarr.metadata.Encoding) -> int:
    return _zarr.checksums.CHECKSUM_BYTES if encoding.checksum else 0


def _check_array(
    directory: Path, encoding: _zarr.metadata.Encoding, info: LeafInfo
) -> None:
    """Raises DamagedCheckpointError for missing array files or wrong sizes."""
    known = chunk_bytes(encoding, info)
    metadata, *chunks = array_files(encoding, info)
    faults = []
    for name in chunks:
        size = _status(f"{directory}/{name}")[0]
        wanted = known
        if size and not known:
            wanted = _compressed_bytes(directory / name, encoding, info)
        if not size or size != wanted:
            faults.append(
                f"{name}: wanted {wanted or 'some'} bytes, found {size or 'none'}"
            )
    if not _status(f"{directory}/{metadata}")[0]:
        faults.append(f"{metadata} is missing or empty")
    if faults:
        raise errors.DamagedCheckpointError(
            f"{directory} is incomplete; restore another step:\n" + errors.rows(faults)
        )


def _compressed_bytes(
    chunk: Path, encoding: _zarr.metadata.Encoding, info: LeafInfo
) -> int:
    """Returns the size that a compressed chunk has by its headers."""
    codec = _zarr.metadata.choose_codec(encoding, *_arrays.forms.stored_form(info))
    size = _zarr.chunk_headers.compressed_bytes(chunk, codec)
    return size + _checksum_bytes(encoding)


def array_files(encoding: _zarr.metadata.Encoding, info: LeafInfo) -> list[str]:
    """Returns the names of an array's metadata file and chunk files, in this order.

    The names are relative to the array's directory.
    """
    shape, _ = _arrays.forms.stored_form(info)
    keys = [
        chunk.key
        for chunk in _zarr.metadata.chunks(
            _zarr.metadata.whole(shape), info.chunk_shape or ()
        )
    ]
    if encoding.version == 3:
        return [_zarr.metadata.METADATA, *keys]
    return [".zarray", *(k.removeprefix("c").removeprefix(".") or "0" for k in keys)]


def _sizes(directory: Path) -> dict[str, int]:
    """Returns name -> size of the files in a directory; empty without a directory."""
    try:
        with os.scandir(directory) as entries:
            return {e.name: e.stat().st_size for e in entries if e.is_file()}
    except FileNotFoundError:
        return {}
