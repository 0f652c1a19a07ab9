"""Reader of streams of EasyLM and fjformer, with a msgpack record for each leaf.

A record is a list of the leaf's keys and the Flax msgpack of its value, as bytes. A
stream has no header, count or checksum, so a file cut between two records looks
complete.

Source: `StreamingCheckpointer` of EasyLM and fjformer.
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _state, _storage
from flaxckpt._formats.msgpack import leaves, scanner
from flaxckpt._formats.msgpack.scanner import ByteRun, Scanner, Value
from flaxckpt._formats.reader import Stored


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    stamp = _storage.stamp(path)
    tree: dict[str, Value] = {}
    with scanner.scanner(path) as scan:
        while scan.position < scan.size:
            _read_record(scan, tree)
    return leaves.make_stored(
        path, path, leaves.walk(tree), format_name="streaming", step=step, stamp=stamp
    )


def _read_record(scan: Scanner, tree: dict[str, Value]) -> None:
    start = scan.position
    keys = _read_keys(scan)
    run = scan.value()
    if not isinstance(run, ByteRun):
        raise scan.fault("a record whose value is not bytes")
    end = scan.position
    scan.enter(run)
    value = scan.value()
    scan.leave()
    assert scan.position == end, (scan.position, end)
    if isinstance(value, dict | list | ByteRun):
        raise scan.fault("a record whose value is not a leaf", back=end - start)
    if conflict := leaves.put(tree, keys, value):
        name = repr("/".join(keys)[:100])
        raise scan.fault(f"the record {name} {conflict}", back=end - start)


def _read_keys(scan: Scanner) -> list[str]:
    if scan.head() != ("array", 2):
        raise scan.fault("something else than a record of keys and a value")
    kind, size = scan.head()
    if kind != "array" or not 0 < size <= _state.tree.MAX_DEPTH:
        raise scan.fault("a record without keys, or with too many")
    return [scan.key() for _ in range(size)]
