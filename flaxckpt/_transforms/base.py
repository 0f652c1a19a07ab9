"""The base class of transforms, and the construction of new leaf tables."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flaxckpt import _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms import function_names
from flaxckpt._transforms.patterns import no_match
from flaxckpt._types import LeafPath

Transform: TypeAlias = Callable[[LeafTable], LeafTable]
"""Leaf table in, leaf table out."""


class TableTransform(abc.ABC):
    """A transform with a recorded description and, for most, an inverse."""

    @abc.abstractmethod
    def __call__(self, table: LeafTable) -> LeafTable:
        """Returns the new table."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Returns the call that creates the transform, for the record."""

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        """Returns this transform for restoring `wanted`, or all leaves if None."""
        return self

    def on_restore(self) -> Transform | None:
        """Returns the inverse for a run's own saves, if one is needed.

        Raises OptionError if the transform has no inverse.
        """
        return self.inverse()

    def inverse(self) -> Transform:
        """Returns the inverse transform; raises OptionError if there is none."""
        raise errors.OptionError(f"{self} cannot be inverted: it loses information")


def apply(
    transforms: Sequence[Transform], table: LeafTable, wanted: LeafTable | None = None
) -> LeafTable:
    """Applies `transforms` to a table in order; on restore, to fill `wanted`."""
    for transform in transforms:
        new_table = _with_containers(_apply_one(transform, table, wanted))
        table = _with_name(transform, new_table, table)
    return table


def _with_name(transform: Transform, new: LeafTable, old: LeafTable) -> LeafTable:
    """Returns the table `new` with the transform's name in the leaves it changed."""
    [call] = describe([transform])
    name = call.partition("(")[0].rpartition(".")[2]
    for path, leaf in new.items():
        if not _is_same(leaf, old.get(path)):
            chain = (*leaf.transforms, name)
            new[path] = dataclasses.replace(leaf, transforms=chain)
    return new


def _is_same(leaf: Leaf, old: Leaf | None) -> bool:
    if leaf is old or old is None:
        return leaf is old
    return (
        leaf.fn is old.fn
        and len(leaf.sources) == len(old.sources)
        and all(map(operator.is_, leaf.sources, old.sources))
        and leaf.info == old.info
    )


def _apply_one(
    transform: Transform, table: LeafTable, wanted: LeafTable | None
) -> LeafTable:
    if isinstance(transform, TableTransform):
        transform = transform.with_wanted(wanted)
    [name] = describe([transform])
    try:
        new_table = transform(dict(table))
    except errors.CheckpointError:
        raise
    except Exception as error:
        raise errors.OptionError(
            f"{name[:200]} failed: {type(error).__name__}: {errors.one_line(error)}"
        ) from error
    if not _is_table(new_table):
        raise errors.OptionError(
            f"{name[:200]} must return a leaf table, path -> Leaf of that path,"
            f" got {str(new_table)[:80]}"
        )
    return new_table


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(leaf, Leaf) and leaf.info.path == path
        for path, leaf in value.items()
    )


def check(
    transforms: Iterable[Transform], option: str = "transforms"
) -> tuple[Transform, ...]:
    """Returns the argument `option` of a user as a tuple of transforms, checked."""
    if callable(transforms) or not _util.arguments.is_list(transforms):
        raise errors.OptionError(
            f"{option} must be a list of transforms, got {_shown(transforms)}:"
            f" write {option}=[rename('old/(.*)', 'new/\\1')]"
        )
    listed = tuple(transforms)
    for transform in listed:
        if inspect.isclass(transform) or not callable(transform):
            raise errors.OptionError(
                f"{option} must be a list of transforms, such as"
                f" drop('opt_state/.*'), but contains {_shown(transform)}"
            )
        module = getattr(transform, "__module__", None) or ""
        if inspect.isfunction(transform) and module.startswith(_PACKAGE):
            raise errors.OptionError(
                f"{option} contains the function {transform.__name__}: call it, as in"
                f" {option}=[{transform.__name__}(…)]"
            )
    return listed


_PACKAGE = __name__.rpartition(".")[0]


def _shown(transform: object) -> str:
    is_ours = isinstance(transform, TableTransform)
    return f"{transform!s:.80}" if is_ours else _util.arguments.describe(transform)


def _with_containers(table: LeafTable) -> LeafTable:
    """Returns the table without the empty containers that now have leaves."""
    containers = {
        beginning for path in table for beginning in _state.tree.prefixes(path)
    }
    both = [path for path in table if path and path in containers]
    faults = [path for path in both if table[path].info.kind != "empty"]
    if faults:
        inner = {p: next(q for q in table if q.startswith(f"{p}/")) for p in faults}
        raise errors.OptionError(
            f"{_util.humanize.count(len(faults), 'leaf is', 'leaves are')} also"
            " containers of other leaves:\n"
            + errors.rows(f"{path}: contains {other}" for path, other in inner.items())
            + "\nRename or drop one of each."
        )
    filled = set(both)
    return {path: leaf for path, leaf in table.items() if path not in filled}


