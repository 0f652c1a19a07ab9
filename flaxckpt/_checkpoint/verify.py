"""Verification of every byte of a checkpoint.

Files are read in small parts, several at a time, and not kept in memory.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import crc32c

from flaxckpt import _arrays, _state, _steps, _storage, _util, errors
from flaxckpt._checkpoint import file_sizes, verify_report
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath, PathLike
from flaxckpt.formats import _locate, _native
from flaxckpt.formats._reader import Stored

_DECODED_AT_ONCE = 128 * 2**20
_PIECE_BYTES = 64 * 2**20
"""At least a chunk of our format: smaller pieces would read chunks repeatedly."""


def verify(path: PathLike, *, step: int | None = None) -> verify_report.VerifyReport:
    """Reads a whole checkpoint in any format, and compares the data with checksums.

    Every byte of a flaxckpt checkpoint is compared: arrays with the CRC-32C of their
    chunks, all other files with the digests in the manifest. In other formats, all
    leaves are read and decoded, and `unchecked` names the leaves without checksums.
    The memory use is small and independent of the size of the checkpoint.

    ```python
    report = verify("run", step=1000)
    print(report)
    assert report.ok
    ```

    Args:
        path: A checkpoint, or a run directory.
        step: Step of a run directory; by default the newest.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        CheckpointFormatError: `path` is not a checkpoint.
    """
    root = _storage.paths.resolve(path)
    try:
        located = _locate.locate(root, step)
    except errors.DamagedCheckpointError as error:
        return report_lost(root, step, error)
    return _verify(located.path, located.step, located.open)


def verify_checkpoint(
    path: Path, step: int | None, *, thorough: bool = True
) -> verify_report.VerifyReport:
    """Reads and verifies the whole checkpoint `path`.

    Args:
        path: A checkpoint.
        step: Step number of the checkpoint, or None.
        thorough: Whether to go on after the first problem.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: There is no checkpoint.
    """
    read = functools.partial(_locate.read_stored, path, step)
    return _verify(path, step, read, thorough=thorough)


def _verify(
    path: Path,
    step: int | None,
    read: Callable[[], Stored],
    *,
    thorough: bool = True,
) -> verify_report.VerifyReport:
    start, counter = time.monotonic(), _util.progress.Counter(f"verifying {path.name}")
    found = verify_report.Findings(counter, thorough=thorough)
    with _util.progress.bar(counter), _storage.paths.listing_cache(path):
        stored = _description(path, read, found)
        format_name = "unknown" if stored is None else stored.metadata.format
        extra: list[str] = []
        try:
            if stored is not None and format_name == "flaxckpt":
                extra = _verify_own(path, stored, found)
            elif stored is not None:
                _verify_foreign(path, stored, found)
            if stored is not None and step is not None:
                check = functools.partial(_locate.check_step, path, step, stored)
                found.attempt(verify_report.HERE, check)
        except OSError as error:
            if not _storage.permissions.is_unread(error):
                raise
            found.add(found.unread, verify_report.HERE, str(error))
    secs = time.monotonic() - start
    if stored is None:
        return found.report(path, format_name, step, extra, secs)
    return found.report(
        path,
        format_name,
        step,
        extra,
        secs,
        leaves=sum(leaf.info.kind != "empty" for leaf in stored.table.values()),
        unreadable=_unreadable(stored, found),
    )


def check(path: Path) -> None:
    """Raises an error unless the checkpoint `path` can be read; metrics may be damaged.

    Raises:
        DamagedCheckpointError: The checkpoint is damaged, or cannot be read.
        CheckpointNotFoundError, CheckpointFormatError: There is no checkpoint.
    """
    report = verify_checkpoint(path, None)
    for name, why in {**report.problems, **report.unread}.items():
        if not name.startswith(f"{_native.items.METRICS}/"):
            where = path if name == verify_report.HERE else name
            raise errors.DamagedCheckpointError(f"{where}: {why}")


def report_lost(
    path: Path, step: int | None, error: Exception
) -> verify_report.VerifyReport:
    """Returns the report on a path no longer recognised as a checkpoint."""
    found = verify_report.Findings(_util.progress.Counter(""), thorough=True)
    is_unread = _storage.permissions.is_unread(error)
    found.add(
        found.unread if is_unread else found.problems, verify_report.HERE, str(error)
    )
    return found.report(path, "unknown", step, (), 0.0)


def find_damage(path: Path, step: int | None) -> str | None:
    """Returns a short description of proved damage to the checkpoint `path`, or None.

    None also if the checkpoint cannot be read at present.
    """
    try:
        report = verify_checkpoint(path, step, thorough=False)
    except (errors.CheckpointError, OSError) as error:
        if _storage.permissions.is_unread(error):
            return None
        # The path was a checkpoint before the damage.
        is_ours = _steps.index.sign(path) or (path / _native.items.STATE).is_dir()
        if is_ours and verify_report.unreadable(path) is None:
            return str(error).splitlines()[0]
        return None
    for name, why in report.problems.items():
        return why if name == verify_report.HERE else f"{name}: {why}"
    return None


def _description(
    path: Path, read: Callable[[], Stored], found: verify_report.Findings
) -> Stored | None:
    """Reads the metadata of a checkpoint; on failure, records it and returns None."""
    try:
        return read()
    except (OSError, errors.DamagedCheckpointError) as error:
        if isinstance(error, errors.CheckpointNotFoundError):
            raise
        if _storage.permissions.is_unread(error):
            found.add(found.unread, verify_report.HERE, str(error))
        elif (why := verify_report.unreadable(path)) is not None:
            found.add(found.unread, verify_report.HERE, why)
        else:
            found.add(found.problems, verify_report.HERE, str(error))
        return None


def _unreadable(stored: Stored, found: verify_report.Findings) -> dict[LeafPath, str]:
    """Returns leaf path -> the reason why a restore cannot read the leaf."""
    unreadable: dict[LeafPath, str] = {}
    for faults, default in (
        (found.problems, "damaged"),
        (found.unread, "not readable"),
    ):
        for name, why in faults.items():
            if name in stored.table:
                unreadable.setdefault(name, why)
            elif _native.items.is_of_arrays(name):
                state = "missing" if name in found.missing else default
                for leaf_path in _leaves_in(name, stored):
                    unreadable.setdefault(leaf_path, f"{name} is {state}")
    return unreadable


def _leaves_in(name: str, stored: Stored) -> list[LeafPath]:
    """Returns the leaves that a restore cannot read without the array file `name`."""
    arrays = {path: leaf for path, leaf in stored.table.items() if _is_array(leaf)}
    is_index = name == f"{_native.items.STATE}/{_arrays.zarr.ocdbt.MANIFEST}"
    if is_index or _has_database(stored.digests):  # a database is read as a whole
        return list(arrays)
    directory = name.removeprefix(f"{_native.items.STATE}/").rpartition("/")[0]
    return [
        path
        for path, leaf in arrays.items()
        if _native.orbax_json.param_name(leaf.info.keys) == directory
    ]


# ---- our own format ---------------------------------------------------------------


def _verify_own(path: Path, stored: Stored, found: verify_report.Findings) -> list[str]:
    """Compares every file with a checksum; returns files not in the checkpoint."""
    manifest = _native.items.json_file(path / _native.orbax_json.MANIFEST, path)
    encoding = _native.manifest.parse_encoding(manifest)
    digests = file_sizes.digests(path, stored)
    checks: list[tuple[str, Callable[[], object]]] = [
        (
            name,
            functools.partial(check_digest, path, name, digest, found.counter.add),
        )
        for name, digest in digests.items()
    ]
    known = {*digests, *_native.items.UNDIGESTED}
    leaves = {p: leaf for p, leaf in stored.table.items() if _is_array(leaf)}
    if encoding is None or manifest["ocdbt"]:
        undigested = {} if _has_database(digests) else leaves
        if undigested:
            known |= verify_report.names(path, path / _native.items.STATE)
    else:
        undigested = {}
        for leaf_path, leaf in leaves.items():
            files, made = of_array(path, encoding, leaf.info, digests, found)
            known |= files
            checks += [(leaf_path, check) for check in made]
            if not encoding.checksum and not files <= digests.keys():
                undigested[leaf_path] = leaf
    is_digested = manifest.get("metrics") is True or _steps.markers.is_measured(path)
    checks += of_metrics(path, found, is_digested=is_digested)
    checks.append(
        (_storage.commit_marker.MARKER, functools.partial(check_committed, path))
    )
    found.counter.total = _storage.of(path).known_size_below(path)
    found.run(checks)
    if encoding is not None and manifest["ocdbt"] and leaves:
        check_keys(path, encoding, leaves, found)
    if encoding is None or not encoding.checksum:
        for leaf_path in undigested:
            found.unchecked[leaf_path] = "it was saved without checksums; it is there"
    _decode(path, undigested, found)
    there = {name for name in verify_report.names(path, path) if not _is_mark(name)}
    return sorted(there - known)


def _is_array(leaf: Leaf) -> bool:
    return isinstance(leaf.source, StoredLeaf) and leaf.source.open is not None


def _is_mark(name: str) -> bool:
    return "/" not in name and _steps.markers.is_marker(name)


def _has_database(digests: Mapping[str, str]) -> bool:
    return f"{_native.items.STATE}/{_arrays.zarr.ocdbt.MANIFEST}" in digests


def check_keys(
    path: Path,
    encoding: _arrays.zarr.metadata.Encoding,
    leaves: Mapping[LeafPath, Leaf],
    found: verify_report.Findings,
) -> None:
    """Records arrays without metadata or with missing chunks in the OCDBT database.

    The database itself may be valid without them.
    """
    if any(_native.items.is_of_arrays(name) for name in found.problems):
        return  # the database has changed and may not be readable
    there: set[str] = set()
    manifest = f"{_native.items.STATE}/{_arrays.zarr.ocdbt.MANIFEST}"
    found.attempt(
        manifest,
        lambda: there.update(_arrays.zarr.ocdbt.keys(path / _native.items.STATE)),
    )
    if manifest in found.problems or manifest in found.unread:
        return
    for leaf_path, leaf in leaves.items():
        name = _native.orbax_json.param_name(leaf.info.keys)
        chunks = file_sizes.chunk_names(encoding, leaf.info)
        missing = [
            key
            for key in (file_sizes.metadata_name(encoding), *chunks)
            if _arrays.zarr.metadata.database_key(name, key) not in there
        ]
        if missing:
            rest = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            why = f"{missing[0]}{rest} missing in the database"
            found.add(found.problems, leaf_path, why)


def of_array(
    path: Path,
    encoding: _arrays.zarr.metadata.Encoding,
    info: LeafInfo,
    digests: Mapping[str, str],
    found: verify_report.Findings,
) -> tuple[set[str], list[Callable[[], object]]]:
    """Returns the files of an array, and checks of the files without a digest."""
    directory = file_sizes.array_directory(info)
    shape, dtype = _arrays.layout.stored_form(info)
    chunk_shape = info.chunk_shape or ()
    metadata = f"{directory}/{file_sizes.metadata_name(encoding)}"
    files = {metadata}
    checks: list[Callable[[], object]] = []
    if metadata not in digests:

        def check_metadata() -> None:
            text = _arrays.zarr.chunk_file.small(path / metadata)
            _arrays.zarr.metadata.check_metadata(
                text, encoding, shape, dtype, chunk_shape
            )
            _arrays.zarr.metadata.check_compact(text)

        checks.append(check_metadata)
    size = file_sizes.chunk_bytes(encoding, info)
    most = size or math.prod(chunk_shape) * _state.dtypes.item_bits(dtype) // 8
    for key in file_sizes.chunk_names(encoding, info):
        file = f"{directory}/{key}"
        files.add(file)
        if file not in digests:
            check = _check_chunk if encoding.checksum else _check_size
            chunk = _Chunk(path / file, path, size, most)
            checks.append(functools.partial(check, chunk, found.counter.add))
    return files, checks


def check_digest(
    path: Path, name: str, recorded: str, count: Callable[[int], object]
) -> None:
    """Raises ValueError if the SHA-256 of a file differs from `recorded`."""
    digest = hashlib.sha256()
    most = verify_report.LARGE if _native.items.is_of_arrays(name) else 0
    verify_report.stream(path / name, path, count, digest.update, most)
    _storage.files.check_digest("it", f"sha256:{digest.hexdigest()}", recorded)


class _Chunk(NamedTuple):
    """A chunk file and the expected size.

    Attributes:
        file: Path of the chunk file.
        root: The checkpoint.
        size: Expected size in bytes; 0 if the size varies.
        most: Size in bytes without compression.
    """

    file: Path
    root: Path
    size: int
    most: int

    def check_size(self, found: int) -> None:
        if found != (self.size or found) or not found:
            wanted = self.size or "some"
            raise ValueError(f"{self.file.name} has {found} bytes instead of {wanted}")


def _check_size(chunk: _Chunk, count: Callable[[int], object]) -> None:
    """Raises ValueError if a chunk file has the wrong size."""
    found = _storage.of(chunk.file).known_size(chunk.file, chunk.root)
    if found is not None:
        chunk.check_size(found)
        return
    sizes: list[int] = []
    verify_report.stream(
        chunk.file, chunk.root, count, lambda part: sizes.append(len(part)), chunk.most
    )
    chunk.check_size(sum(sizes))


def _check_chunk(chunk: _Chunk, count: Callable[[int], object]) -> None:
    """Raises ValueError if a chunk file does not match the checksum at the end."""
    size = _storage.of(chunk.file).known_size(chunk.file, chunk.root)
    if size is not None:
        chunk.check_size(size)  # before reading the whole file
    value, found, tail = 0, 0, b""

    def take(part: memoryview) -> None:
        nonlocal value, found, tail
        found += len(part)
        if len(part) < _arrays.zarr.chunk_file.CHECKSUM_BYTES:
            part, tail = memoryview(tail + bytes(part)), b""
        value = crc32c.crc32c(tail, value)
        value = crc32c.crc32c(part[: -_arrays.zarr.chunk_file.CHECKSUM_BYTES], value)
        tail = bytes(
            part[-_arrays.zarr.chunk_file.CHECKSUM_BYTES :]
        )  # the checksum, unless another part follows

    verify_report.stream(chunk.file, chunk.root, count, take, chunk.most)
    chunk.check_size(found)
    if tail != value.to_bytes(_arrays.zarr.chunk_file.CHECKSUM_BYTES, "little"):
        raise ValueError(
            f"{chunk.file.name} has changed since it was written: its CRC-32C is"
            " another"
        )


def check_committed(path: Path) -> None:
    """Raises ValueError if the commit marker does not match the manifest."""
    manifest = _native.items.read_file(path / _native.orbax_json.MANIFEST, path)
    found = _native.items.read_file(path / _storage.commit_marker.MARKER, path)
    if found != _native.checkpoint.commit_marker(manifest):
        raise ValueError("its content has changed since it was written")


def of_metrics(
    path: Path, found: verify_report.Findings, *, is_digested: bool
) -> list[tuple[str, Callable[[], object]]]:
    """Returns the checks of the metrics, as pairs of file name and check.

    Args:
        path: The checkpoint.
        found: Receives metrics that have no digest.
        is_digested: Whether the digests of the metrics must exist.
    """
    name = f"{_native.items.METRICS}/{_native.items.METRICS}"
    digests = _native.items.METRICS_DIGESTS

    def check() -> None:
        if (path / _native.items.METRICS).exists():
            (path / name).stat()  # raises if the directory has no metrics file
        _native.metadata.load_metrics(path)

    checks: list[tuple[str, Callable[[], object]]] = [(name, check)]
    if is_digested or (path / digests).exists():
        check_digests = functools.partial(_native.metadata.check_metrics_digests, path)
        checks.append((digests, check_digests))
    elif (path / name).exists():
        found.unchecked[name] = "they were written without a digest"
    return checks


# ---- other formats ----------------------------------------------------------------


def _verify_foreign(path: Path, stored: Stored, found: verify_report.Findings) -> None:
    """Reads and decodes every array of a checkpoint in another format."""
    leaves = {p: leaf for p, leaf in stored.table.items() if _is_array(leaf)}
    found.counter.total = sum(
        _arrays.layout.stored_bytes(i.info) for i in leaves.values()
    )
    for leaf_path, leaf in leaves.items():
        if not _has_checksums(leaf):
            found.unchecked[leaf_path] = "its format has no checksums; it was decoded"
    _decode(path, leaves, found)


def _has_checksums(leaf: Leaf) -> bool:
    """Returns True if reading an array compares the data with checksums."""
    source = leaf.source
    assert isinstance(source, StoredLeaf), leaf.info.path
    if source.check is not None:
        return True
    try:
        codec = _arrays.read.open_one(source).codec
    except (errors.CheckpointError, OSError, ValueError):
        return False
    return codec is not None and "crc32c" in str(codec.to_json())


def _decode(
    path: Path, leaves: Mapping[LeafPath, Leaf], found: verify_report.Findings
) -> None:
    """Reads and decodes arrays in pieces, and records errors."""
    pieces = [
        piece
        for leaf in leaves.values()
        for piece in _arrays.blockwise.cut(
            leaf, chunk_shape=None, max_bytes=_PIECE_BYTES
        )
    ]
    faults = verify_report.Findings(found.counter, thorough=found.thorough)
    for batch in _arrays.blockwise.batches(pieces, max_bytes=_DECODED_AT_ONCE):
        if found.is_enough or faults.is_enough:
            break
        try:
            _arrays.blockwise.read(batch, max_bytes=_DECODED_AT_ONCE)
        except (OSError, ValueError, MemoryError):
            for piece in batch:  # find the damaged pieces
                read = functools.partial(
                    _arrays.blockwise.read, [piece], max_bytes=_DECODED_AT_ONCE
                )
                faults.attempt(piece.path, read)
        found.counter.add(sum(piece.nbytes for piece in batch))
    # The error does not tell a failed read from a failed decoding.
    proved = not faults.problems or verify_report.unreadable(path) is None
    for name, why in faults.problems.items():
        found.add(found.problems if proved else found.unread, name, why)
    for name, why in faults.unread.items():
        found.add(found.unread, name, why)
