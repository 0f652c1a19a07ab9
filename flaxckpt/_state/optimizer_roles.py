"""Roles of optimizer leaves: transform, field and parameter, independent of place."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from flaxckpt import _util
from flaxckpt._state import optax_containers, tree
from flaxckpt._state.leaf import Leaf, LeafTable, Role
from flaxckpt._types import LeafPath

Keys: TypeAlias = tuple[tree.Key, ...]


class LeafFacts(NamedTuple):
    """Facts about the leaves in a field of a transform's state.

    Attributes:
        state_class: Class of the innermost transform's state; empty if none is known,
            or if the state is a dict with the fields of an optax state.
        fields: All fields of the state.
        place: Path of the state.
        skip: Length of the start of a leaf's path that ends with the field.
        optimizer: Path of the whole optimizer's state.
        group: Path of the container that holds this optimizer and others beside it; the
            optimizer's own path if it is alone.
        seat: Path of the element of `optimizer` with the leaf, if `optimizer` may be a
            tuple of several optimizers; else empty.
    """

    state_class: str
    field: str
    fields: frozenset[str]
    place: LeafPath
    skip: int
    optimizer: LeafPath
    group: LeafPath
    seat: LeafPath = ""

    def role(self, path: LeafPath) -> Role:
        if not self.state_class:
            # Fields without a class help to match leaves, and are not recorded.
            skip = len(self.optimizer) + 1 if self.optimizer else 0
            return Role("", "", path[skip:], self.optimizer)
        return Role(self.state_class, self.field, path[self.skip :], self.optimizer)


NAMES = frozenset(("opt_state", "param_states", "optimizer", "opt"))
"""Usual names of optimizer states (optax, T5X, flax), if their classes are unknown."""

NAMED_VALUES = frozenset(("hyperparams", "measurements"))
"""Fields of optax states that hold named values instead of mirroring parameters."""

_COPY = re.compile("(ema|average|avg|target|teacher|shadow|swa|polyak)[^/]*/")
"""Path parts that mark a copy of the parameters, not a second network."""

_LONGEST = 64
"""An upper bound on the transforms in the chain of an optimizer."""


def with_roles(table: LeafTable, facts: Mapping[LeafPath, LeafFacts]) -> LeafTable:
    return {
        path: Leaf(
            dataclasses.replace(leaf.info, role=facts[path].role(path)), leaf.sources
        )
        if path in facts
        else leaf
        for path, leaf in table.items()
    }


def find_facts(
    structure: tree.Node | LeafPath,
    optimizer_states: Iterable[tuple[Keys, tree.Node | LeafPath]] = (),
) -> dict[LeafPath, LeafFacts]:
    """Returns the facts about all leaves of optimizer states, by leaf path.

    A state is that of an optax transform, a tuple of such, or any tree below a key
    `opt_state`. `optimizer_states` has those whose classes `structure` lacks.
    """
    return _Roles(structure).all(optimizer_states)


def find_optimizers(
    structure: tree.Node | LeafPath,
    optimizer_states: Iterable[tuple[Keys, tree.Node | LeafPath]] = (),
) -> set[LeafPath]:
    """Returns the paths of all optimizer states, also of those without leaves."""
    found = [*_Roles(structure).optimizers, *optimizer_states]
    return {tree.join(keys) for keys, _ in found}


def trusted_roles(
    structure: tree.Node | LeafPath, recorded: Mapping[LeafPath, Role]
) -> dict[LeafPath, Role | None]:
    """Corrects the recorded roles of a checkpoint's leaves by its containers.

    flaxckpt 0.1.0 recorded the parameters' own classes as states of transforms, and
    several optimizers in a tuple as one. Classes of containers are more reliable,
    except where they are lost. Returns the roles of leaves with wrong ones; None if
    unknown.
    """
    finder = _Roles(structure)
    known = finder.all(())
    corrected: dict[LeafPath, Role | None] = {}
    for path, role in recorded.items():
        facts = known.get(path)
        if facts is not None and facts.state_class:
            if (better := facts.role(path)) != role:
                corrected[path] = better
        elif role.state_class in finder.parameter_classes:
            corrected[path] = None if facts is None else facts.role(path)
    return corrected


class _MirroredParams(NamedTuple):
    """The parameters mirrored by a part of an optimizer, below possible `roots`.

    With `is_masked`, other parameters have no moments here.
    """

    roots: frozenset[LeafPath]
    params: frozenset[LeafPath]
    is_masked: bool

    def leaves(self) -> set[LeafPath]:
        return {root + param for root in self.roots for param in self.params}


class _Roles:
    """Finds the optimizers of a structure, and the states of transforms in them."""

    def __init__(self, structure: tree.Node | LeafPath) -> None:
        self.parameter_classes: set[str] = set()
        self._outside: list[LeafPath] = []
        self._types: set[str] = set()
        self.optimizers: list[tuple[Keys, tree.Node | LeafPath]] = []
        self._structure = structure
        self._found: dict[LeafPath, LeafFacts] = {}
        self._find_optimizers(structure, ())

    def all(
        self, optimizer_states: Iterable[tuple[Keys, tree.Node | LeafPath]]
    ) -> dict[LeafPath, LeafFacts]:
        """Returns the facts of all optimizer leaves; see `find_facts`."""
        for keys, node in self.optimizers:
            self._enter(node, keys, tree.join(keys))
        for keys, node in optimizer_states:
            path = tree.join(keys)
            prefix = f"{path}/" if keys else ""
            owner = LeafFacts("", "", frozenset(), "", _skip(keys), path, path)
            self._collect(node, keys, prefix, owner, may_be_state=True)
        return self._found

    # -- finding optimizers --

    def _find_optimizers(self, node: tree.Node | LeafPath, keys: Keys) -> None:
        if isinstance(node, str):
            self._outside.append(node)
            return
        if optax_containers.is_state_of_optax(node) or optax_containers.is_chain(node):
            self.optimizers.append((keys, node))
            return
        self._types.add(node.type)
        for key, child in zip(node.keys, node.children, strict=True):
            inner = keys if node.is_box else (*keys, key)
            if key.name == "opt_state":
                self.optimizers.append((inner, child))
            else:
                self._find_optimizers(child, inner)

    def _enter(self, node: tree.Node | LeafPath, keys: Keys, group: LeafPath) -> None:
        """Collects the leaves of an optimizer, or of several side by side."""
        path = tree.join(keys)
        owner = LeafFacts("", "", frozenset(), "", _skip(keys), path, group)
        count = "one" if isinstance(node, str) else self._count_optimizers(node, keys)
        if isinstance(node, str) or count == "one":
            self._collect(node, keys, "", owner, may_be_state=True)
            return
        for key, child in zip(node.keys, node.children, strict=True):
            inner = (*keys, key)
            if isinstance(child, str):
                self._found[child] = owner
            elif count == "several":
                self._enter(child, inner, group)
            else:
                seated = owner._replace(seat=tree.join(inner))
                self._collect(child, inner, "", seated, may_be_state=True)

    def _count_optimizers(
        self, node: tree.Node, keys: Keys
    ) -> Literal["one", "several", "either"]:
        """Returns the number of optimizers in `node`: one, several, or either.

        A chain is a tuple of states, or a dict (`named_chain`), and so are optimizers
        side by side. A tuple is a chain unless its elements have moments of different
        parameters; if these do not decide, it may be either.
        """
        by_key = {
            key: child
            for key, child in zip(node.keys, node.children, strict=True)
            if isinstance(child, tree.Node)
        }
        nodes = by_key.values()
        if len(nodes) < 2:
            return "one"
        if not optax_containers.is_plain(node):
            are_states = all(
                optax_containers.is_state_of_optax(n) or optax_containers.is_chain(n)
                for n in nodes
            )
            is_own = not node.type.startswith("optax")
            is_holder = are_states and is_own and len(nodes) == len(node.children)
            return "several" if is_holder else "one"
        if node.type == "list":
            return "several"  # optax creates no lists
        complete = [child for child in nodes if optax_containers.is_complete(child)]
        carriers = {
            key: child
            for key, child in by_key.items()
            if self._has_moments(child, may_be_state=True)
        }
        if (
            not carriers
            and node.type != "tuple"
            and not optax_containers.has_state_class(node)
        ):
            return self._count_without_classes(node)
        candidates = [
            n
            for k, n in by_key.items()
            if k in carriers or optax_containers.is_complete(n)
        ]
        if node.type != "tuple" and self._are_named_by_params(by_key, carriers, keys):
            return "several"
        if len(candidates) < 2:
            return "one"
        if node.type == "tuple" and not carriers:
            return "either" if len(complete) == len(node.children) else "one"
        if len(carriers) > _LONGEST:
            return "several"
        if node.type == "tuple":
            n = len(node.children)
            is_full, are_complete = len(candidates) == n, len(complete) == n
            return self._count_in_tuple(
                carriers, keys, n, is_full=is_full, are_complete=are_complete
            )
        classes = {child.type for child in carriers.values()}
        if len(carriers) > 1 and classes == {"tuple"}:
            return "several"
        beside = _prefix_beside(keys)
        mirrors = self._mirrors(carriers, keys)
        known = set[LeafPath]().union(*[mirror.roots for mirror in mirrors])
        if len(known) == 1 and (len(classes) != 1 or len(carriers) < 2):
            is_of_params = (
                bool(keys)
                and keys[-1].name == "opt_state"
                and not known.isdisjoint((f"{beside}params/", f"{beside}target/"))
            )
            return "one" if is_of_params or len(complete) < 2 else "several"
        return "several"  # distinguished by their names

    def _are_named_by_params(
        self,
        children: Iterable[tree.Key],
        carriers: Mapping[tree.Key, tree.Node],
        keys: Keys,
    ) -> bool:
        """Returns True if optimizers have the names of the parameters they update."""
        names = [f"{tree.join((key,))}/" for key in children]
        parents: set[LeafPath] | None = None
        for key, mirror in zip(carriers, self._mirrors(carriers, keys), strict=True):
            name = f"{tree.join((key,))}/"
            own = {
                root.removesuffix(name)
                for root in mirror.roots
                if f"/{root}".endswith(f"/{name}")
            }
            parents = own if parents is None else parents & own
        return any(
            all(
                tree.beginning_with(parent + name, self._sorted_outside)
                for name in names
            )
            for parent in parents or ()
        )

    def _count_without_classes(self, node: tree.Node) -> Literal["one", "several"]:
        """Counts the optimizers in a dict without states of known classes."""
        if self._is_unnamed_state(node) or optax_containers.has_indices(node):
            return "one"
        nodes = [child for child in node.children if isinstance(child, tree.Node)]
        holders = [child for child in nodes if self._has_unnamed_state(child)]
        return "several" if len(holders) > 1 else "one"

    def _count_in_tuple(
        self,
        carriers: Mapping[tree.Key, tree.Node],
        keys: Keys,
        n_elements: int,
        *,
        is_full: bool,
        are_complete: bool,
    ) -> Literal["one", "several", "either"]:
        """Counts the optimizers in a tuple, by its elements with moments.

        The tuple `is_full` if each element has moments or is a complete optimizer.
        """
        beside = _prefix_beside(keys)
        mirrors = self._mirrors(carriers, keys)
        pairs = list(itertools.combinations(mirrors, 2))
        if any(self._are_apart(one, other) for one, other in pairs):
            return "several"
        roots = set[LeafPath]().union(*[mirror.roots for mirror in mirrors])
        params = f"{beside}params/"
        are_branches = all(r.startswith(params) and r != params for r in roots)
        if is_full and roots and are_branches and len(roots) == n_elements:
            return "several"  # one for each of several equal networks
        are_groups = any(
            one.is_masked and other.is_masked and one.params.isdisjoint(other.params)
            for one, other in pairs
        )
        if not are_complete or are_groups:
            return "one"
        if len(roots) == 1:
            [root] = roots
            if root in (params, f"{beside}target/") or not any(
                not path.startswith(root)
                and "/" in path[len(beside) :]
                and not _COPY.search(path, len(beside))
                for path in tree.beginning_with(beside, self._sorted_outside)
            ):
                return "one"
        return "either"

    def _are_apart(self, one: _MirroredParams, other: _MirroredParams) -> bool:
        """Returns True if two states certainly have moments of different parameters."""
        is_masked = one.is_masked or other.is_masked
        if not one.roots and not other.roots and not self._outside:
            return not is_masked and one.params.isdisjoint(other.params)
        if not one.roots or not other.roots:
            return False
        if not is_masked:
            return one.leaves().isdisjoint(other.leaves())
        return not any(
            a.startswith(b) or b.startswith(a) for a in one.roots for b in other.roots
        )

    def _has_moments(self, node: tree.Node, *, may_be_state: bool) -> bool:
        is_transform = self._is_transform(node, may_be_state)
        for key, child in zip(node.keys, node.children, strict=True):
            if isinstance(child, str):
                continue
            if is_transform and key.name in NAMED_VALUES:
                continue
            inner = optax_containers.holds_states(key) if is_transform else may_be_state
            if self._has_moments(child, may_be_state=inner):
                return True
            if (
                is_transform
                and not inner
                and next(optax_containers.leaves(child), None) is not None
            ):
                return True
        return False

    def _mirrors(
        self, carriers: Mapping[tree.Key, tree.Node], keys: Keys
    ) -> list[_MirroredParams]:
        """Returns the parameters of each element with moments of a container."""
        return [
            self._mirror(child, (*keys, key), _prefix_beside(keys))
            for key, child in carriers.items()
        ]

    def _mirror(self, node: tree.Node, keys: Keys, beside: LeafPath) -> _MirroredParams:
        """Returns the parameters mirrored by the moments in an optimizer or a state.

        Parameters elsewhere than `beside` it count only if none match there.
        """
        part = _Roles("")
        part._types = self._types
        owner = LeafFacts("", "", frozenset(), "", 0, "", "")
        part._collect(node, keys, "", owner, may_be_state=True)
        by_field: dict[tuple[LeafPath, str], list[LeafPath]] = {}
        for path, known in part._found.items():
            param = path[known.skip :]
            if known.state_class and param and known.field not in NAMED_VALUES:
                by_field.setdefault((known.place, known.field), []).append(param)
        is_masked = optax_containers.is_masked(node)
        for params in by_field.values():
            if roots := self._roots(params, beside):
                # A moving average has the same paths as the parameters.
                originals = {
                    root for root in roots if not _COPY.search(root, len(beside))
                }
                return _MirroredParams(
                    frozenset(originals or roots), frozenset(params), is_masked
                )
        every = itertools.chain.from_iterable(by_field.values())
        return _MirroredParams(frozenset(), frozenset(every), is_masked)

    def _roots(self, params: Sequence[LeafPath], beside: LeafPath) -> set[LeafPath]:
        """Returns the prefixes of leaves outside that have all `params`.

        Those that begin with `beside` are returned alone.
        """
        outside = self._outside_set

        def have_all(roots: Iterable[LeafPath]) -> set[LeafPath]:
            return {r for r in roots if all(r + p in outside for p in params)}

        roots = self._roots_by_end.get(params[0], ())
        near = have_all(tree.beginning_with(beside, roots))
        return near or have_all(roots)

    @_util.forks.lazy
    def _outside_set(self) -> frozenset[LeafPath]:
        return frozenset(self._outside)

    @_util.forks.lazy
    def _sorted_outside(self) -> list[LeafPath]:
        return sorted(self._outside)

    @_util.forks.lazy
    def _roots_by_end(self) -> dict[LeafPath, list[LeafPath]]:
        """End of each leaf outside of optimizers -> sorted prefixes of the leaves."""
        ends = [
            (path[: len(path) - len(end)], end)
            for path in self._outside
            for end in tree.suffixes(path)
        ]
        by_end: dict[LeafPath, list[LeafPath]] = {}
        for root, end in sorted(ends):
            by_end.setdefault(end, []).append(root)
        return by_end

    # -- finding the states of transforms --

    def _collect(
        self,
        node: tree.Node | LeafPath,
        keys: Keys,
        prefix: LeafPath,
        owner: LeafFacts,
        *,
        may_be_state: bool,
    ) -> None:
        """Adds the facts about the leaves of a container or leaf in an optimizer.

        `prefix` is missing at the start of its paths; `owner` has the facts about its
        leaves if it is no state; `may_be_state` allows a state of any class.
        """
        if isinstance(node, str):
            self._found[prefix + node] = owner
            return
        is_transform = self._is_transform(node, may_be_state)
        is_unnamed = not is_transform and may_be_state and self._is_unnamed_state(node)
        if not is_transform and not optax_containers.is_plain(node):
            may_be_state = False
            if not node.is_box:
                self.parameter_classes.add(optax_containers.class_name(node))
        place = tree.join(keys) if is_transform or is_unnamed else ""
        fields = frozenset([str(key.name) for key in node.keys])
        for key, child in zip(node.keys, node.children, strict=True):
            inner = keys if node.is_box else (*keys, key)
            child_owner, inner_may_be_state = owner, may_be_state
            if is_transform or is_unnamed:
                child_owner = LeafFacts(
                    optax_containers.class_name(node) if is_transform else "",
                    str(key.name),
                    fields,
                    place,
                    _skip(inner),
                    owner.optimizer,
                    owner.group,
                    owner.seat,
                )
                inner_may_be_state = optax_containers.holds_states(key)
            if isinstance(child, str):
                self._found[prefix + child] = child_owner
            else:
                self._collect(
                    child, inner, prefix, child_owner, may_be_state=inner_may_be_state
                )

    def _is_transform(self, node: tree.Node, may_be_state: bool) -> bool:
        """Returns True for a transform's state, False for a container of parameters.

        States of other libraries are classes with fields, at a place of states. A field
        such as `mu` contains no states, whatever the class of the parameters.
        """
        if optax_containers.is_state_of_optax(node):
            return True
        return (
            may_be_state
            and not optax_containers.is_plain(node)
            and node.type not in self._types
        )

    def _is_unnamed_state(self, node: tree.Node) -> bool:
        """Returns True for a dict with the fields of a state, as `nnx.state` makes."""
        if (
            node.is_box
            or node.type in ("tuple", "list")
            or node.leaf_type is not None
            or not optax_containers.is_plain(node)
        ):
            return False
        fields = frozenset([str(key.name) for key in node.keys])
        return fields in self._fields_of_optax and not any(
            isinstance(child, tree.Node)
            and (
                optax_containers.is_state_of_optax(child)
                or optax_containers.is_chain(child)
            )
            for child in node.children
        )

    def _has_unnamed_state(self, node: tree.Node) -> bool:
        return self._is_unnamed_state(node) or any(
            isinstance(child, tree.Node) and self._has_unnamed_state(child)
            for child in node.children
        )

    @_util.forks.lazy
    def _fields_of_optax(self) -> frozenset[frozenset[str]]:
        loaded = list(sys.modules)  # other threads may import
        return optax_containers.fields_of_states(
            tuple(sorted(name for name in loaded if name.startswith("optax")))
        )


def _prefix_beside(keys: Keys) -> LeafPath:
    return tree.join(keys[:-1]) + "/" if keys[:-1] else ""


def _skip(keys: Keys) -> int:
    return len(tree.join(keys)) + 1 if keys else 0
