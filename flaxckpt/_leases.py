"""Who reads a checkpoint, across processes and machines: a file in it for each reader.

A reader's file is touched again and again while it reads; one that has not been for a
minute, by the clock of the file system, is of a reader that is gone.

Whoever deletes says so by a file, too, and then looks for readers; a reader says so and
then looks for that file. Whichever comes first, one of them sees the other, and nobody
begins to read what is about to go. Both make a file before they list the directory, so
that clients of a network file system do not list what they remember of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import errors

_log = logging.getLogger(__name__)

READING = "READING-"
"""How the name of a reader's file begins: `READING-<host>-<pid>-<random>`."""

DELETING = "DELETING"
"""The file by which a checkpoint is about to be deleted."""

_EXPIRES_SECS = 60.0
"""Readers, and deletions, that have not been heard of for so long are gone."""

_TOUCHES = 4
"""How often a file is touched before it would expire."""


class Lease:
    """Keeps a checkpoint from being deleted until it is released.

    Args:
        path: The checkpoint.

    Raises:
        OSError: No file can be made there; FileNotFoundError if there is no checkpoint.
    """

    def __init__(self, path: Path) -> None:
        host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64]
        name = f"{READING}{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._file = path / name
        self._file.touch(exist_ok=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._refresh, name="flaxckpt lease", daemon=True
        )
        self._thread.start()

    def _refresh(self) -> None:
        while not self._ended.wait(_EXPIRES_SECS / _TOUCHES):
            # Without times: the file system's clock counts, not this machine's.
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Lets the checkpoint go."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # it may have been deleted all the same
            self._file.unlink(missing_ok=True)


def reader(name: str) -> str:
    """Whose file is called `name`: `host:pid`."""
    host, _, rest = name.removeprefix(READING).rpartition("-")[0].rpartition("-")
    return f"{host}:{rest}" if host else name


def living(path: Path, names: Iterable[str]) -> list[str]:
    """Which of the files `names` in the checkpoint `path` are not too old.

    All are if the clock of the file system cannot be asked.
    """
    names = list(names)
    if not names:
        return []
    now = _now(path)
    return [name for name in names if not _is_old(path / name, now)]


def is_older(path: Path, secs: float) -> bool:
    """Whether what is at `path` was last changed, or touched, before `secs` seconds.

    By the clock of the file system; no if that cannot be asked, or nothing is there.
    """
    now = _now(path.parent)
    try:
        return now is not None and now - path.lstat().st_mtime > secs
    except FileNotFoundError:
        return False


def _is_old(file: Path, now: float | None) -> bool:
    try:
        return now is not None and now - file.stat().st_mtime > _EXPIRES_SECS
    except FileNotFoundError:
        return True


def _now(directory: Path) -> float | None:
    """What time it is for the file system; None if no file can be made there."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return None


def readers(path: Path) -> list[str]:
    """Who reads the checkpoint `path`: `host:pid`; empty if it is not there."""
    return [reader(name) for name in living(path, _files(path, READING))]


def _files(path: Path, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(path) if name.startswith(prefix)]  # noqa: PTH208
    except FileNotFoundError:
        return []


def is_going(path: Path) -> bool:
    """Whether the checkpoint `path` is about to be deleted, or was already."""
    return not path.is_dir() or bool(living(path, _files(path, DELETING)))


@contextlib.contextmanager
def deletion(path: Path) -> Iterator[None]:
    """Announces that a checkpoint, or a part of it, is deleted in the `with` block.

    Raises:
        SaveFailedError: Somebody reads it.
        OSError: It cannot be announced.
    """
    mark = path / DELETING
    mark.touch()
    try:
        if found := readers(path):
            raise in_use(path, found)
        yield
    finally:
        with contextlib.suppress(OSError):  # it has gone with the rest
            mark.unlink(missing_ok=True)


def in_use(path: Path, found: Iterable[str]) -> errors.SaveFailedError:
    """The error for a checkpoint that cannot be deleted because it is read."""
    return errors.SaveFailedError(
        f"{path} is not deleted: it is being read by {', '.join(sorted(found))};"
        " delete it when they are done (a reader that is gone is forgotten after"
        f" {_EXPIRES_SECS:g} s)"
    )
