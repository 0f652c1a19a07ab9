"""Finished directories get their names, lose them or exchange them, durably."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from flaxckpt import errors
from flaxckpt._storage import files

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class NotDurableError(OSError):
    """A directory has got its name, and nobody knows whether that is durable."""


def publish(temporary: Path, final: Path) -> None:
    """Renames a finished directory to its name, durably.

    Raises:
        CheckpointExistsError: Something that is no empty directory is there.
    """
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise errors.CheckpointExistsError(
                f"{final} was created by another writer meanwhile"
            ) from None
        raise
    _settle(final, lambda: final.rename(temporary))


def exchange(temporary: Path, final: Path, aside: Path | None = None) -> None:
    """Puts a finished directory in the place of another, which gets its old name.

    One step where the system has `renameat2`. Elsewhere three, and a crash between
    them may leave `final` without its name.

    Args:
        temporary: The finished one.
        final: The other.
        aside: What the other is called meanwhile, if it takes more than one step.

    Raises:
        NotDurableError: It was done, or half of it, and may not last.
    """
    aside = aside or temporary.with_name(temporary.name + "-replaced")

    def swap() -> None:
        _swap(temporary, final, aside)

    swap()
    _settle(final, swap)


def withdraw(final: Path, aside: Path) -> None:
    """Takes a directory's name away, durably, so that nothing lists it any more.

    Raises:
        OSError: It has its name still.
        NotDurableError: It has not, perhaps, and that may not last.
    """
    final.rename(aside)
    _settle(final, lambda: aside.rename(final))


def exchanged_at_once(one: Path, other: Path) -> bool:
    """Has two directories get each other's names in one step, where that is possible.

    Raises:
        OSError: It is possible, and has failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    code = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if code == 0:
        return True
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), "cannot exchange", str(other))
    return False


def _settle(final: Path, undo: Callable[[], object]) -> None:
    """Makes the names beside `final` durable, or as they were before.

    Raises:
        OSError: They are as they were before, and that is durable.
        NotDurableError: They are not, or that is not.
    """
    try:
        files.sync_directory(final.parent)
    except OSError as error:
        try:
            undo()
            files.sync_directory(final.parent)
        except OSError:
            raise NotDurableError(error.errno, error.strerror, str(final)) from error
        raise


def _swap(temporary: Path, final: Path, aside: Path) -> None:
    if exchanged_at_once(temporary, final):
        return
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    aside.rename(temporary)
