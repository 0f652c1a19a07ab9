"""The formats that are read; `detect` tells them apart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flaxckpt import _storage, errors
from flaxckpt._info import Reader
from flaxckpt._types import PathLike
from flaxckpt.formats import _orbax, _safetensors

__all__ = ["Detected", "detect", "recognises"]

READERS: dict[str, Reader] = {"orbax": _orbax, "safetensors": _safetensors}
"""Name of a format -> its reader, in the order in which they are asked."""


class Detected(NamedTuple):
    """What a path was found to be.

    Attributes:
        format: Its name, such as `orbax`.
        why: What it was recognised by.
        reader: Reads it.
    """

    format: str
    why: str
    reader: Reader


def recognises(path: Path) -> bool:
    """Whether `path` is a checkpoint in a format that is read here."""
    return any(reader.recognises(path) for reader in READERS.values())


def detect(path: PathLike) -> Detected:
    """Says what a path is, and why.

    Args:
        path: A checkpoint, as a directory or a file.

    Raises:
        CheckpointNotFoundError: There is nothing.
        CheckpointFormatError: What is there is no checkpoint that is read here.
    """
    path = _storage.resolve(path)
    if not path.exists():
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path}: the path does not exist"
        )
    for name, reader in READERS.items():
        if why := reader.recognises(path):
            return Detected(name, why, reader)
    raise errors.CheckpointFormatError(
        f"{path} is no checkpoint: wanted a directory that flaxckpt or Orbax wrote"
        f" (with a _METADATA file in it or in its state/), or"
        f" safetensors, found {_content(path)}"
    )


def _content(path: Path) -> str:
    if not path.is_dir():
        return "a file"
    names = sorted(child.name for child in path.iterdir())
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"a directory with {listed}" if names else "an empty directory"
