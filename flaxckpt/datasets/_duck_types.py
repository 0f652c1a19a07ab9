"""Recognises objects by the names of their classes, without imports."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any


def type_name(thing: Any) -> str:
    """Returns `package.module.Class` of the type of `thing`."""
    return full_name(type(thing))


def full_name(cls: type) -> str:
    """Returns `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_a(thing: Any, *names: str) -> bool:
    """Returns True if `thing` is an instance of a class with one of the names."""
    return any(full_name(cls) in names for cls in type(thing).__mro__)


def package(thing: Any) -> str:
    """Returns the top-level package of the class of `thing`."""
    return type(thing).__module__.partition(".")[0]


def has(thing: Any, *names: str) -> bool:
    """Returns True for an instance with all of the named methods."""
    return not isinstance(thing, type) and all(
        callable(getattr(thing, name, None)) for name in names
    )


def version(thing: Any) -> str | None:
    """Returns the version of the library of `thing`; None for flaxckpt."""
    if package(thing) == "flaxckpt":
        return None
    found = getattr(sys.modules.get(package(thing)), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(package(thing))
    except importlib.metadata.PackageNotFoundError:
        return None
