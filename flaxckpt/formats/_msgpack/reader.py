"""Reader of Flax's old checkpoints, a file with the whole state in msgpack.

Source: `flax.training.checkpoints` and `flax.serialization.to_bytes`.
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _state, _storage, errors
from flaxckpt.formats._msgpack import leaves, scanner
from flaxckpt.formats._reader import Stored

_ELSEWHERE = "//GDAPlaceholder:"
"""Prefix of a string that stands for an array of several processes."""


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: The file differs from Flax's.
        CheckpointFormatError: Some arrays are in other files, which is not supported.
    """
    stamp = _storage.stamp(path)
    with scanner.scanner(path) as scan:
        tree = scan.value()
        scan.leave()
    beside = path.with_name(f"{path.name}_gda")
    elsewhere = [
        _state.tree.join(keys)
        for keys, value in leaves.walk(tree)
        if isinstance(value, str) and value.startswith(_ELSEWHERE)
    ]
    if elsewhere or beside.exists():
        raise errors.CheckpointFormatError(
            f"{path} was saved by several processes; wanted all values in this file,"
            f" found {len(elsewhere)} leaves in {beside.name}/:\n"
            + errors.rows(elsewhere)
            + "\nRestore it with the Flax that wrote it, and save it in a single file."
        )
    return leaves.make_stored(
        path, path, leaves.walk(tree), format_name="msgpack", step=step, stamp=stamp
    )
