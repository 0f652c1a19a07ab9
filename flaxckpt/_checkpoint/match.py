"""Finding optimizer leaves of a checkpoint by what they are.

Transforms are matched first, and leaves only between transforms that match: a transform
of the wanted state, such as the second of two `trace`s, is the only one of its class in
its optimizer, or has the same place among all of its class. Then a leaf is that of the
same field and parameter.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _util
from flaxckpt._state.leaf import LeafInfo, LeafTable, Role, StoredLeaf
from flaxckpt._types import LeafPath

_BRANCHES = "inner_states"
"""Field of optax's states in which each branch has parameters of its own."""

_HYPERPARAMETERS = "hyperparams_states"
"""Field of optax's states in which each hyperparameter has a state of its own."""


class _Kind(NamedTuple):
    """What transforms have in common that may be taken for each other.

    Attributes:
        optimizer: Path of the optimizer.
        state_class: Class of their states; empty where that is not recorded.
        hyperparameter: Whose schedules they are; mostly empty.
        fields: Where the class is not recorded, the names of their fields.
        leaf_fields: Likewise, those that are leaves.
        is_unnamed: Whether the class of the wanted states is not known.
    """

    optimizer: LeafPath
    state_class: str
    hyperparameter: str
    fields: frozenset[str] = frozenset()
    leaf_fields: frozenset[str] = frozenset()
    is_unnamed: bool = False


class _Transform:
    """A transform's state in the wanted state.

    Attributes:
        known: What is known of its leaves.
        leaf_fields: Fields that are leaves.
        moments: Paths, below its own, of leaves that may mirror parameters.
    """

    def __init__(self, known: _state.optimizer_roles.Known) -> None:
        self.known = known
        self.leaf_fields: set[str] = set()
        self.moments: list[LeafPath] = []


class _Match(NamedTuple):
    """The stored transforms that a wanted transform may match.

    Attributes:
        same: Path of the one that has its place; None if that is not certain.
        others: Paths of those that may have leaves of it besides.
        is_ambiguous: Whether nobody knows which of `others` it is, if any.
        counters: Paths of those that may have its leaves that mirror no parameter.
    """

    same: LeafPath | None
    others: Sequence[LeafPath]
    is_ambiguous: bool
    counters: Sequence[LeafPath]


