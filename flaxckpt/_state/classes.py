"""Finds and rebuilds the container classes named in a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxckpt import _util, errors
from flaxckpt._state import flax_state, treedef
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

_TRUSTED_PACKAGES = ("flax", "optax")
_NO_STATE = re.compile(r"_test$|\.testing(\.|$)")
"""Modules without state classes, whose import may have side effects."""

Build = Callable[[dict[str | int, Any], Mapping[str, JSON]], Any]


def resolver(types: Sequence[type] = ()) -> treedef.Resolve:
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
                "types must be a list of classes, got"
                f" {_util.arguments.describe(cls)} in it"
            )
    own = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in types}

    def find(type_name: str) -> Build | None:
        if type_name in own:
            return _builder(own[type_name])
        return resolve(type_name)

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
        found: Any = sys.modules.get(module_name) or importlib.import_module(
            module_name
        )
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    if not isinstance(found, type) or found.__module__.split(".")[0] != package:
        return None  # imported there from another package
    return _builder(found)


def _builder(cls: Any) -> Build | None:
    """Returns a builder of `cls` that returns a dict if the fields have changed."""
    build = _exact_builder(cls)

    def forgiving(children: dict[str | int, Any], static: Mapping[str, JSON]) -> Any:
        assert build is not None
        try:
            return build(children, static)
        except (TypeError, ValueError) as error:
            _log.warning("%s cannot be made (%s): it becomes a dict", cls, error)
            return children

    return None if build is None else forgiving


def _exact_builder(cls: Any) -> Build | None:
    nnx = flax_state.loaded_nnx()
    if nnx is not None and issubclass(cls, nnx.Variable):
        return lambda children, static: _variable(cls, children["value"], static)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda children, _: cls(**_named(children))
    if dataclasses.is_dataclass(cls):
        return lambda children, static: _dataclass(cls, _named(children), static)
    if issubclass(cls, Mapping):
        return lambda children, _: cls(children)
    return None


def _named(children: Mapping[str | int, Any]) -> dict[str, Any]:
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
    known = {
        **{name: flax_state.tuples(value) for name, value in static.items()},
        **children,
    }
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    return cls(**{**dict.fromkeys(required), **known})
