"""Recognises formats by names and first bytes of files; returns the evidence."""

from __future__ import annotations

import re
from pathlib import Path

from flaxckpt import errors
from flaxckpt._formats import hub_cache, signatures
from flaxckpt._formats.gguf.header import MAGIC
from flaxckpt._formats.msgpack import scanner

T5X_FILE = "checkpoint"
T5X_KEYS = {"version", "optimizer"}


def t5x(path: Path) -> str | None:
    """Returns the evidence for a step of T5X or its msgpack file; else None."""
    is_dir = path.is_dir()
    file = path / T5X_FILE if is_dir else path
    if not file.is_file() or (path / "_METADATA").exists() or not _is_of_t5x(file):
        return None
    if is_dir:
        return f"it has a file {T5X_FILE!r} with the keys 'version' and 'optimizer'"
    return "it begins with a msgpack map of 'version' and 'optimizer'"


def _is_of_t5x(file: Path) -> bool:
    keys = signatures.read_first_keys(file)
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
    if path.is_file() and signatures.read_start(path, len(MAGIC)) == MAGIC:
        return f"it begins with {MAGIC.decode()!r}"
    return None


def npz(path: Path) -> str | None:
    """Returns the evidence for an archive of arrays; else None."""
    if not path.is_file():
        return None
    if signatures.is_archive_of_arrays(path):
        return "it is a zip archive that begins with an array of numpy"
    return None


def streaming(path: Path) -> str | None:
    """Returns the evidence for a stream of records; else None."""
    if not signatures.begins_with_record(path):
        return None
    return "it begins with a msgpack record of keys and a value"


def msgpack(path: Path) -> str | None:
    """Returns the evidence for a file with a msgpack map, or for shards; else None."""
    if index := find_flax_index(hub_cache.find_snapshot(path) or path):
        return f"it has the index {index.name}" if path.is_dir() else "it is an index"
    keys = signatures.read_first_keys(path)
    if keys is None or keys == ["version", "optimizer"]:
        return None
    if not keys:
        return "it is an empty msgpack map"
    return f"it begins with a msgpack map, whose first key is {keys[0][:60]!r}"


def big_vision(path: Path) -> str | None:
    """Returns the evidence for a directory of big_vision, or a pointer to one."""
    if not path.is_dir():
        checkpoint = follow(path)
        return None if checkpoint == path else f"it stands for {checkpoint.name}"
    children = [child for child in path.iterdir() if not child.name.startswith(".")]
    # A step of T5X that has lost its file has arrays, too: their names have dots.
    named = [child for child in children if "~" in child.name]
    if not any((child / ".zarray").is_file() for child in named):
        return None
    # The reader names an array that has lost its `.zarray`.
    if not all(child.is_dir() for child in children):
        return None
    return f"it holds {len(children)} arrays of zarr 2, with ~ in their names"


def find_pointer(path: Path) -> Path | None:
    """Returns the pointer to the newest checkpoint of big_vision, if there is one.

    `path` is the pointer, or the name of the checkpoint without a step.
    """
    if not path.name.endswith(_POINTER):
        if path.exists():
            return None
        path = path.with_name(f"{path.name}{_POINTER}")
    text = signatures.read_start(path) if path.is_file() else b""
    return path if _STEP.fullmatch(text) else None


def follow(path: Path) -> Path:
    """Returns the checkpoint that the pointer of a path names; else the path itself."""
    pointer = None if path.is_dir() else find_pointer(path)
    if pointer is None:
        return path
    end = signatures.read_start(pointer).decode("ascii").strip()
    return pointer.with_name(f"{stem(pointer).name}-{end}")


def stem(pointer: Path) -> Path:
    """Returns the path that stands for the checkpoint that a pointer names."""
    return pointer.with_name(pointer.name.removesuffix(_POINTER))


_POINTER = "-LAST"
_STEP = re.compile(rb"[0-9]{9,18}(-tmp)?\s?")


def find_flax_index(path: Path) -> Path | None:
    """Returns the index of shards in msgpack: `path`, or the only one in it."""
    if path.name.endswith(_FLAX_INDEX):
        return path if path.is_file() else None
    if not path.is_dir():
        return None
    found = [p for p in path.iterdir() if p.name.endswith(_FLAX_INDEX) and p.is_file()]
    return found[0] if len(found) == 1 else None


_FLAX_INDEX = ".msgpack.index.json"
