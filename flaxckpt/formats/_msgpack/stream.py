"""Streams of EasyLM and fjformer: one msgpack record a leaf, one after another.

A record is a list of two: the leaf's keys, and Flax's msgpack of its value as bytes.
There is no header, no count and no checksum, so a file that was cut between two records
cannot be told from a whole one.

Source: `StreamingCheckpointer` of EasyLM and fjformer.
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _state, _storage
from flaxckpt.formats import _signatures
from flaxckpt.formats._msgpack import leaves, scanner
from flaxckpt.formats._msgpack.scanner import Run, Scanner, Value
from flaxckpt.formats._reader import Stored


def recognises(path: Path) -> str | None:
    """Why `path` is a stream of records."""
    if not _signatures.begins_with_record(path):
        return None
    return "it begins with a msgpack record of keys and a value"


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: The file is no such stream, or ends within a record.
    """
    stamp = _storage.local.stamp(path)
    tree: dict[str, Value] = {}
    with scanner.scanner(path) as scan:
        while scan.position < scan.size:
            _enter(scan, tree)
    return leaves.stored(
        path, path, tree, format_name="streaming", step=step, stamp=stamp
    )


def _enter(scan: Scanner, tree: dict[str, Value]) -> None:
    """Puts the next record in its place."""
    start = scan.position
    keys = _keys(scan)
    run = scan.value()
    if not isinstance(run, Run):
        raise scan.fault("a record whose value is not bytes")
    end = scan.position
    scan.enter(run)
    value = scan.value()
    scan.leave()
    assert scan.position == end, (scan.position, end)
    if isinstance(value, dict | list | Run):
        raise scan.fault("a record whose value is no leaf", back=end - start)
    inner = tree
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise scan.fault(f"{_name(keys)}, below a leaf", back=end - start)
    if keys[-1] in inner:
        is_leaf = not isinstance(inner[keys[-1]], dict)
        again = "a second time" if is_leaf else "where others are below it"
        raise scan.fault(f"{_name(keys)} {again}", back=end - start)
    inner[keys[-1]] = value


def _keys(scan: Scanner) -> list[str]:
    if scan.head() != ("array", 2):
        raise scan.fault("what is no record of keys and a value")
    kind, size = scan.head()
    if kind != "array" or not 0 < size <= _state.tree.MAX_DEPTH:
        raise scan.fault("a record without keys, or with too many")
    return [scan.key() for _ in range(size)]


def _name(keys: list[str]) -> str:
    return repr("/".join(keys)[:100])
