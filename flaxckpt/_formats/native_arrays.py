"""Checks and opens the arrays of a checkpoint in Orbax's layout.

The checks come first: TensorStore follows symlinks, and aborts the process if metadata
are nested too deep or ask for more memory than the machine has.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import threading
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import _arrays, _state, _storage, _util, _zarr, errors
from flaxckpt._formats import items, orbax_json, plain
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr.checksums import ChunkChecksums
from flaxckpt._zarr.chunk_headers import Chunks
from flaxckpt._zarr.metadata import ArrayForm, RawArray

if TYPE_CHECKING:
    import tensorstore as ts


def check_size(form: ArrayForm, stored_bytes: int) -> None:
    """Raises ValueError for an impossibly large array, or chunks beyond free memory.

    Chunks of zeros need not be stored: only above 1 TiB do the stored bytes count.
    """
    itemsize = _state.dtypes.item_size(form.dtype)
    size = math.prod(form.shape) * itemsize
    if size > _MAX_ZEROS_BYTES and size > stored_bytes * _BEST_RATIO:
        raise ValueError(f"it has {size} bytes, but only {stored_bytes} are stored")
    _util.memory.check(math.prod(form.chunk_shape) * itemsize)


def _parse_as(text: bytes, form: ArrayForm) -> Chunks:
    chunks = _parse(text)
    if (stored := chunks.form) != form:
        raise ValueError(
            f"recorded as {form.dtype}{list(form.shape)} in chunks"
            f" {list(form.chunk_shape)}, stored as {stored.dtype}{list(stored.shape)}"
            f" in chunks {list(stored.chunk_shape)}"
        )
    return chunks


@functools.lru_cache(maxsize=256)  # many arrays have equal metadata
def _parse(text: bytes) -> Chunks:
    """Parses the metadata of an array, within the limits of TensorStore."""
    if len(text) > _zarr.metadata.MAX_METADATA_BYTES:
        raise ValueError("its metadata is too large")
    try:
        # TensorStore parses it again, and may pick the other of two equal keys.
        data = json.loads(
            text.decode(), object_pairs_hook=_util.json_limits.refuse_duplicates
        )
        return _zarr.chunk_headers.parse(data)
    except (
        *(errors.CheckpointError, KeyError, TypeError),
        *(AttributeError, RecursionError),
    ) as error:
        raise ValueError(
            f"its metadata is not supported: {errors.one_line(error, 150)}"
        ) from None


def _text_of_file(path: Path, checkpoint: Path) -> bytes:
    _storage.of(path).check_file(path, checkpoint)
    try:
        return _storage.of(path).read(path, max_bytes=_zarr.metadata.MAX_METADATA_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path.name} is missing") from None


def _open_database(root: Path, checkpoint: Path) -> _arrays.read_files.Database:
    """Returns a database; raises DamagedCheckpointError if missing or unsafe."""
    try:
        return _arrays.read_files.Databases().open(root, checkpoint)
    except (FileNotFoundError, NotADirectoryError) as error:
        file = error.filename or root / _zarr.metadata.DATABASE
        raise errors.DamagedCheckpointError(
            f"{file} is missing; restore another step"
        ) from None
    except ValueError as error:
        raise errors.DamagedCheckpointError(str(error)) from None


def check_names(path: Path, names: Iterable[str], *, ocdbt: bool) -> None:
    """Raises DamagedCheckpointError for array names that lead out of the directory."""
    faults = [n for n in names if orbax_json.UNSAFE.search(n)] if not ocdbt else []
    if faults:
        raise errors.DamagedCheckpointError(
            f"{path} has arrays with names that lead out of it:\n"
            + errors.rows(repr(name[:80]) for name in faults)
        )


_MAX_CHUNK_BYTES = 64 * 2**20  # if the array is smaller; old releases never cut arrays


def array_forms(
    item: Path, checkpoint: Path, names: Sequence[str], *, version: int, ocdbt: bool
) -> tuple[dict[str, ArrayForm], set[str]]:
    """Reads the forms of arrays, and the names of those compressed by blosc."""
    check_names(item, names, ocdbt=ocdbt)
    file = _zarr.metadata.METADATA_FILES[version]
    keys = {name: _zarr.metadata.database_key(name, file) for name in names}
    forms: dict[str, ArrayForm] = {}
    blosc: set[str] = set()
    faults: dict[str, str] = {}
    database = None
    if ocdbt and names:  # Orbax writes no database without arrays
        database = _open_database(item, checkpoint)
        for name in names:
            try:
                database.request(keys[name], _zarr.metadata.MAX_METADATA_BYTES)
            except ValueError as error:
                faults[name] = str(error)[:200]
        in_store = _storage.of(item).costs_requests
        _arrays.read_files.run([database.reading()], in_store=in_store)
    for name in [name for name in names if name not in faults]:
        try:
            text = (
                _text_of_file(item / keys[name], checkpoint)
                if database is None
                else database.value(keys[name])
            )
            chunks = _parse(text)
            forms[name] = chunks.form
            _check_chunks(chunks.form)
            if chunks.codec == "blosc":
                blosc.add(name)
        except PermissionError:
            raise
        except (ValueError, KeyError, TypeError, OSError, errors.CheckpointError) as e:
            faults[name] = _arrays.read.short_message(e)
    if faults:
        raise plain.unreadable_error(item, faults)
    return forms, blosc


def _check_chunks(form: ArrayForm) -> None:
    """Raises ValueError if TensorStore would abort over too large chunks."""
    shape, dtype, chunk_shape = form
    itemsize = _state.dtypes.item_size(dtype)
    chunk_bytes = math.prod(chunk_shape) * itemsize
    if (
        len(chunk_shape) != len(shape)
        or 0 in chunk_shape
        or chunk_bytes > max(math.prod(shape) * itemsize, _MAX_CHUNK_BYTES)
    ):
        raise ValueError(f"chunks {list(chunk_shape)} in an array {list(shape)}")


_MAX_ZEROS_BYTES = 2**40
_BEST_RATIO = 2**16
"""Upper bound on the compression ratio of a file."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The location and the encoding of the arrays of a checkpoint.

    Attributes:
        strict: True if a missing chunk is damage; False if it stands for zeros.
        encoding: Encoding of the chunks; None if only in the metadata of each array.
        is_checked: True if the forms come from the arrays' own metadata.
        blosc: Names of arrays in a database compressed by blosc, as far as known.
        sizes: Files of the database with values -> recorded bytes; None if unknown.
    """

    root: Path
    version: int
    ocdbt: bool
    strict: bool = True
    encoding: _zarr.metadata.Encoding | None = None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_checked: bool = False
    blosc: Collection[str] = ()
    checksums: Mapping[LeafPath, ChunkChecksums] = dataclasses.field(
        default_factory=dict
    )
    sizes: Mapping[str, int] | None = None

    @_util.forks.lazy
    def has_digests(self) -> bool:
        """True if the digests cover the chunks, not only the tree of a database."""
        if self.ocdbt:
            return items.has_chunk_digests(self.digests, "")
        return bool(self.digests) and self.version == 2

    def open(
        self,
        name: str,
        form: ArrayForm,
        checkpoint: Path,
        context: ts.Context,
        keys: Container[str] | None = None,
    ) -> ts.Future[ts.TensorStore]:
        """Opens an array after a check of its form, to read `keys`, or all chunks."""
        size = _storage.of(self.root).check_root(self.root, checkpoint)
        if not self.ocdbt:
            size = _storage.of(self.root).check_array(self.root, name, checkpoint)
        check_size(form, size)
        open_array = functools.partial(
            _arrays.read.open_zarr,
            context,
            root=self.root,
            name=name,
            version=self.version,
            ocdbt=self.ocdbt,
            strict=self.strict,
        )
        # Before TensorStore reads the metadata, some of which abort the process.
        file = _zarr.metadata.METADATA_FILES[self.version]
        if not self.ocdbt:
            text = _zarr.chunk_file.read_small(self.root / name / file)
            chunks = _parse_as(text, form)
            _zarr.chunk_headers.check_files(self.root / name, chunks)
            return open_array()
        is_compact = self.encoding is not None and self.encoding.codec == "compact"
        is_blosc = is_compact or name in self.blosc
        index = _zarr.ocdbt.open_index(self.root, context)
        if self.is_checked and not is_blosc:
            return open_array()
        text = index.read(_zarr.metadata.database_key(name, file))
        chunks = _parse_as(text, form)
        if chunks.codec == "blosc" and not is_blosc:
            raise ValueError("it is compressed by blosc, unlike when saved")
        if chunks.codec == "blosc":
            _zarr.chunk_headers.check_values(index, name, chunks, keys)
        return open_array()

    def raw(
        self,
        name: str,
        form: ArrayForm,
        checksums: ChunkChecksums | None,
        compare: _DigestChecks | None,
    ) -> RawArray | None:
        """Returns the location of the chunks of an uncompressed array, else None."""
        if self.encoding is None or not _zarr.metadata.is_raw(self.encoding, form):
            return None
        return RawArray(
            self.root,
            name,
            self.ocdbt,
            self.encoding,
            form,
            self.has_digests,
            checksums,
            None if compare is None else functools.partial(compare, name),
            self.sizes,
        )

    def check(
        self,
        name: str,
        info: LeafInfo,
        keys: Container[str] | None,
        compare: _DigestChecks | None,
    ) -> Callable[[], None] | None:
        """Returns the check of chunks that TensorStore does not make, or None."""
        recorded = self.checksums.get(info.path)
        has_places = recorded is not None and bool(recorded.whole)
        if compare is None and not has_places:
            return None

        def check() -> None:
            if compare is not None:
                compare(name)
            if recorded is not None and has_places and not self.has_digests:
                self._check_places(name, info, keys, recorded)

        return check

    def find_files(
        self, name: str, info: LeafInfo, checkpoint: Path, keys: Container[str] | None
    ) -> dict[str, tuple[int, int]]:
        """Returns the files with chunks of an array: path -> first byte and end."""
        index = _zarr.ocdbt.open_index(self.root)
        found: dict[str, tuple[int, int]] = {}
        for _, chunk in _select(info, keys):
            place = index.find(_zarr.metadata.database_key(name, chunk.key))
            if isinstance(place, bytes):
                continue
            file = str((self.root / place.file).relative_to(checkpoint))
            start, end = found.get(file, (place.offset, 0))
            place_end = place.offset + place.size
            found[file] = min(start, place.offset), max(end, place_end)
        return found

    def _check_places(
        self,
        name: str,
        info: LeafInfo,
        keys: Container[str] | None,
        recorded: ChunkChecksums,
    ) -> None:
        """Compares the checksums after an array's chunks with the recorded ones."""
        size = _zarr.checksums.CHECKSUM_BYTES
        index = _zarr.ocdbt.open_index(self.root) if self.ocdbt else None
        for n, chunk in _select(info, keys):
            key = _zarr.metadata.database_key(name, chunk.key)
            content = (
                _storage.of(self.root).read_end(self.root / key, size)
                if index is None
                else index.read(key, slice(-size, None))
            )
            if len(content) != size:
                raise ValueError(f"{chunk.key} has no checksum: it is cut off")
            value = int.from_bytes(content, "little")
            _zarr.checksums.check_place(chunk.key, value, recorded.number(n))


