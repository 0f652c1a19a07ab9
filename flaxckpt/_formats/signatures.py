"""The first bytes of files, by which formats are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._formats.msgpack import scanner

_LFS = b"version https://git-lfs"

_PAGES = (b"<!doctype html", b"<html", b"<?xml")

ARRAY = b"\x93NUMPY"
"""Beginning of a `.npy` file."""

ARCHIVE = b"PK\x03\x04"
"""Beginning of a zip archive, such as numpy's and torch's."""

_FIRST_BYTES = 512
"""Buffer size for recognising a file."""


def read_start(path: Path, count: int = 64) -> bytes:
    """Returns at most `count` first bytes of a regular file; else empty."""
    try:
        with _storage.of(path).open_file(path) as file:
            return file.read(count)
    except PermissionError:
        raise
    except OSError:
        return b""


def describe_stand_in(start: bytes) -> str | None:
    """Describes what begins with these bytes in place of a file; None for a file."""
    if start.startswith(_LFS):
        return "a Git LFS pointer, not the file itself: run git lfs pull there"
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        return (
            "a web page, not the file itself: it may say why the download failed, such"
            " as a wrong address or a missing login. Read it, and download again"
        )
    return None


def is_archive_of_arrays(path: Path) -> bool:
    """Returns True for a zip archive with a `.npy` file as its first member."""
    return first_member(path).endswith(".npy")


def first_member(path: Path) -> str:
    """Returns the name of the first member of a zip archive; else empty."""
    head = read_start(path, _NAME_OFFSET + _LONGEST_NAME)
    if not head.startswith(ARCHIVE):
        return ""
    size = int.from_bytes(head[_NAME_OFFSET - 4 : _NAME_OFFSET - 2], "little")
    return head[_NAME_OFFSET : _NAME_OFFSET + size].decode("utf-8", "replace")


def holds_arrays(path: Path) -> bool:
    """Returns True for several `.npy` files in one, also after a line of JSON."""
    start = read_start(path, _LONGEST_NAME)
    if start.startswith(b"{"):
        return start.partition(b"\n")[2].startswith(ARRAY)
    return start.count(ARRAY) > 1 and start.startswith(ARRAY)


_NAME_OFFSET = 30
_LONGEST_NAME = 8192


# ---- in msgpack ---------------------------------------------------------------------


def is_msgpack(path: Path) -> bool:
    """Returns True if a file begins like a supported msgpack file."""
    return read_first_keys(path) is not None or begins_with_record(path)


def read_first_keys(path: Path) -> Sequence[str] | None:
    """Returns up to two first keys of the msgpack map at the start of a file.

    The second counts only if the first value is a number or a string; an empty map has
    none. Returns None if `path` is not a regular file, or does not begin with a map
    with keys of strings or integers.
    """
    keys: list[str] = []
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            kind, size = scan.head()
            if kind != "map":
                return None
            if size == 0:
                return [] if scan.size == 1 else None
            for _ in range(min(size, 2)):
                kind, length = scan.head()
                is_integer = kind == "number" and type(length) is int
                if is_integer and not keys:
                    return _read_integer_keys(path)
                keys.append(str(length) if is_integer else scan.text(kind, length))
                kind, length = scan.head()
                if kind == "str":
                    scan.text(kind, length)
                elif kind != "number":
                    break
    except errors.DamagedCheckpointError:
        return keys or None
    return keys or None


def _read_integer_keys(path: Path) -> Sequence[str] | None:
    """Returns the first keys, if the whole file is a map: HDF5 begins alike, too."""
    with scanner.scanner(path) as scan:
        try:
            tree = scan.value()
            scan.leave()
        except errors.DamagedCheckpointError:
            return None
    return [*tree][:2] if isinstance(tree, dict) else None


def begins_with_array(path: Path) -> bool:
    """Returns True if the file `path` begins with an array in Flax's msgpack."""
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            kind, _ = scan.head()
            return kind == "ext" and scan.value_type() == scanner.NDARRAY
    except errors.DamagedCheckpointError:
        return False


def begins_with_record(path: Path) -> bool:
    """Returns True if `path` begins with a list of two items, the first of strings."""
    try:
        with scanner.scanner(path, buffer_bytes=_FIRST_BYTES) as scan:
            if scan.head() != ("array", 2):
                return False
            kind, size = scan.head()
            if kind != "array" or size == 0:
                return False
            scan.text(*scan.head())  # the reader checks the rest of the key
            return True
    except errors.DamagedCheckpointError:
        return False
