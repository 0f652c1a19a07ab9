"""Package doors: the modules that a package hands on, imported when first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any


def opener(
    package: str,
    modules: Collection[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `package` that imports `modules` on first use.

    A package need not import all of itself for a caller that wants one module: jax
    alone takes a second, and much of the command line works without it.

    Args:
        package: The package's `__name__`.
        modules: Names of the modules in it that other packages may use.
        names: Names of functions and classes that they may use -> their modules.

    Raises:
        AttributeError: The returned function was asked for any other name.
    """

    def get(name: str) -> Any:
        if name in names:
            module = importlib.import_module(f"{package}.{names[name]}")
            found = getattr(module, name)
            setattr(sys.modules[package], name, found)
            return found
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return get