class Finder:
    """Finds optimizer leaves of a checkpoint by their role.

    Only leaves of the same optimizer are considered: those of a generator are never
    taken for a discriminator's. Where the checkpoint has no roles, as Orbax writes it,
    a transform is a container whose keys are the fields of the wanted transform.

    Args:
        table: The leaves of the checkpoint.
        structure: Its containers.
        known: What is known of the wanted leaves.
        at: Returns the path of the stored leaf at a path, or in a box there; None if
            there is none.
    """

    def __init__(
        self,
        table: LeafTable,
        structure: _state.tree.Node | LeafPath,
        known: Mapping[LeafPath, _state.optimizer_roles.Known],
        at: Callable[[LeafPath], LeafPath | None],
    ) -> None:
        self._at = at
        self._table = table
        self._structure = structure
        self._known = known

    def find(self, path: LeafPath) -> list[LeafPath]:
        """The stored leaves that the wanted optimizer leaf at `path` may be.

        Several if nobody knows which, the same one twice if several wanted leaves may
        be that one.
        """
        known = self._known[path]
        if not known.fields:
            return self._outside_of_transforms(path)
        if path in self._assigned:
            return [path]
        match = self._matches[known.place]
        tail = _below(known.place, path)
        if not _is_moment(tail, known):
            return self._leaves(match.counters, tail, known.field)
        if match.same is not None:
            same = self._leaf(match.same, tail, known.field)
            if same is not None:
                return [same]
        all_found = self._leaves(match.others, tail, known.field)
        if match.is_ambiguous and len(all_found) == 1:
            return all_found * 2
        return all_found

    def _outside_of_transforms(self, path: LeafPath) -> list[LeafPath]:
        """The stored leaf at a path outside of all transforms' states."""
        if (found := self._at(path)) is None:
            return []
        role = self._table[found].info.role
        return [found] if role is None or not role.state_class else []

    def _leaves(
        self, places: Sequence[LeafPath], tail: LeafPath, field: str
    ) -> list[LeafPath]:
        found = (self._leaf(place, tail, field) for place in places)
        return [path for path in found if path is not None]

    def _leaf(self, place: LeafPath, tail: LeafPath, field: str) -> LeafPath | None:
        """The leaf `tail` of the stored transform at `place`, if it has one."""
        found = self._at(f"{place}/{tail}" if place else tail)
        if found is None:
            return None
        role = self._table[found].info.role
        is_same = (
            role is None
            or not role.state_class
            or (role.field == field and len(_tail(role)) == len(tail))
        )
        return found if is_same else None

    # ---- transforms of the checkpoint -----------------------------------------------

    @_util.forks.lazy
    def _places(self) -> dict[tuple[LeafPath, str, LeafPath], None]:
        """Optimizer, class and path of each state that leaves have roles in."""
        return self._survey[0]

    @_util.forks.lazy
    def _assigned(self) -> set[LeafPath]:
        """Leaves that were assigned to a wanted leaf's path, without their states."""
        return self._survey[1]

    @_util.forks.lazy
    def _survey(
        self,
    ) -> tuple[dict[tuple[LeafPath, str, LeafPath], None], set[LeafPath]]:
        """See `_places` and `_assigned`."""
        places: dict[tuple[LeafPath, str, LeafPath], None] = {}
        moved = []
        for path, leaf in self._table.items():
            role = leaf.info.role
            if role is None or (place := _place(leaf.info)) is None:
                continue
            state = (role.optimizer, role.state_class, place)
            source = leaf.sources[0]
            if isinstance(source, StoredLeaf) and source.info.path != path:
                before = _place(source.info)
                if before != place:
                    moved.append((path, before, state))
                    continue
            places[state] = None
        left = {place for _, _, place in places}
        assigned = set()
        for path, before, state in moved:
            if before is None or before in left:
                assigned.add(path)
            else:
                places[state] = None
        return places, assigned

    @_util.forks.lazy
    def _stored(self) -> dict[_Kind, list[LeafPath]]:
        """The states that leaves have roles in, by their kind."""
        stored: dict[_Kind, list[LeafPath]] = {}
        for optimizer, state_class, place in self._places:
            kind = _Kind(
                self._optimizer(place, optimizer), state_class, _hyperparameter(place)
            )
            stored.setdefault(kind, []).append(place)
        return stored

    @_util.forks.lazy
    def _seats(self) -> set[LeafPath]:
        """Elements of tuples of which nobody knows whether each is an optimizer.

        If the tuple of the checkpoint is a chain beyond doubt, so is the wanted one.
        """
        seats = {
            (known.optimizer, known.seat)
            for known in self._known.values()
            if known.seat
        }
        doubtful = {
            optimizer
            for optimizer in {optimizer for optimizer, _ in seats}
            if (node := _node_at(self._structure, optimizer)) is not None
            and _state.optimizer_states.may_be_several(node)
        }
        return {seat for optimizer, seat in seats if optimizer in doubtful}

    @_util.forks.lazy
    def _optimizers(self) -> set[LeafPath]:
        """The paths of all optimizers, stored and wanted."""
        stored = {optimizer for optimizer, _, _ in self._places}
        wanted = {known.optimizer for known in self._known.values()}
        return stored | wanted | self._seats

    def _optimizer(self, place: LeafPath, optimizer: LeafPath) -> LeafPath:
        """The path of the optimizer that the state at `place` is in.

        Where one side knows of several optimizers in a container, and the other side
        takes it for one, there are several.
        """
        for path in (place, *_above(place)):
            if path in self._optimizers:
                return path
        return optimizer

    @_util.forks.lazy
    def _unnamed(self) -> dict[frozenset[str], list[LeafPath]]:
        """States whose classes nobody knows, by the names of their fields; sorted.

        Those are containers of leaves without roles, and states of classes that optax
        has no longer: it renames them now and then.
        """
        known = {place for _, _, place in self._places}
        children = self._children()
        unnamed = dict.fromkeys(
            path for path in children if known.isdisjoint((path, *_above(path)))
        )
        for path, node in _containers(self._structure, ()):
            if path in known and _state.optimizer_states.is_gone(node.type):
                unnamed[path] = None
                children[path] = {str(key.name) for key in node.keys}
        by_fields: dict[frozenset[str], list[LeafPath]] = {}
        for path in sorted(unnamed):
            by_fields.setdefault(frozenset(children[path]), []).append(path)
        return by_fields

    @_util.forks.lazy
    def _all_by_fields(self) -> dict[frozenset[str], list[LeafPath]]:
        """All containers, by the names of what is in them; sorted."""
        by_fields: dict[frozenset[str], list[LeafPath]] = {}
        for path, names in sorted(self._children().items()):
            by_fields.setdefault(frozenset(names), []).append(path)
        return by_fields

    def _children(self) -> dict[LeafPath, set[str]]:
        """The names right below each container, by its path."""
        children: dict[LeafPath, set[str]] = {}
        for path in self._table:
            inner = path
            while inner:
                container, _, name = inner.rpartition("/")
                names = children.setdefault(container, set())
                if name in names:
                    break  # and so are the containers around it
                names.add(name)
                inner = container
        return children

    def _alike(self, kind: _Kind) -> list[LeafPath]:
        """The states that have the fields of this kind, and of unknown class.

        Of any class if that of the wanted states is not known.
        """
        by_fields = self._all_by_fields if kind.is_unnamed else self._unnamed
        places = by_fields.get(kind.fields, [])
        inside = f"{kind.optimizer}/" if kind.optimizer else ""
        start = stop = bisect.bisect_left(places, inside)
        while stop < len(places) and places[stop].startswith(inside):
            stop += 1
        alike = places[start:stop]
        at = bisect.bisect_left(places, kind.optimizer)
        if inside and kind.optimizer in places[at : at + 1]:
            alike.insert(0, kind.optimizer)
        found: list[LeafPath] = []
        for place in alike:
            # Parameters may be called like the fields of the state that they are in.
            is_within = bool(found) and place.startswith(f"{found[-1]}/")
            if (
                not is_within
                and self._optimizer(place, kind.optimizer) == kind.optimizer
                and _hyperparameter(place) == kind.hyperparameter
                and all(
                    self._is_leaf(place, field) in (None, field in kind.leaf_fields)
                    for field in kind.fields
                )
            ):
                found.append(place)
        return found

    def _is_leaf(self, place: LeafPath, field: str) -> bool | None:
        """Whether a field of a stored container is a leaf; None if it is empty."""
        path = f"{place}/{field}" if place else field
        leaf = self._table.get(path)
        if leaf is not None and leaf.info.kind == "empty":
            return None
        return self._at(path) is not None

    # ---- matching transforms --------------------------------------------------------

    @_util.forks.lazy
    def _matches(self) -> dict[LeafPath, _Match]:
        """Path of each wanted transform -> the stored transforms that it matches."""
        kinds: dict[_Kind, list[_Transform]] = {}
        for place, transform in self._wanted().items():
            known = transform.known
            optimizer = self._optimizer(place, known.optimizer)
            kind = _Kind(optimizer, known.state_class, _hyperparameter(place))
            if kind not in self._stored:
                kind = _Kind(
                    optimizer,
                    "",
                    kind.hyperparameter,
                    known.fields,
                    frozenset(transform.leaf_fields),
                    not known.state_class,
                )
            kinds.setdefault(kind, []).append(transform)
        matches: dict[LeafPath, _Match] = {}
        for kind, transforms in kinds.items():
            stored = self._stored.get(kind) or self._alike(kind)
            self._match(kind.optimizer, transforms, stored, matches)
            if not stored and kind.optimizer in self._seats:
                for transform in transforms:
                    self._refuse_moved(kind, transform, matches, kinds.keys())
        return matches

    def _refuse_moved(
        self,
        kind: _Kind,
        transform: _Transform,
        matches: dict[LeafPath, _Match],
        wanted: Collection[_Kind],
    ) -> None:
        """Makes a transform ambiguous that may have moved within a chain.

        Or it is another optimizer's, and nothing tells which.
        """
        known = transform.known
        inside = f"{known.optimizer}/" if known.optimizer else ""
        moved: list[LeafPath] = []
        for seat in (known.optimizer, *sorted(self._seats)):
            if seat != known.optimizer and not seat.startswith(inside):
                continue
            named = _Kind(seat, known.state_class, kind.hyperparameter)
            unnamed = kind._replace(optimizer=seat)
            if named not in wanted and unnamed not in wanted:
                moved += self._stored.get(named) or self._alike(unnamed)
        if moved:
            counters = self._with_moments(transform, moved)
            matches[known.place] = _Match(None, moved, True, counters * 2)

    def _wanted(self) -> dict[LeafPath, _Transform]:
        """The transforms of the wanted state, by their paths."""
        wanted: dict[LeafPath, _Transform] = {}
        for path, known in self._known.items():
            if not known.fields:
                continue
            transform = wanted.get(known.place)
            if transform is None:
                transform = wanted[known.place] = _Transform(known)
            tail = _below(known.place, path)
            if "/" not in tail:
                transform.leaf_fields.add(tail)
            elif _is_moment(tail, known):
                transform.moments.append(tail)
        return wanted

    def _match(
        self,
        optimizer: LeafPath,
        wanted: Sequence[_Transform],
        stored: Sequence[LeafPath],
        matches: dict[LeafPath, _Match],
    ) -> None:
        """Adds the matches of all wanted transforms of one kind.

        As many, in the same order and with the same names are the same transforms.
        Branches have other parameters each, so that it does not matter which of them
        a parameter was in. All else is ambiguous.
        """
        ours = sorted(
            (_parts(optimizer, t.known.place), n) for n, t in enumerate(wanted)
        )
        theirs = sorted((_parts(optimizer, place), n) for n, place in enumerate(stored))
        places = [stored[n] for _, n in theirs]
        our_parts = [parts for parts, _ in ours]
        their_parts = [parts for parts, _ in theirs]
        is_aligned = _names(our_parts) == _names(their_parts)
        are_branches = _are_branches(our_parts) and _are_branches(their_parts)
        by_labels: dict[tuple[str, ...], list[LeafPath]] = {}
        for parts, place in zip(their_parts, places, strict=True):
            by_labels.setdefault(_labels(parts), []).append(place)
        for i, (parts, n) in enumerate(ours):
            transform = wanted[n]
            same = places[i] if is_aligned else None
            others = places if are_branches or not is_aligned else []
            is_ambiguous = not is_aligned and not are_branches
            if not transform.moments:
                if is_ambiguous:
                    counters = places if len(places) > 1 else places * 2
                elif same is not None:
                    counters = [same]
                else:
                    counters = by_labels.get(_labels(parts), places)
            else:
                # A counter says how many gradients the moments beside it are of.
                likely = [same] if same is not None else []
                counters = self._with_moments(transform, likely) or self._with_moments(
                    transform, others
                )
                if is_ambiguous and len(counters) == 1:
                    counters *= 2
            matches[transform.known.place] = _Match(
                same, others, is_ambiguous, counters
            )

    def _with_moments(
        self, transform: _Transform, places: Sequence[LeafPath]
    ) -> list[LeafPath]:
        """Those of the stored states that have a moment of a wanted transform, if any.

        All of them if it has no moments.
        """
        if not transform.moments:
            return list(places)
        return [place for place in places if self._has_moment(transform, place)]

    def _has_moment(self, transform: _Transform, place: LeafPath) -> bool:
        """Whether the stored state at `place` has a moment of a wanted transform."""
        return any(
            self._leaf(place, tail, tail.partition("/")[0])
            for tail in transform.moments
        )


