"""The formats that are read; `detect` tells them apart."""

from __future__ import annotations

from pathlib import Path

from flaxckpt import errors
from flaxckpt._info import Reader
from flaxckpt.formats import _orbax

__all__ = ["detect", "recognises"]

READERS: tuple[Reader, ...] = (_orbax,)


def recognises(path: Path) -> bool:
    """Whether `path` is a checkpoint in a format that is read here."""
    return any(reader.recognises(path) for reader in READERS)


def detect(path: Path) -> Reader:
    """Finds the reader of the checkpoint at `path`.

    Raises:
        CheckpointNotFoundError: There is nothing.
        CheckpointFormatError: What is there is no checkpoint that is read here.
    """
    if not path.exists():
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path}: the path does not exist"
        )
    for reader in READERS:
        if reader.recognises(path):
            return reader
    raise errors.CheckpointFormatError(
        f"{path} is no checkpoint: wanted a directory that flaxckpt or Orbax wrote"
        f" (with a _METADATA file in it or in its state/), found {_content(path)}"
    )


def _content(path: Path) -> str:
    if not path.is_dir():
        return "a file"
    names = sorted(child.name for child in path.iterdir())
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"a directory with {listed}" if names else "an empty directory"
