"""What cannot be read says so, in the same words everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flaxckpt import errors


def denied(path: Path, error: PermissionError) -> errors.DamagedCheckpointError:
    """The error for what is there, but may not be read.

    Args:
        path: What was read, if `error` does not know.
        error: What the system said.
    """
    return errors.DamagedCheckpointError(
        f"{_where(path, error)} cannot be read: permission denied; change its mode, or"
        " run as its owner"
    )


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Explains errors of the system that arise while `path` is read.

    That something is not there is none: what that means depends on what it is.

    Raises:
        DamagedCheckpointError: There was one; `is_unread` tells it from damage.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (errors.CheckpointError, *_MISSING)):
            raise
        if isinstance(error, PermissionError):
            raise denied(path, error) from error
        raise errors.DamagedCheckpointError(
            f"{_where(path, error)} cannot be read: {error.strerror or error}; try"
            " again, and see that the disk is sound"
        ) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Explains errors of the system, missing files too, while a checkpoint is read.

    Args:
        path: The checkpoint, which was there when the reading began.

    Raises:
        CheckpointNotFoundError: It was deleted meanwhile.
        DamagedCheckpointError: A file is missing, or could not be read.
    """
    with explained(path):
        try:
            yield
        except _MISSING as error:
            if isinstance(error, errors.CheckpointError):
                raise
            if not path.exists():
                raise errors.CheckpointNotFoundError(
                    f"{path} was deleted or replaced while it was read: try again, or"
                    " load another step"
                ) from error
            raise errors.DamagedCheckpointError(
                f"{_where(path, error)} is missing: restore another step, or try again"
                " if it was being replaced"
            ) from error


def is_unread(error: BaseException) -> bool:
    """Whether the system could not read something, which proves no damage."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and not isinstance(found, errors.CheckpointError):
            return not isinstance(found, _MISSING)
        found = found.__cause__ or found.__context__
    return False


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _where(path: Path, error: OSError) -> object:
    name = error.filename
    return name if isinstance(name, str) and name else path
