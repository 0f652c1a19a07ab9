"""Reader of big_vision's directories: a zarr 2 array for each leaf.

The name of an array is its leaf path with `~` in place of `/`. A text file beside the
checkpoints, `checkpoint.bv-LAST`, has the end of the newest one's name.

Source: `tssave` and `save_checkpoint_ts` in `utils.py` of
https://github.com/google-research/big_vision; jax writes the arrays
(`jax.experimental.array_serialization`).
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _formats, _state, _storage
from flaxckpt._formats import plain, zarr2
from flaxckpt._formats.msgpack import leaves
from flaxckpt._formats.msgpack.scanner import Value
from flaxckpt._formats.reader import Stored
from flaxckpt._types import LeafPath


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays; follows a pointer to the checkpoint."""
    root = _formats.follow(path)
    stamp = _storage.stamp(root)
    tree: dict[str, Value] = {}
    faults: dict[LeafPath, str] = {}
    for name in sorted(child.name for child in root.iterdir()):
        if name.startswith("."):
            continue
        keys = name.split("~")
        leaf = _state.tree.join([_state.tree.Key(key, "key") for key in keys])
        with plain.fault_recorded(faults, leaf):
            array = zarr2.find_array(root, name)
            if not all(keys) or len(keys) > _state.tree.MAX_DEPTH:
                raise ValueError("its name is not a leaf path")
            if conflict := leaves.put(tree, keys, array):
                raise ValueError(f"its name is {conflict}")
    if faults:
        raise plain.unreadable_error(root, faults)
    return leaves.make_stored(
        root, root, leaves.walk(tree), format_name="big_vision", step=step, stamp=stamp
    )
