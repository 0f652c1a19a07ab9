"""What all transforms share: leaves that match, their mirrors, and the new table.

A *mirror* of a parameter is a leaf of the optimizer that has the same place in its own
tree: a moment. Whatever happens to a parameter happens to its mirrors, slot by slot:
`opt_state/0/mu/…` is one slot, `opt_state/0/nu/…` another.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flaxckpt import _tree, errors
from flaxckpt._info import Leaf, LeafInfo, LeafTable
from flaxckpt._types import LeafPath
from flaxckpt.transforms._patterns import no_match

Transform: TypeAlias = Callable[[LeafTable], LeafTable]
"""Leaf table in, leaf table out."""

_ROOTS = frozenset(("params", "target"))
"""What containers of all parameters are called, if they are not the outermost."""

_OPTIMIZERS = frozenset(("opt_state", "param_states"))
"""What optimizer states are called where no roles are recorded (Orbax, T5X, flax)."""


class TableTransform(abc.ABC):
    """A transform that can be written down, and perhaps undone."""

    @abc.abstractmethod
    def __call__(self, table: LeafTable) -> LeafTable:
        """The new table."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """The call that makes it, for the record."""

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        """This transform for what a restore asks for; None if it asks for all."""
        return self

    def inverse(self) -> Transform:
        """What undoes it.

        Raises:
            OptionError: Nothing does.
        """
        raise errors.OptionError(
            f"{self} cannot be inverted: it loses what was there before"
        )


def apply(
    transforms: Sequence[Transform],
    table: LeafTable,
    wanted: LeafTable | None = None,
) -> LeafTable:
    """The table after all `transforms`, one after another.

    Args:
        transforms: What to do.
        table: Of a state, or of a checkpoint.
        wanted: When restoring, the table of the state to fill.
    """
    for transform in transforms:
        if isinstance(transform, TableTransform):
            transform = transform.with_wanted(wanted)
        table = transform(table)
    return _with_containers(table) if transforms else table


def _with_containers(table: LeafTable) -> LeafTable:
    """The table less empty containers that are not empty any more.

    Raises:
        OptionError: A leaf stands where others have a container.
    """
    containers = {beginning for path in table for beginning in _beginnings(path)}
    both = [path for path in table if path and path in containers]
    faults = [path for path in both if table[path].info.kind != "empty"]
    if faults:
        inner = {p: next(q for q in table if q.startswith(f"{p}/")) for p in faults}
        raise errors.OptionError(
            f"{len(faults)} leaves would stand where others have a container:\n"
            + errors.rows(f"{path}: beside {other}" for path, other in inner.items())
            + "\nRename or drop one of each."
        )
    filled = set(both)
    return {path: leaf for path, leaf in table.items() if path not in filled}


def describe(transforms: Iterable[Transform]) -> tuple[str, ...]:
    """The transforms as text, for the record."""
    return tuple(
        str(transform)
        if isinstance(transform, TableTransform)
        else getattr(transform, "__qualname__", type(transform).__qualname__)
        for transform in transforms
    )


def call(name: str, *args: Any, **options: Any) -> str:
    """A call as text; options that are None are left out."""
    shown = [repr(arg) for arg in args]
    shown += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(shown)})"


# ---- matching -----------------------------------------------------------------------


def matches(
    pattern: re.Pattern[str], table: Iterable[LeafPath]
) -> dict[LeafPath, re.Match[str]]:
    """The leaf paths that `pattern` matches as a whole.

    Raises:
        OptionError: There are none.
    """
    paths = list(table)
    found = {path: m for path in paths if (m := pattern.fullmatch(path))}
    if not found:
        raise no_match(pattern.pattern, paths)
    return found


class Slot(NamedTuple):
    """Where the mirrors of parameters are: between a head and a tail.

    Attributes:
        head: What comes before the parameter's path, `opt_state/0/mu`.
        tail: What comes after it: Adafactor's `v_row` in T5X, mostly nothing.
    """

    head: str
    tail: str

    def path(self, param: LeafPath) -> LeafPath:
        """The mirror of what is called `param` below the root of all parameters."""
        return "/".join(part for part in (self.head, param, self.tail) if part)


class Mirror(NamedTuple):
    """A leaf that mirrors a parameter.

    Attributes:
        param: The parameter's leaf path.
        name: The same below the root of all parameters.
        slot: Where the mirror is.
    """

    param: LeafPath
    name: LeafPath
    slot: Slot

    def renamed(self, param: LeafPath) -> LeafPath:
        """The new name if the parameter gets the path `param`."""
        root = self.param.removesuffix(self.name)
        return param.removeprefix(root) if param.startswith(root) else below_root(param)


def mirrors(table: LeafTable) -> dict[LeafPath, Mirror]:
    """The mirrors in a table: leaf path -> what it mirrors.

    Roles tell them, where they are recorded. Elsewhere it is a leaf of an optimizer's
    state whose path ends as that of a parameter, less its root.
    """
    params = _Params()
    others = []
    for path, leaf in table.items():
        if leaf.info.role is not None or not _OPTIMIZERS.isdisjoint(path.split("/")):
            others.append(path)
        elif leaf.info.kind != "empty":
            params.add(path)
    found = {}
    for path in others:
        role = table[path].info.role
        known = _by_path(path, params) if role is None else _by_role(path, role.param)
        if known is not None and (param := params.nearest(known[0], path)):
            found[path] = Mirror(param, *known)
    return found


class _Params:
    """Parameters by their names below a root, of which there may be several."""

    def __init__(self) -> None:
        self._names: set[LeafPath] = set()
        self._beside: dict[tuple[LeafPath, str], LeafPath | None] = {}

    def __contains__(self, name: LeafPath) -> bool:
        return name in self._names

    def add(self, path: LeafPath) -> None:
        for name in _names(path):
            self._names.add(name)
            for beginning in _beginnings(path):
                key = name, beginning
                self._beside[key] = None if key in self._beside else path

    def nearest(self, name: LeafPath, path: LeafPath) -> LeafPath | None:
        """That parameter of this name which shares the longest beginning with `path`.

        None if several do. A discriminator's moments are beside its own parameters.
        """
        for beginning in _beginnings(path):
            if (name, beginning) in self._beside:
                return self._beside[name, beginning]
        return None


def _beginnings(path: LeafPath) -> Iterator[str]:
    """`a/b`, `a` and the empty one, of the path `a/b/c`."""
    end = path.rfind("/")
    while end >= 0:
        yield path[:end]
        end = path.rfind("/", 0, end)
    yield ""


def _names(path: LeafPath) -> set[LeafPath]:
    """What a parameter may be called below the root of all parameters."""
    return {path.partition("/")[2] or path, below_root(path)}


def below_root(path: LeafPath) -> LeafPath:
    """A path below the root of all parameters: `params`, or whatever comes first."""
    parts = path.split("/")
    for i, part in enumerate(parts[:3]):
        if part in _ROOTS and i + 1 < len(parts):
            return "/".join(parts[i + 1 :])
    return "/".join(parts[1:]) or path


def _by_role(path: LeafPath, param: LeafPath) -> tuple[LeafPath, Slot] | None:
    bare = path.removesuffix("/value")
    if not param or not bare.endswith(f"/{param}"):
        return None
    return param, Slot(bare[: -len(param) - 1], path[len(bare) + 1 :])


def _by_path(path: LeafPath, params: _Params) -> tuple[LeafPath, Slot] | None:
    parts = path.split("/")
    first = next(i for i, part in enumerate(parts) if part in _OPTIMIZERS) + 1
    # T5X's own optimizers have their fields below the parameter.
    ends = (len(parts), len(parts) - 1) if "param_states" in parts else (len(parts),)
    for start in range(first, len(parts)):
        for end in ends:
            name = "/".join(parts[start:end])
            if name and name in params:
                head, tail = "/".join(parts[:start]), "/".join(parts[end:])
                return name, Slot(head, tail)
    return None


# ---- the new table ------------------------------------------------------------------


class Row(NamedTuple):
    """A leaf of the new table.

    Attributes:
        at: Leaf whose place in the order it takes.
        path: Its path.
        leaf: The leaf; its info may still have the old path.
    """

    at: LeafPath
    path: LeafPath
    leaf: Leaf


Act: TypeAlias = Callable[[dict[LeafPath, Leaf], bool], Iterable[Row]]
"""From leaves by path, and whether they are mirrors, to what takes their place."""


def replace(table: LeafTable, chosen: Iterable[LeafPath], act: Act) -> LeafTable:
    """The table with `chosen` leaves, and their mirrors, replaced.

    Args:
        table: Old table.
        chosen: What was asked for.
        act: Is called once for the chosen leaves, and once for each slot with their
            mirrors, under the paths of the parameters that they mirror.

    Raises:
        OptionError: Two leaves get one path.
    """
    members: dict[Slot | None, dict[LeafPath, LeafPath]] = {
        None: {path: path for path in chosen}
    }
    direct = members[None]
    mirrored = mirrors(table)
    for path, mirror in mirrored.items():
        if path not in direct and mirror.param in direct:
            members.setdefault(mirror.slot, {})[mirror.param] = path
    rows: dict[LeafPath, list[Row]] = {}
    gone: set[LeafPath] = set()
    for slot, paths in members.items():
        leaves = {param: table[path] for param, path in paths.items()}
        gone.update(paths.values())
        for at, new, leaf in act(leaves, slot is not None):
            where = paths[at]
            if slot is not None:
                name = mirrored[where].renamed(new)
                leaf = with_role_of(leaf, name)
                new = slot.path(name)
            rows.setdefault(where, []).append(Row(where, new, leaf))
    return _assembled(table, gone, rows)


def with_role_of(leaf: Leaf, param: LeafPath) -> Leaf:
    """A moment of another parameter."""
    role = leaf.info.role
    if role is None or role.param == param:
        return leaf
    info = dataclasses.replace(leaf.info, role=role._replace(param=param))
    return dataclasses.replace(leaf, info=info)


def _assembled(
    table: LeafTable, gone: set[LeafPath], rows: Mapping[LeafPath, Sequence[Row]]
) -> LeafTable:
    new: LeafTable = {}
    origin: dict[LeafPath, LeafPath] = {}
    faults: dict[LeafPath, list[LeafPath]] = {}

    def add(path: LeafPath, leaf: Leaf, at: LeafPath) -> None:
        if path in new:
            faults.setdefault(path, [origin[path]]).append(at)
        new[path] = leaf
        origin[path] = at

    for path, leaf in table.items():
        if path not in gone:
            add(path, leaf, path)
        for row in rows.get(path, ()):
            add(row.path, moved(row.leaf, row.path), path)
    if faults:
        raise errors.OptionError(
            f"{len(faults)} leaf paths would be taken twice:\n"
            + errors.rows(
                f"{path}: by {', '.join(all_)}" for path, all_ in faults.items()
            )
            + "\nDrop one of each first, or rename both at once: rename({…: …})."
        )
    return new


def moved(leaf: Leaf, path: LeafPath) -> Leaf:
    """`leaf` under another path."""
    info = leaf.info
    if info.path == path:
        return leaf
    role = info.role
    if role is not None:
        optimizer = _optimizer(role.optimizer, info.path, path)
        role = None if optimizer is None else role._replace(optimizer=optimizer)
    renamed = dataclasses.replace(info, path=path, keys=keys(path, info), role=role)
    return dataclasses.replace(leaf, info=renamed)


def _optimizer(optimizer: LeafPath, old: LeafPath, new: LeafPath) -> LeafPath | None:
    """Where an optimizer is, once one of its leaves is moved; None if nobody knows."""
    if new.startswith(f"{optimizer}/"):
        return optimizer
    inner = old.removeprefix(f"{optimizer}/") if optimizer else old
    if new == inner:
        return ""
    return new.removesuffix(f"/{inner}") if new.endswith(f"/{inner}") else None


def keys(path: LeafPath, info: LeafInfo) -> tuple[_tree.Key, ...]:
    """The keys of a new path; what it shares with the old one keeps its kind."""
    names = [_unescape(part) for part in path.split("/")]
    old = info.keys
    leading = 0
    while leading < min(len(names), len(old)) and _is(names[leading], old[leading]):
        leading += 1
    trailing = 0
    while trailing < min(len(names), len(old)) - leading and _is(
        names[-1 - trailing], old[-1 - trailing]
    ):
        trailing += 1
    middle = names[leading : len(names) - trailing]
    return (
        *old[:leading],
        *(_tree.Key(name, "key") for name in middle),
        *(old[len(old) - trailing :] if trailing else ()),
    )


def _is(name: str, key: _tree.Key) -> bool:
    return str(key.name) == name


def _unescape(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")
