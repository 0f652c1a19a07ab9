"""Recognises formats by the names and the first bytes of files.

Each function returns the evidence for a checkpoint of its format, or None. The reader
of a format is imported only for its checkpoints.
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import errors
from flaxckpt.formats import _hub_cache, _signatures
from flaxckpt.formats._gguf.header import MAGIC
from flaxckpt.formats._msgpack import scanner

T5X_FILE = "checkpoint"
T5X_KEYS = {"version", "optimizer"}


def t5x(path: Path) -> str | None:
    """Returns the evidence for a step of T5X or its msgpack file; else None."""
    file = path / T5X_FILE if path.is_dir() else path
    if (path / "_METADATA").exists() or not _is_of_t5x(file):
        return None
    if path.is_dir():
        return f"it has a file {T5X_FILE!r} with the keys 'version' and 'optimizer'"
    return "it begins with a msgpack map of 'version' and 'optimizer'"


def _is_of_t5x(file: Path) -> bool:
    keys = _signatures.read_first_keys(file)
    if not keys or keys[0] not in T5X_KEYS:
        return False
    if set(keys) == T5X_KEYS:
        return True
    if keys[0] == "version":
        return False
    # In the other order, the whole state precedes the version.
    try:
        with scanner.scanner(file) as scan:
            tree = scan.value()
    except errors.DamagedCheckpointError:
        return False
    return set(tree) == T5X_KEYS and isinstance(tree["version"], int)


def gguf(path: Path) -> str | None:
    """Returns the evidence for a GGUF file; else None."""
    if path.is_file() and _signatures.read_start(path, len(MAGIC)) == MAGIC:
        return f"it begins with {MAGIC.decode()!r}"
    return None


def npz(path: Path) -> str | None:
    """Returns the evidence for an archive of arrays; else None."""
    if not path.is_file():
        return None
    if _signatures.is_archive_of_arrays(path):
        return "it is a zip archive that begins with an array of numpy"
    return None


def streaming(path: Path) -> str | None:
    """Returns the evidence for a stream of records; else None."""
    if not _signatures.begins_with_record(path):
        return None
    return "it begins with a msgpack record of keys and a value"


def msgpack(path: Path) -> str | None:
    """Returns the evidence for a file with a msgpack map, or for shards; else None."""
    if index := find_flax_index(_hub_cache.find_snapshot(path) or path):
        return f"it has the index {index.name}" if path.is_dir() else "it is an index"
    keys = _signatures.read_first_keys(path)
    if keys is None or keys == ["version", "optimizer"]:
        return None
    if not keys:
        return "it is an empty msgpack map"
    return f"it begins with a msgpack map, whose first key is {keys[0][:60]!r}"


def find_flax_index(path: Path) -> Path | None:
    """Returns the index of shards in msgpack: `path`, or the only one in it."""
    if path.name.endswith(_FLAX_INDEX):
        return path if path.is_file() else None
    if not path.is_dir():
        return None
    found = [p for p in path.iterdir() if p.name.endswith(_FLAX_INDEX) and p.is_file()]
    return found[0] if len(found) == 1 else None


_FLAX_INDEX = ".msgpack.index.json"
