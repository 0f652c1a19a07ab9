"""Sizes of the values of a checkpoint, by subtree."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _util, errors
from flaxckpt._formats.reader import CheckpointMetadata
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath


class Subtree(NamedTuple):
    """A leaf, or a container with all its contents; the root has an empty path.

    `leaves` have a value: neither None nor an empty container; `bytes` are
    uncompressed.
    """

    path: LeafPath
    depth: int
    leaves: int
    bytes: int
    info: LeafInfo | None

    @property
    def name(self) -> str:
        """The last key; `(all)` for the root, and `''` for an empty key."""
        return self.path.rpartition("/")[2] or ("''" if self.depth else "(all)")

    @property
    def shown_path(self) -> str:
        """The path; `name` where it is empty."""
        return self.path or self.name


def subtrees(
    leaves: Mapping[LeafPath, LeafInfo], *, below: LeafPath = ""
) -> list[Subtree]:
    """Returns the container `below` and its descendants, parents before children."""
    # By keys: the path of the root is also that of its child with an empty key.
    inner: dict[_Keys, list[str]] = {}
    counts: dict[_Keys, list[int]] = {(): [0, 0]}
    infos: dict[_Keys, LeafInfo] = {}
    for path, info in leaves.items():
        keys = tuple(path.split("/")) if path or info.keys else ()
        infos[keys] = info
        size = info.stored_bytes
        has_value = info.kind != "empty"
        for depth in range(len(keys) + 1):
            above = keys[:depth]
            if above not in counts:
                counts[above] = [0, 0]
                inner.setdefault(above[:-1], []).append(above[-1])
            counts[above][0] += has_value
            counts[above][1] += size
    top = tuple(below.split("/")) if below else ()
    trees: list[Subtree] = []
    waiting = [top] if top in counts else []
    while waiting:
        keys = waiting.pop()
        count, size = counts[keys]
        trees.append(Subtree("/".join(keys), len(keys), count, size, infos.get(keys)))
        names = _util.folding.order_numbers(inner.get(keys, []))
        waiting += [(*keys, name) for name in reversed(names)]
    return trees


_Keys: TypeAlias = tuple[str, ...]


def shown(trees: Sequence[Subtree], *, depth: int | None, rows: int) -> list[Subtree]:
    """Returns the subtrees to print, of the result of `subtrees`, by depth below it.

    The `depth` None is the largest within `rows`, or one more, cut off, if that shows
    few.
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
    kept = [tree for tree, d in zip(trees, depths, strict=True) if d <= depth]
    return kept[:rows] if is_cut else kept


_SHARE_SHOWN = 5
"""Inverse of the share of `rows` below which a deeper level is shown."""


def _prefixes(path: LeafPath) -> list[LeafPath]:
    """Returns `a`, `a/b` and `a/b/c` for `a/b/c`; empty for the empty path."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def find_layers(paths: Iterable[LeafPath]) -> dict[LeafPath, LeafPath]:
    """Returns leaf -> its layer: its container if that contains leaves only.

    A leaf beside containers, such as `params/head`, is a layer of its own.
    """
    above = {path: path.rpartition("/")[0] for path in paths}
    inner = {container.rpartition("/")[0] for container in above.values()}
    outer = {"", *(prefix for each in inner for prefix in _prefixes(each))}
    return {path: path if each in outer else each for path, each in above.items()}


def missing_path(metadata: CheckpointMetadata, path: LeafPath) -> str:
    near, is_similar = _find_near(metadata.leaves, path)
    names = [_util.folding.LeafLine(errors.name_leaf(name)) for name in near]
    shown = [row.name for row in _util.folding.fold(names)]
    listed = errors.first_few(shown, _MOST_NEAR)
    advice = f"did you mean {listed}?" if is_similar else f"it has {listed}"
    if "%2F" in listed and "%2F" not in path:
        advice += f"{'' if is_similar else '.'} A slash in a key is written %2F"
    return f"{metadata.path} has neither a leaf nor a container {path}: {advice}"


_MOST_NEAR = 6
_NEAREST_AMONG = 5_000


def _find_near(
    leaves: Mapping[LeafPath, LeafInfo], path: LeafPath
) -> tuple[list[LeafPath], bool]:
    """Returns paths for a path that does not exist, and whether they are similar to it.

    Similar are siblings with a similar name and the same paths below, paths that end
    like `path`, and paths alike with plain slashes. Without these, the children of the
    last container on the way.
    """
    known = dict.fromkeys(prefix for leaf in leaves for prefix in _prefixes(leaf))
    plain = {_state.tree.unescape(p): p for p in known if "%" in p}
    bare = path.strip("/")
    if bare in known or bare in plain:
        return [plain.get(bare, bare)], True
    parts = bare.split("/")
    depth = next(n for n in range(len(parts)) if "/".join(parts[: n + 1]) not in known)
    above, rest = "/".join(parts[:depth]), parts[depth + 1 :]
    siblings = [p for p in known if p.rpartition("/")[0] == above]
    names = {p.rpartition("/")[2]: p for p in siblings}
    if not siblings:  # `path` goes on below a leaf
        return [above], True
    near = difflib.get_close_matches(parts[depth], names, n=_MOST_NEAR)
    numbers = re.findall("[0-9]+", parts[depth])
    near = [name for name in near if re.findall("[0-9]+", name) == numbers] or near
    below = ["/".join((names[name], *rest)) for name in near]
    if existing := [p for p in below if p in known]:
        return existing, True
    ending = [p for p in known if p.endswith("/" + "/".join(parts))]
    if near or ending:
        return [names[name] for name in near] or ending, True
    if len(plain) <= _NEAREST_AMONG:
        alike = difflib.get_close_matches(path, plain, n=1, cutoff=0.8)
        siblings = [plain[each] for each in alike] or siblings
        return siblings, bool(alike)
    return siblings, False
