"""Who reads a checkpoint, across processes and machines: a file in it for each reader.

A reader's file is touched again and again while it reads; one that has not been for a
minute, by the clock of the file system, is of a reader that is gone.

Whoever deletes says so by a file, too, and then looks for readers; a reader says so and
then looks for that file. Whichever comes first, one of them sees the other, and nobody
begins to read what is about to go. Both make a file before they list the directory, so
that clients of a network file system do not list what they remember of it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._storage import paths, permissions
from flaxckpt._storage.paths import RemotePath

READING = "READING-"
"""How the name of a reader's file begins: `READING-<host>-<pid>-<random>`."""

_READER = re.compile(rf"{READING}[A-Za-z0-9_.]{{0,64}}-[0-9]+-[0-9a-f]{{8}}")

DELETING = "DELETING"
"""The file by which a checkpoint is about to be deleted."""

_EXPIRES_SECS = 60.0
"""Readers, and deletions, that have not been heard of for so long are gone."""

_CLOCKS_DIFFER_SECS = 3600.0
"""By more than that, no machine's clock is off from the file system's."""

_MACHINES_DIFFER_SECS = 300.0
"""By more than that, clocks of machines that share a store do not differ."""

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
        self._name = f"{READING}{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._pid = os.getpid()
        self._is_released = False
        self._remote = path / self._name if paths.is_remote(path) else None
        if self._remote is not None:
            if not path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such checkpoint", str(path))
            self._directory = -1
            _say_now(self._remote)
        else:
            self._directory = self._make_file(path)
        self._heartbeat = _util.threads.Heartbeat(
            self._refresh, _EXPIRES_SECS / _TOUCHES, "flaxckpt lease"
        )
        _held.add(self)

    def _make_file(self, path: Path) -> int:
        """Makes the reader's file; returns the descriptor of its directory."""
        # By its directory, not its path: whoever deletes may give it another name.
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            os.close(os.open(self._name, flags, 0o666, dir_fd=directory))
        except BaseException:
            os.close(directory)
            raise
        return directory

    def _refresh(self) -> None:
        # Without times: the file system's clock counts, not this machine's.
        with contextlib.suppress(OSError):
            if self._remote is not None:
                _say_now(self._remote)
            else:
                os.utime(self._name, dir_fd=self._directory)

    def release(self) -> None:
        """Lets the checkpoint go, once."""
        if self._is_released:
            return
        self._is_released = True
        _held.discard(self)
        if os.getpid() == self._pid:  # and not a child that was forked meanwhile
            self._heartbeat.stop()
            with contextlib.suppress(OSError):  # it may have been deleted all the same
                if self._remote is not None:
                    self._remote.unlink(missing_ok=True)
                else:
                    os.unlink(self._name, dir_fd=self._directory)
        if self._directory >= 0:
            os.close(self._directory)


_held: set[Lease] = set()
"""Those not released yet: a loop that is left alone ends when Python is half gone."""


@atexit.register
def _release_all() -> None:
    for lease in list(_held):
        lease.release()


def is_lease(name: str) -> bool:
    """Whether a reader, or who deletes, calls a file so: exactly so, not just alike."""
    return name == DELETING or _READER.fullmatch(name) is not None


def reader(name: str) -> str:
    """Whose file is called `name`: `host:pid`."""
    host, _, rest = name.removeprefix(READING).rpartition("-")[0].rpartition("-")
    return errors.printable(f"{host}:{rest}" if host else name)


def living(path: Path, names: Iterable[str]) -> list[str]:
    """Which of the files `names` in the checkpoint `path` are not too old.

    Nor may they be of the future: nobody touches those.
    """
    names = list(names)
    if not names:
        return []
    if paths.is_remote(path):
        return [name for name in names if _is_said_lately(path / name)]
    now, limit = _now(path), _EXPIRES_SECS
    if now is None:  # the clocks of machines differ
        now, limit = time.time(), limit + _CLOCKS_DIFFER_SECS
    return [name for name in names if _is_living(path / name, now, limit)]


def is_older(path: Path, secs: float) -> bool:
    """Whether what is at `path` was last changed, or touched, before `secs` seconds.

    By the clock of the file system; no if that cannot be asked, or nothing is there.
    """
    now = _now(path.parent)
    try:
        return now is not None and now - path.lstat().st_mtime > secs
    except FileNotFoundError:
        return False


def _say_now(file: RemotePath) -> None:
    """Writes down what time it is: objects have no time that could be relied on."""
    file.write_bytes(json.dumps({"time": time.time()}).encode())


def _is_said_lately(file: RemotePath) -> bool:
    try:
        said = float(json.loads(file.read_bytes())["time"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, RecursionError):
        return True  # nobody knows
    return abs(time.time() - said) <= _EXPIRES_SECS + _MACHINES_DIFFER_SECS


def sweep(directory: RemotePath) -> None:
    """Removes the marks of readers, and of deletions, that are gone.

    Raises:
        StoreError: The store cannot be reached.
    """
    for name, is_directory in directory.names().items():
        is_mark = name == DELETING or name.startswith(READING)
        if is_mark and not is_directory and not _is_said_lately(directory / name):
            (directory / name).unlink(missing_ok=True)


def _is_living(file: Path, now: float, limit: float) -> bool:
    try:
        return abs(now - file.stat().st_mtime) <= limit
    except FileNotFoundError:
        return False


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
        names = path.names() if paths.is_remote(path) else os.listdir(path)  # noqa: PTH208
        return [name for name in names if name.startswith(prefix)]
    except FileNotFoundError:
        return []


def is_going(path: Path) -> bool:
    """Whether the checkpoint `path` is about to be deleted, or was already.

    Raises:
        DamagedCheckpointError: It cannot be looked at.
    """
    with permissions.explained(path):
        return not path.is_dir() or bool(living(path, _files(path, DELETING)))


@contextlib.contextmanager
def deletion(path: Path) -> Iterator[None]:
    """Announces that a checkpoint, or a part of it, is deleted in the `with` block.

    Raises:
        SaveFailedError: Somebody reads it.
        OSError: It cannot be announced.
    """
    mark = path / DELETING
    try:
        if paths.is_remote(mark):
            _say_now(mark)
        else:
            mark.touch()
    except OSError as error:
        # On a full disk it goes without: readers cannot say that they come, either.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
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
