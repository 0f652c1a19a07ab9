"""Writes the containers of a pytree to JSON, and reads them from untrusted JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from flaxckpt import _util
from flaxckpt._state import leaf_types, tree
from flaxckpt._types import JSON, LeafPath

Build: TypeAlias = Callable[[dict[tree.KeyName, Any], Mapping[str, JSON]], Any]
"""Builds a container from named children and static fields."""

Resolve: TypeAlias = Callable[[str], Build | leaf_types.LeafType | None]
"""Class name -> builder or leaf type, or None."""


def resolve_nothing(type_name: str) -> None:
    """Resolves no class: containers become dicts and lists, as for metadata."""


def to_json(structure: tree.Node | LeafPath) -> JSON:
    """Describes `structure` in JSON; `from_json` is the inverse.

    A leaf is its path as a string. A container is `[type, keys, children]`, with any
    static fields as a fourth element; an `int` key of a mapping stays an `int`, and a
    tuple is a list. A box has `null` instead of keys.
    """
    if isinstance(structure, str):
        return structure
    keys = None if structure.is_box else [key.name for key in structure.keys]
    children = [to_json(child) for child in structure.children]
    row: list[JSON] = [structure.type, keys, children]
    return [*row, dict(structure.static)] if structure.static else row


def from_json(
    data: JSON, resolve: Resolve, unknown: set[str], depth: int = 0
) -> tree.Node | LeafPath:
    """Reads a description written by `to_json`, from an untrusted file.

    A container whose class `resolve` does not know becomes a dict or list; `unknown`
    gets its name. Raises ValueError if `data` is not valid.
    """
    if depth > tree.MAX_DEPTH:
        raise ValueError(f"containers are nested more than {tree.MAX_DEPTH} deep")
    match data:
        case str():
            return data
        case [str(type_name), keys, [*children], *rest] if len(rest) <= 1:
            nodes = tuple(
                [from_json(child, resolve, unknown, depth + 1) for child in children]
            )
            static = rest[0] if rest else {}
            if not isinstance(static, dict):
                raise ValueError(f"{type_name} has static fields {static!r}")
            return _described_node(type_name, keys, nodes, static, resolve, unknown)
        case _:
            raise ValueError(f"{str(data)[:80]!r} does not describe a container")


# ---- auxiliary data of registered classes ---------------------------------------

AUX = "*aux"
"""The name of auxiliary data among static fields, which no field has."""

_MAX_AUX_BYTES = 2**20
_MAX_AUX_DEPTH = 32
_TAGS: Mapping[str, type] = {"tuple": tuple, "list": list, "dict": dict}


def has_fields(cls: type, children: Collection[tree.KeyName]) -> bool:
    if not dataclasses.is_dataclass(cls):
        return False
    return {*children} <= {field.name for field in dataclasses.fields(cls)}


def aux_to_json(aux: Any) -> dict[str, JSON]:
    """Returns the static field with the auxiliary data of a class, if JSON holds it."""
    try:
        field = _util.json_limits.copy({AUX: _tag(aux, 0)}, "it")
    except ValueError:
        return {}
    return field if len(json.dumps(field)) <= _MAX_AUX_BYTES else {}


def aux_from_json(data: JSON) -> Any:
    match data:
        case [str(tag), *items] if tag in _TAGS:
            values = [aux_from_json(item) for item in items]
            return _TAGS[tag](values)
        case list() | dict():
            raise ValueError("its auxiliary data have no type")
    return data


def _tag(value: Any, depth: int) -> Any:
    """Returns a value with the type of each container before its items."""
    if not isinstance(value, tuple | list | Mapping):
        return value
    name = type(value).__name__
    if type(value) is not _TAGS.get(name):
        raise ValueError(f"it has a container of another class, {name}")
    if depth > _MAX_AUX_DEPTH:
        raise ValueError("it is nested too deep")
    items = value.items() if isinstance(value, Mapping) else value
    return [name, *[_tag(item, depth + 1) for item in items]]


def _described_node(
    type_name: str,
    keys: JSON,
    children: tuple[tree.Node | LeafPath, ...],
    static: Mapping[str, JSON],
    resolve: Resolve,
    unknown: set[str],
) -> tree.Node:
    is_box = keys is None
    names: list[tree.KeyName] = ["value"] if is_box else _names(type_name, keys)
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


def _names(type_name: str, keys: JSON) -> list[tree.KeyName]:
    if not isinstance(keys, list):
        raise ValueError(f"{type_name} has keys {str(keys)[:80]!r}")
    names: list[tree.KeyName] = []
    for key in keys:
        if isinstance(key, list) and all(isinstance(part, str | int) for part in key):
            names.append(tuple(key))
        elif isinstance(key, str | int):
            names.append(key)
        else:
            raise ValueError(f"{type_name} has the key {str(key)[:80]!r}")
    return names


def _rebuild(
    build: Build,
    static: Mapping[str, JSON],
    keys: Sequence[tree.Key],
    children: Sequence[Any],
) -> Any:
    return build(tree.make_dict(keys, children), static)


def _plain(names: list[tree.KeyName], is_box: bool) -> tree.Rebuild:
    if is_box:
        return lambda _, new: new[0]
    if names and names == list(range(len(names))):
        return tree.make_list
    return tree.make_dict
