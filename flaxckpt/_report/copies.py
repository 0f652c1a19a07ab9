"""Finds the parts of a state that have the shapes of the parameters, as moments have.

Moments of the optimizer repeat the tree of the parameters. A report shows that tree
once, and names the containers that repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt import _state
from flaxckpt._run.disk_usage import Subtree
from flaxckpt._types import LeafPath

_AVERAGES = frozenset(("ema", "ema_params", "params_ema", "target_params"))
_DEEPEST = 3
"""An optimizer state further inside is one of the user's own containers."""

_LEAST_SHARE = 0.02
"""Smaller copies are not worth a name."""


class Copy(NamedTuple):
    """A container with the leaves and shapes of another one; `bytes` of its values.

    The types may differ from those of the other.
    """

    path: LeafPath
    of: LeafPath
    leaves: int
    bytes: int


def is_optimizer(path: LeafPath) -> bool:
    """Returns True for a leaf or container of an optimizer state."""
    return not _state.optimizer_roles.NAMES.isdisjoint(path.split("/")[:_DEEPEST])


def find(trees: Sequence[Subtree]) -> tuple[Copy, ...]:
    """Returns the largest containers that repeat one outside of the optimizer.

    The trees are those of a whole checkpoint, each container before its children.
    """
    forms = _forms(trees)
    originals: dict[int, Subtree] = {}
    for tree, form in zip(trees, forms, strict=True):
        if tree.info is None and not _may_repeat(tree.path):
            originals.setdefault(form, tree)
    copies: list[Copy] = []
    least = trees[0].bytes * _LEAST_SHARE
    for tree, form in zip(trees, forms, strict=True):
        if tree.info is not None or tree.bytes < least or not _may_repeat(tree.path):
            continue
        is_inside = copies and tree.path.startswith(f"{copies[-1].path}/")
        if form in originals and not is_inside:
            of = originals[form].path
            copies.append(Copy(tree.path, of, tree.leaves, tree.bytes))
    return tuple(copies)


def without(trees: Sequence[Subtree], copies: Sequence[Copy]) -> list[Subtree]:
    """Returns the trees without the copies, in smaller containers."""
    paths = {copy.path for copy in copies}
    rest: list[Subtree] = []
    skipped: LeafPath | None = None
    for tree in trees:
        if skipped is not None and tree.path.startswith(f"{skipped}/"):
            continue
        if tree.path in paths:
            skipped = tree.path
            continue
        inside = [c for c in copies if _contains(tree, c.path)]
        rest.append(
            tree._replace(
                leaves=tree.leaves - sum(copy.leaves for copy in inside),
                bytes=tree.bytes - sum(copy.bytes for copy in inside),
            )
        )
    return [tree for tree in rest if tree.leaves]


def _contains(container: Subtree, path: LeafPath) -> bool:
    return not container.depth or path.startswith(f"{container.path}/")


def _may_repeat(path: LeafPath) -> bool:
    keys = path.split("/")
    return is_optimizer(path) or not _AVERAGES.isdisjoint(keys[:_DEEPEST])


def _forms(trees: Sequence[Subtree]) -> list[int]:
    """Returns a number for each tree, equal for trees of equal names and shapes."""
    numbers: dict[object, int] = {}
    forms = [0] * len(trees)
    inner: list[list[tuple[str, int]]] = [[] for _ in trees]
    parents = find_parents([tree.depth for tree in trees])
    for n in range(len(trees) - 1, -1, -1):  # children before their container
        tree, parent = trees[n], parents[n]
        form: object = tuple(sorted(inner[n]))
        if tree.info is not None:
            form = (tree.info.kind == "empty", tree.info.shape)
        forms[n] = numbers.setdefault(form, len(numbers))
        if parent is not None:
            inner[parent].append((tree.name, forms[n]))
    return forms


def find_parents(depths: Sequence[int]) -> list[int | None]:
    """Returns the index of the container of each tree; None for the root.

    A container comes before its children.
    """
    parents: list[int | None] = []
    above: list[int] = []
    for n, depth in enumerate(depths):
        while above and depths[above[-1]] >= depth:
            above.pop()
        parents.append(above[-1] if above else None)
        above.append(n)
    return parents
