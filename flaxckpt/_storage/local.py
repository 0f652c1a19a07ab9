"""Files and directories, made durable.

A file counts as written when it, its directory, and every directory that was made
for it have been synced. Nothing here follows a symbolic link to delete or replace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit

from flaxckpt import _util, errors
from flaxckpt._storage import commit_marker, locks, store_settings
from flaxckpt._storage import paths as storage_paths
from flaxckpt._types import PathLike

_URL_IN_A_PATH = re.compile(r"(s3|gs|memory|file):/", re.IGNORECASE)
_SYNCING_THREADS = 8
_REMOVALS = 100

_REPLACING = ".tmp"
_REPLACING_NAME = re.compile(rf".+\.[0-9a-f]{{8}}{re.escape(_REPLACING)}", re.DOTALL)


def resolve(path: PathLike) -> Path:
    """The absolute path that `path` means, local or in an object store.

    Raises:
        OptionError: It is a URL of a kind that is not supported, or has a backslash.
    """
    if isinstance(path, storage_paths.RemotePath):
        return path
    if not _util.arguments.is_path(path):
        raise errors.OptionError(
            "wanted a path, as a str or a pathlib.Path, found"
            f" {_util.arguments.found(path)}; the path comes before the state"
        )
    text = os.fspath(path)
    if not text:
        raise errors.OptionError(
            "wanted a path, found an empty text: '.' is the current directory"
        )
    if "://" in text:
        url = urlsplit(text)
        if url.scheme in store_settings.SCHEMES:
            return storage_paths.parse(url.scheme + text[len(url.scheme) :])
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise errors.OptionError(
                f"{text}: wanted a local path or a URL of file://, s3://, gs:// or"
                f" memory://, found {url.scheme}://"
            )
        text = unquote(url.path)
    elif _URL_IN_A_PATH.match(text):
        raise errors.OptionError(
            f"{text!r} was a URL before it was a Path, which takes one '/' away: pass"
            " it as a str"
        )
    found = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111
    if "\\" in found:  # TensorStore would write to another directory
        raise errors.OptionError(
            f"{found!r}: wanted a path without backslashes, which TensorStore takes for"
            " '/': rename that directory, or use another"
        )
    return Path(found)


def read(path: Path, *, max_bytes: int) -> bytes:
    """The content of the file `path`.

    Raises:
        FileNotFoundError: There is none.
        DamagedCheckpointError: It is larger than `max_bytes`, or no plain file.
    """
    if storage_paths.is_remote(path):
        return _read_object(path, max_bytes)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            content = file.read(max_bytes + 1)
            size = len(content)
        if size > max_bytes:  # perhaps only since it was opened
            raise errors.DamagedCheckpointError(
                f"{path}: wanted a file of at most {max_bytes} bytes, found {size}"
            )
        return content


@contextlib.contextmanager
def opened(path: Path, *, buffer_bytes: int = 2**13) -> Iterator[io.BufferedReader]:
    """Opens a plain file to be read. Nobody waits for the writer of a pipe.

    Args:
        path: Which file.
        buffer_bytes: What is read at once.

    Raises:
        FileNotFoundError: There is none.
        DamagedCheckpointError: It is no plain file.
    """
    if storage_paths.is_remote(path):
        # Which has all the methods that are used.
        yield cast("io.BufferedReader", io.BytesIO(path.read_bytes()))
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise errors.DamagedCheckpointError(f"{path} is no plain file")
        with io.FileIO(descriptor, closefd=False) as file:
            yield io.BufferedReader(file, buffer_bytes)
    finally:
        os.close(descriptor)


def _read_object(path: storage_paths.RemotePath, max_bytes: int) -> bytes:
    content = path.read_bytes()
    if len(content) > max_bytes:
        raise errors.DamagedCheckpointError(
            f"{path}: wanted at most {max_bytes} bytes, found {len(content)}"
        )
    return content


def lexists(path: Path) -> bool:
    """Whether anything is called `path`, even a link to nothing."""
    return path.exists() if storage_paths.is_remote(path) else os.path.lexists(path)


def names(path: Path) -> list[str]:
    """What is in a directory.

    Raises:
        FileNotFoundError: There is none.
    """
    return list(path.names()) if storage_paths.is_remote(path) else os.listdir(path)  # noqa: PTH208


class Stamp(NamedTuple):
    """Which file was found under a name, and as of when.

    Attributes:
        path: The name.
        identity: Of the file and its content; None if there was none.
    """

    path: Path
    identity: tuple[int, ...] | None

    def is_current(self) -> bool:
        """Whether it is still that file, as it was."""
        return stamp(self.path) == self


def stamp(path: Path) -> Stamp:
    """Notes which file `path` is now; of a checkpoint in a store, its marker."""
    if storage_paths.is_remote(path):
        return Stamp(path, _identity_in_store(path))
    try:
        found = path.stat()
    except OSError:
        return Stamp(path, None)
    return Stamp(path, identity(found))


def _identity_in_store(path: storage_paths.RemotePath) -> tuple[int, ...] | None:
    for key in (path.key, f"{path.prefix}{commit_marker.MARKER}"):
        found = path.store.read(key, start=0, stop=0)
        if found is not None:
            return tuple(found.generation)
    return None


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Of a file and its content, as far as the file system tells."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def write(path: Path, content: bytes) -> None:
    """Writes a new file and syncs it; its directory is the caller's to sync."""
    if storage_paths.is_remote(path):
        commit_marker.write_new(path, content)
        return
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Writes `path` anew in one step: readers see the old content or the new.

    Several may do so at a time: one of them is the last.
    """
    if storage_paths.is_remote(path):
        path.write_bytes(content)
        return
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_REPLACING}")
    try:
        write(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_replacing(name: str) -> bool:
    """Whether `replace` calls a file so until it has its name."""
    return _REPLACING_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Has whoever locks that file, too, wait until the `with` block ends.

    Where the file system has no such locks, nobody waits. In a store, it is the
    checkpoint of that file that is locked.

    Raises:
        OSError: The file cannot be opened.
    """
    if storage_paths.is_remote(file):
        with locks.held(file.parent, patient=True):
            yield
        return
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NONBLOCK)  # or NFS would not lock
    except (PermissionError, IsADirectoryError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes `path` and its parents, each of them durable.

    In a store, there is nothing to be made, but no object may be called so.

    Raises:
        OSError: One cannot be made, or is no directory; or the store is out of reach.
    """
    if storage_paths.is_remote(path):
        for above in (path, *path.parents):
            if len(above.parts) > 1 and above.is_file():
                raise NotADirectoryError(errno.ENOTDIR, "it is an object", str(above))
        return
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in `path` durable; those in stores are."""
    if storage_paths.is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> int:
    """Syncs every file and directory under `root`, whoever wrote them.

    Several at a time: the disk then settles them together.

    Returns:
        The size of all files that have no other name elsewhere, in bytes. In a store,
        what was written there since it was begun.
    """
    if storage_paths.is_remote(root):
        return root.store.counted_bytes(root.prefix)
    sizes: list[int] = []

    def sync(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            sizes.append(status.st_size)

    paths = [
        os.path.join(directory, name)  # noqa: PTH118
        for directory, _, files in os.walk(root, topdown=False)
        for name in (*files, "")
    ]
    _util.threads.each(sync, paths, threads=_SYNCING_THREADS)
    return sum(sizes)


def remove_tree(path: Path) -> None:
    """Removes a directory and all in it, if it is there.

    Raises:
        OSError: It is a symbolic link or a file, which are never followed or removed.
    """
    if storage_paths.is_remote(path):
        path.store.delete_under(path.prefix)
        return
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory of ours", str(path))
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        else:
            return
    shutil.rmtree(path)  # raises: it is not that somebody else removes it, too


def directories(path: Path) -> Iterator[str]:
    """Names of the directories in `path`; those behind symbolic links are not."""
    if storage_paths.is_remote(path):
        yield from [name for name, is_dir in path.names().items() if is_dir]
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name


def digest_file(path: Path, *, max_bytes: int) -> str | None:
    """The checksum of a file's content; None if it is larger than `max_bytes`.

    Raises:
        FileNotFoundError: There is none.
        DamagedCheckpointError: It is no plain file.
    """
    if storage_paths.is_remote(path):
        content = path.read_bytes()
        return digest(content) if len(content) <= max_bytes else None
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            return None
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def digest(content: bytes) -> str:
    """The checksum that is written down for `content`."""
    return "sha256:" + hashlib.sha256(content).hexdigest()
