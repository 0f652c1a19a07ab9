"""Leases of readers: files in a checkpoint to prevent deletion during a read.

A reader touches its file again and again; one that was not touched for a minute, by the
clock of the file system, belongs to a dead reader.

A process that deletes makes a file, too, and then looks for readers; a reader makes its
file and then looks for a deletion: at least one sees the other. Both make a file before
they list, so that clients of a network file system list no outdated cache. Of several
deletions, each may remove the file of the others, so each looks for readers again
before it removes anything for good.
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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._storage import files, paths, read_errors
from flaxckpt._storage.paths import RemotePath

READING = "READING-"
"""Prefix of the name of a reader's file: `READING-<host>-<pid>-<random>`."""

_READER = re.compile(rf"{READING}[A-Za-z0-9_.]{{0,64}}-[0-9]+-[0-9a-f]{{8}}")

DELETING = "DELETING"
"""Name of the file that announces the deletion of a checkpoint."""

_EXPIRES_SECS = 60.0
"""Seconds without a touch after which a reader or a deletion counts as dead."""

_CLOCKS_DIFFER_SECS = 3600.0
"""Maximal difference between the clocks of a machine and of a file system."""

_MACHINES_DIFFER_SECS = 300.0
"""Maximal difference between the clocks of machines that share a store."""

_TOUCHES = 4
"""Number of touches in the time in which a file would expire."""


class Lease:
    """A reader's lease: prevents the deletion of a checkpoint until released.

    Raises OSError if the file cannot be made.
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
            _write_time(self._remote)
        else:
            self._directory = self._make_file(path)
        self._heartbeat = _util.threads.Heartbeat(
            self._refresh, _EXPIRES_SECS / _TOUCHES, "flaxckpt lease"
        )
        _leases.add(self)

    def _make_file(self, path: Path) -> int:
        """Makes the reader's file; returns the descriptor of the directory."""
        # By the descriptor, not the path: a deletion may rename the directory.
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            os.close(os.open(self._name, flags, 0o666, dir_fd=directory))
        except BaseException:
            os.close(directory)
            raise
        return directory

    def _refresh(self) -> None:
        # Without times: the file system sets the time by its own clock.
        with contextlib.suppress(OSError):
            if self._remote is not None:
                _write_time(self._remote)
            else:
                os.utime(self._name, dir_fd=self._directory)

    def release(self) -> None:
        """Releases the lease; further calls do nothing."""
        if self._is_released:
            return
        self._is_released = True
        _leases.discard(self)
        if os.getpid() == self._pid:  # not in a forked child
            self._heartbeat.stop()
            with contextlib.suppress(OSError):  # the checkpoint may have been deleted
                if self._remote is not None:
                    self._remote.unlink(missing_ok=True)
                else:
                    os.unlink(self._name, dir_fd=self._directory)
        if self._directory >= 0:
            os.close(self._directory)


_leases: set[Lease] = set()
"""Leases to release at exit, where abandoned generators are closed too late."""


@atexit.register
def _release_all() -> None:
    for lease in list(_leases):
        lease.release()


def is_lease(name: str) -> bool:
    """Returns True for exactly the names of files of readers and deletions."""
    return name == DELETING or _READER.fullmatch(name) is not None


def reader(name: str) -> str:
    """Returns the reader with the file `name`, as `host:pid`."""
    host, _, rest = name.removeprefix(READING).rpartition("-")[0].rpartition("-")
    return errors.printable(f"{host}:{rest}" if host else name)


def unexpired(path: Path, names: Iterable[str]) -> list[str]:
    """Returns the unexpired files among `names`; times in the future are expired."""
    names = list(names)
    if not names:
        return []
    if paths.is_remote(path):
        return [name for name in names if _is_recent(path / name)]
    now, limit = _file_system_time(path), _EXPIRES_SECS
    if now is None:  # use this machine's clock, with a margin
        now, limit = time.time(), limit + _CLOCKS_DIFFER_SECS
    present = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if abs(now - (path / name).stat().st_mtime) <= limit:
                present.append(name)
    return present


def is_older(path: Path, secs: float) -> bool:
    """Returns True if `path` is older than `secs` by the file system's clock."""
    now = _file_system_time(path.parent)
    try:
        return now is not None and now - path.lstat().st_mtime > secs
    except FileNotFoundError:
        return False


def _write_time(file: RemotePath) -> None:
    """Writes the present time; modification times of objects cannot be relied on."""
    file.write_bytes(json.dumps({"time": time.time()}).encode())


def _is_recent(file: RemotePath) -> bool:
    try:
        written = float(json.loads(file.read_bytes())["time"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, RecursionError):
        return True  # unknown time: assume the file is current
    return abs(time.time() - written) <= _EXPIRES_SECS + _MACHINES_DIFFER_SECS


def sweep(directory: RemotePath) -> None:
    """Removes expired files of readers and deletions, or raises StoreError."""
    for name, is_directory in directory.names().items():
        is_lease = name == DELETING or name.startswith(READING)
        if is_lease and not is_directory and not _is_recent(directory / name):
            (directory / name).unlink(missing_ok=True)


def _file_system_time(directory: Path) -> float | None:
    """Returns the file system's time; None if no file can be made in `directory`."""
    with contextlib.suppress(OSError, AttributeError):  # as on NFS, or on a Mac
        return _time_of_new(directory, os.O_TMPFILE)
    probe = files.temporary_file(directory / "TIME")
    try:
        return _time_of_new(probe, os.O_CREAT | os.O_EXCL)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):  # left to a sweep, as after a crash
            probe.unlink(missing_ok=True)


def _time_of_new(path: Path, flag: int) -> float:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def readers(path: Path) -> list[str]:
    """Returns the readers of the checkpoint `path`, as `host:pid`; empty if missing."""
    return [reader(name) for name in unexpired(path, _names(path, READING))]


def _names(path: Path, prefix: str) -> list[str]:
    """Returns the names in `path` with this prefix; none for a missing path."""
    try:
        return [entry.name for entry in path.iterdir() if entry.name.startswith(prefix)]
    except FileNotFoundError:
        return []


def is_being_deleted(path: Path) -> bool:
    """Returns True if the checkpoint `path` was, or will soon be, deleted.

    Raises DamagedCheckpointError if the checkpoint is inaccessible.
    """
    with read_errors.explain_errors(path):
        # The name last: a deletion that was not announced before has seen the lease.
        return bool(unexpired(path, _names(path, DELETING))) or not path.is_dir()


@contextlib.contextmanager
def deletion(path: Path) -> Iterator[None]:
    """Announces a deletion in the block, or raises SaveFailedError during a read."""
    file = path / DELETING
    try:
        if paths.is_remote(file):
            _write_time(file)
        else:
            file.touch()
    except OSError as error:
        # On a full disk, delete without announcing: readers cannot make files, either.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    try:
        if present := readers(path):
            raise in_use_error(path, present)
        yield
    finally:
        with contextlib.suppress(OSError):  # deleted along with the checkpoint
            file.unlink(missing_ok=True)


def in_use_error(path: Path, present: Iterable[str]) -> errors.SaveFailedError:
    """Returns the error for the deletion of a checkpoint with readers."""
    return errors.SaveFailedError(
        f"{path} is not deleted: it is being read by {', '.join(sorted(present))};"
        " delete it when they are done (the lease of a dead reader expires after"
        f" {_EXPIRES_SECS:g} s)"
    )