_Part: TypeAlias = tuple[int, str]
"""Index and name of a part of a path; -1 with a name, no name with an index."""


def _parts(optimizer: LeafPath, place: LeafPath) -> tuple[_Part, ...]:
    """The parts of a place in an optimizer, as they are sorted."""
    inner = place[len(optimizer) + 1 :] if optimizer else place
    parts: list[_Part] = []
    for name in inner.split("/") if inner else ():
        is_label = bool(parts) and parts[-1][1] == _BRANCHES
        is_index = name.isdecimal() and not is_label
        parts.append((int(name), "") if is_index else (-1, name))
    return tuple(parts)


def _names(places: Sequence[Sequence[_Part]]) -> list[tuple[str, ...]]:
    """The names in the parts of each place, without the common prefix."""
    names = [tuple(name for _, name in parts if name) for parts in places]
    if not names:
        return []
    first, last = min(names), max(names)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return [each[same:] for each in names]


def _are_branches(places: Sequence[Sequence[_Part]]) -> bool:
    """Whether sorted places are in different branches, and none is after another."""
    for one, other in itertools.pairwise(places):
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        if same == 0 or same == len(one) or one[same - 1][1] != _BRANCHES:
            return False
    return True


def _labels(parts: Sequence[_Part]) -> tuple[str, ...]:
    """The names of the branches that a place is in."""
    return tuple(
        label
        for (_, name), (_, label) in itertools.pairwise(parts)
        if name == _BRANCHES
    )


