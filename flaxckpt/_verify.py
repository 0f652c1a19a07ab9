"""Whether every byte of a checkpoint is what was written.

Files are read in small parts, several at a time, and nothing is kept.
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

from flaxckpt import (
    _access,
    _audit,
    _blocks,
    _dtypes,
    _findings,
    _layout,
    _locate,
    _ocdbt,
    _pieces,
    _progress,
    _read,
    _remote,
    _steps,
    _zarr,
    errors,
)
from flaxckpt._info import Leaf, LeafInfo, Stored, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt.formats import _manifest, _orbax, _orbax_disk, _orbax_json

_DECODED_AT_ONCE = 128 * 2**20
_PIECE_BYTES = 64 * 2**20
"""No less than a chunk of ours, which would be read for each piece of it."""


def verify(
    path: Path, step: int | None, *, thorough: bool = True
) -> _findings.VerifyReport:
    """Reads all of the checkpoint `path`, whose number is `step`.

    Args:
        path: A checkpoint.
        step: Its number, for the report.
        thorough: Whether to go on after the first problem.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: There is none.
    """
    start, counter = time.monotonic(), _progress.Counter(f"verifying {path.name}")
    found = _findings.Findings(counter, thorough=thorough)
    with _progress.shown(counter), _remote.looking(path):
        stored = _description(path, step, found)
        format_name = "unknown" if stored is None else stored.metadata.format
        extra: list[str] = []
        try:
            if stored is not None and format_name == "flaxckpt":
                extra = _verify_own(path, stored, found)
            elif stored is not None:
                _verify_foreign(path, stored, found)
            if stored is not None and step is not None:
                check = functools.partial(_locate.check_step, path, step, stored)
                found.attempt(_findings.HERE, check)
        except OSError as error:
            if not _access.is_unread(error):
                raise
            found.add(found.unread, _findings.HERE, str(error))
    return found.report(path, format_name, step, extra, time.monotonic() - start)


def check(path: Path) -> None:
    """Reads all of the checkpoint `path`; its metrics alone may be lost.

    Raises:
        DamagedCheckpointError: It is damaged, or cannot be read.
        CheckpointNotFoundError, CheckpointFormatError: There is none.
    """
    report = verify(path, None)
    for name, why in {**report.problems, **report.unread}.items():
        if not name.startswith(f"{_orbax.METRICS}/"):
            where = path if name == _findings.HERE else name
            raise errors.DamagedCheckpointError(f"{where}: {why}")


def lost(path: Path, step: int | None, error: Exception) -> _findings.VerifyReport:
    """The report on what is not recognised as the checkpoint that it was."""
    found = _findings.Findings(_progress.Counter(""), thorough=True)
    is_unread = _access.is_unread(error)
    found.add(found.unread if is_unread else found.problems, _findings.HERE, str(error))
    return found.report(path, "unknown", step, (), 0.0)


def damage(path: Path, step: int | None) -> str | None:
    """What is proved to be wrong with the checkpoint `path`, in a few words.

    None if nothing is: it may be good, or it may be out of reach for now.
    """
    try:
        report = verify(path, step, thorough=False)
    except (errors.CheckpointError, OSError) as error:
        if _access.is_unread(error):
            return None
        # It was a checkpoint, and is none any more.
        is_ours = _steps.has_mark(path) or (path / _orbax.STATE).is_dir()
        if is_ours and _findings.unreadable(path) is None:
            return str(error).splitlines()[0]
        return None
    for name, why in report.problems.items():
        return why if name == _findings.HERE else f"{name}: {why}"
    return None


def _description(
    path: Path, step: int | None, found: _findings.Findings
) -> Stored | None:
    """Everything of a checkpoint but its arrays; None if it cannot be had."""
    try:
        return _locate.read_stored(path, step)
    except (OSError, errors.DamagedCheckpointError) as error:
        if isinstance(error, errors.CheckpointNotFoundError):
            raise
        if _access.is_unread(error):
            found.add(found.unread, _findings.HERE, str(error))
        elif (why := _findings.unreadable(path)) is not None:
            found.add(found.unread, _findings.HERE, why)
        else:
            found.add(found.problems, _findings.HERE, str(error))
        return None


# ---- our own format ---------------------------------------------------------------


def _verify_own(path: Path, stored: Stored, found: _findings.Findings) -> list[str]:
    """Compares every file with its checksum; returns those that are no part of it."""
    manifest = _orbax_disk.json_file(path / _orbax_json.MANIFEST, path)
    encoding = _manifest.encoding(manifest)
    digests = _audit.digests(path, stored)
    checks: list[tuple[str, Callable[[], object]]] = [
        (name, functools.partial(_check_digest, path, name, digest, found.counter.add))
        for name, digest in digests.items()
    ]
    known = {*digests, *_orbax.UNDIGESTED}
    leaves = {p: leaf for p, leaf in stored.table.items() if _is_array(leaf)}
    if encoding is None or manifest["ocdbt"]:
        undigested = {} if _has_database(digests) else leaves
        if undigested:
            known |= _findings.names(path, path / _orbax.STATE)
    else:
        undigested = {}
        for leaf_path, leaf in leaves.items():
            files, made = _chunk_checks(path, encoding, leaf.info, digests, found)
            known |= files
            checks += [(leaf_path, check) for check in made]
            if not encoding.checksum and not files <= digests.keys():
                undigested[leaf_path] = leaf
    is_digested = manifest.get("metrics") is True or _steps.is_measured(path)
    checks += _metrics_checks(path, found, is_digested=is_digested)
    checks.append((_orbax.COMMITTED, functools.partial(_check_committed, path)))
    found.counter.total = _findings.size_of(path)
    found.run(checks)
    if encoding is not None and manifest["ocdbt"] and leaves:
        _check_keys(path, encoding, leaves, found)
    if encoding is None or not encoding.checksum:
        for leaf_path in undigested:
            found.unchecked[leaf_path] = "it was saved without checksums; it is there"
    _decode(path, undigested, found)
    there = {name for name in _findings.names(path, path) if not _is_mark(name)}
    return sorted(there - known)


def _is_array(leaf: Leaf) -> bool:
    return isinstance(leaf.source, StoredLeaf) and leaf.source.open is not None


def _is_mark(name: str) -> bool:
    return "/" not in name and _steps.is_mark(name)


def _has_database(digests: Mapping[str, str]) -> bool:
    return f"{_orbax.STATE}/manifest.ocdbt" in digests


def _check_keys(
    path: Path,
    encoding: _zarr.Encoding,
    leaves: Mapping[LeafPath, Leaf],
    found: _findings.Findings,
) -> None:
    """Looks for all that arrays must have in a database, which is sound without."""
    if any(_orbax.is_of_arrays(name) for name in found.problems):
        return  # it has changed, and may not be readable
    there: set[str] = set()
    manifest = f"{_orbax.STATE}/{_ocdbt.MANIFEST}"
    found.attempt(manifest, lambda: there.update(_ocdbt.keys(path / _orbax.STATE)))
    if manifest in found.problems or manifest in found.unread:
        return
    for leaf_path, leaf in leaves.items():
        name = _orbax_json.param_name(leaf.info.keys)
        shape, _ = _layout.stored_form(leaf.info)
        chunks = _audit.keys(encoding, shape, leaf.info.chunk_shape or ())
        missing = [
            key
            for key in (_audit.metadata_name(encoding), *chunks)
            if _zarr.database_key(name, key) not in there
        ]
        if missing:
            rest = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            why = f"{missing[0]}{rest} missing in the database"
            found.add(found.problems, leaf_path, why)


def _chunk_checks(
    path: Path,
    encoding: _zarr.Encoding,
    info: LeafInfo,
    digests: Mapping[str, str],
    found: _findings.Findings,
) -> tuple[set[str], list[Callable[[], object]]]:
    """The files of an array, and what is to be done with those without a digest."""
    name = _orbax_json.param_name(info.keys)
    directory = f"{_orbax.STATE}/{name}" if name else _orbax.STATE
    shape, dtype = _layout.stored_form(info)
    chunk_shape = info.chunk_shape or ()
    metadata = f"{directory}/{_audit.metadata_name(encoding)}"
    files = {metadata}
    checks: list[Callable[[], object]] = []
    if metadata not in digests:

        def check_metadata() -> None:
            text = _blocks.small(path / metadata)
            _zarr.check_metadata(text, encoding, shape, dtype, chunk_shape)
            _zarr.check_compact(text)

        checks.append(check_metadata)
    size = _audit.chunk_bytes(encoding, info)
    most = size or math.prod(chunk_shape) * _dtypes.item_bits(dtype) // 8
    for key in _audit.keys(encoding, shape, chunk_shape):
        file = f"{directory}/{key}"
        files.add(file)
        if file not in digests:
            check = _check_chunk if encoding.checksum else _check_size
            chunk = _Chunk(path / file, path, size, most)
            checks.append(functools.partial(check, chunk, found.counter.add))
    return files, checks


def _check_digest(
    path: Path, name: str, recorded: str, count: Callable[[int], object]
) -> None:
    digest = hashlib.sha256()
    most = _findings.LARGE if _orbax.is_of_arrays(name) else 0
    _findings.stream(path / name, path, count, digest.update, most)
    if f"sha256:{digest.hexdigest()}" != recorded:
        raise ValueError("it has changed since it was saved: its SHA-256 is another")


class _Chunk(NamedTuple):
    """What is known of a chunk's file.

    Attributes:
        file: Where it is.
        root: The checkpoint.
        size: What it must have, in bytes; 0 if that varies.
        most: What it has without compression.
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
    """Compares the size of a chunk with what it must be."""
    if not _remote.is_remote(chunk.file):
        with _findings.opened(chunk.file, chunk.root) as (_, found):
            chunk.check_size(found)
        return
    sizes: list[int] = []
    _findings.stream(
        chunk.file, chunk.root, count, lambda part: sizes.append(len(part)), chunk.most
    )
    chunk.check_size(sum(sizes))


