"""What files begin with: enough to tell whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt.formats._msgpack import scanner

LFS = b"version https://git-lfs"
"""What stands in the place of a file that Git LFS has not brought."""

OF_LFS = "a pointer of Git LFS, not the file itself: run git lfs pull there"

ARRAY = b"\x93NUMPY"
"""What a file of one numpy array begins with."""

ARCHIVE = b"PK\x03\x04"
"""What a zip archive begins with, numpy's and torch's among them."""

_FIRST_BYTES = 512
"""What is read of a file to see what it is."""


def first_bytes(path: Path, count: int = 64) -> bytes:
    """The first bytes of a plain file, at most `count`; none of anything else."""
    try:
        with _storage.local.opened(path) as file:
            return file.read(count)
    except PermissionError:
        raise
    except OSError:
        return b""


def is_archive_of_arrays(path: Path) -> bool:
    """Whether the file `path` is a zip archive whose first member is a numpy array."""
    head = first_bytes(path, _NAME_OFFSET + _LONGEST_NAME)
    if not head.startswith(ARCHIVE):
        return False
    size = int.from_bytes(head[_NAME_OFFSET - 4 : _NAME_OFFSET - 2], "little")
    return head[_NAME_OFFSET : _NAME_OFFSET + size].endswith(b".npy")


_NAME_OFFSET = 30
_LONGEST_NAME = 8192


# ---- in msgpack ---------------------------------------------------------------------


def is_msgpack(path: Path) -> bool:
    """Whether a file begins as those in msgpack that are read here."""
    return first_keys(path) is not None or begins_with_record(path)


def first_keys(path: Path) -> Sequence[str] | None:
    """The keys of the map that the file `path` begins with, as far as they are cheap.

    None: it is no plain file, or begins with no map of strings. Only numbers and
    strings are passed over on the way to the next key. Keys that are refused when the
    file is read are told all the same. An empty map has none, and nothing behind it.
    """
    found: list[str] = []
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            kind, size = scan.head()
            if kind != "map":
                return None
            if size == 0:
                return [] if scan.size == 1 else None
            for _ in range(min(size, 2)):
                found.append(scan.text(*scan.head()))
                kind, length = scan.head()
                if kind == "str":
                    scan.text(kind, length)
                elif kind != "number":
                    break
    except errors.DamagedCheckpointError:
        return found or None
    return found or None


def begins_with_array(path: Path) -> bool:
    """Whether the file `path` begins with an array, as Flax has it in msgpack."""
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            kind, _ = scan.head()
            return kind == "ext" and scan.value_type() == scanner.NDARRAY
    except errors.DamagedCheckpointError:
        return False


def begins_with_record(path: Path) -> bool:
    """Whether the file `path` begins with a list of two, the first a list of strings.

    So do streams of records `[key, value]`.
    """
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            if scan.head() != ("array", 2):
                return False
            kind, size = scan.head()
            if kind != "array" or size == 0:
                return False
            scan.text(*scan.head())  # one that is refused is refused when it is read
            return True
    except errors.DamagedCheckpointError:
        return False
