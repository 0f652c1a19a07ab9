"""Functions on files and directories in any storage, chosen by the path."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from flaxckpt._storage.files import digest, identity, is_replacing
from flaxckpt._storage.paths import resolve
from flaxckpt._storage.storage import Stamp, of, stamp

__all__ = [
    "Stamp",
    "digest",
    "digest_file",
    "directories",
    "identity",
    "is_replacing",
    "lexists",
    "locked",
    "make_directory",
    "names",
    "opened",
    "read",
    "remove_tree",
    "replace",
    "resolve",
    "stamp",
    "sync_directory",
    "sync_tree",
    "write",
]


def read(path: Path, *, max_bytes: int) -> bytes:
    """See `Storage.read`."""
    return of(path).read(path, max_bytes=max_bytes)


def opened(
    path: Path, *, buffer_bytes: int = 2**13
) -> AbstractContextManager[io.BufferedReader]:
    """See `Storage.opened`."""
    return of(path).opened(path, buffer_bytes=buffer_bytes)


def lexists(path: Path) -> bool:
    """See `Storage.exists`."""
    return of(path).exists(path)


def names(path: Path) -> list[str]:
    """See `Storage.names`."""
    return of(path).names(path)


def write(path: Path, content: bytes) -> None:
    """See `Storage.write`."""
    of(path).write(path, content)


def replace(path: Path, content: bytes) -> None:
    """See `Storage.replace`."""
    of(path).replace(path, content)


def locked(file: Path) -> AbstractContextManager[None]:
    """See `Storage.locked`."""
    return of(file).locked(file)


def make_directory(path: Path) -> None:
    """See `Storage.make_directory`."""
    of(path).make_directory(path)


def sync_directory(path: Path) -> None:
    """See `Storage.sync_directory`."""
    of(path).sync_directory(path)


def sync_tree(root: Path) -> int:
    """See `Storage.sync_tree`."""
    return of(root).sync_tree(root)


def remove_tree(path: Path) -> None:
    """See `Storage.remove_tree`."""
    of(path).remove_tree(path)


def directories(path: Path) -> Iterator[str]:
    """See `Storage.directories`."""
    return of(path).directories(path)


def digest_file(path: Path, *, max_bytes: int) -> str | None:
    """See `Storage.digest_file`."""
    return of(path).digest_file(path, max_bytes=max_bytes)
