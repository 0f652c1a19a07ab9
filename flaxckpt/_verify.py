"""Whether every byte of a checkpoint is what was written.

Files are read in small parts, several at a time, and nothing is kept. What was found
wrong is told apart from what could not be looked at, which proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import crc32c

from flaxckpt import (
    _audit,
    _blocks,
    _layout,
    _links,
    _locate,
    _pieces,
    _progress,
    _raw,
    _read,
    _steps,
    _threads,
    _zarr,
    errors,
)
from flaxckpt._info import Leaf, LeafInfo, Stored, StoredLeaf
from flaxckpt.formats import _orbax, _orbax_disk, _orbax_json

_log = logging.getLogger(__name__)

_THREADS = 8
_READ_AT_ONCE = 2**20
_DECODED_AT_ONCE = 128 * 2**20
_PIECE_BYTES = 32 * 2**20
_HERE = "."
"""What stands for the checkpoint itself where files and leaves are named."""


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found of a checkpoint when all of it was read.

    Attributes:
        path: The checkpoint.
        format: Whose it is, as `CheckpointMetadata.format`; `unknown` if that cannot
            be told any more.
        step: Its number under a run directory; None if it stands alone.
        problems: Leaf path, or file in the checkpoint -> what is wrong with it.
        unread: The same -> why it could not be looked at, such as a permission. That
            proves no damage.
        unchecked: The same -> why nothing tells whether its values are the ones that
            were written: it has no checksum.
        extra: Files that are no part of the checkpoint. They do no harm.
        bytes_checked: How many bytes were read and compared.
        secs: How long that took.
    """

    path: str
    format: str
    step: int | None
    problems: Mapping[str, str]
    unread: Mapping[str, str]
    unchecked: Mapping[str, str]
    extra: tuple[str, ...]
    bytes_checked: int
    secs: float

    @property
    def ok(self) -> bool:
        """Whether all of it was read and nothing is wrong."""
        return not self.problems and not self.unread

    def __str__(self) -> str:
        size = f"{self.bytes_checked / 1e6:.1f} MB checked in {self.secs:.1f} s"
        if self.problems:
            verdict = "is damaged"
        else:
            verdict = "could not be read" if self.unread else "is good"
        lines = [f"{self.path} {verdict} ({self.format}; {size})"]
        for title, found in (
            ("wrong", self.problems),
            ("could not be read", self.unread),
            ("without checksums", self.unchecked),
        ):
            if found:
                lines.append(f"{title}: {len(found)}")
                lines += [f"  {name}: {why}" for name, why in found.items()]
        if self.extra:
            lines.append(f"no part of it: {', '.join(self.extra)}")
        return "\n".join(lines)


def verify(path: Path, step: int | None, *, thorough: bool = True) -> VerifyReport:
    """Reads all of the checkpoint `path`, whose number is `step`.

    Args:
        path: A checkpoint.
        step: Its number, for the report.
        thorough: Whether to go on after the first problem.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: There is none.
    """
    start, counter = time.monotonic(), _progress.Counter(f"verifying {path.name}")
    found = _Findings(counter, thorough=thorough)
    with _progress.shown(counter):
        stored = _description(path, step, found)
        format_name = "unknown" if stored is None else stored.metadata.format
        extra: list[str] = []
        if stored is not None and format_name == "flaxckpt":
            extra = _verify_own(path, stored, found)
        elif stored is not None:
            _verify_foreign(path, stored, found)
    return VerifyReport(
        str(path),
        format_name,
        step,
        MappingProxyType(dict(sorted(found.problems.items()))),
        MappingProxyType(dict(sorted(found.unread.items()))),
        MappingProxyType(dict(sorted(found.unchecked.items()))),
        tuple(sorted(extra)),
        counter.done,
        time.monotonic() - start,
    )


def damage(path: Path, step: int | None) -> str | None:
    """What is proved to be wrong with the checkpoint `path`, in a few words.

    None if nothing is: it may be good, or it may be out of reach for now.
    """
    try:
        report = verify(path, step, thorough=False)
    except (errors.CheckpointError, OSError) as error:
        # It was a checkpoint, and is none any more.
        is_ours = _steps.has_mark(path) or (path / _orbax.STATE).is_dir()
        if is_ours and _unreadable(path) is None:
            return str(error).splitlines()[0]
        return None
    for name, why in report.problems.items():
        return why if name == _HERE else f"{name}: {why}"
    return None


