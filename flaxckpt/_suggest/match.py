"""Matches the leaves of two models: by names, numbers of layers, and shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from flaxckpt import _util
from flaxckpt._suggest import alike, forms, names
from flaxckpt._suggest.patterns import Key, Parts, Pattern, Scope, join
from flaxckpt._types import LeafPath, Shape

# ---- links --------------------------------------------------------------------------


class Group(NamedTuple):
    """Leaves of the source that become leaves of the target together.

    `loop` has the values of the indices of both, in the source and in the target; the
    leaves are in the order of the other indices.
    """

    loop: tuple[tuple[int, int], ...]
    sources: tuple[LeafPath, ...]
    targets: tuple[LeafPath, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A pattern of the source that may fill a pattern of the target.

    Attributes:
        paired: The positions of the indices of both.
        groups: The leaves that belong together.
        forms: The forms that fit all shapes.
        similarity: Of the names, from 0 to 1.
    """

    source: Pattern
    target: Pattern
    paired: tuple[tuple[int, int], ...]
    groups: tuple[Group, ...]
    forms: tuple[forms.Candidate, ...]
    similarity: float

    @property
    def scope(self) -> tuple[str, ...]:
        """The modules around the source."""
        return self.source.components[:-1]

    @property
    def shared(self) -> list[str]:
        pairs = itertools.product(self.source.meanings, self.target.meanings)
        return names.telling(max((a & b for a, b in pairs), key=len))

    @property
    def is_by_order(self) -> bool:
        """True if only the order of their numbers says which leaves belong together.

        Numbers say so themselves if they are equal, or if one side counts from 0 and
        the other from 1.
        """
        for at, (a, b) in enumerate(self.paired):
            mine, theirs = {*self.source.series[a]}, {*self.target.series[b]}
            steps = {i - j for i, j in (group.loop[at] for group in self.groups)}
            if steps == {0}:
                is_told = mine <= theirs or theirs <= mine
            else:
                is_told = len(steps) == 1 and {min(mine), min(theirs)} == {0, 1}
            if not is_told:
                return True
        return False

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers of one kind have in common, for the choice of a form."""
        shape = next(iter(self.source.shapes.values()))
        last = self.source.components[-1], self.target.components[-1]
        return _kind(shape, self.target.meanings, last)


def _kind(
    shape: Shape, meanings: Sequence[names.Meaning], last: tuple[str, str]
) -> tuple[object, ...]:
    is_table = any("embed" in one for one in meanings)
    axes = len([size for size in shape if size != 1])
    role = "embedding" if is_table else "kernel" if axes < 3 else "convolution"
    return role, *last


def observe_same(path: LeafPath, shape: Shape) -> forms.Observation:
    """Returns the match of a leaf with the leaf of the same path and shape."""
    components = names.without_numbers(path).split("/")
    axes = forms.Axes((), shape)
    kind = _kind(shape, names.meanings(path.split("/")), (components[-1],) * 2)
    plain = next(one for one in forms.candidates(axes, axes) if one.is_plain)
    return forms.Observation(tuple(components[:-1]), kind, plain)


def link(source: Pattern, target: Pattern, similarity: float) -> Link | None:
    """Returns how a pattern may fill another; None if the shapes do not fit."""
    most = min(len(source.numbers), len(target.numbers))
    ways = [
        tuple(zip(mine, theirs, strict=True))
        for mine in itertools.combinations(source.numbers, most)
        for theirs in itertools.combinations(target.numbers, most)
    ]
    ways.sort(key=lambda way: -sum(_alike(source, a, target, b) for a, b in way))
    # First by the numbers of all modules: the leaf may be in some of them only.
    numbers = dict.fromkeys(
        [(source.series, target.series), (source.values, target.values)]
    )
    for way in ways:
        maps = (
            [_map_values(mine[a], theirs[b]) for a, b in way]
            for mine, theirs in numbers
        )
        found = [_link(source, target, way, one, similarity) for one in maps]
        if any(found):
            return max(filter(None, found), key=lambda one: len(one.groups))
    return None


def _alike(source: Pattern, mine: int, target: Pattern, theirs: int) -> float:
    """Returns how well two indices go together: by the module, and by their values."""
    before = [
        names.meanings([piece.strip("/").rpartition("/")[2] or "x"])[0]
        for piece in (source.pieces[mine], target.pieces[theirs])
    ]
    same_values = source.values[mine] == target.values[theirs]
    return 2 * (before[0] == before[1]) + same_values


def _link(
    source: Pattern,
    target: Pattern,
    paired: tuple[tuple[int, int], ...],
    maps: Sequence[Mapping[int, int]],
    similarity: float,
) -> Link | None:
    if not paired and source.total != target.total:
        return None
    loops = [a for a, _ in paired], [b for _, b in paired]
    mine, theirs = (
        [at for at in range(len(pattern.words)) if at not in loop]
        for pattern, loop in zip((source, target), loops, strict=True)
    )
    counts = tuple(len(source.values[at]) for at in mine)
    cuts = tuple(len(target.values[at]) for at in theirs)
    if not all(
        _is_run(pattern.values[at])
        for pattern, own in ((source, mine), (target, theirs))
        for at in own
    ):
        return None
    by_loop = [_by_loop(source, loops[0]), _by_loop(target, loops[1])]
    groups, pairs = [], set()
    for loop, keys in by_loop[1].items():
        back = [mapping.get(value) for mapping, value in zip(maps, loop, strict=True)]
        sources = by_loop[0].get(tuple(back), [])  # type: ignore[arg-type]
        if len(sources) != math.prod(counts) or len(keys) != math.prod(cuts):
            continue
        shapes = {source.shapes[key] for key in sources}
        wanted = {target.shapes[key] for key in keys}
        if len(shapes) > 1 or len(wanted) > 1:
            return None
        pairs.add((shapes.pop(), wanted.pop()))
        groups.append(
            Group(
                tuple(zip(back, loop, strict=True)),  # type: ignore[arg-type]
                tuple(source.members[key] for key in sources),
                tuple(target.members[key] for key in keys),
            )
        )
    if not groups:
        return None
    fitting = _fitting(pairs, counts, cuts)
    if not fitting:
        return None
    return Link(source, target, paired, tuple(groups), fitting, similarity)


def _is_run(values: Sequence[int]) -> bool:
    """Returns True if each number is the one before plus 1."""
    return values[-1] - values[0] == len(values) - 1


def _fitting(
    pairs: Iterable[tuple[Shape, Shape]], counts: Shape, cuts: Shape
) -> tuple[forms.Candidate, ...]:
    common: dict[object, forms.Candidate] | None = None
    for shape, wanted in pairs:
        found: dict[object, forms.Candidate] = {
            one.layout: one
            for one in forms.candidates(
                forms.Axes(counts, shape), forms.Axes(cuts, wanted)
            )
        }
        if common is None:
            common = found
            continue
        common = {
            layout: one
            for layout, one in common.items()
            if layout in found
            and (not one.composed or found[layout].sizes == one.sizes)
        }
    return tuple((common or {}).values())


def _map_values(source: tuple[int, ...], target: tuple[int, ...]) -> Mapping[int, int]:
    """Returns the number in the target -> the number in the source."""
    if not {*target} <= {*source} and len(target) == len(source):
        return dict(zip(target, source, strict=True))
    return {value: value for value in target if value in source}


def _by_loop(pattern: Pattern, loop: Sequence[int]) -> dict[Key, list[Key]]:
    """Groups the members of a pattern by the values of some of its indices."""
    grouped: dict[Key, list[Key]] = defaultdict(list)
    for key in sorted(pattern.members):
        grouped[tuple(key[at] for at in loop)].append(key)
    return grouped


# ---- the assignment -----------------------------------------------------------------


_Pair: TypeAlias = tuple[int, int]
"""The places of a pattern of the source, and of one of the target."""


class Match(NamedTuple):
    """A link that was chosen, and its score, from 0 to 1.

    `margin` is how much worse the best other choice is for the leaves concerned;
    `rivals` are links that are nearly as good.
    """

    link: Link
    score: float
    margin: float
    rivals: tuple[Link, ...]


_ROUNDS = 3
_CONTEXT = 0.35
"""The part of the score that neighbours decide."""

CLOSE = 0.02
"""Scores that differ by less are equally good."""

_CLEAR = 0.2
"""A margin that leaves no doubt."""

WEAK = 0.2
"""Names that are less alike do not show that leaves belong together."""

_FEW = 4
"""The most leaves that one is linked to if its name is not like theirs."""


def match(sources: Sequence[Pattern], targets: Sequence[Pattern]) -> list[Match]:
    """Returns the best assignment of patterns of the source to those of the target.

    The score of a link is how alike the names are, and how many of the leaves in the
    same modules are assigned to leaves in the same modules.
    """
    similarity = names.Similarity(
        [one.meanings for one in sources], [one.meanings for one in targets]
    )
    sources, targets = _join_fused(sources, targets, similarity)
    links = _find_links(sources, targets, similarity)
    if not links:
        return []
    base = {at: found.similarity for at, found in links.items()}
    chosen = _assign(base)
    clear = _find_clear(chosen, base)
    for _ in range(_ROUNDS):
        scores = {
            at: (1 - _CONTEXT) * base[at] + _CONTEXT * bonus
            for at, bonus in _context(clear, links).items()
        }
        chosen = _assign(scores)
        clear = _find_clear(chosen, scores)
    around = _Around([links[at] for at in clear])
    ends = _by_end(links)
    partners = dict(chosen), {j: i for i, j in chosen}
    return [
        _with_rivals(
            (i, j), [*ends["source", i], *ends["target", j]], partners, around, links
        )
        for i, j in chosen
    ]


def _by_end(pairs: Iterable[_Pair]) -> dict[tuple[str, int], list[_Pair]]:
    ends: dict[tuple[str, int], list[_Pair]] = defaultdict(list)
    for i, j in pairs:
        ends["source", i].append((i, j))
        ends["target", j].append((i, j))
    return ends


def _find_clear(chosen: Sequence[_Pair], scores: Mapping[_Pair, float]) -> list[_Pair]:
    """Returns the links that are better than all others of their source and target.

    Only these say something about the links around them: two layers that may as well be
    swapped would confirm each other.
    """
    two_best = {
        end: sorted((scores[at] for at in ats), reverse=True)[:2]
        for end, ats in _by_end(scores).items()
    }
    clear = []
    for i, j in chosen:
        rivals = []
        for end in (("source", i), ("target", j)):
            best = two_best[end]
            rivals += best[1:] if best[0] == scores[i, j] else best[:1]
        if scores[i, j] - max(rivals, default=-np.inf) > CLOSE:
            clear.append((i, j))
    return clear


def _find_links(
    sources: Sequence[Pattern], targets: Sequence[Pattern], similarity: names.Similarity
) -> dict[_Pair, Link]:
    """Returns all links of patterns with names that are alike.

    Patterns without such a link are linked to some without one that have their size:
    by their order, as nothing else is known.
    """
    links = {
        (i, j): found
        for i, j in _find_pairs(sources, targets)
        if (score := similarity(sources[i].meanings, targets[j].meanings)) >= WEAK
        and (found := link(sources[i], targets[j], score))
    }
    rows, columns = {i for i, _ in links}, {j for _, j in links}
    free = [
        _by_size(side, used) for side, used in ((sources, rows), (targets, columns))
    ]
    for size, mine in free[1].items():
        others = free[0].get(size, [])
        for place, j in enumerate(mine):
            first = max(0, min(place - 1, len(others) - _FEW))
            for i in others[first : first + _FEW]:
                score = similarity(sources[i].meanings, targets[j].meanings)
                if found := link(sources[i], targets[j], score):
                    links[i, j] = found
    return links


def _by_size(patterns: Sequence[Pattern], used: set[int]) -> dict[int, list[int]]:
    """Groups the patterns that are not used by their elements, in order."""
    free = {str(one): i for i, one in enumerate(patterns) if i not in used}
    grouped: dict[int, list[int]] = defaultdict(list)
    for name in _util.folding.order_numbers([*free]):
        i = free[name]
        grouped[patterns[i].total].append(i)
    return grouped


def _find_pairs(
    sources: Sequence[Pattern], targets: Sequence[Pattern]
) -> Iterator[tuple[int, int]]:
    """Yields the pairs that may fit; of large tables, those with the nearest names."""
    if max(len(sources), len(targets)) <= alike.ALL:
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                if _may_fit(source, target):
                    yield i, j
        return
    sides = sources, targets
    found = set()
    for own, others in ((0, 1), (1, 0)):
        other = sides[others]
        index = alike.Index(
            [one.meanings for one in other], [one.sizes for one in other]
        )
        for at, one in enumerate(sides[own]):

            def fits(place: int, at: int = at, own: int = own) -> bool:
                ends = (at, place) if own == 0 else (place, at)
                return _may_fit(sources[ends[0]], targets[ends[1]])

            place = at / len(sides[own])
            for near in index.near(one.meanings, place, one.sizes, fits):
                found.add((at, near) if own == 0 else (near, at))
    yield from sorted(found)


def _may_fit(source: Pattern, target: Pattern) -> bool:
    """Returns False if no form can fit, by the numbers of elements."""
    if source.sizes & target.sizes:
        return True
    if len(source.sizes) > 1 or len(target.sizes) > 1:
        return False
    [mine], [theirs] = source.sizes, target.sizes
    if mine * len(source.members) == theirs * len(target.members):
        return True
    if len(source.words) == len(target.words):
        return False
    return theirs != 0 and mine != 0 and (mine % theirs == 0 or theirs % mine == 0)


def _join_fused(
    sources: Sequence[Pattern], targets: Sequence[Pattern], similarity: names.Similarity
) -> tuple[list[Pattern], list[Pattern]]:
    """Joins query, key and value of one side, if the other has them in one array."""
    sides = [list(sources), list(targets)]
    for side, other in ((0, 1), (1, 0)):
        parts_of = {roles: Parts(roles, sides[other]) for roles in names.PARTS}
        joined: list[Pattern] = []
        for fused in sides[side]:
            role = next(filter(None, map(names.fused_roles, fused.meanings)), None)
            if role is None:
                continue
            best: tuple[float, Pattern] | None = None
            for parts in parts_of[role[1]].near(fused.meanings):
                if (whole := join(parts, role[0])) is None:
                    continue
                ends = (fused, whole) if side == 0 else (whole, fused)
                score = _joined_similarity(fused, whole)
                if link(*ends, score) and (best is None or score > best[0]):
                    best = score, whole
            if best is not None:
                for one in parts_of.values():
                    one.remove(best[1].parts)
                joined.append(best[1])
        used = {id(part) for one in joined for part in one.parts}
        sides[other] = [one for one in sides[other] if id(one) not in used]
        sides[other] += joined
    return sides[0], sides[1]


def _joined_similarity(fused: Pattern, joined: Pattern) -> float:
    return max(len(a & b) / len(a | b) for a in fused.meanings for b in joined.meanings)


def find_tied(
    sources: Sequence[Pattern], targets: Sequence[Pattern], matches: Sequence[Match]
) -> Iterator[Link]:
    """Yields links from the embedding of tokens to heads that have no source."""
    filled = {id(one.link.target) for one in matches}
    embedding = frozenset(("embed", "token", "weight"))
    tables = [one for one in sources if any(embedding <= m for m in one.meanings)]
    for target in targets:
        is_head = any({"head", "weight"} <= meaning for meaning in target.meanings)
        if is_head and id(target) not in filled:
            for source in tables:
                if found := link(source, target, 0.0):
                    yield found
                    break


def _context(
    chosen: Sequence[_Pair], links: Mapping[_Pair, Link]
) -> dict[_Pair, float]:
    """Returns from 0 to 1 how well each link agrees with the chosen links around."""
    around = _Around([links[at] for at in chosen])
    target_of, source_of = dict(chosen), {j: i for i, j in chosen}
    bonus = {}
    for (i, j), found in links.items():
        own = {(i, target_of[i])} if i in target_of else set()
        if j in source_of:
            own.add((source_of[j], j))
        bonus[i, j] = around.agreement(found, [links[at] for at in own])
    return bonus


class _Around:
    """Counts the chosen links in each module, and in each pair of modules."""

    def __init__(self, chosen: Sequence[Link]) -> None:
        self._counted = frozenset(chosen)
        self._left: Counter[Scope] = Counter()
        self._right: Counter[Scope] = Counter()
        self._both: Counter[tuple[Scope, Scope]] = Counter()
        for one in chosen:
            left, right = one.source.scopes, one.target.scopes
            self._left.update(left)
            self._right.update(right)
            self._both.update(itertools.product(left, right))

    def agreement(self, link: Link, own: Sequence[Link]) -> float:
        """Returns the part of the leaves around a link that is assigned alike.

        The chosen links of its source and its target, `own`, do not count.
        """
        ends = [
            (one.source.scopes, one.target.scopes)
            for one in own
            if one in self._counted
        ]
        right = link.target.scopes
        bonus = weights = 0.0
        for weight, mine in zip((4, 2, 1), link.source.scopes, strict=False):
            lefts = self._left[mine] - sum(mine in left for left, _ in ends)
            best = 0.0
            for theirs in right if lefts else ():
                rights = self._right[theirs] - sum(theirs in one for _, one in ends)
                both = self._both[mine, theirs] - sum(
                    mine in left and theirs in one for left, one in ends
                )
                either = lefts + rights - both
                best = max(best, both / either if either else 0.0)
            if lefts:
                bonus, weights = bonus + weight * best, weights + weight
        return bonus / weights if weights else 0.5


def _with_rivals(
    at: _Pair,
    others: Sequence[_Pair],
    partners: tuple[Mapping[int, int], Mapping[int, int]],
    around: _Around,
    links: Mapping[_Pair, Link],
) -> Match:
    """Returns a match with its margin: to swaps with others, and to free patterns.

    `others` are all links of its source or its target; `partners` are the target of
    each source, and the source of each target, of all matches, which `around` has
    counted.
    """
    i, j = at
    target_of, source_of = partners
    margin, rivals = math.inf, []
    for a, b in others:
        if (a, b) == at:
            continue
        here, there = [at], [(a, b)]
        if a == i and b in source_of:
            here, there = [at, (source_of[b], b)], [(a, b), (source_of[b], j)]
        elif b == j and a in target_of:
            here, there = [at, (a, target_of[a])], [(a, b), (i, target_of[a])]
        if there[-1] not in links:
            continue
        own = [links[one] for one in here]
        names_say = sum(one.similarity for one in own) - sum(
            links[one].similarity for one in there
        )
        if (1 - _CONTEXT) * names_say - _CONTEXT * len(there) > _CLEAR:
            continue
        loss = sum(_score(one, around, own) for one in own) - sum(
            _score(links[one], around, own) for one in there
        )
        margin = min(margin, loss)
        if loss < CLOSE:
            rivals.append(links[a, b])
    own = [links[at]]
    return Match(links[at], _score(links[at], around, own), margin, tuple(rivals))


def _score(link: Link, around: _Around, own: Sequence[Link]) -> float:
    """Returns the score of a link, without the chosen links `own` around it."""
    context = around.agreement(link, own)
    return (1 - _CONTEXT) * link.similarity + _CONTEXT * context


def _assign(scores: Mapping[_Pair, float]) -> list[_Pair]:
    """Returns the assignment with the largest sum of squared scores.

    Pairs without a common member, also through others, are assigned apart. Where very
    many hang together, the best pair that is left is taken, one after the other.
    """
    chosen: list[_Pair] = []
    for pairs in _connected(scores):
        if max(len({i for i, _ in pairs}), len({j for _, j in pairs})) > alike.ALL:
            chosen += _assign_greedily({at: scores[at] for at in pairs})
            continue
        rows, columns = (sorted({at[end] for at in pairs}) for end in (0, 1))
        places = [{at: n for n, at in enumerate(ends)} for ends in (rows, columns)]
        matrix = np.full((len(rows), len(columns)), -np.inf)
        for i, j in pairs:
            matrix[places[0][i], places[1][j]] = scores[i, j]
        chosen += [(rows[i], columns[j]) for i, j in _assign_exactly(matrix)]
    return sorted(chosen, key=lambda at: at[1])


def _connected(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Yields the pairs that hang together by their members."""
    ends = _by_end(pairs)
    seen: set[tuple[str, int]] = set()
    for first in ends:
        if first in seen:
            continue
        seen.add(first)
        found, todo = set(), [first]
        while todo:
            for i, j in ends[todo.pop()]:
                found.add((i, j))
                new = {("source", i), ("target", j)} - seen
                seen |= new
                todo += new
        yield sorted(found)


def _assign_greedily(scores: Mapping[_Pair, float]) -> Iterator[_Pair]:
    rows: set[int] = set()
    columns: set[int] = set()
    for i, j in sorted(scores, key=lambda at: (-scores[at], abs(at[0] - at[1]), at)):
        if i not in rows and j not in columns:
            rows.add(i)
            columns.add(j)
            yield i, j


def _assign_exactly(scores: np.ndarray) -> list[_Pair]:
    """Returns the best assignment of the rows and columns of a matrix."""
    from scipy import optimize  # jax has it; only guesses need it

    rows, columns = scores.shape
    cost = np.zeros((rows, columns + rows))  # a row may go without a column
    cost[:, :columns] = np.where(np.isfinite(scores), -(scores**2) - 1e-3, np.inf)
    pairs = zip(*optimize.linear_sum_assignment(cost), strict=True)
    return [(int(row), int(column)) for row, column in pairs if column < columns]