def _check_chunk(chunk: _Chunk, count: Callable[[int], object]) -> None:
    """Compares a chunk with the checksum at its end."""
    if not _remote.is_remote(chunk.file):
        _check_size(chunk, count)  # before all of it is read
    value, found, tail = 0, 0, b""

    def take(part: memoryview) -> None:
        nonlocal value, found, tail
        found += len(part)
        if len(part) < _blocks.CHECKSUM_BYTES:
            part, tail = memoryview(tail + bytes(part)), b""
        value = crc32c.crc32c(tail, value)
        value = crc32c.crc32c(part[: -_blocks.CHECKSUM_BYTES], value)
        tail = bytes(part[-_blocks.CHECKSUM_BYTES :])  # of the file, for all we know

    _findings.stream(chunk.file, chunk.root, count, take, chunk.most)
    chunk.check_size(found)
    if tail != value.to_bytes(_blocks.CHECKSUM_BYTES, "little"):
        raise ValueError(
            f"{chunk.file.name} has changed since it was written: its CRC-32C is"
            " another"
        )


def _check_committed(path: Path) -> None:
    manifest = _orbax_disk.read_file(path / _orbax_json.MANIFEST, path)
    found = _orbax_disk.read_file(path / _orbax.COMMITTED, path)
    if found != _orbax.seal_of(manifest):
        raise ValueError("it is not what was written there")


