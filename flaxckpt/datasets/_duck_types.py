"""Recognises objects by the names of their classes, without imports."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any


def type_name(obj: Any) -> str:
    """Returns `package.module.Class` of the type of `obj`."""
    return full_name(type(obj))


def full_name(cls: type) -> str:
    """Returns `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_a(obj: Any, *names: str) -> bool:
    """Returns True if `obj` is an instance of a class with one of the names."""
    return any(full_name(cls) in names for cls in type(obj).__mro__)


def package(obj: Any) -> str:
    """Returns the top-level package of the class of `obj`."""
    return type(obj).__module__.partition(".")[0]


def has(obj: Any, *names: str) -> bool:
    return not isinstance(obj, type) and all(
        callable(getattr(obj, name, None)) for name in names
    )


def has_shards(obj: Any) -> bool:
    """Returns True for an iterator that can get and set the state of each shard."""
    return has(obj, "get_shard_states", "set_shard_states")


def version(obj: Any) -> str | None:
    """Returns the version of the library of `obj`; None for flaxckpt."""
    if package(obj) == "flaxckpt":
        return None
    version = getattr(sys.modules.get(package(obj)), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(package(obj))
    except importlib.metadata.PackageNotFoundError:
        return None
