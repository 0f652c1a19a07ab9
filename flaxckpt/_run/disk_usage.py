"""How large a checkpoint is: its values by subtree, its files on the disk."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _arrays, _storage
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.formats._reader import CheckpointMetadata


class Subtree(NamedTuple):
    """A leaf, or a container with all that is in it.

    Attributes:
        path: Its leaf path, or what those of its leaves begin with; empty for all.
        depth: How many keys that are.
        leaves: How many leaves it has.
        bytes: The size of their values, uncompressed.
        info: What is known of the leaf; None for a container.
    """

    path: LeafPath
    depth: int
    leaves: int
    bytes: int
    info: LeafInfo | None


def subtrees(
    leaves: Mapping[LeafPath, LeafInfo], *, below: LeafPath = ""
) -> list[Subtree]:
    """A container and all that is in it, each container before what it contains.

    Args:
        leaves: Those of a checkpoint. What is in one container need not stand together.
        below: The container; by default that of all.

    Returns:
        Nothing, if there is no such container.
    """
    inner: dict[LeafPath, list[LeafPath]] = {"": []}
    counts: dict[LeafPath, list[int]] = {"": [0, 0]}
    for path, info in leaves.items():
        size = _arrays.layout.stored_bytes(info)
        above = ""
        for prefix in _prefixes(path):
            counts[above][0] += 1
            counts[above][1] += size
            if prefix not in counts:
                counts[prefix] = [0, 0]
                inner.setdefault(above, []).append(prefix)
            above = prefix
        counts[above][0] += 1
        counts[above][1] += size
    found: list[Subtree] = []
    waiting = [(below, below.count("/") + 1 if below else 0)] if below in counts else []
    while waiting:
        path, depth = waiting.pop()
        found.append(
            Subtree(path, depth, counts[path][0], counts[path][1], leaves.get(path))
        )
        waiting += [(child, depth + 1) for child in reversed(inner.get(path, []))]
    return found


def shown(trees: Sequence[Subtree], *, depth: int | None, rows: int) -> list[Subtree]:
    """Those of `trees` that are to be printed.

    Args:
        trees: As `subtrees` gives them.
        depth: How much deeper than the first they may be. None: as deep as `rows`
            allow; the deepest may be cut off, lest there be next to nothing.
        rows: How many there are then at most.
    """
    depths = [tree.depth - trees[0].depth for tree in trees]
    is_cut = depth is None
    if depth is None:
        depth = max(depths)
        while depth > 1 and sum(d <= depth for d in depths) > rows:
            depth -= 1
        fewest = rows // _SHARE_SHOWN
        while sum(d <= depth for d in depths) < min(fewest, len(trees)):
            depth += 1
    found = [tree for tree, d in zip(trees, depths, strict=True) if d <= depth]
    return found[:rows] if is_cut else found


_SHARE_SHOWN = 5
"""A tree that shows less than this part of what it could is shown one level deeper."""


def _prefixes(path: LeafPath) -> list[LeafPath]:
    """`a`, `a/b` and `a/b/c` of `a/b/c`; none of the path of a state that is a leaf."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def nothing_there(found: CheckpointMetadata, path: LeafPath) -> str:
    """What to say of a leaf or container that a checkpoint does not have."""
    near = difflib.get_close_matches(path, list(found.leaves)[:_NEAREST_AMONG], n=1)
    advice = f"did you mean {near[0]}?" if near else "show without it lists them all"
    return f"{found.path} has neither a leaf nor a container {path}: {advice}"


_NEAREST_AMONG = 5_000


class Usage(NamedTuple):
    """What a checkpoint takes on the disk.

    Attributes:
        bytes: The size of its files, each counted once.
        own: That of the files that were not counted before.
    """

    bytes: int
    own: int


FileId = tuple[int, int]


def on_disk(path: Path, counted: set[FileId]) -> Usage | None:
    """The size of the files at `path`; None in object stores, which do not tell.

    Args:
        path: A directory or a file. Links to others are not followed.
        counted: The files that are counted already; those found are added.
    """
    found = _storage.of(path).disk_files(path)
    if found is None:
        return None
    own = sum(size for file, size in found.items() if file not in counted)
    counted.update(found)
    return Usage(sum(found.values()), own)
