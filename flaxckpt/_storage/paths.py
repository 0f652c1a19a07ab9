"""Paths in object stores, with a subset of the methods of `pathlib.Path`.

Stores have no directories: each prefix of keys counts as a directory, so an empty
directory does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard, TypeVar
from urllib.parse import unquote_to_bytes

from flaxckpt import _util, errors
from flaxckpt._storage import store_settings
from flaxckpt._types import PathLike

if TYPE_CHECKING:
    import tensorstore as ts

    from flaxckpt._storage.bucket import Bucket

    _Base = Path  # the type of paths in all signatures
else:
    _Base = PurePosixPath

_T = TypeVar("_T")

_URL_IN_A_PATH = re.compile(r"(s3|gs|memory|file):/", re.IGNORECASE)


class StatResult(NamedTuple):
    """Result of `RemotePath.stat`, with the field names of `os.stat_result`."""

    st_mode: int
    st_size: int
    st_mtime: float = 0.0
    st_mtime_ns: int = 0


class RemotePath(_Base):
    """A key in an object store, or a prefix of keys; its first part is `s3:bucket`.

    `os.fspath` raises TypeError, so that no system call takes it for a local path.
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, colon, bucket = self.parts[0].partition(":") if self.parts else [""] * 3
        if not colon:
            return "/".join(self.parts) or "."
        return "/".join((f"{scheme}://{bucket}", *self.parts[1:]))

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is not a path in the file system")

    @property
    def parent(self) -> RemotePath:
        """The prefix above; of a bucket, itself, as of the root of a disk."""
        return super().parent if self.parts[1:] else self

    # ---- keys ---------------------------------------------------------------------

    @property
    def store(self) -> Bucket:
        scheme, _, bucket = self.parts[0].partition(":")
        return store_settings.of(scheme, bucket)

    @property
    def key(self) -> str:
        return "/".join(self.parts[1:])

    @property
    def prefix(self) -> str:
        return f"{self.key}/" if self.parts[1:] else ""

    def keys(self) -> list[str]:
        """Returns the keys below this path, without the prefix, in ascending order."""
        size = len(self.prefix)
        return [key[size:] for key in self.store.keys(self.prefix) if key[size:]]

    # ---- listing ------------------------------------------------------------------

    def is_file(self) -> bool:
        return bool(self.key) and self.store.has(self.key)

    def is_dir(self) -> bool:
        return bool(self.store.keys(self.prefix))

    def exists(self) -> bool:
        """Returns True if this key, or any key below, exists."""
        return self.is_dir() or self.is_file()

    def is_symlink(self) -> bool:
        """Returns False: object stores contain no links."""
        return False

    def names(self) -> dict[str, bool]:
        """Maps each name in this directory to True for a directory."""
        names: dict[str, bool] = {}
        for key in self.keys():
            name, slash, _ = key.partition("/")
            if name:
                names[name] = names.get(name, False) or bool(slash)
        return names

    def tree(self) -> dict[str, set[str]]:
        """Maps each subdirectory to the names inside, from a single listing."""
        directories: dict[str, set[str]] = {}
        for key in self.keys():
            name, slash, rest = key.partition("/")
            if name and slash:
                directories.setdefault(name, set()).add(rest.partition("/")[0])
        return directories

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        for name in self.names():
            yield self / name

    def glob(self, pattern: str) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yields the entries like `pattern`, part by part: `*` does not match `/`."""
        patterns = PurePosixPath(pattern).parts
        depth = len(patterns)
        for parts in {tuple(key.split("/")[:depth]): None for key in self.keys()}:
            if len(parts) == depth and all(map(fnmatch.fnmatchcase, parts, patterns)):
                yield self.joinpath(*parts)

    def rglob(self, pattern: str) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yields the objects below this path with names like `pattern`."""
        for key in self.keys():
            if (child := self / key).match(pattern):
                yield child

    def stat(self) -> StatResult:  # type: ignore[override]
        """Returns type and size, by a read, or raises FileNotFoundError."""
        stored = self.store.read(self.key)
        if stored is not None:
            return StatResult(stat.S_IFREG, len(stored.value))
        if self.is_dir():
            return StatResult(stat.S_IFDIR, 0)
        raise missing_error(self)

    lstat = stat  # type: ignore[assignment]

    # ---- reading and writing ------------------------------------------------------

    def read_bytes(self) -> bytes:
        """Returns the content; raises FileNotFoundError if missing."""
        stored = self.store.read(self.key)
        if stored is None:
            raise missing_error(self)
        return stored.value

    def read_text(self, encoding: str = "utf-8") -> str:  # type: ignore[override]
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:  # type: ignore[override]
        """Reads the object into memory and returns a file for reading."""
        if mode not in ("r", "rb"):
            raise OSError(errno.EINVAL, "cannot open an object for writing", str(self))
        content = io.BytesIO(self.read_bytes())
        return content if mode == "rb" else io.TextIOWrapper(content, "utf-8")

    def write_bytes(self, content: bytes | bytearray) -> int:  # type: ignore[override]
        """Writes or replaces the object atomically."""
        self.store.write(self.key, bytes(content))
        return len(content)

    def write_text(self, content: str, encoding: str = "utf-8") -> int:  # type: ignore[override]
        return self.write_bytes(content.encode(encoding))

    def touch(self) -> None:  # type: ignore[override]
        """Creates an empty object, unless the object exists."""
        self.store.create(self.key, b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object; raises FileNotFoundError if missing."""
        if not missing_ok and not self.is_file():
            raise missing_error(self)
        self.store.delete(self.key)

    def mkdir(
        self, mode: int = 0, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Does nothing: a directory exists with the first object inside."""


def missing_error(path: RemotePath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", str(path))


def real(path: Path) -> str:
    return str(path) if is_remote(path) else os.path.realpath(path)


def overlap(one: Path, other: Path) -> bool:
    """Returns True if one of two directories contains the other, or both are one."""
    if is_remote(one) or is_remote(other):
        return one == other or one in other.parents or other in one.parents
    paths = Path(real(one)), Path(real(other))  # without links
    # A directory that is mounted twice has two paths.
    first, second = map(_identify, paths)
    return any(
        place in map(_identify, (path, *path.parents))
        for place, path in zip((second, first), paths, strict=True)
    )


def is_same(one: str, other: Path) -> bool:
    """Returns True if both lead to one directory, by links or mounts."""
    try:
        return not is_remote(other) and other.samefile(one)
    except (OSError, ValueError):
        return False


def _identify(path: Path) -> tuple[object, object]:
    """Returns the identity of a directory; by its parent, if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return _identify(path.parent), path.name
    return status.st_dev, status.st_ino


def is_remote(path: object) -> TypeGuard[RemotePath]:
    return isinstance(path, RemotePath)


def listing_cache(path: Path) -> contextlib.AbstractContextManager[None]:
    """Caches the listing of a path in an object store; see `Bucket.listing_cache`."""
    if is_remote(path):
        return path.store.listing_cache(path.prefix)
    return contextlib.nullcontext()


def read_ahead(files: Sequence[Path]) -> contextlib.AbstractContextManager[None]:
    """Reads small files of one object store at once; see `Bucket.read_ahead`."""
    if not files or not is_remote(first := files[0]):
        return contextlib.nullcontext()
    return first.store.read_ahead([file.key for file in files if is_remote(file)])


def result(future: ts.Future[_T], path: Path, size: int = 0) -> _T:
    """Returns the result of a read; raises StoreError after the deadline of a store."""
    if is_remote(path):
        return path.store.connection.wait(f"read {path}", future, size)
    return future.result()


def from_text(text: str) -> Path:
    """Converts the result of `str(path)` back to the path."""
    scheme, separator, _ = text.partition("://")
    is_remote = separator and scheme in store_settings.SCHEMES
    return parse(text) if is_remote else Path(text)


def parse(url: str) -> Path:
    """Converts the URL of a bucket to a path; raises OptionError for another."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise errors.OptionError(f"{url!a} is not valid Unicode") from None
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if not bucket or ":" in bucket or "." in parts or ".." in parts or "\0" in key:
        raise errors.OptionError(
            f"{url}: wanted {scheme}://bucket/path, without '.' or '..'"
        )
    return RemotePath(f"{scheme}:{bucket}", *parts)


def resolve(path: PathLike) -> Path:
    """Returns the absolute form of `path`; raises OptionError for an invalid one."""
    if isinstance(path, RemotePath):
        return path
    if not _util.arguments.is_path(path):
        way = "the path comes before the state"
        if hasattr(path, "directory"):  # such as a Checkpointer
            way = "pass its directory"
        raise errors.OptionError(
            "wanted a path, as a str or a pathlib.Path, found"
            f" {_util.arguments.describe(path)}; {way}"
        )
    text = os.fspath(path)
    if not text:
        raise errors.OptionError(
            "wanted a path, found an empty string: use '.' for the current directory"
        )
    if "://" in text:
        scheme, _, rest = text.partition("://")
        scheme = scheme.lower()
        if scheme in store_settings.SCHEMES:
            return parse(f"{scheme}://{rest}")
        text = _parse_file_url(text)
    elif _URL_IN_A_PATH.match(text):
        raise errors.OptionError(
            f"{text!r} looks like a URL that was converted to a Path, which removes a"
            " '/': pass the URL as a str"
        )
    if "\0" in text:
        raise errors.OptionError(f"{text!r}: wanted a path without NUL characters")
    try:
        absolute = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111
    except FileNotFoundError as error:
        raise errors.OptionError(
            f"{text!r}: the current directory no longer exists: pass an absolute path"
        ) from error
    if "\\" in absolute:  # TensorStore would write to another directory
        raise errors.OptionError(
            f"{absolute!r}: wanted a path without backslashes, which TensorStore reads"
            " as '/': rename the directory, or use another"
        )
    return Path(absolute)


def _parse_file_url(url: str) -> str:
    """Returns the path that a URL of file:// names; raises OptionError for another."""
    # `urlsplit` removes newlines and tabs, and ends the path at a "?" or "#", so that
    # several directories would be one.
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower() != "file" or host not in ("", "localhost") or not slash:
        raise errors.OptionError(
            f"{url}: wanted a local path or a URL of file:///path, s3://, gs:// or"
            f" memory://, found {scheme}://{host}"
        )
    if "?" in path or "#" in path:
        raise errors.OptionError(
            f"{url}: wanted a file:// URL without a query and a fragment: write %3F for"
            " '?' and %23 for '#', or pass the path without file://"
        )
    return os.fsdecode(b"/" + unquote_to_bytes(os.fsencode(path)))


# ---- directories in memory, for TensorStore to write to ---------------------------


@contextlib.contextmanager
def new_memory() -> Iterator[RemotePath]:
    """Yields an empty directory in memory, which is freed in the end."""
    memory = parse(f"memory://flaxckpt-{secrets.token_hex(8)}")
    assert is_remote(memory), memory
    try:
        yield memory
    finally:
        memory.store.delete_under("")
        store_settings.forget(memory.store)


def take_files(directory: RemotePath) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a directory in memory, name and content, and removes each."""
    for name in directory.store.keys(""):
        content = (directory / name).read_bytes()
        directory.store.delete((directory / name).key)
        yield name, content
