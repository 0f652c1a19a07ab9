"""Checks the environment of a run: package versions and the directory's storage."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flaxckpt import _storage, errors
from flaxckpt._types import PathLike

_PACKAGES = (
    "flaxckpt",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "tensorstore",
    "numpy",
    "ml_dtypes",
    "orbax-checkpoint",
    "grain",
)
_FILE_BYTES = 2**24
_SMALL_FILES = 9


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of a check.

    Attributes:
        versions: Package -> its version; also `python` and `platform`.
        file_system: Its kind; empty if unknown.
        free_bytes: The free space; None in object stores.
        sync_secs: The median time to write a small file durably.
        write_rate: Bytes per second of durable writes.
        read_rate: Bytes per second of reads; from memory if the system caches the files
            nevertheless.
        features: Feature of the file system -> whether available.
        problems: Reasons why a run cannot save here; empty if none.
    """

    versions: Mapping[str, str]
    directory: str
    file_system: str
    free_bytes: int | None
    sync_secs: float | None
    write_rate: float | None
    read_rate: float | None
    features: Mapping[str, bool]
    problems: tuple[str, ...]


def examine(
    directory: PathLike, *, max_bytes: int = 2**28, max_secs: float = 2.0
) -> Diagnosis:
    """Returns package versions, and tests the storage of a directory.

    Files are written to a temporary directory beside the steps: at most `max_bytes`,
    for at most `max_secs` of writing and as much of reading, but at least one large
    file. In object stores, `directory` need not exist.
    """
    root = _storage.paths.resolve(directory)
    if not _storage.of(root).costs_requests and not root.is_dir():
        raise errors.OptionError(f"{root} is not a directory: pass an existing one")
    free, problems = _storage.filesystem.free_bytes(root), []
    if free is not None:
        max_bytes = min(max_bytes, free // 10)
    sync_secs = write_rate = read_rate = None
    features: Mapping[str, bool] = {}
    try:
        with _scratch(root) as scratch:
            sync_secs = _sync_secs(scratch)
            write_rate, read_rate = _rates(scratch, max_bytes, max_secs)
            features = _features(scratch) if free is not None else {}
    except OSError as error:
        problems.append(f"cannot write to {root}: {error.strerror or error}")
    return Diagnosis(
        _versions(),
        str(root),
        _storage.filesystem.kind(root),
        free,
        sync_secs,
        write_rate,
        read_rate,
        features,
        tuple(problems),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """Creates a directory and removes it at the end."""
    path = root / f".flaxckpt-doctor-{secrets.token_hex(4)}"
    _storage.of(path).make_directory(path)
    try:
        yield path
    finally:
        _storage.of(path).remove_tree(path)


# ---- speed ------------------------------------------------------------------------


def _sync_secs(scratch: Path) -> float:
    storage = _storage.of(scratch)

    def write(file: Path) -> None:
        storage.write(file, b"x" * 4096)
        storage.sync_directory(scratch)

    files = [scratch / f"small-{number}" for number in range(_SMALL_FILES)]
    return median(_time(write, file) for file in files)


def _rates(scratch: Path, max_bytes: int, max_secs: float) -> tuple[float, float]:
    """Returns the bytes per second of durable writes, and of reads."""
    size = min(_FILE_BYTES, max(1, max_bytes))
    content = os.urandom(size)  # incompressible for any file system
    files = [scratch / f"large-{n}" for n in range(max(1, max_bytes // size))]
    written: list[Path] = []

    def write(file: Path) -> None:
        _storage.of(file).write(file, content)
        written.append(file)

    write_rate = _rate(write, files, size, max_secs)
    for file in written:
        _storage.filesystem.forget_cached(file)
    return write_rate, _rate(Path.read_bytes, written, size, max_secs)


def _rate(
    work: Callable[[Path], object], files: list[Path], size: int, max_secs: float
) -> float:
    secs, done = 0.0, 0
    for file in files:
        secs += _time(work, file)
        done += size
        if secs > max_secs:
            break
    return done / max(secs, 1e-9)


def _time(work: Callable[[Path], object], file: Path) -> float:
    start = time.perf_counter()
    work(file)
    return time.perf_counter() - start


# ---- features of the file system ----------------------------------------------------


def _features(scratch: Path) -> dict[str, bool]:
    return {
        "file locks": _works(lambda: _lock(scratch)),
        "hard links": _works(lambda: _link(scratch)),
        "exchange of directories": _works(lambda: _exchange(scratch)),
        "memory maps": _storage.filesystem.is_local(scratch),
    }


def _works(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except (OSError, NotImplementedError):
        return False


def _lock(scratch: Path) -> bool:
    descriptor = os.open(scratch / "small-0", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
    return True


def _link(scratch: Path) -> bool:
    (scratch / "linked").hardlink_to(scratch / "small-0")
    return (scratch / "small-0").stat().st_nlink == 2


def _exchange(scratch: Path) -> bool:
    (scratch / "one").mkdir()
    (scratch / "other").mkdir()
    return _storage.rename.exchange_atomically(scratch / "one", scratch / "other")