def invert_for_restore(transforms: Sequence[Transform]) -> list[Transform] | None:
    """Returns the inverses for a run that restores its own saves, or None."""
    try:
        return undo(transforms, on_restore=True)
    except errors.OptionError:
        return None


def not_restored(transforms: Sequence[Transform], table: LeafTable) -> list[LeafPath]:
    """Lists the leaves that a run cannot restore from its own saves.

    If one of the transforms has no inverse, none is undone at a restore.
    """
    undo = invert_for_restore(transforms)
    before = _trace(table)
    if undo is None:
        back = _apply_some(transforms, before)
    else:  # as in a restore into the state
        back = apply(undo, apply(transforms, before), before)
    return [
        path
        for path, leaf in before.items()
        if leaf.info.kind != "empty"
        and not (path in back and _is_alike(leaf, back[path]))
    ]


def _is_alike(leaf: Leaf, other: Leaf) -> bool:
    is_same_form = leaf.info.shape == other.info.shape
    return is_same_form and set(leaf.sources) <= set(other.sources)


def changed_in_place(
    transforms: Sequence[Transform], table: LeafTable
) -> list[LeafPath]:
    """Lists the leaves with new values at the same paths, in the same shapes.

    These do not show whether the transforms were applied or undone. Transforms that do
    not apply to `table` are skipped.
    """
    before = _trace(table)
    return [
        path
        for path, leaf in _apply_some(transforms, before).items()
        if leaf.info.kind != "empty"
        and path in before
        and leaf.info.shape == before[path].info.shape
        and (leaf.fn is not None or leaf.sources != before[path].sources)
    ]


_SHOWN_BY_PATHS = frozenset(
    {"assign", "cast", "copy", "drop", "fuse", "grow", "keep", "pad", "rename", "slice"}
    | {"split", "stack", "tie", "unstack", "untie", "use_orbax_names"}
)
"""Transforms of which paths or shapes tell whether they were undone, or no matter."""


def may_change_in_place(descriptions: Iterable[str]) -> list[str]:
    """Returns the descriptions of transforms that do not show in paths and shapes."""
    return [
        each for each in descriptions if each.partition("(")[0] not in _SHOWN_BY_PATHS
    ]


def _apply_some(transforms: Sequence[Transform], table: LeafTable) -> LeafTable:
    """Applies the transforms that apply to a table without values."""
    for transform in transforms:
        with contextlib.suppress(errors.OptionError):
            table = apply([transform], table)
    return table


def _trace(table: LeafTable) -> LeafTable:
    return {
        path: leaf
        if leaf.info.kind == "empty"
        else dataclasses.replace(leaf, sources=(path,))
        for path, leaf in table.items()
    }


def describe(transforms: Iterable[Transform]) -> tuple[str, ...]:
    return tuple(
        str(transform)
        if isinstance(transform, TableTransform)
        else function_names.describe(transform)
        for transform in transforms
    )


def is_described(recorded: Sequence[str], transforms: Sequence[Transform]) -> bool:
    """Returns True if a record names these transforms, also one of flaxckpt 0.1.0."""
    described = describe(transforms)
    return len(recorded) == len(described) and all(
        map(function_names.is_described, recorded, described)
    )


def call(name: str, *args: Any, **options: Any) -> str:
    """Formats a call; options that are None are left out."""
    shown = [repr(arg) for arg in args]
    shown += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(shown)})"


# ---- matching -----------------------------------------------------------------------


def matches(
    pattern: re.Pattern[str], table: Iterable[LeafPath]
) -> dict[LeafPath, re.Match[str]]:
    """Returns the leaf paths that `pattern` matches as a whole, at least one."""
    paths = list(table)
    matching = {path: m for path in paths if (m := pattern.fullmatch(path))}
    if not matching:
        raise no_match(pattern.pattern, paths)
    return matching


def match_arrays(
    pattern: re.Pattern[str], table: LeafTable, what: str
) -> dict[LeafPath, re.Match[str]]:
    """Returns the matching leaves with values; raises OptionError, too for strings."""
    chosen = {
        path: match
        for path, match in matches(pattern, table).items()
        if table[path].info.kind != "empty"
    }
    strings = [path for path in chosen if table[path].info.kind == "string"]
    if strings:
        raise errors.OptionError(
            f"{what} works on arrays, but these leaves are strings:"
            f" {errors.one_or_rows(strings)}\nChoose a pattern that excludes them"
        )
    return chosen


