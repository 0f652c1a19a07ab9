"""Matches optimizer leaves of a checkpoint with wanted leaves by their roles.

Transforms are matched first, by class: a wanted transform matches the only stored
transform of the class in the same optimizer, or the one at the same place among all of
the class. Within matched transforms, leaves match by field and parameter.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _util
from flaxckpt._state.leaf import LeafInfo, LeafTable, Role, StoredLeaf
from flaxckpt._types import LeafPath

_BRANCHES = "inner_states"
"""Field of optax states with branches, where each branch has its own parameters."""

_HYPERPARAMETERS = "hyperparams_states"
"""Field of optax states with a separate state for each hyperparameter."""


class _Kind(NamedTuple):
    """Common properties of transforms: equal kinds may match.

    Field names tell transforms apart if the class is not recorded; `hyperparameter` is
    the one that they schedule.
    """

    optimizer: LeafPath
    state_class: str
    hyperparameter: str
    fields: frozenset[str] = frozenset()
    leaf_fields: frozenset[str] = frozenset()
    is_unnamed: bool = False


class _Transform:
    """A transform in the wanted state; `moments` are relative paths of its leaves."""

    def __init__(self, known: _state.optimizer_roles.LeafFacts) -> None:
        self.known = known
        self.leaf_fields: set[str] = set()
        self.moments: list[LeafPath] = []

    def kind_by_fields(self, optimizer: LeafPath, hyperparameter: str) -> _Kind:
        """Returns the kind by the names of fields, without a class."""
        return _Kind(
            optimizer,
            "",
            hyperparameter,
            self.known.fields,
            frozenset(self.leaf_fields),
            not self.known.state_class,
        )


class _Match(NamedTuple):
    """The stored transforms that a wanted one may match; `same` is at the same place.

    `counters` may hold its leaves without a parameter.
    """

    same: LeafPath | None
    others: Sequence[LeafPath]
    is_ambiguous: bool
    counters: Sequence[LeafPath]


class OptimizerMatcher:
    """Finds optimizer leaves of a checkpoint by role, within the same optimizer.

    In a checkpoint without roles, such as Orbax's, a transform is a container whose
    keys are the fields of the wanted transform. `known` are facts about the wanted
    leaves; `at` returns the path of the stored leaf at a path, or in a box there.
    """

    def __init__(
        self,
        table: LeafTable,
        structure: _state.tree.Node | LeafPath,
        known: Mapping[LeafPath, _state.optimizer_roles.LeafFacts],
        at: Callable[[LeafPath], LeafPath | None],
    ) -> None:
        self._at = at
        self._table = table
        self._structure = structure
        self._known = known

    def find(self, path: LeafPath) -> list[LeafPath]:
        """Returns stored leaves that may match: several, or one twice, if ambiguous."""
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

    def is_of_another_state(
        self, path: LeafPath, wanted: _state.tree.Node | LeafPath
    ) -> bool:
        """Returns True if `wanted` has another class than a stored leaf's state."""
        role, place = (
            self._table[path].info.role,
            place_of_state(self._table[path].info),
        )
        if role is None or place is None:
            return False
        node = _state.tree.node_at(wanted, place)
        return (
            isinstance(node, _state.tree.Node)
            and not _state.optax_containers.is_plain(node)
            and _state.optax_containers.class_name(node) != role.state_class
        )

    def has_moved(self, place: LeafPath) -> bool:
        """Returns True if a stored state matches a wanted state at another path."""
        return not self._wanted_by.get(place, set()) <= {place}

    @_util.forks.lazy
    def _wanted_by(self) -> dict[LeafPath, set[LeafPath]]:
        """Path of each stored state -> paths of the wanted states that it matches."""
        wanted_by: dict[LeafPath, set[LeafPath]] = {}
        for wanted, match in self._matches.items():
            for place in (match.same, *match.others):
                if place is not None:
                    wanted_by.setdefault(place, set()).add(wanted)
        return wanted_by

    def _outside_of_transforms(self, path: LeafPath) -> list[LeafPath]:
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
        """Returns the leaf `tail` of the stored transform at `place`, or None."""
        found = self._at(_state.tree.inside(place) + tail)
        if found is None:
            return None
        info = self._table[found].info
        role = info.role
        is_same = (
            role is None
            or not role.state_class
            or (
                role.field == field
                # The name of a parameter may end with the field of a box.
                and (len(_tail(role)) == len(tail) or place_of_state(info) == place)
            )
        )
        return found if is_same else None

    # ---- transforms of the checkpoint -----------------------------------------------

    @_util.forks.lazy
    def _places(self) -> dict[tuple[LeafPath, str, LeafPath], None]:
        """Optimizer, class and path of each stored state with roles, in order."""
        return self._survey[0]

    @_util.forks.lazy
    def _assigned(self) -> set[LeafPath]:
        """Leaves that transforms moved to a wanted leaf's path without their states."""
        return self._survey[1]

    @_util.forks.lazy
    def _survey(
        self,
    ) -> tuple[dict[tuple[LeafPath, str, LeafPath], None], set[LeafPath]]:
        places: dict[tuple[LeafPath, str, LeafPath], None] = {}
        moved = []
        for path, leaf in self._table.items():
            role = leaf.info.role
            if role is None or (place := place_of_state(leaf.info)) is None:
                continue
            state = (role.optimizer, role.state_class, place)
            source = leaf.sources[0]
            if isinstance(source, StoredLeaf) and source.info.path != path:
                before = place_of_state(source.info)
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
        stored: dict[_Kind, list[LeafPath]] = {}
        alone = [("", name, place) for place, name in self._classes.items()]
        for optimizer, state_class, place in (*self._places, *alone):
            kind = _Kind(
                self._optimizer(place, optimizer), state_class, _hyperparameter(place)
            )
            stored.setdefault(kind, []).append(place)
        return stored

    @_util.forks.lazy
    def _classes(self) -> dict[LeafPath, str]:
        """Path -> class of stored containers that have a class, and no roles."""
        known = {place for _, _, place in self._places}
        wrappers = {above for place in known for above in _state.tree.prefixes(place)}
        return {
            path: _state.optax_containers.class_name(node)
            for keys, node in _state.tree.containers(self._structure)
            if (path := _state.tree.join(keys)) not in wrappers
            and not _state.optax_containers.is_plain(node)
            and not _state.optax_containers.is_gone(node.type)
            and next(_state.optax_containers.leaves(node), None) is not None
            and known.isdisjoint((path, *_state.tree.prefixes(path)))
        }

    @_util.forks.lazy
    def _seats(self) -> set[LeafPath]:
        """Paths of elements of tuples that may be a chain or several optimizers."""
        seats = {
            (known.optimizer, known.seat)
            for known in self._known.values()
            if known.seat
        }
        doubtful = {
            optimizer
            for optimizer in {optimizer for optimizer, _ in seats}
            if isinstance(
                node := _state.tree.node_at(self._structure, optimizer),
                _state.tree.Node,
            )
            and _state.optax_containers.may_be_several(node)
        }
        return {seat for optimizer, seat in seats if optimizer in doubtful}

    @_util.forks.lazy
    def _optimizers(self) -> set[LeafPath]:
        stored = {optimizer for optimizer, _, _ in self._places}
        wanted = {known.optimizer for known in self._known.values()}
        return stored | wanted | self._seats

    def _optimizer(self, place: LeafPath, optimizer: LeafPath) -> LeafPath:
        """Returns the path of the optimizer that contains the state at `place`."""
        for path in (place, *_state.tree.prefixes(place)):
            if path in self._optimizers:
                return path
        return optimizer

    @_util.forks.lazy
    def _unnamed(self) -> dict[frozenset[str], list[LeafPath]]:
        """Field names -> sorted paths of states without roles or a known class."""
        known = {place for _, _, place in self._places}
        children = self._children()
        unnamed = dict.fromkeys(
            path
            for path in children
            if path not in self._classes
            and known.isdisjoint((path, *_state.tree.prefixes(path)))
        )
        for keys, node in _state.tree.containers(self._structure):
            path = _state.tree.join(keys)
            if path in known and _state.optax_containers.is_gone(node.type):
                unnamed[path] = None
                children[path] = {str(key.name) for key in node.keys}
        return _by_fields({path: children[path] for path in unnamed})

    @_util.forks.lazy
    def _all_by_fields(self) -> dict[frozenset[str], list[LeafPath]]:
        return _by_fields(self._children())

    def _children(self) -> dict[LeafPath, set[str]]:
        """Returns the path of each container -> names of the direct children."""
        children: dict[LeafPath, set[str]] = {}
        for path in self._table:
            inner = path
            while inner:
                container, _, name = inner.rpartition("/")
                names = children.setdefault(container, set())
                if name in names:
                    break  # the containers around this container are done, too
                names.add(name)
                inner = container
        return children

    def _alike(self, kind: _Kind) -> list[LeafPath]:
        """Returns the states that fit `kind` by fields, as a class is not known."""
        by_fields = self._all_by_fields if kind.is_unnamed else self._unnamed
        places = by_fields.get(kind.fields, [])
        alike = _state.tree.beginning_with(_state.tree.inside(kind.optimizer), places)
        at = bisect.bisect_left(places, kind.optimizer)
        if kind.optimizer and kind.optimizer in places[at : at + 1]:
            alike.insert(0, kind.optimizer)
        found: list[LeafPath] = []
        for place in alike:
            # Parameters may have the names of the fields of their state.
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
        """Returns True if a field of a stored container is a leaf; None if empty."""
        path = _state.tree.inside(place) + field
        leaf = self._table.get(path)
        if leaf is not None and leaf.info.kind == "empty":
            return None
        return self._at(path) is not None

    # ---- matching transforms --------------------------------------------------------

    @_util.forks.lazy
    def _matches(self) -> dict[LeafPath, _Match]:
        """Path of each wanted transform -> the matching stored transforms."""
        kinds: dict[_Kind, list[_Transform]] = {}
        matches: dict[LeafPath, _Match] = {}
        for place, transform in self._wanted().items():
            known = transform.known
            if known.group in self._unchanged:
                matches[place] = _Match(place, (), False, (place,))
                continue
            optimizer = self._optimizer(place, known.optimizer)
            kind = _Kind(optimizer, known.state_class, _hyperparameter(place))
            if kind not in self._stored:
                kind = transform.kind_by_fields(optimizer, kind.hyperparameter)
            kinds.setdefault(kind, []).append(transform)
        for kind, transforms in kinds.items():
            stored = self._stored.get(kind) or self._alike(kind)
            self._match(kind.optimizer, transforms, stored, matches)
        self._refuse_moved(kinds, matches)
        return matches

    @_util.forks.lazy
    def _unchanged(self) -> set[LeafPath]:
        """Paths of the containers of optimizers with the same leaves on both sides."""
        groups: dict[LeafPath, list[LeafPath]] = {}
        for path, known in self._known.items():
            groups.setdefault(known.group, []).append(path)
        stored = sorted(
            path for path, leaf in self._table.items() if leaf.info.kind != "empty"
        )
        return {
            group
            for group, paths in groups.items()
            if len(paths)
            == len(_state.tree.beginning_with(_state.tree.inside(group), stored))
            and all(self._is_unchanged(path) for path in paths)
        }

    def _is_unchanged(self, path: LeafPath) -> bool:
        """Returns True if the stored leaf at a path may be of the same transform."""
        if (found := self._at(path)) is None:
            return False
        known, info = self._known[path], self._table[found].info
        if known.fields and (place := place_of_state(info)) is not None:
            return place == known.place and _class(info) == known.state_class
        return self._classes.get(known.place, known.state_class) == known.state_class

    def _refuse_moved(
        self,
        kinds: Mapping[_Kind, Sequence[_Transform]],
        matches: dict[LeafPath, _Match],
    ) -> None:
        """Marks transforms as ambiguous that may have moved within a chain.

        A tuple may be a chain or several optimizers, which match differently unless
        each element has as many transforms of a class as the stored element.
        """
        groups: dict[_Kind, list[tuple[LeafPath, _Transform]]] = {}
        for kind, transforms in kinds.items():
            if kind.optimizer not in self._seats:
                continue
            for transform in transforms:
                known = transform.known
                group = transform.kind_by_fields(known.optimizer, kind.hyperparameter)
                group = group._replace(state_class=known.state_class)
                groups.setdefault(group, []).append((kind.optimizer, transform))
        for group, members in groups.items():
            stored = self._stored_by_seat(group)
            wanted = collections.Counter(seat for seat, _ in members)
            if not stored or wanted == {seat: len(at) for seat, at in stored.items()}:
                continue
            places = list(itertools.chain.from_iterable(stored.values()))
            for _, transform in members:
                counters = self._with_moments(transform, places)
                matches[transform.known.place] = _Match(
                    None, places, True, counters * 2
                )

    def _stored_by_seat(self, group: _Kind) -> dict[LeafPath, list[LeafPath]]:
        """Returns the stored states of a class by element of the optimizer's tuple."""
        inside = _state.tree.inside(group.optimizer)
        seats = [seat for seat in sorted(self._seats) if seat.startswith(inside)]
        kinds = [
            _Kind(seat, group.state_class, group.hyperparameter)
            for seat in (group.optimizer, *seats)
        ]
        stored = {kind.optimizer: self._stored.get(kind, []) for kind in kinds}
        if not any(stored.values()):
            kinds = [
                group._replace(optimizer=kind.optimizer, state_class="")
                for kind in kinds
            ]
            stored = {kind.optimizer: self._alike(kind) for kind in kinds}
        return {seat: places for seat, places in stored.items() if places}

    def _wanted(self) -> dict[LeafPath, _Transform]:
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
        """Adds the matches of all wanted transforms of the same kind to `matches`.

        Transforms match in order if both sides have the same number and names. In
        branches, a leaf may come from any branch. All other cases are ambiguous.
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
                # A counter is the number of gradients in the moments beside it.
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
        """Returns stored states with a moment of a transform; all if it has none."""
        if not transform.moments:
            return list(places)
        return [place for place in places if self._has_moment(transform, place)]

    def _has_moment(self, transform: _Transform, place: LeafPath) -> bool:
        return any(
            self._leaf(place, tail, tail.partition("/")[0])
            for tail in transform.moments
        )


_Part: TypeAlias = tuple[int, str]
"""Index and name of a part of a path: `(-1, name)` or `(index, "")`."""


def _parts(optimizer: LeafPath, place: LeafPath) -> tuple[_Part, ...]:
    """Returns the parts of a path relative to the optimizer, as a sort key."""
    inner = _below(optimizer, place)
    parts: list[_Part] = []
    for name in inner.split("/") if inner else ():
        is_label = bool(parts) and parts[-1][1] == _BRANCHES
        is_index = name.isdecimal() and not is_label
        parts.append((int(name), "") if is_index else (-1, name))
    return tuple(parts)


def _names(places: Sequence[Sequence[_Part]]) -> list[tuple[str, ...]]:
    """Returns the names in the parts of each place, without the common prefix."""
    names = [tuple(name for _, name in parts if name) for parts in places]
    same = _count_equal(min(names), max(names)) if names else 0
    return [each[same:] for each in names]


def _are_branches(places: Sequence[Sequence[_Part]]) -> bool:
    """Returns True if sorted places are in different branches of the same states."""
    for one, other in itertools.pairwise(places):
        same = _count_equal(one, other)
        if same == 0 or same == len(one) or one[same - 1][1] != _BRANCHES:
            return False
    return True


def _count_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns how many items at the beginning of both are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _labels(parts: Sequence[_Part]) -> tuple[str, ...]:
    """Returns the names of the branches around a place."""
    return tuple(
        label
        for (_, name), (_, label) in itertools.pairwise(parts)
        if name == _BRANCHES
    )


def _by_fields(
    children: Mapping[LeafPath, set[str]],
) -> dict[frozenset[str], list[LeafPath]]:
    """Returns names of children -> sorted paths of the containers with these."""
    by_fields: dict[frozenset[str], list[LeafPath]] = {}
    for path in sorted(children):
        by_fields.setdefault(frozenset(children[path]), []).append(path)
    return by_fields


def _hyperparameter(place: LeafPath) -> str:
    """Returns the hyperparameter scheduled by the state at `place`; else empty."""
    _, found, name = f"/{place}".rpartition(f"/{_HYPERPARAMETERS}/")
    return name.partition("/")[0] if found else ""


def _class(info: LeafInfo) -> str:
    """Returns the class of the state around a leaf; empty if it is not recorded."""
    return info.role.state_class if info.role is not None else ""


def _below(place: LeafPath, path: LeafPath) -> LeafPath:
    return path.removeprefix(_state.tree.inside(place))


def _is_moment(tail: LeafPath, known: _state.optimizer_roles.LeafFacts) -> bool:
    return "/" in tail and known.field not in _state.optimizer_roles.NAMED_VALUES


def place_of_state(info: LeafInfo) -> LeafPath | None:
    """Returns the path of the state around a leaf; None for a leaf without a role."""
    role = info.role
    if role is None or not role.state_class or info.kind == "empty":
        return None
    return _state.tree.before(info.path, _tail(role))


def _tail(role: Role) -> LeafPath:
    """Returns the path of a leaf relative to the transform's state."""
    return f"{role.field}/{role.param}" if role.param else role.field
