"""Finds the classes of containers by untrusted names: the caller's, flax's, optax's."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flaxckpt import _util, errors
from flaxckpt._state import leaf_types, nnx_objects, treedef
from flaxckpt._state.tree import KeyName
from flaxckpt._state.treedef import Build, Resolve
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

_TRUSTED_PACKAGES = ("flax", "optax")
_NOT_SAVED = {"apply_fn", "tx", "mesh", "rules"}
"""Fields of flax's dataclasses that belong to the program, not to its state."""

_NO_STATE = re.compile(r"_test$|\.testing(\.|$)")
"""Modules without state classes, whose import may have side effects."""


def resolver(types: Sequence[type] = ()) -> Resolve:
    """Returns a `resolve` that also finds the caller's `types` by stored names."""
    if not _util.arguments.is_list(types):
        raise errors.OptionError(
            f"types must be a list of classes, got {_util.arguments.describe(types)}"
        )
    classes = tuple(types)
    for cls in classes:
        if not inspect.isclass(cls):
            raise errors.OptionError(
                "types must be a list of classes, but contains"
                f" {_util.arguments.describe(cls)}"
            )
    by_name = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes}

    @functools.cache  # a builder warns once
    def find(type_name: str) -> Build | leaf_types.LeafType | None:
        cls = by_name.get(type_name)
        if cls is None:
            return leaf_types.of_name(type_name) or resolve(type_name)
        return leaf_types.of_class(cls) or _lenient_builder(cls, _own_builder(cls))

    return find


def resolve(type_name: str) -> Build | None:
    """Returns the builder of a class of flax, optax or `collections`, or None.

    No other module is imported, whatever names the file holds.
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
    return _lenient_builder(cls, _exact_builder(cls))


def _lenient_builder(cls: Any, exact: Build | None) -> Build | None:
    """Returns a builder of `cls` that returns a dict if the fields have changed."""

    def build(children: dict[KeyName, Any], static: Mapping[str, JSON]) -> Any:
        assert exact is not None
        try:
            return exact(children, static)
        except Exception as error:  # a class may raise anything
            _log.warning("%s cannot be built (%s): returning a dict", cls, error)
            return children

    return None if exact is None else build


def _own_builder(cls: Any) -> Build:
    """Returns a builder of one of the caller's classes, which jax may rebuild."""
    exact = _exact_builder(cls)

    def build(children: dict[KeyName, Any], static: Mapping[str, JSON]) -> Any:
        if treedef.AUX in static:
            aux = treedef.aux_from_json(static[treedef.AUX])
            return _unflatten(cls, aux, list(children.values()))
        if exact is None:
            raise ValueError(
                "the checkpoint lacks its auxiliary data, which JSON cannot hold: pass"
                " a state"
            )
        return exact(children, static)

    return build


def _unflatten(cls: type, aux: Any, children: list[Any]) -> Any:
    """Returns an instance of a class that is registered as a pytree."""
    pytree: Any = jax.tree_util.PyTreeDef
    make = getattr(pytree, "from_node_data_and_children", None)
    make = make or pytree.make_from_node_data_and_children  # older jax
    leaf = jax.tree.structure(0)
    registry = jax.tree_util.default_registry
    return make(registry, (cls, aux), [leaf] * len(children)).unflatten(children)


def _exact_builder(cls: Any) -> Build | None:
    nnx = nnx_objects.loaded_nnx()
    if nnx is not None and issubclass(cls, nnx.Variable):
        return lambda children, static: _variable(cls, children["value"], static)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda children, _: cls(**_by_field_name(children))
    if dataclasses.is_dataclass(cls):
        return functools.partial(
            _dataclass, cls, _takes_fields(cls), _known_fields(cls)
        )
    if issubclass(cls, Mapping):
        return lambda children, _: cls(children)
    return None


def _by_field_name(children: Mapping[KeyName, Any]) -> dict[str, Any]:
    return {str(name): child for name, child in children.items()}


def _variable(cls: Any, value: Any, metadata: Mapping[str, JSON]) -> Any:
    fields = {name: to_tuples(field) for name, field in metadata.items()}
    # The mesh of the saved variable may not exist in this process.
    variable = cls(value, **{**fields, "eager_sharding": False})
    variable.set_metadata(eager_sharding=metadata.get("eager_sharding", False))
    return variable


def _takes_fields(cls: Any) -> bool:
    """Returns True if `__init__` takes the fields, and is not one of its own kind."""
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    return names == {field.name for field in dataclasses.fields(cls)}


def _known_fields(cls: Any) -> set[str]:
    """Returns the fields that are documented as not saved, such as `tx` of Flax."""
    libraries = [
        base
        for base in cls.__mro__
        if base.__module__.split(".")[0] in _TRUSTED_PACKAGES
        and dataclasses.is_dataclass(base)
    ]
    fields = {field.name for base in libraries for field in dataclasses.fields(base)}
    return fields & _NOT_SAVED


def _dataclass(
    cls: Any,
    takes_fields: bool,
    warned: set[str],
    children: Mapping[KeyName, Any],
    static: Mapping[str, JSON],
) -> Any:
    """Builds an instance; fields that were not saved have their defaults, or None.

    A warning names them once: the class may be newer than the checkpoint. As in jax,
    `__init__` is called only if it takes the fields. Raises ValueError for others.
    """
    if not treedef.has_fields(cls, [*children, *static]):
        raise ValueError("its fields have changed")
    fields: dict[str, Any] = {
        **{name: to_tuples(value) for name, value in static.items()},
        **_by_field_name(children),
    }
    missing = dataclasses.MISSING
    for field in dataclasses.fields(cls):
        if field.name in fields:
            continue
        has_default = (
            field.default is not missing or field.default_factory is not missing
        )
        if field.name not in warned:
            warned.add(field.name)
            _log.warning(
                "%s.%s is not in the checkpoint, as JSON cannot hold its value, or as"
                " it is a new field: it %s. Pass a state that has the value, or set it"
                " with dataclasses.replace",
                cls.__qualname__,
                field.name,
                "has its default" if has_default else "is None",
            )
        if not has_default:
            fields[field.name] = None
        elif not takes_fields:
            make = field.default_factory
            fields[field.name] = field.default if make is missing else make()
    if takes_fields:
        return cls(**fields)
    instance = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


def to_tuples(value: Any) -> Any:
    """Converts JSON lists back to tuples, recursively."""
    return tuple(map(to_tuples, value)) if isinstance(value, list | tuple) else value
