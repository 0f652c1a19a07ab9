"""Temporary directories of writes and deletions, and their removal after crashes.

Their names, `<name>.orbax-checkpoint-tmp-<what>-<random>`, are no names of steps, and
unique to a writer, who holds a lock. Where other machines may see the directory, locks
are not relied on: it is abandoned if it has not been touched for a while.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flaxckpt import _util
from flaxckpt._storage import files, filesystem, leases, modes, rename

_log = logging.getLogger(__name__)

TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of an uncommitted directory, as in Orbax."""

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
"""Names of temporary directories at the start of a run, not of checkpoints."""

_UNFINISHED = re.compile(rf"|-[0-9]+|-{WRITING}(?:-[0-9a-f]{{8}})?")
"""End of the name of an unfinished save, after `TEMPORARY`."""

_MESSAGES = re.compile(rf"together{re.escape(TEMPORARY)}-.+", re.DOTALL)
"""Directories of messages between processes, which no process locks."""

_TOUCHED_EVERY_SECS = 15.0
_ABANDONED_SECS = 600.0
_BRIEF_SECS = 60.0
_MESSAGES_SECS = 86_400.0

_LOCK_POLL_SECS = 0.01

_claimed: dict[Path, int] = {}
"""Directory that this process has claimed -> its descriptor."""

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def new_path(path: Path, what: str) -> Path:
    """Returns a new temporary name beside `path`, for unfinished or old content."""
    return path.with_name(f"{path.name}{TEMPORARY}-{what}-{secrets.token_hex(4)}")


def unfinished_names(root: Path) -> list[str]:
    """Returns the final names of unfinished, also interrupted, saves under `root`.

    Source: Orbax ends the names of its temporary directories in this way, too.
    """
    stems = set()
    for path in root.iterdir():
        stem, temporary, rest = path.name.partition(TEMPORARY)
        if temporary and stem and stem not in _TRIALS and _UNFINISHED.fullmatch(rest):
            stems.add(stem)
    return sorted(stems)


# ---- directories in use ----------------------------------------------------------


@contextlib.contextmanager
def new_directory(final: Path, mode: int | None = None) -> Iterator[Path]:
    """Yields a new directory, to be renamed to `final` in the `with` block.

    Only this user opens it until it gets `mode`. At the end, removes any directory with
    the temporary name: the unfinished one, or the one that it replaced.
    """
    while True:
        path = new_path(final, WRITING)
        path.mkdir(0o777 if mode is None else modes.PRIVATE)
        with claim(path) as is_ours:
            if not is_ours:  # another process swept it at once
                continue
            try:
                yield path
            except rename.NotDurableError:
                raise  # after a power cut, this may be the only copy
            except BaseException:
                discard(path)
                raise
            discard(path)
            return


