"""OCDBT databases of a restore: opened once, their small values read in few calls."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._arrays import read_tasks
from flaxckpt._arrays.read_tasks import Reading
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr import ocdbt as zarr_ocdbt
from flaxckpt._zarr.btree import Place, Value

_VALUES_AT_ONCE = 2**20
"""Bytes of small values that are read in a call."""


class Database:
    """A database, opened and checked.

    Its small values are not read through TensorStore, which takes several times as
    long: they are in the index, or in files of the database, where values that are read
    together are mostly adjacent. `request` values, run the tasks of `reading`, and take
    each from `value`. Large values have a `place`.

    Args:
        root: The directory of the database, with checked links.
        sizes: Its files with values -> recorded bytes; None if not recorded.

    Raises:
        ValueError, OSError: The index is damaged, or cannot be read.
    """

    def __init__(self, root: Path, sizes: Mapping[str, int] | None = None) -> None:
        self._root = root
        self._index = zarr_ocdbt.open_index(root)
        self._sizes = sizes
        self._checked: set[str] = set()
        self._requested: dict[str, Place] = {}
        self._uses: collections.Counter[str] = collections.Counter()
        self._read: dict[str, bytes | Exception] = {}

    def _find(self, key: str) -> Value:
        found = self._index.find(key)
        if isinstance(found, Place) and self._sizes is not None:
            self._check_place(found, self._sizes)
        return found

    def _check_place(self, place: Place, sizes: Mapping[str, int]) -> None:
        """Raises ValueError for a place outside of the recorded files of the database.

        Also for a local file of another size.
        """
        size = sizes.get(place.file)
        if size is None:
            raise ValueError(f"the index names {place.file[:80]}, which was not saved")
        if place.offset + place.size > size:
            raise ValueError(
                f"the index has a place behind the {size} bytes of {place.file}"
            )
        if place.file not in self._checked:
            file = self._root / place.file
            found = _storage.of(file).known_size(file, None)
            if found is not None and found != size:
                raise ValueError(f"{file.name} has {found} bytes instead of {size}")
            self._checked.add(place.file)

    def is_inline(self, key: str) -> bool:
        """Returns True if a value is in the index.

        Raises:
            ValueError: The value is missing.
        """
        return isinstance(self._find(key), bytes)

    def place(self, key: str, size: int) -> Place:
        """Returns the place of a value that is not in the index.

        Raises:
            ValueError: The value is missing, or does not have `size` bytes.
        """
        found = self._find(key)
        found_bytes = len(found) if isinstance(found, bytes) else found.size
        if isinstance(found, bytes) or found.size != size:
            raise ValueError(f"{key} has {found_bytes} bytes instead of {size}")
        return found

    def request(self, key: str, max_bytes: int) -> None:
        """Requests a value; `value` must be called as often, as leaves share arrays.

        Raises:
            ValueError: The value is missing, or is larger than `max_bytes`.
        """
        found = self._find(key)
        if isinstance(found, bytes):
            self._read[key] = found
        elif found.size > max_bytes:
            raise ValueError(f"{key} has {found.size} bytes instead of {max_bytes}")
        else:
            self._requested[key] = found
        self._uses[key] += 1

    def reading(self) -> Reading:
        """Returns a reading with the tasks that read the requested values."""
        gap = read_tasks.small_gap(self._root)
        pieces: list[list[tuple[str, Place]]] = []
        start, end, file = 0, 0, ""
        by_place = sorted(self._requested.items(), key=lambda item: item[1])
        for key, place in by_place:
            stop = place.offset + place.size
            is_near = place.file == file and place.offset - end <= gap
            if not is_near or stop - start > _VALUES_AT_ONCE:
                pieces.append([])
                start, end, file = place.offset, stop, place.file
            pieces[-1].append((key, place))
            end = max(end, stop)
        self._requested = {}
        tasks = [functools.partial(self._read_piece, piece) for piece in pieces]
        return Reading(tasks, dict)

    def read(self) -> None:
        """Reads the requested values now."""
        in_store = _storage.of(self._root).costs_requests
        read_tasks.run([self.reading()], in_store=in_store)

    def _read_piece(self, values: Sequence[tuple[str, Place]]) -> None:
        """Reads values that are near each other in a file, the first at the start."""
        start = values[0][1].offset
        stop = max(place.offset + place.size for _, place in values)
        file = self._root / values[0][1].file
        try:
            content = _storage.of(file).read_range(file, start, stop - start)
        except (ValueError, OSError, MemoryError) as error:
            self._read.update((key, error) for key, _ in values)
            return
        for key, place in values:
            offset = place.offset - start
            self._read[key] = content[offset : offset + place.size]

    def value(self, key: str) -> bytes:
        """Returns a requested value after the tasks of `reading`.

        It is shorter than in the index if its file ends too early.

        Raises:
            ValueError, OSError, MemoryError: The value cannot be read.
        """
        value = self._read[key]
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._read[key], self._uses[key]
        if isinstance(value, Exception):
            raise value
        return value


class Databases:
    """Databases of a restore, each opened and verified once."""

    def __init__(self) -> None:
        self._opened: dict[Path, Database] = {}
        self._faults: dict[Path, Exception] = {}

    def open(
        self,
        root: Path,
        checkpoint: Path,
        *,
        check: Callable[[], None] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Database:
        """Returns the opened database.

        Args:
            root: The directory of the database.
            checkpoint: The directory that links in the database must not leave.
            check: Compares the database with its digests; raises ValueError, OSError.
            sizes: Its files with values -> recorded bytes; None if not recorded.

        Raises:
            ValueError, OSError: The database has a link to the outside, has changed
                since it was written, or is missing.
        """
        opened = self._opened.get(root)
        if opened is not None:
            return opened
        if root in self._faults:
            raise self._faults[root]
        try:
            self._opened[root] = opened = self._open(root, checkpoint, check, sizes)
        except (ValueError, OSError) as error:
            self._faults[root] = error
            raise
        return opened

    def _open(
        self,
        root: Path,
        checkpoint: Path,
        check: Callable[[], None] | None,
        sizes: Mapping[str, int] | None,
    ) -> Database:
        _storage.of(root).check_root(root, checkpoint)
        with _storage.paths.read_ahead(
            [root / name for name in zarr_metadata.INDEX_FILES]
        ):
            if check is not None:
                check()
            return Database(root, sizes)

    def readings(self) -> list[Reading]:
        """Returns readings with the tasks that read the requested values."""
        return [database.reading() for database in self._opened.values()]


def check_digests(root: Path, digests: Mapping[str, str], *, max_bytes: int) -> None:
    """Compares the files of arrays below `root` with their digests.

    Raises:
        ValueError: A file has changed, or is larger than `max_bytes`.
        OSError: A file is missing, or cannot be read.
    """

    def check(name: str) -> None:
        found = _storage.of(root).digest_file(root / name, max_bytes=max_bytes)
        _storage.files.check_digest(name, found, digests[name])

    _util.threads.each(check, digests, threads=read_tasks.THREADS)