# ---- the new table ------------------------------------------------------------------


class NewLeaf(NamedTuple):
    """A leaf in the place of the leaf `at`; its info may still have the old path."""

    at: LeafPath
    path: LeafPath
    leaf: Leaf


def assemble(
    table: LeafTable, gone: set[LeafPath], rows: Mapping[LeafPath, Sequence[NewLeaf]]
) -> LeafTable:
    """Returns the table without `gone`, and with the new leaves in place of old ones.

    Raises OptionError if two leaves get the same path, or paths are invalid.
    """
    made = itertools.chain.from_iterable(rows.values())
    check_paths(row.path for row in made if row.path != row.leaf.info.path)
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
            # A new object, even at the old path: `untouched` finds the others.
            add(row.path, dataclasses.replace(move(row.leaf, row.path)), path)
    if faults:
        raise errors.OptionError(
            f"{_util.humanize.count(len(faults), 'leaf path')} would be used twice:\n"
            + errors.rows(
                f"{path}: by {', '.join(all_)}" for path, all_ in faults.items()
            )
            + "\nDrop one of each first, or rename both at once: rename({…: …})."
        )
    return new


def untouched(new: LeafTable, old: LeafTable) -> list[LeafPath]:
    """Lists the leaves that no transform between two tables has chosen."""
    return [path for path, leaf in new.items() if leaf is old.get(path)]


def move(leaf: Leaf, path: LeafPath) -> Leaf:
    info = leaf.info
    if info.path == path:
        return leaf
    role = info.role
    if role is not None:
        optimizer = _moved_optimizer(role.optimizer, info.path, path)
        # A moment of an unknown parameter.
        is_lost = optimizer is None or (
            role.param and _state.tree.before(path, role.param) is None
        )
        role = None if is_lost else role._replace(optimizer=optimizer or "")
    renamed = dataclasses.replace(info, path=path, keys=keys(path, info), role=role)
    return dataclasses.replace(leaf, info=renamed)


def _moved_optimizer(
    optimizer: LeafPath, old: LeafPath, new: LeafPath
) -> LeafPath | None:
    """Returns the path of an optimizer after a move of a leaf; None if unknown."""
    if new.startswith(f"{optimizer}/"):
        return optimizer
    inner = old.removeprefix(f"{optimizer}/") if optimizer else old
    if new == inner:
        return ""
    return new.removesuffix(f"/{inner}") if new.endswith(f"/{inner}") else None


def check_paths(paths: Iterable[LeafPath]) -> None:
    """Raises OptionError if new leaf paths are invalid; names all."""
    invalid = [repr(path) for path in paths if not _is_leaf_path(path)]
    if invalid:
        raise errors.OptionError(
            f"{_util.humanize.count(len(invalid), 'new name')} cannot be a leaf path:\n"
            + errors.rows(invalid)
            + "\nParts of a path may not be empty; write % as %25."
        )


def _is_leaf_path(path: LeafPath) -> bool:
    names = _state.tree.split(path)
    keys = [_state.tree.Key(name, "key") for name in names]
    return "" not in names and _state.tree.join(keys) == path


def keys(path: LeafPath, info: LeafInfo) -> tuple[_state.tree.Key, ...]:
    """Returns the keys of a new path; keys shared with the old path keep their kind."""
    names = _state.tree.split(path)
    old = info.keys
    old_names = [str(key.name) for key in old]
    most = min(len(names), len(old))
    leading = 0
    while leading < most and names[leading] == old_names[leading]:
        leading += 1
    trailing = 0
    while trailing < most - leading and names[~trailing] == old_names[~trailing]:
        trailing += 1
    return (
        *old[:leading],
        *(
            _state.tree.Key(name, "key")
            for name in names[leading : len(names) - trailing]
        ),
        *old[len(old) - trailing :],
    )


def inverse(transforms: Sequence[Transform]) -> list[Transform]:
    """Returns the inverse transforms in order; raises OptionError if one has none."""
    return undo(check(transforms))


def undo(
    transforms: Sequence[Transform], *, on_restore: bool = False
) -> list[Transform]:
    """Returns `inverse`, perhaps without the inverses that a restore does not need."""
    undone: list[Transform | None] = []
    for transform in reversed(transforms):
        if not isinstance(transform, TableTransform):
            [name] = describe([transform])
            raise errors.OptionError(f"{name} cannot be inverted: it is a function")
        undone.append(transform.on_restore() if on_restore else transform.inverse())
    return [transform for transform in undone if transform is not None]
