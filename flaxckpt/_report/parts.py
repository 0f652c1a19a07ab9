"""Divides a state into its largest parts, and those that repeat the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt import _state
from flaxckpt._inspect.subtrees import Subtree
from flaxckpt._types import LeafPath

_AVERAGES = frozenset(("ema", "ema_params", "params_ema", "target_params"))
_DEEPEST = 3
"""An optimizer state further inside is one of the user's own containers."""

_LEAST_SHARE = 0.08
"""Smaller copies are not worth a name, and smaller parts are not divided."""


class Part(NamedTuple):
    """A part of a state, or several small parts of a container combined.

    Attributes:
        name: The leaf path, or the common prefix of the leaves; of several parts that
            of the first, and the last key of the last one.
        bytes: The size of the values, uncompressed.
    """

    name: str
    leaves: int
    bytes: int


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


def group_of(path: LeafPath, repeated: Sequence[Copy]) -> str:
    """Returns the part of a state with a leaf: a copy, or an outermost container."""
    for copy in repeated:
        if path.startswith(f"{copy.path}/"):
            return copy.path
    return path.partition("/")[0]


def rank(group: str) -> tuple[bool, bool, str]:
    """Ranks parts of a state: the parameters come first, the optimizer last."""
    return is_optimizer(group), group != "params", group


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
    inner = find_children(trees)
    for n in range(len(trees) - 1, -1, -1):  # children before their container
        tree = trees[n]
        form: object = tuple(sorted((trees[c].name, forms[c]) for c in inner[n]))
        if tree.info is not None:
            form = (tree.info.kind == "empty", tree.info.shape)
        forms[n] = numbers.setdefault(form, len(numbers))
    return forms


def find_children(trees: Sequence[Subtree]) -> list[list[int]]:
    """Returns the indices of the children of each tree, which comes before them."""
    children: list[list[int]] = [[] for _ in trees]
    above: list[int] = []
    for n, tree in enumerate(trees):
        while above and trees[above[-1]].depth >= tree.depth:
            above.pop()
        if above:
            children[above[-1]].append(n)
        above.append(n)
    return children


# ---- the largest parts ------------------------------------------------------------

_MOST_PARTS = 60
_MOST_INNER = 14
"""Limit for a container; its smaller children are combined."""


def divide(trees: Sequence[Subtree]) -> tuple[Part, ...]:
    """Divides a checkpoint into parts that add up to the whole, the largest first.

    Each container comes before its children.
    """
    inner = find_children(trees)

    def size_of(numbers: Sequence[int]) -> int:
        return sum(trees[n].bytes for n in numbers)

    waiting, parts = [[0]], list[Part]()
    while waiting:  # the largest first, as there is room for few
        waiting.sort(key=size_of)
        numbers = waiting.pop()
        size = size_of(numbers)
        is_large = len(numbers) == 1 and size >= trees[0].bytes * _LEAST_SHARE
        inside = _split(trees, inner[numbers[0]]) if is_large else []
        if inside and len(parts) + len(waiting) + len(inside) < _MOST_PARTS:
            waiting += inside
        else:
            name, last = trees[numbers[0]].shown_path, trees[numbers[-1]].name
            name += f" … {last}" if len(numbers) > 1 else ""
            parts.append(Part(name, sum(trees[n].leaves for n in numbers), size))
    return tuple(sorted(parts, key=lambda part: (-part.bytes, part.name)))


def _split(trees: Sequence[Subtree], inner: Sequence[int]) -> list[list[int]]:
    """Returns the large children of a container alone, and the rest together."""
    if len(inner) <= _MOST_INNER:
        return [[n] for n in inner]
    alone = sorted(inner, key=lambda n: -trees[n].bytes)[: _MOST_INNER - 1]
    return [*([n] for n in alone), [n for n in inner if n not in alone]]
