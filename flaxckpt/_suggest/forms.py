"""Forms from arrays of one shape to arrays of another, and the evidence for them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from flaxckpt._types import Shape

Factors: TypeAlias = tuple[int, ...]
"""Atoms that an axis is composed of, the slowest first."""


class Axes(NamedTuple):
    """The axes of the arrays of one side of a match.

    `indices` are the sizes of the indices that only this side has in its names.
    """

    indices: Shape
    shape: Shape

    @property
    def sizes(self) -> Shape:
        return (*self.indices, *self.shape)


class Candidate(NamedTuple):
    """A form that fits the shapes of a source and a target.

    Attributes:
        left: The axes of the source, as atoms.
        right: The axes of the target, as the same atoms.
        sizes: The size of each atom.
        orientation: Whether the first axis of the source, which torch's layers write
            to, comes last; None for arrays of one axis.
        stacked: The axes of the target that stacked leaves become, or of the source
            that become several leaves; empty without.
        fused: Whether an axis of the source that is cut into several leaves is cut into
            blocks, or alternates; None without.
    """

    left: tuple[Factors, ...]
    right: tuple[Factors, ...]
    sizes: Shape
    orientation: Literal["transposed", "as stored"] | None = None
    stacked: tuple[int, ...] = ()
    fused: Literal["in blocks", "alternating"] | None = None

    @property
    def is_plain(self) -> bool:
        """True if the values stay as they are."""
        return self.left == self.right

    @property
    def composed(self) -> int:
        return sum(len(atoms) > 1 for atoms in (*self.left, *self.right))

    @property
    def layout(self) -> tuple[object, ...]:
        return self.left, self.right


# ---- candidates ---------------------------------------------------------------------

_MOST_AXES = 7


@functools.lru_cache(maxsize=4096)
def candidates(source: Axes, target: Axes) -> tuple[Candidate, ...]:
    """Returns all usual forms from arrays of one shape to arrays of another.

    Axes are permuted, and either axes of the source are split into several of the
    target, as into heads, or axes are merged. Axes of size 1 come and go.
    """
    if math.prod(source.sizes) != math.prod(target.sizes):
        return ()
    if permutations := tuple(_permutations(source, target)):
        return permutations
    if max(len(source.sizes), len(target.sizes)) > _MOST_AXES or 0 in source.sizes:
        return ()
    found = list(_splits(source, target))
    found += [
        _described(merge.right, merge.left, merge.sizes, source, target)
        for merge in _splits(target, source)
    ]
    unique: dict[object, Candidate] = {}
    for one in found:
        named = _renumbered(one)
        unique.setdefault(named.layout, named)
    return tuple(sorted(_usual(list(unique.values()), source, target), key=_rank))


def _permutations(source: Axes, target: Axes) -> Iterator[Candidate]:
    """Yields the usual permutations of single leaves.

    A kernel stays, or is turned: from `O I` to `I O`, from `O I H W` to `H W I O`.
    """
    axes = len(source.shape)
    if source.indices or target.indices or len(target.shape) != axes:
        return
    for order in _usual_orders(axes):
        if tuple(source.shape[axis] for axis in order) == target.shape:
            left = tuple((axis,) for axis in range(axes))
            right = tuple((axis,) for axis in order)
            yield _described(left, right, source.shape, source, target)


def _usual_orders(axes: int) -> list[tuple[int, ...]]:
    """Returns the orders of axes between torch and Flax, and the order as it is."""
    if axes < 2:
        return [tuple(range(axes))]
    to_flax = (*range(2, axes), 1, 0)
    to_torch = (axes - 1, axes - 2, *range(axes - 2))
    return list(dict.fromkeys((to_flax, to_torch, tuple(range(axes)))))


def _splits(source: Axes, target: Axes) -> Iterator[Candidate]:
    """Yields forms that permute axes, and split axes of the source."""
    whole = len(source.indices)
    left_over = list(source.sizes)
    owners: list[int | None] = []

    def assign(at: int) -> Iterator[list[int | None]]:
        if at == len(target.sizes):
            if all(size == 1 for size in left_over):
                yield [*owners]
            return
        size = target.sizes[at]
        if size == 1:
            yield from assign_to(None, at)
            return
        for owner, left in enumerate(left_over):
            is_fit = left == size if owner < whole else left % size == 0
            if left > 1 and is_fit and not (owner < whole and at < len(target.indices)):
                yield from assign_to(owner, at)

    def assign_to(owner: int | None, at: int) -> Iterator[list[int | None]]:
        owners.append(owner)
        size = 1 if owner is None else target.sizes[at]
        if owner is not None:
            left_over[owner] //= size
        yield from assign(at + 1)
        if owner is not None:
            left_over[owner] *= size
        owners.pop()

    for found in assign(0):
        yield from _of_owners(found, source, target)


def _of_owners(
    owners: Sequence[int | None], source: Axes, target: Axes
) -> Iterator[Candidate]:
    """Yields the forms in which axis i of the target is of axis `owners[i]`.

    If an axis is cut into several leaves, they are blocks of it, or alternate.
    """
    right = tuple(() if owner is None else (i,) for i, owner in enumerate(owners))
    atoms: list[list[int]] = [[] for _ in source.sizes]
    for i, owner in enumerate(owners):
        if owner is not None:
            atoms[owner].append(i)
    orders = []
    for mine in atoms:
        cut = [i for i in mine if i < len(target.indices)]
        rest = [i for i in mine if i >= len(target.indices)]
        turns = [(*cut, *rest)]
        if cut and len(rest) > 1:
            turns.append((*rest[:1], *cut, *rest[1:]))
        elif cut and rest:
            turns.append((*rest, *cut))
        orders.append(turns)
    for left in itertools.product(*orders):
        yield _described(left, right, target.sizes, source, target)


def _described(
    left: Sequence[Factors],
    right: Sequence[Factors],
    sizes: Shape,
    source: Axes,
    target: Axes,
) -> Candidate:
    gathered, scattered = len(source.indices), len(target.indices)
    own = [atoms for atoms in left[gathered:] if math.prod(_sizes(atoms, sizes)) > 1]
    last = next(
        (a for a in reversed(right[scattered:]) if math.prod(_sizes(a, sizes)) > 1), ()
    )
    orientation: Literal["transposed", "as stored"] | None = None
    if len(own) > 1:
        single = [atoms[0] for atoms in own if len(atoms) == 1]
        order = [a for atoms in right[scattered:] for a in atoms if a in single]
        is_turned = bool(last) and last[-1] in own[0]
        if len(single) == len(own) == len(right) - scattered:
            is_turned = order != single
        orientation = "transposed" if is_turned else "as stored"
    index_atoms = {atom for atoms in left[:gathered] for atom in atoms}
    cut_atoms = {atom for atoms in right[:scattered] for atom in atoms}
    stacked = [i for i, atoms in enumerate(right) if index_atoms & {*atoms}]
    stacked += [i for i, atoms in enumerate(left) if cut_atoms & {*atoms}]
    fused: Literal["in blocks", "alternating"] | None = None
    for atoms in left[gathered:]:
        if cut_atoms & {*atoms} and len(atoms) > 1:
            fused = "in blocks" if atoms[0] in cut_atoms else "alternating"
    return Candidate(
        tuple(left), tuple(right), sizes, orientation, tuple(stacked), fused
    )


def _sizes(atoms: Factors, sizes: Shape) -> Shape:
    return tuple(sizes[atom] for atom in atoms)


def _renumbered(one: Candidate) -> Candidate:
    """Returns the form with its atoms numbered in the order of the source."""
    order = [atom for atoms in one.left for atom in atoms]
    number = {atom: i for i, atom in enumerate(order)}
    return one._replace(
        left=tuple(tuple(number[atom] for atom in atoms) for atoms in one.left),
        right=tuple(tuple(number[atom] for atom in atoms) for atoms in one.right),
        sizes=tuple(one.sizes[atom] for atom in order),
    )


def _usual(found: list[Candidate], source: Axes, target: Axes) -> list[Candidate]:
    """Leaves out unusual forms, if there are others.

    A kernel is not turned in an unusual way, and as few axes as possible are split.
    """
    gathered, scattered = len(source.indices), len(target.indices)

    def is_usual(one: Candidate) -> bool:
        own = [atoms[0] for atoms in one.left[gathered:] if len(atoms) == 1]
        right = [atom for atoms in one.right[scattered:] for atom in atoms]
        order = tuple(own.index(atom) for atom in right if atom in own)
        is_whole = len(own) == len(source.shape) == len(order)
        is_free = len(own) < 3 or not is_whole or one.composed > 0
        return is_free or order in _usual_orders(len(own))

    found = [one for one in found if is_usual(one)] or found
    least = min((one.composed for one in found), default=0)
    return [one for one in found if one.composed == least]


def _rank(one: Candidate) -> tuple[object, ...]:
    scattered = sum(
        1 for atoms in one.left if len(atoms) > 1 and not _side_by_side(one, atoms)
    )
    return (one.fused == "alternating", scattered, one.orientation == "as stored")


def _side_by_side(one: Candidate, atoms: Factors) -> bool:
    at = [i for atom in atoms for i, axis in enumerate(one.right) if atom in axis]
    return all(b - a <= 1 for a, b in itertools.pairwise(at))


# ---- evidence -----------------------------------------------------------------------

Trait: TypeAlias = Literal["orientation", "stacked", "fused", "layout"]
TRAITS: tuple[Trait, ...] = ("orientation", "stacked", "fused", "layout")


class Observation(NamedTuple):
    """A match whose shapes leave no doubt of its form.

    Attributes:
        scope: Components of the source's path, without the last.
        kind: What is alike in layers of one kind: the names of the arrays, their axes.
    """

    scope: tuple[str, ...]
    kind: tuple[object, ...]
    form: Candidate


class Evidence:
    """Counts the forms of matches, by the modules around them and their kind.

    Leaves that are the same on both sides count only for leaves of their names: a table
    of positions says nothing about kernels.
    """

    def __init__(
        self, observations: Iterable[Observation], same: Iterable[Observation] = ()
    ) -> None:
        self._counts: dict[tuple[object, ...], Counter[Candidate]] = defaultdict(
            Counter
        )
        for one in observations:
            self._count(one, one.kind)
            self._count(one, one.kind[:1])
        for one in same:
            self._count(one, one.kind)

    def _count(self, one: Observation, kind: tuple[object, ...]) -> None:
        for depth in range(len(one.scope) + 1):
            self._counts[one.scope[:depth], kind][one.form] += 1

    def nearest(
        self,
        trait: Trait,
        scope: tuple[str, ...],
        kind: tuple[object, ...],
        values: set[object],
    ) -> Mapping[object, int]:
        """Returns the values of a trait among the nearest matches that show it."""
        for depth in range(len(scope), -1, -1):
            for alike in (kind, kind[:1]):
                counts: Counter[object] = Counter()
                for form, count in self._counts.get((scope[:depth], alike), {}).items():
                    if getattr(form, trait) in values:
                        counts[getattr(form, trait)] += count
                if counts:
                    return counts
        return {}


class Decision(NamedTuple):
    """The form that was chosen for a match; several if nothing decides, the best first.

    The reason is empty if the shapes leave no doubt.
    """

    forms: tuple[Candidate, ...]
    reason: str = ""


def decide(
    forms: Sequence[Candidate],
    scope: tuple[str, ...],
    kind: tuple[object, ...],
    evidence: Evidence,
) -> Decision:
    """Chooses among forms that fit, as other layers of the same model have it.

    The nearest layers count: of the same module, then of the module around it. Layers
    that disagree decide nothing.
    """
    left = list(forms)
    reasons = []
    for trait in TRAITS:
        values = {getattr(one, trait) for one in left}
        if len(left) < 2:
            break
        if len(values) < 2:
            continue
        counts = evidence.nearest(trait, scope, kind, values)
        if len(counts) != 1:
            break
        [(value, count)] = counts.items()
        left = [one for one in left if getattr(one, trait) == value]
        reasons.append(f"{_say(trait, value)} like {count} other leaves")
    return Decision(tuple(left), ", ".join(reasons))


def _say(trait: Trait, value: object) -> str:
    match trait:
        case "orientation":
            return str(value)
        case "stacked":
            return f"stacked along axis {', '.join(map(str, value))}"  # type: ignore[call-overload]
        case "fused":
            return f"cut {value}"
    return "the same form"
