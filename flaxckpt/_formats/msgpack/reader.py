"""Reader of Flax's old checkpoints: the whole state in msgpack, or shards of it.

Source: `flax.training.checkpoints` and `flax.serialization.to_bytes`; of shards,
`flax_shard_checkpoint` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flaxckpt import _state, _storage, errors
from flaxckpt._formats import hub_cache, recognise, shards
from flaxckpt._formats.msgpack import leaves, scanner
from flaxckpt._formats.msgpack.scanner import Value
from flaxckpt._formats.reader import Stored


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads all but arrays; raises CheckpointFormatError if some are in other files."""
    path = hub_cache.find_snapshot(path) or path
    index = recognise.find_flax_index(path)
    if index is not None:
        return _read_shards(path, index, step)
    shards.warn_if_shard(path)
    stamp = _storage.stamp(path)
    tree = _scan(path)
    beside = path.with_name(f"{path.name}_gda")
    elsewhere = [
        _state.tree.join(keys)
        for keys, value in leaves.walk(tree)
        if isinstance(value, str) and value.startswith(leaves.ELSEWHERE)
    ]
    if elsewhere or beside.exists():
        raise errors.CheckpointFormatError(
            f"{path} was saved by several processes; wanted all values in this file,"
            f" found leaves in {beside.name}/:\n"
            + errors.rows(elsewhere)
            + "\nRestore it with the Flax that wrote it, and save it in a single file."
        )
    return leaves.make_stored(
        path, path, leaves.walk(tree), format_name="msgpack", step=step, stamp=stamp
    )


def _scan(path: Path) -> Value:
    with scanner.scanner(path) as scan:
        tree = scan.value()
        scan.leave()
    return tree


def _read_shards(path: Path, index_file: Path, step: int | None) -> Stored:
    stamp = _storage.stamp(index_file)
    index = shards.read_index(index_file)
    files = shards.list_files(index_file, index)
    tree: dict[str, Value] = {}
    found: set[tuple[str, str]] = set()
    for name, file in files.items():
        for keys, value in _flatten(_scan(file.path)):
            found.add(("/".join(keys), name))
            if not keys or leaves.put(tree, keys, value):
                raise shards.mismatch_error(
                    index_file,
                    [f"{'/'.join(keys)[:80]}: wanted in one shard, found in several"],
                )
    shards.check_leaves(index_file, index, found)
    return leaves.make_stored(
        path,
        index_file,
        leaves.walk(tree),
        format_name="msgpack",
        step=step,
        stamp=stamp,
        shards=[*files.values()],
    )


def _flatten(
    value: Value, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yields the leaves of nested maps, with their keys."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flatten(child, (*keys, key))
    else:
        yield keys, value
