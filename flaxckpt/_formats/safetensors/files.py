"""Recognises safetensors by names and first bytes: a file, or shards with an index."""

from __future__ import annotations

import re
from pathlib import Path

from flaxckpt import _steps, errors
from flaxckpt._formats import hub_cache, shards, signatures
from flaxckpt._formats.safetensors.header import INDEX_SUFFIX, MAX_HEADER_BYTES, SUFFIX

_IN_STEPS = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint")
"""Every step of Orbax, T5X or flaxckpt has at least one of these files."""

_BEGINNING = re.compile(rb'\s*\{\s*["}]')


def recognises(path: Path) -> str | None:
    """Returns the evidence for safetensors (file, index, directory); else None."""
    if path.is_dir():
        main = find_main_file(hub_cache.find_snapshot(path) or path)
        return None if main is None else f"it holds {main.relative_to(path)}"
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        return f"its name ends in {INDEX_SUFFIX}"
    if not path.is_file():
        return None
    start = signatures.read_start(path, 8 + 64)
    length = int.from_bytes(start[:8], "little")
    if _BEGINNING.match(start[8:]) and length <= MAX_HEADER_BYTES:
        return "it begins with the header of a safetensors file"
    if path.suffix == SUFFIX and not _is_something_else(path, start):
        return f"its name ends in {SUFFIX}"
    return None


def describe_ambiguity(directory: Path) -> str | None:
    """Describes a directory with several safetensors files or indices; else None."""
    names = shards.list_candidates(directory, SUFFIX)
    if len(names) < 2 or names[0].endswith(INDEX_SUFFIX):
        return shards.describe_indices(directory, SUFFIX)
    return (
        "a directory that holds several safetensors files"
        f" ({errors.first_few(names, shards.MANY)}): pass the path of one"
    )


def _is_something_else(path: Path, start: bytes) -> bool:
    """Returns True if a file begins like a file of another format."""
    others = (signatures.ARCHIVE, b"\x80\x02", b"\x80\x04")
    is_stand_in = signatures.describe_stand_in(start) is not None
    return is_stand_in or start.startswith(others) or signatures.is_msgpack(path)


def find_main_file(directory: Path) -> Path | None:
    """Returns the only index or file, or the first of incomplete shards, or None."""
    names = shards.list_candidates(directory, SUFFIX)
    if not names or (len(names) > 1 and not shards.is_incomplete(names)):
        return None
    if any(_is_step(path) for path in directory.iterdir()):
        return None
    return directory / names[0]


def _is_step(path: Path) -> bool:
    """Returns True for a step of a run; a safetensors file beside it is an export."""
    try:
        if any((path / name).exists() for name in _IN_STEPS):
            return True
        return (
            _steps.names.is_usual(path.name)
            and path.is_file()
            and signatures.is_msgpack(path)
        )
    except PermissionError:
        return _steps.names.is_usual(path.name)