def _select(
    info: LeafInfo, keys: Container[str] | None
) -> Iterator[tuple[int, _zarr.metadata.Chunk]]:
    """Yields the chunks of an array, with their numbers: all, or `keys`."""
    for n, chunk in enumerate(_zarr.metadata.chunks_of(info)):
        if keys is None or chunk.key in keys:
            yield n, chunk


_MAX_DIGESTED_BYTES = 2**30
"""Limit on a file of a database that is read before its values."""


class _DigestChecks:
    def __init__(self, arrays: Arrays) -> None:
        self._root = arrays.root
        self._max_bytes = _MAX_DIGESTED_BYTES if arrays.ocdbt else sys.maxsize
        self._digests: dict[str, dict[str, str]] = {}
        for file, digest in arrays.digests.items():
            # Every array depends on all files of a database.
            name = "" if arrays.ocdbt else file.rpartition("/")[0]
            self._digests.setdefault(name, {})[file] = digest
        self._ocdbt = arrays.ocdbt
        self._done: dict[str, Exception | None] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        """Compares the files of the array `name`; raises ValueError or OSError."""
        name = "" if self._ocdbt else name
        with self._lock:
            if name not in self._done:
                self._done[name] = None
                digests = self._digests.get(name, {})
                try:
                    _arrays.read_files.check_digests(
                        self._root, digests, max_bytes=self._max_bytes
                    )
                except (ValueError, OSError) as error:
                    self._done[name] = error
        if fault := self._done[name]:
            raise fault


