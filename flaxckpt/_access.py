"""What may not be read says so, in the same words everywhere."""

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
    name = error.filename
    where = name if isinstance(name, str) and name else path
    return errors.DamagedCheckpointError(
        f"{where} cannot be read: permission denied; change its mode, or run as its"
        " owner"
    )


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Explains a `PermissionError` of the system that arises while `path` is read.

    Raises:
        DamagedCheckpointError: There was one.
    """
    try:
        yield
    except PermissionError as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise denied(path, error) from None