def _metrics_checks(
    path: Path, found: _findings.Findings, *, is_digested: bool
) -> list[tuple[str, Callable[[], object]]]:
    """What is to be done with metrics, if there are or were some."""
    name = f"{_orbax.METRICS}/{_orbax.METRICS}"
    digests = path / _orbax_disk.METRICS_DIGESTS

    def check() -> None:
        if (path / _orbax.METRICS).exists():
            (path / name).stat()  # or there would be none
        _orbax.metrics_in(path)

    def check_digests() -> None:
        text = _orbax_disk.read_file(digests, path)
        if not _orbax.are_digests_of_metrics(text, digests):
            raise ValueError("it is not what was written there")

    checks: list[tuple[str, Callable[[], object]]] = [(name, check)]
    if is_digested or digests.exists():
        checks.append((_orbax_disk.METRICS_DIGESTS, check_digests))
    elif (path / name).exists():
        found.unchecked[name] = "they were written without a digest"
    return checks


# ---- other formats ----------------------------------------------------------------


def _verify_foreign(path: Path, stored: Stored, found: _findings.Findings) -> None:
    """Reads and decodes every array; that is all that can be done."""
    leaves = {p: leaf for p, leaf in stored.table.items() if _is_array(leaf)}
    found.counter.total = sum(_layout.stored_bytes(i.info) for i in leaves.values())
    for leaf_path, leaf in leaves.items():
        if not _has_checksums(leaf):
            found.unchecked[leaf_path] = "its format has no checksums; it was decoded"
    _decode(path, leaves, found)


def _has_checksums(leaf: Leaf) -> bool:
    """Whether TensorStore compares the chunks of an array with their checksums."""
    source = leaf.source
    assert isinstance(source, StoredLeaf), leaf.info.path
    try:
        codec = _read.open_one(source).codec
    except (errors.CheckpointError, OSError, ValueError):
        return False
    return codec is not None and "crc32c" in str(codec.to_json())


def _decode(
    path: Path, leaves: Mapping[LeafPath, Leaf], found: _findings.Findings
) -> None:
    """Reads arrays, in pieces, and lets them go."""
    pieces = [
        piece
        for leaf in leaves.values()
        for piece in _pieces.cut(leaf, chunk_shape=None, max_bytes=_PIECE_BYTES)
    ]
    faults = _findings.Findings(found.counter, thorough=found.thorough)
    for batch in _pieces.batches(pieces, max_bytes=_DECODED_AT_ONCE):
        if found.is_enough or faults.is_enough:
            break
        try:
            _pieces.read(batch, max_bytes=_DECODED_AT_ONCE)
        except (OSError, ValueError, MemoryError):
            for piece in batch:  # whose fault it is
                read = functools.partial(
                    _pieces.read, [piece], max_bytes=_DECODED_AT_ONCE
                )
                faults.attempt(piece.path, read)
        found.counter.add(sum(piece.nbytes for piece in batch))
    # What reads and decodes does not say which of the two has failed.
    proved = not faults.problems or _findings.unreadable(path) is None
    for name, why in faults.problems.items():
        found.add(found.problems if proved else found.unread, name, why)
    for name, why in faults.unread.items():
        found.add(found.unread, name, why)
