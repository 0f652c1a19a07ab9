"""Writes the containers of a pytree to JSON, and rebuilds them by the names of classes.

The JSON is untrusted: only classes known to the caller, and of flax and optax, are
built.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from flaxckpt import _util, errors
from flaxckpt._state import flax_state, leaf_types, tree
from flaxckpt._types import JSON, LeafPath

_log = logging.getLogger(__name__)

_TRUSTED_PACKAGES = ("flax", "optax")
_NO_STATE = re.compile(r"_test$|\.testing(\.|$)")
"""Modules without state classes, whose import may have side effects."""

Build: TypeAlias = Callable[[dict[str | int, Any], Mapping[str, JSON]], Any]
"""Builds a container from named children and static fields."""

Resolve: TypeAlias = Callable[[str], Build | leaf_types.LeafType | None]
"""Class name -> builder or leaf type, or None."""


def to_json(structure: tree.Node | LeafPath) -> JSON:
    """Describes `structure` in JSON; `from_json` is the inverse.

    A leaf is its path as a string. A container is `[type, keys, children]`, with any
    static fields as a fourth element; an `int` key of a mapping stays an `int`. A box
    has `null` instead of keys.
    """
    if isinstance(structure, str):
        return structure
    keys = None if structure.is_box else [key.name for key in structure.keys]
    children = [to_json(child) for child in structure.children]
    row: list[JSON] = [structure.type, keys, children]
    return [*row, dict(structure.static)] if structure.static else row


def from_json(data: JSON, resolve: Resolve, unknown: set[str]) -> tree.Node | LeafPath:
    """Reads a description written by `to_json`.

    Args:
        data: The description, from an untrusted file.
        resolve: Finds the builder of a class; other classes are never built.
        unknown: Receives the class names that `resolve` does not know. Such a container
            becomes a dict, or a list if its children have no names.

    Raises:
        ValueError: `data` is not a valid description.
    """
    return _from_json(data, resolve, unknown, depth=0)


def _from_json(
    data: JSON, resolve: Resolve, unknown: set[str], depth: int
) -> tree.Node | LeafPath:
    if depth > tree.MAX_DEPTH:
        raise ValueError(f"containers are nested more than {tree.MAX_DEPTH} deep")
    match data:
        case str():
            return data
        case [str(type_name), keys, [*children], *rest] if len(rest) <= 1:
            nodes = tuple(
                [_from_json(child, resolve, unknown, depth + 1) for child in children]
            )
            static = rest[0] if rest else {}
            if not isinstance(static, dict):
                raise ValueError(f"{type_name} has static fields {static!r}")
            return _described_node(type_name, keys, nodes, static, resolve, unknown)
        case _:
            raise ValueError(f"{str(data)[:80]!r} does not describe a container")


def _described_node(
    type_name: str,
    keys: JSON,
    children: tuple[tree.Node | LeafPath, ...],
    static: Mapping[str, JSON],
    resolve: Resolve,
    unknown: set[str],
) -> tree.Node:
    is_box = keys is None
    names: list[str | int] = ["value"] if is_box else _names(type_name, keys)
    if len(names) != len(children):
        raise ValueError(f"{type_name} has {len(names)} keys, {len(children)} children")
    rebuild = tree.MAKERS.get(type_name)
    leaf_type = None
    if rebuild is None:
        known = resolve(type_name)
        if isinstance(known, leaf_types.LeafType):
            rebuild, leaf_type = tree.make_dict, known
        elif known is not None:
            rebuild = functools.partial(_rebuild, known, static)
    if rebuild is None:
        unknown.add(type_name)
        rebuild = _plain(names, is_box)
    kind: Literal["key", "index"] = "index" if type_name in ("list", "tuple") else "key"
    return tree.Node(
        type_name,
        tuple([tree.Key(name, kind) for name in names]),
        children,
        rebuild,
        static,
        is_box,
        leaf_type,
    )


def _names(type_name: str, keys: JSON) -> list[str | int]:
    if not isinstance(keys, list):
        raise ValueError(f"{type_name} has keys {str(keys)[:80]!r}")
    names: list[str | int] = []
    for key in keys:
        if not isinstance(key, str | int):
            raise ValueError(f"{type_name} has the key {str(key)[:80]!r}")
        names.append(key)
    return names


def _rebuild(
    build: Build,
    static: Mapping[str, JSON],
    keys: Sequence[tree.Key],
    children: Sequence[Any],
) -> Any:
    return build(tree.make_dict(keys, children), static)


def _plain(names: list[str | int], is_box: bool) -> tree.Rebuild:
    if is_box:
        return lambda _, new: new[0]
    if names and names == list(range(len(names))):
        return tree.make_list
    return tree.make_dict


# ---- classes ---------------------------------------------------------------------


def resolver(types: Sequence[type] = ()) -> Resolve:
    """Returns a function that finds the builder of a class by its stored name.

    Args:
        types: The caller's own classes that may be built.

    Raises:
        OptionError: `types` is not a list of classes.
    """
    if not _util.arguments.is_list(types):
        raise errors.OptionError(
            f"types must be a list of classes, got {_util.arguments.describe(types)}"
        )
    for cls in types:
        if not inspect.isclass(cls):
            raise errors.OptionError(
                "types must be a list of classes, but contains"
                f" {_util.arguments.describe(cls)}"
            )
    by_name = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in types}

    def find(type_name: str) -> Build | leaf_types.LeafType | None:
        cls = by_name.get(type_name)
        if cls is None:
            return leaf_types.of_name(type_name) or resolve(type_name)
        return leaf_types.of_class(cls) or _lenient_builder(cls)

    return find


def resolve(type_name: str) -> Build | None:
    """Returns the builder of a class by its stored name, or None.

    Only containers defined by flax, optax or the standard library's `collections` are
    found; no other module is imported, whatever names the file holds.
    """
    module_name, _, qualname = type_name.partition(":")
    package = module_name.split(".")[0]
    if package not in _TRUSTED_PACKAGES and module_name != "collections":
        return None
    if _NO_STATE.search(module_name):
        return None
    try:
        cls: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in qualname.split("."):
            cls = getattr(cls, part)
    except (ImportError, AttributeError, ValueError):
        return None
    if not isinstance(cls, type) or cls.__module__.split(".")[0] != package:
        return None  # imported there from another package
    return _lenient_builder(cls)


def _lenient_builder(cls: Any) -> Build | None:
    """Returns a builder of `cls` that returns a dict if the fields have changed."""
    exact = _exact_builder(cls)

    def build(children: dict[str | int, Any], static: Mapping[str, JSON]) -> Any:
        assert exact is not None
        try:
            return exact(children, static)
        except (TypeError, ValueError) as error:
            _log.warning("%s cannot be built (%s): returning a dict", cls, error)
            return children

    return None if exact is None else build


def _exact_builder(cls: Any) -> Build | None:
    nnx = flax_state.loaded_nnx()
    if nnx is not None and issubclass(cls, nnx.Variable):
        return lambda children, static: _variable(cls, children["value"], static)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda children, _: cls(**_by_field_name(children))
    if dataclasses.is_dataclass(cls):
        return lambda children, static: _dataclass(
            cls, _by_field_name(children), static
        )
    if issubclass(cls, Mapping):
        return lambda children, _: cls(children)
    return None


def _by_field_name(children: Mapping[str | int, Any]) -> dict[str, Any]:
    return {str(name): child for name, child in children.items()}


def _variable(cls: Any, value: Any, metadata: Mapping[str, JSON]) -> Any:
    # The mesh of the saved variable may not exist in this process.
    variable = cls(value, **{**metadata, "eager_sharding": False})
    variable.set_metadata(eager_sharding=metadata.get("eager_sharding", False))
    return variable


def _dataclass(
    cls: Any, children: Mapping[str, Any], static: Mapping[str, JSON]
) -> Any:
    """Builds an instance; fields that were not saved, such as `tx`, are None."""
    fields = {
        **{name: flax_state.to_tuples(value) for name, value in static.items()},
        **children,
    }
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    return cls(**{**dict.fromkeys(required), **fields})