def _stored_array(
    path: Path,
    name: str,
    info: LeafInfo,
    arrays: Arrays,
    compare: _DigestChecks | None,
    keys: Container[str] | None = None,
) -> StoredLeaf:
    """Returns an array of a checkpoint, of which all chunks are read, or `keys`."""
    form = _zarr.metadata.form_of(info)
    checksums = arrays.checksums.get(info.path)
    has_known_keys = arrays.encoding is not None and arrays.version == 3
    find_files = with_chunks = None
    if arrays.ocdbt and has_known_keys:
        find_files = functools.partial(arrays.find_files, name, info, path, keys)
        with_chunks = functools.partial(
            _stored_array, path, name, info, arrays, compare
        )
    return StoredLeaf(
        path,
        info,
        functools.partial(arrays.open, name, form, path, keys=keys),
        raw=arrays.raw(name, form, checksums, compare),
        check=arrays.check(name, info, keys, compare),
        checksums=checksums,
        find_files=find_files,
        with_chunks=with_chunks,
    )


def leaf_table(
    path: Path,
    names: Sequence[str],
    infos: Sequence[LeafInfo],
    arrays: Arrays,
    strings: Mapping[LeafPath, str],
) -> LeafTable:
    """Returns the leaf table of a checkpoint, or of an item, with `names` on disk.

    Raises DamagedCheckpointError if names of arrays lead out of the checkpoint.
    """
    table = {}
    stored_names = [
        name for name, info in zip(names, infos, strict=True) if info.dtype is not None
    ]
    check_names(path, stored_names, ocdbt=arrays.ocdbt)
    is_digested = bool(arrays.digests) and (arrays.ocdbt or arrays.has_digests)
    compare = _DigestChecks(arrays) if is_digested else None
    for name, info in zip(names, infos, strict=True):
        if info.dtype is None:
            stored = StoredLeaf(path, info, value=strings.get(info.path))
        else:
            stored = _stored_array(path, name, info, arrays, compare)
        table[info.path] = Leaf(info, (stored,))
    return table
