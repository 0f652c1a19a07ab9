"""Uniform errors for unreadable files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flaxckpt import errors


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Converts system errors while reading `path` to DamagedCheckpointError.

    Leaves FileNotFoundError to the caller, because its meaning depends on the file.
    `is_unread` tells these errors from damage.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (errors.CheckpointError, *_MISSING)):
            raise
        if isinstance(error, PermissionError):
            raise errors.DamagedCheckpointError(
                f"{_where(path, error)} cannot be read: permission denied; change its"
                " mode, or run as its owner"
            ) from error
        raise errors.DamagedCheckpointError(
            f"{_where(path, error)} cannot be read: {error.strerror or error}; try"
            " again, and check the disk"
        ) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts system errors, including missing files, while reading a checkpoint.

    Raises CheckpointNotFoundError if the checkpoint was deleted during the read;
    DamagedCheckpointError if a file is missing or unreadable.
    """
    with explain_errors(path):
        try:
            yield
        except _MISSING as error:
            if isinstance(error, errors.CheckpointError):
                raise
            if not path.exists():
                raise errors.CheckpointNotFoundError(
                    f"{path} was deleted or replaced during the read: try again, or"
                    " load another step"
                ) from error
            raise errors.DamagedCheckpointError(
                f"{_where(path, error)} is missing: restore another step, or try again"
                " if it was being replaced"
            ) from error


def is_unread(error: BaseException) -> bool:
    """Returns True for a failed read of a disk or a store, not proof of damage."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, errors.StoreError):
            return True
        if isinstance(cause, OSError) and not isinstance(cause, errors.CheckpointError):
            return not isinstance(cause, _MISSING)
        cause = cause.__cause__ or cause.__context__
    return False


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _where(path: Path, error: OSError) -> object:
    name = error.filename
    return name if isinstance(name, str) and name else path