@contextlib.contextmanager
def claim(path: Path, *, patience_secs: float = 0.0) -> Iterator[bool]:
    """Protects a directory from sweeps in the `with` block, even if renamed.

    Waits `patience_secs` for another claim. Yields True unless another process has
    claimed or removed it. Raises OSError if it cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        yield False
        return
    try:
        with _regular_touches(path, descriptor):
            is_ours = False
            if _lock(descriptor, patience_secs):
                with contextlib.suppress(FileNotFoundError):
                    is_ours = os.path.samestat(path.lstat(), os.fstat(descriptor))
            if is_ours:
                _claimed[path] = descriptor
            yield is_ours
    finally:
        _claimed.pop(path, None)
        with contextlib.suppress(OSError):
            # Closing alone does not unlock if a fork has inherited the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def check_claim(path: Path) -> None:
    """Raises FileNotFoundError if a claimed directory has lost its name.

    After a pause, another process may have swept it. TensorStore then makes a directory
    anew, with what it still had to write.
    """
    if (claimed := _claimed.get(path)) is None:
        return
    try:
        is_same = os.path.samestat(path.lstat(), os.fstat(claimed))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        is_same = False
    if not is_same:
        raise FileNotFoundError(
            errno.ENOENT,
            f"another process removed the directory, which had not been touched for"
            f" {_ABANDONED_SECS:g} s",
            str(path),
        )


def _lock(descriptor: int, patience_secs: float) -> bool:
    """Locks a directory; returns False if another has it, True without any locks."""
    until = time.monotonic() + patience_secs
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_POLL_SECS)
        except OSError:
            return True
        else:
            return True


@contextlib.contextmanager
def _regular_touches(path: Path, descriptor: int) -> Iterator[None]:
    """Touches a directory regularly where sweeps depend on age."""
    if filesystem.is_local(path):
        yield
        return

    def touch() -> None:
        # Without times: the file system sets the time by its own clock.
        with contextlib.suppress(OSError):
            os.utime(descriptor)

    heartbeat = None
    with contextlib.suppress(RuntimeError):  # no new threads: stays young for a while
        heartbeat = _util.threads.Heartbeat(
            touch, _TOUCHED_EVERY_SECS, "flaxckpt touch"
        )
    try:
        yield
    finally:
        if heartbeat is not None:
            heartbeat.stop()


def discard(path: Path) -> None:
    """Removes a directory; a later sweep removes any rest."""
    try:
        files.remove_tree(path)
    except OSError as error:
        _log.warning("could not remove %s for now: %s", path, error)


# ---- leftovers of crashes --------------------------------------------------------


def sweep(root: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes abandoned directories that `is_ours` knows, or raises OSError."""
    for path in [root / name for name in leftovers(files.directories(root), is_ours)]:
        with claim(path) as is_free:
            if is_free and _is_abandoned(path):
                _remove_or_restore(path)


def is_being_written(final: Path) -> bool:
    """Returns True if a process, perhaps this one, is writing `final`."""
    for name in list(files.directories(final.parent)):
        match = _NAME.fullmatch(name)
        if match and match["stem"] == final.name and match["what"] == WRITING:
            path = final.with_name(name)
            with claim(path) as is_free:
                if path.exists() and not (is_free and _is_abandoned(path)):
                    return True
    return False


def leftovers(names: Iterable[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Returns the `names` of temporary directories; `is_ours` knows checkpoints."""
    return [
        name
        for name in names
        if _MESSAGES.fullmatch(name)
        or (
            (match := _NAME.fullmatch(name))
            and (match["stem"] in _TRIALS or is_ours(match["stem"]))
        )
    ]


def _is_abandoned(path: Path) -> bool:
    """Returns True if no process uses this unlocked directory."""
    match = _NAME.fullmatch(path.name)
    if match and match["what"] == DELETED and leases.readers(path):
        return False  # its deletion ended before it looked for readers again
    if match and match["what"]:
        if filesystem.is_local(path):
            return True
        limit = _ABANDONED_SECS
    else:
        limit = _BRIEF_SECS if match else _MESSAGES_SECS
    return leases.is_older(path, limit)


def _remove_or_restore(path: Path) -> None:
    """Removes a leftover, or gives a replaced checkpoint its name again."""
    match = _NAME.fullmatch(path.name)
    if match and match["what"] == REPLACED:
        final = path.with_name(match["stem"])
        if not os.path.lexists(final):  # interrupted before the new one got its name
            path.rename(final)
            files.sync_directory(final.parent)
            _log.warning("restored %s, because its replacement was interrupted", final)
            return
    # Its replacement, or deletion, may not be durable yet. Not earlier: the names may
    # have changed until this process claimed the directory and looked for `final`.
    files.sync_directory(path.parent)
    aside = path
    if match and match["what"]:
        # Its process may be alive, after a pause: it must not publish what is left.
        aside = new_path(path.with_name(match["stem"]), DELETED)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
    files.remove_tree(aside)
    _log.info("removed %s, left by a crash", path)


def sweep_files(directory: Path) -> None:
    """Removes temporary files and leases left by crashes, or raises OSError."""
    try:
        names = os.listdir(directory)  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not (files.is_temporary(name) or leases.is_lease(name)):
            continue
        path = directory / name
        if (
            path.is_file()
            and not path.is_symlink()
            and leases.is_older(path, _BRIEF_SECS)
        ):
            path.unlink(missing_ok=True)