class _Findings:
    """What is found by several threads."""

    def __init__(self, counter: _progress.Counter, *, thorough: bool) -> None:
        self.problems: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.unchecked: dict[str, str] = {}
        self.counter = counter
        self._thorough = thorough
        self._lock = threading.Lock()

    @property
    def is_enough(self) -> bool:
        """Whether nothing more needs to be known."""
        return bool(self.problems) and not self._thorough

    def attempt(self, name: str, check: Callable[[], object]) -> None:
        """Calls `check`, and takes down what it raises."""
        if self.is_enough:
            return
        try:
            check()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._add(self.problems, name, f"{_file_of(error)} is missing")
        except (ValueError, errors.DamagedCheckpointError) as error:
            is_room = _raw.TOO_LARGE in str(error)
            self._add(self.unread if is_room else self.problems, name, str(error))
        except (OSError, MemoryError) as error:
            self._add(self.unread, name, str(error) or _raw.TOO_LARGE)

    def _add(self, found: dict[str, str], name: str, why: str) -> None:
        with self._lock:
            found.setdefault(name, " ".join(why.split())[:300])

    def run(self, checks: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Does all `checks`, several at a time."""
        _threads.each(lambda check: self.attempt(*check), checks, threads=_THREADS)


def _file_of(error: OSError) -> str:
    return Path(error.filename).name if error.filename else "a file"


def _description(path: Path, step: int | None, found: _Findings) -> Stored | None:
    """Everything of a checkpoint but its arrays; None if it cannot be had."""
    try:
        return _locate.read_stored(path, step)
    except (OSError, errors.DamagedCheckpointError) as error:
        if isinstance(error, errors.CheckpointNotFoundError):
            raise
        if (why := _unreadable(path)) is not None:
            found.unread[_HERE] = why
        elif isinstance(error, errors.DamagedCheckpointError):
            found.problems[_HERE] = " ".join(str(error).split())[:300]
        else:
            found.unread[_HERE] = str(error)
        return None


def _unreadable(path: Path) -> str | None:
    """Why a file or directory of a checkpoint cannot be read; None if all can be."""
    try:
        if path.is_file():
            _stream(path, path.parent, _progress.ignore, lambda part: None)
            return None
        for directory, _, names in os.walk(path, onerror=_raise):
            for name in names:
                file = Path(directory, name)
                with contextlib.suppress(FileNotFoundError, ValueError):
                    _stream(file, path, _progress.ignore, lambda part: None)
    except OSError as error:
        return str(error)
    return None


def _raise(error: OSError) -> None:
    raise error


# ---- our own format ---------------------------------------------------------------


def _verify_own(path: Path, stored: Stored, found: _Findings) -> list[str]:
    """Compares every file with its checksum; returns those that are no part of it."""
    manifest = _orbax_disk.json_file(path / _orbax_json.MANIFEST)
    encoding = _orbax_json.encoding(manifest)
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
            known |= _names(path, path / _orbax.STATE)
    else:
        undigested = {}
        for leaf_path, leaf in leaves.items():
            files, made = _chunk_checks(path, encoding, leaf.info, digests, found)
            known |= files
            checks += [(leaf_path, check) for check in made]
            if not encoding.checksum and not files <= digests.keys():
                undigested[leaf_path] = leaf
    checks += _metrics_checks(path, found)
    checks.append((_orbax.COMMITTED, (path / _orbax.COMMITTED).stat))
    found.counter.total = _size(path)
    found.run(checks)
    if encoding is None or not encoding.checksum:
        for leaf_path in undigested:
            found.unchecked[leaf_path] = "it was saved without checksums; it is there"
    _decode(undigested, found)
    there = {name for name in _names(path, path) if not _is_mark(name)}
    return sorted(there - known)


def _is_array(leaf: Leaf) -> bool:
    return isinstance(leaf.source, StoredLeaf) and leaf.source.open is not None


def _is_mark(name: str) -> bool:
    return "/" not in name and _steps.is_mark(name)


def _has_database(digests: Mapping[str, str]) -> bool:
    return f"{_orbax.STATE}/manifest.ocdbt" in digests


def _chunk_checks(
    path: Path,
    encoding: _zarr.Encoding,
    info: LeafInfo,
    digests: Mapping[str, str],
    found: _Findings,
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

        checks.append(check_metadata)
    size = _audit.chunk_bytes(encoding, info)
    for key in _audit.keys(encoding, shape, chunk_shape):
        file = f"{directory}/{key}"
        files.add(file)
        if file not in digests:
            check = _check_chunk if encoding.checksum else _check_size
            checks.append(
                functools.partial(check, path / file, path, size, found.counter.add)
            )
    return files, checks


def _check_digest(
    path: Path, name: str, recorded: str, count: Callable[[int], object]
) -> None:
    digest = hashlib.sha256()
    _stream(path / name, path, count, digest.update)
    if f"sha256:{digest.hexdigest()}" != recorded:
        raise ValueError("it has changed since it was saved: its SHA-256 is another")


def _check_size(
    file: Path, root: Path, size: int, count: Callable[[int], object]
) -> None:
    """Compares the size of a chunk with what it must be; 0 if that varies."""
    with _opened(file, root) as (_, found):
        if found != (size or found) or not found:
            raise ValueError(
                f"{file.name} has {found} bytes instead of {size or 'some'}"
            )


def _check_chunk(
    file: Path, root: Path, size: int, count: Callable[[int], object]
) -> None:
    """Compares a chunk with the checksum at its end."""
    _check_size(file, root, size, count)
    body = file.stat().st_size - _blocks.CHECKSUM_BYTES
    value, at = 0, 0
    recorded = b""

    def take(part: memoryview) -> None:
        nonlocal value, at, recorded
        inside = part[: max(0, body - at)]
        value = crc32c.crc32c(inside, value)
        recorded += bytes(part[len(inside) :])
        at += len(part)

    _stream(file, root, count, take)
    if recorded != value.to_bytes(_blocks.CHECKSUM_BYTES, "little"):
        raise ValueError(
            f"{file.name} has changed since it was written: its CRC-32C is another"
        )


def _metrics_checks(
    path: Path, found: _Findings
) -> list[tuple[str, Callable[[], object]]]:
    name = f"{_orbax.METRICS}/{_orbax.METRICS}"
    if not os.path.lexists(path / _orbax.METRICS):
        return []
    if not (path / _orbax_disk.METRICS_DIGESTS).is_file():
        found.unchecked[name] = "they were written without a digest"
    return [(name, functools.partial(_orbax_disk.checked_metrics, path))]


# ---- other formats ----------------------------------------------------------------


def _verify_foreign(path: Path, stored: Stored, found: _Findings) -> None:
    """Reads and decodes every array; that is all that can be done."""
    leaves = {p: leaf for p, leaf in stored.table.items() if _is_array(leaf)}
    found.counter.total = sum(_layout.stored_bytes(i.info) for i in leaves.values())
    for leaf_path, leaf in leaves.items():
        if not _has_checksums(leaf):
            found.unchecked[leaf_path] = "its format has no checksums; it was decoded"
    _decode(leaves, found)
    if found.problems and (why := _unreadable(path)) is not None:
        found.unread[_HERE] = why  # so that what failed to be decoded proves nothing
        found.unread.update(found.problems)
        found.problems.clear()


def _has_checksums(leaf: Leaf) -> bool:
    """Whether TensorStore compares the chunks of an array with their checksums."""
    source = leaf.source
    assert isinstance(source, StoredLeaf), leaf.info.path
    try:
        codec = _read.open_one(source).codec
    except (errors.CheckpointError, OSError, ValueError):
        return False
    return codec is not None and "crc32c" in str(codec.to_json())


def _decode(leaves: Mapping[str, Leaf], found: _Findings) -> None:
    """Reads arrays, in pieces, and lets them go."""
    pieces = [
        piece
        for leaf in leaves.values()
        for piece in _pieces.cut(leaf, chunk_shape=None, max_bytes=_PIECE_BYTES)
    ]
    for batch in _pieces.batches(pieces, max_bytes=_DECODED_AT_ONCE):
        if found.is_enough:
            return
        try:
            _pieces.read(batch, max_bytes=_DECODED_AT_ONCE)
        except (OSError, ValueError, MemoryError):
            for piece in batch:  # whose fault it is
                read = functools.partial(_pieces.read, [piece])
                found.attempt(
                    piece.path, functools.partial(read, max_bytes=_DECODED_AT_ONCE)
                )
        found.counter.add(sum(piece.nbytes for piece in batch))


# ---- files ------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(file: Path, root: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a plain file, which is in `root`.

    Raises:
        ValueError: It is no plain file, or leads out of `root`.
        OSError: It cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if not _links.is_inside(str(file), root):
            raise ValueError(f"{file.name} is a link out of the checkpoint") from None
        descriptor = os.open(file, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file.name} is no plain file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _stream(
    file: Path,
    root: Path,
    count: Callable[[int], object],
    take: Callable[[memoryview], object],
) -> None:
    """Reads a file from its beginning to its end, part by part."""
    buffer = memoryview(bytearray(_READ_AT_ONCE))
    with _opened(file, root) as (descriptor, _):
        while size := os.readv(descriptor, [buffer]):
            take(buffer[:size])
            count(size)


def _names(root: Path, directory: Path) -> set[str]:
    """The paths below `root` of all that is in a directory and is no directory."""
    return {
        Path(found, name).relative_to(root).as_posix()
        for found, _, names in os.walk(directory)
        for name in names
    }


def _size(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(directory, name)).st_size
    return total
