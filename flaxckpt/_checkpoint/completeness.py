"""Quick check for missing files of a checkpoint, before deleting older checkpoints.

Compares names and sizes of array files, and reads the headers of compressed chunks,
trees of databases, and small databases of older releases.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _formats, _steps, _storage, _util, _zarr, errors
from flaxckpt._checkpoint import inventory
from flaxckpt._checkpoint.inventory import StoredFile
from flaxckpt._formats import locate
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import Encoding

_MAX_LOSS = 300
"""The most characters of the message about lost files."""


class Files(NamedTuple):
    """The names, joined by NUL, and the stamp of the files of a whole checkpoint."""

    names: str
    stamp: int

    def are_unchanged(self, path: Path) -> bool:
        return hash(_statuses(path, self.names.split("\0"))) == self.stamp


def _statuses(path: Path, names: Iterable[str]) -> tuple[tuple[int, int, int], ...]:
    return tuple([_status(f"{path}/{name}") for name in names])


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
def check(
    path: Path, step: int | None, leaves: Collection[LeafPath] | None = None
) -> Files | None:
    """Checks the metadata and the sizes of array files, or of those of `leaves`.

    Returns the files, to notice later that one has changed; None in a store.
    """
    storage = _storage.of(path)
    with _storage.paths.listing_cache(path):
        stored = locate.read_without_classes(path)
        if leaves is None:
            locate.check_step(path, step, stored)
            stored.check_items(stored.metadata.damaged_items)
        if stored.manifest is None:
            raise errors.DamagedCheckpointError(
                f"{path / _formats.orbax_json.MANIFEST} is missing; restore another"
                " step"
            )
        encoding = stored.manifest.encoding
        files, unlisted = inventory.make(stored.manifest, stored.metadata.deleted_items)
        if (parts := _steps.markers.read_parts(path)) is not None:
            files = parts.select(files)
        if leaves is not None:
            wanted = set(leaves)
            files = {n: f for n, f in files.items() if not wanted.isdisjoint(f.leaves)}
        with _storage.read_errors.explain_errors(path):
            if storage.costs_requests:  # it has an object completely or not at all
                missing = sorted(files.keys() - _storage.listing.files_below(path))
                whole, faults = None, [f"{name} is missing" for name in missing]
            else:
                whole, faults = _compare_sizes(path, files, unlisted, encoding)
            if faults:
                raise errors.DamagedCheckpointError(
                    f"{path} is incomplete; restore another step:\n"
                    + errors.rows(faults)
                )
            # Zarr 2 has a digest for each chunk: this check would read everything.
            skips_arrays = encoding is not None and (
                encoding.version == 2 or storage.costs_requests
            )
            for file in files.values():
                is_skipped = skips_arrays and bool(file.leaves)
                if file.digest is not None and not is_skipped:
                    _formats.items.check_digest(path / file.name, file.digest)
    return whole


def _compare_sizes(
    path: Path,
    files: Mapping[str, StoredFile],
    unlisted: Mapping[str, int],
    encoding: Encoding | None,
) -> tuple[Files, list[str]]:
    """Returns the files of a local checkpoint, and the faults of those of arrays."""
    values = {
        item: _find_values(path, item)
        for item in unlisted
        if _formats.items.database(item) in files
    }
    names = [*files, *itertools.chain(*values.values())]
    statuses = _statuses(path, names)
    sizes = {name: status[0] for name, status in zip(names, statuses, strict=True)}
    faults = []
    for name, file in files.items():
        found, wanted = sizes[name], file.size
        if found and file.codec != "none" and encoding is not None:
            wanted = _zarr.chunk_headers.compressed_bytes(path / name, file.codec)
            wanted += inventory.checksum_bytes(encoding)
        if file.leaves and (not found if wanted is None else found != wanted):
            wants = "some" if wanted is None else wanted
            faults.append(f"{name}: wanted {wants} bytes, found {found or 'none'}")
    for item, inside in values.items():
        least, found = unlisted[item], sum(sizes[name] for name in inside)
        if found < max(1, least):
            faults.append(
                f"{_formats.items.prefix(item)}d: wanted at least {least} bytes, found"
                f" {found}"
            )
    return Files(sys.intern("\0".join(names)), hash(statuses)), faults


def _find_values(path: Path, item: str) -> list[str]:
    """Returns the files of values in an item's database of an older release."""
    parts = ("d/*", f"{_zarr.metadata.DATABASE_PART}*/d/*")
    found = (file for part in parts for file in (path / item).glob(part))
    return [str(file.relative_to(path)) for file in found]


class Look(NamedTuple):
    """The result of a look at a step: its loss in a line, or its files if whole."""

    loss: str | None = None
    files: Files | None = None


def look(
    path: Path, step: int | None, leaves: Collection[LeafPath] | None = None
) -> Look:
    """Looks at the files of a step, or at those of some of its leaves.

    Of another program's step, it reads only the leaves' description: there are no
    sizes.
    """
    try:
        if not (path / _formats.orbax_json.MANIFEST).is_file():
            _check_written_by_others(path, leaves)
            return Look()
        return Look(files=check(path, step, leaves))
    except (errors.CheckpointError, OSError) as error:
        is_gone = not _storage.of(path).exists(path)
        if not is_gone and not _storage.read_errors.is_unread(error):
            return Look(errors.one_line(errors.join_rows(error), _MAX_LOSS))
    return Look()


def _check_written_by_others(path: Path, leaves: Collection[LeafPath] | None) -> None:
    """Checks the description of a step of another program, with that of its arrays."""
    try:
        stored = locate.read_without_classes(path)
    except errors.CheckpointFormatError:  # whole, but not read
        return
    if leaves is None:
        stored.check_items(stored.metadata.damaged_items)
    for leaf in leaves or ():
        stored.check_leaf(leaf)


@contextlib.contextmanager
def explain_parts(path: Path) -> Iterator[None]:
    """Says in errors of damage that `path` has only parts of a step, if it does."""
    try:
        yield
    except errors.DamagedCheckpointError as error:
        if (why := _describe_parts(path)) is None:
            raise
        raise errors.DamagedCheckpointError(
            f"{error}\n{why}", leaves=error.leaves
        ) from error.__cause__


def _describe_parts(path: Path) -> str | None:
    """Returns why files of a step may be missing; None for a step in one directory."""
    try:
        parts = _steps.markers.read_parts(path)
    except errors.DamagedCheckpointError as error:
        return str(error)
    if parts is None:
        return None
    return (
        f"{path} has parts of a step that {len(parts.files)} processes have saved."
        " `Checkpointer.restore` of all processes reads what is missing from the"
        " others, or load the step of the run directory."
    )
