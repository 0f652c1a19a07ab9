"""Package doors: the modules that a package hands on, imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from types import ModuleType


def opener(package: str, modules: Collection[str]) -> Callable[[str], ModuleType]:
    """Returns a `__getattr__` for `package` that imports `modules` on first use.

    A package need not import all of itself for a caller that wants one module: jax
    alone takes a second, and much of the command line works without it.

    Args:
        package: The package's `__name__`.
        modules: Names of the modules in it that other packages may use.

    Raises:
        AttributeError: The returned function was asked for any other name.
    """

    def get(name: str) -> ModuleType:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return get
