"""Directories that are being written or deleted, and what crashes have left of them.

They are called `<name>.orbax-checkpoint-tmp-<what>-<random>`: nobody takes them for
steps, two writers of one name do not meet, and those of other programs are told apart.

Whoever works with one holds a lock on it, which ends with the process. Where other
machines may see the directory, such locks are not relied on: it is touched again and
again there, and what has not been for a while is of somebody who is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from flaxckpt import _util
from flaxckpt._storage import files, filesystem, leases, paths, rename

_log = logging.getLogger(__name__)
_Path = TypeVar("_Path", bound=Path)

TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a directory: not committed, for Orbax as for us."""

WRITING = "writing"
DELETED = "deleted"
REPLACED = "replaced"

_NAME = re.compile(
    rf"(?P<stem>.+){re.escape(TEMPORARY)}-"
    rf"(?:(?P<what>{WRITING}|{DELETED}|{REPLACED})-[0-9a-f]{{8}}|(?P<brief>metrics(?:-[0-9a-f]{{8}})?))",
    re.DOTALL,
)
PREFLIGHT = "preflight"
RESUME = "resume"

_TRIALS = frozenset((PREFLIGHT, RESUME))
"""What is there while a run begins, under names that are no checkpoint's."""

_TEXTS = re.compile(rf"together{re.escape(TEMPORARY)}-.+", re.DOTALL)
"""What processes tell each other in files, which none of them has locked."""

_TOUCHED_EVERY_SECS = 15.0
_ABANDONED_SECS = 600.0
_BRIEF_SECS = 60.0
_TEXTS_SECS = 86_400.0

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def beside(path: Path, what: str) -> Path:
    """A new name beside `path` for what is not, or no longer, to be found there."""
    return path.with_name(f"{path.name}{TEMPORARY}-{what}-{secrets.token_hex(4)}")


def being_written(root: Path) -> list[str]:
    """The names that unfinished saves under `root` will have, in any of our ways.

    Those of saves that were cut off are among them.

    Source: Orbax ends the names of its temporary directories in this way, too.
    """
    found = set()
    names = root.names() if paths.is_remote(root) else os.listdir(root)  # noqa: PTH208
    for name in names:
        stem, temporary, rest = name.partition(TEMPORARY)
        if temporary and stem and stem not in _TRIALS and _IS_WRITING.fullmatch(rest):
            found.add(stem)
    return sorted(found)


_IS_WRITING = re.compile(rf"|-[0-9]+|-{WRITING}(?:-[0-9a-f]{{8}})?")


# ---- those of ours ---------------------------------------------------------------


@contextlib.contextmanager
def made(final: Path) -> Iterator[Path]:
    """A new directory, to be filled and to be called `final`, in the `with` block.

    Whatever has its name at the end is removed: it was not finished, or was replaced.

    Raises:
        OSError: It cannot be made.
    """
    while True:
        path = beside(final, WRITING)
        path.mkdir()
        with claimed(path) as is_ours:
            if not is_ours:  # somebody swept it at once
                continue
            try:
                yield path
            except rename.NotDurableError:
                raise  # it may be all that there is after a power cut
            except BaseException:
                discard(path)
                raise
            discard(path)
            return


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Lets nobody sweep a directory in the `with` block, whatever it is called then.

    Yields:
        Whether it is ours: nobody else has claimed or removed it.

    Raises:
        OSError: It is no directory, or cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        yield False
        return
    try:
        with _touching(path, descriptor):
            yield _lock(descriptor) and _is_at(path, descriptor)
    finally:
        with contextlib.suppress(OSError):
            # Closing alone would not, if this process was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Locks a directory; false if somebody has. There may be no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _touching(path: Path, descriptor: int) -> Iterator[None]:
    """Keeps a directory young, where age counts."""
    if filesystem.is_local(path):
        yield
        return

    def touch() -> None:
        # Without times: the file system's clock counts, not this machine's.
        with contextlib.suppress(OSError):
            os.utime(descriptor)

    heartbeat = None
    with contextlib.suppress(RuntimeError):  # no thread: it is young for a while
        heartbeat = _util.threads.Heartbeat(
            touch, _TOUCHED_EVERY_SECS, "flaxckpt touch"
        )
    try:
        yield
    finally:
        if heartbeat is not None:
            heartbeat.stop()


def discard(path: _Path, remove_tree: Callable[[_Path], object] | None = None) -> None:
    """Removes what nobody needs; what cannot be removed is swept another time."""
    try:
        (remove_tree or files.remove_tree)(path)
    except OSError as error:
        _log.warning("%s is left for now: %s", path, error)


# ---- those of the dead -----------------------------------------------------------


def sweep(root: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes what crashes have left under `root`, and nothing that is worked with.

    Args:
        root: A directory.
        is_ours: Whether checkpoints are called so.

    Raises:
        OSError: Something could not be removed.
    """
    found = leftovers(files.directories(root), is_ours)
    if not found:
        return
    # What they were replaced by, or a deletion, may not be durable yet.
    files.sync_directory(root)
    for path in (root / name for name in found):
        with claimed(path) as is_free:
            if is_free and _is_abandoned(path):
                _end(path)


def leftovers(names: Iterable[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Which of `names` are of temporary directories; `is_ours` knows checkpoints."""
    return [
        name
        for name in names
        if _TEXTS.fullmatch(name)
        or (
            (match := _NAME.fullmatch(name))
            and (match["stem"] in _TRIALS or is_ours(match["stem"]))
        )
    ]


def _is_abandoned(path: Path) -> bool:
    """Whether nobody works with a directory that nobody has locked."""
    match = _NAME.fullmatch(path.name)
    if match and match["what"]:
        if filesystem.is_local(path):
            return True
        limit = _ABANDONED_SECS
    else:
        limit = _BRIEF_SECS if match else _TEXTS_SECS
    return leases.is_older(path, limit)


def _end(path: Path) -> None:
    match = _NAME.fullmatch(path.name)
    if match and match["what"] == REPLACED:
        final = path.with_name(match["stem"])
        if not os.path.lexists(final):  # cut off before the new one had its name
            path.rename(final)
            files.sync_directory(final.parent)
            _log.warning("%s has its name again: replacing it was cut off", final)
            return
    files.remove_tree(path)
    _log.info("removed %s, which a crash had left", path)


def sweep_files(directory: Path) -> None:
    """Removes what crashes have left: of files that were to be replaced, of readers.

    Raises:
        OSError: Something could not be removed.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not (files.is_replacing(name) or leases.is_lease(name)):
            continue
        path = directory / name
        if (
            path.is_file()
            and not path.is_symlink()
            and leases.is_older(path, _BRIEF_SECS)
        ):
            path.unlink(missing_ok=True)