def _hyperparameter(place: LeafPath) -> str:
    """The hyperparameter that the state at `place` schedules; empty if none."""
    _, found, name = f"/{place}".rpartition(f"/{_HYPERPARAMETERS}/")
    return name.partition("/")[0] if found else ""


def _below(place: LeafPath, path: LeafPath) -> LeafPath:
    return path[len(place) + 1 :] if place else path


def _is_moment(tail: LeafPath, known: _state.optimizer_roles.Known) -> bool:
    """Whether a leaf of a transform's state may mirror a parameter."""
    return "/" in tail and known.field not in _state.optimizer_roles.NAMED_VALUES


def _place(info: LeafInfo) -> LeafPath | None:
    """Path of the state that contains a leaf; None if the leaf has no role."""
    role = info.role
    if role is None or not role.state_class or info.kind == "empty":
        return None
    tail = _tail(role)
    path = info.path if info.path.endswith(tail) else _state.tree.without_box(info.path)
    if path == tail:
        return ""
    return path[: -len(tail) - 1] if path.endswith(f"/{tail}") else None


def _tail(role: Role) -> LeafPath:
    """Path of a leaf below the transform state that contains it."""
    return f"{role.field}/{role.param}" if role.param else role.field


def _above(path: LeafPath) -> Iterator[LeafPath]:
    """The containers around a path."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _node_at(
    node: _state.tree.Node | LeafPath, path: LeafPath
) -> _state.tree.Node | None:
    """The container at a path of a structure, if there is one."""
    for part in path.split("/") if path else ():
        while not isinstance(node, str) and node.is_box and node.children:
            node = node.children[0]
        if isinstance(node, str):
            return None
        for key, child in zip(node.keys, node.children, strict=True):
            if _state.tree.join((key,)) == part:
                node = child
                break
        else:
            return None
    return None if isinstance(node, str) else node


def _containers(
    node: _state.tree.Node | LeafPath, keys: tuple[_state.tree.Key, ...]
) -> Iterator[tuple[LeafPath, _state.tree.Node]]:
    if isinstance(node, str):
        return
    yield _state.tree.join(keys), node
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _containers(child, keys if node.is_box else (*keys, key))
