"""Durable renames of finished directories: publish, withdraw, exchange."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

from flaxckpt import errors
from flaxckpt._storage import files

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
"""Errors of file systems, and of sandboxes that do not know the call.

If the names may not be changed at all, the first rename alone says so, too.
"""


class NotDurableError(OSError):
    """A directory was renamed, but a crash may undo the rename."""


def publish(temporary: Path, final: Path) -> None:
    """Renames durably; raises CheckpointExistsError if `final` has content."""
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise errors.CheckpointExistsError(
                f"{final} was created by another writer in the meantime: give each run"
                " its own directory"
            ) from None
        raise
    _settle(final, lambda: final.rename(temporary))


def exchange(temporary: Path, final: Path, aside: Path | None = None) -> None:
    """Exchanges the names of a finished directory and an existing directory.

    Without `renameat2`, it renames both by `aside`: a crash may leave `final` unnamed.
    Raises NotDurableError if the exchange was done, or half of it, and may not last.
    """
    aside = aside or temporary.with_name(temporary.name + "-replaced")

    swap = functools.partial(_swap, temporary, final, aside)
    swap()
    _settle(final, swap)


def withdraw(final: Path, aside: Path) -> None:
    """Renames a directory durably, or raises OSError.

    Raises NotDurableError if it may have lost its name, or regain it in a crash.
    """
    final.rename(aside)
    _settle(final, lambda: aside.rename(final))


def exchange_atomically(one: Path, other: Path) -> bool:
    """Exchanges two names, or raises OSError; returns False if unsupported."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    code = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if code == 0:
        return True
    if ctypes.get_errno() not in _UNSUPPORTED:
        raise OSError(ctypes.get_errno(), "cannot exchange", str(other))
    return False


def _settle(final: Path, undo: Callable[[], object]) -> None:
    """Makes the names beside `final` durable, or calls `undo` and raises OSError.

    Raises NotDurableError if they are not as before, or a crash may change them.
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
    if exchange_atomically(temporary, final):
        return
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    aside.rename(temporary)
