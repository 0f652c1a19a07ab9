"""What an object is, told by the names of its classes: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any


def type_name(thing: Any) -> str:
    """`package.module.Class` of `thing`."""
    return full_name(type(thing))


def full_name(cls: type) -> str:
    """`package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_a(thing: Any, *names: str) -> bool:
    """Whether the class of `thing`, or one that it inherits from, has such a name."""
    return any(full_name(cls) in names for cls in type(thing).__mro__)


def package(thing: Any) -> str:
    """The top-level package that the class of `thing` comes from."""
    return type(thing).__module__.partition(".")[0]


def has(thing: Any, *names: str) -> bool:
    """Whether `thing` is no class and has all of these methods."""
    return not isinstance(thing, type) and all(
        callable(getattr(thing, name, None)) for name in names
    )


def version(thing: Any) -> str | None:
    """The version of the library that `thing` comes from, if it is another's."""
    if package(thing) == "flaxckpt":
        return None
    found = getattr(sys.modules.get(package(thing)), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(package(thing))
    except importlib.metadata.PackageNotFoundError:
        return None
