"""Package doors: modules that a package hands on, imported when first used.

A fork waits until no thread imports: a forked process would wait forever for an import
lock whose thread does not exist there. The wait is bounded, as the import may need a
lock that the forking thread holds.
"""

from __future__ import annotations

import contextlib
import importlib
import logging  # noqa: F401  its handlers of forks are called after those below
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

_FORK_SECS = 30


class _Imports(threading.local):
    """Imports that threads are in: `depth` of this thread, `total` of all."""

    changed = threading.Condition()
    total = 0
    depth = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, count: int) -> None:
        with self.changed:
            self.depth += count
            _Imports.total += count
            self.changed.notify_all()

    def before_fork(self) -> None:
        self.changed.acquire()
        self.changed.wait_for(lambda: _Imports.total == self.depth, _FORK_SECS)

    def after_fork_in_child(self) -> None:
        _Imports.total = self.depth
        self.changed.release()


_imports = _Imports()
os.register_at_fork(
    before=_imports.before_fork,
    after_in_parent=_imports.changed.release,
    after_in_child=_imports.after_fork_in_child,
)


def import_module(name: str) -> ModuleType:
    """Imports the module `name`, and makes forks wait for it."""
    with _imports.counted():
        return importlib.import_module(name)


_unopened: dict[str, Collection[str]] = {}
"""Package -> the modules behind its door that may not be imported yet, or none."""


def open_all() -> None:
    """Imports all modules of the packages that are in use.

    Call it before a thread starts that may outlive the main thread: at exit, Python
    refuses some imports.
    """
    while _unopened:
        try:
            package, modules = _unopened.popitem()
        except KeyError:  # another thread has just taken the last package
            return
        for name in modules or _list_modules(package):
            import_module(f"{package}.{name}")


def _list_modules(package: str) -> Iterator[str]:
    """Yields the modules of a package, and those of each package in it."""
    pkgutil = import_module("pkgutil")
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        yield module.name
        if module.ispkg:
            for name in _list_modules(f"{package}.{module.name}"):
                yield f"{module.name}.{name}"


def opener(
    package: str,
    modules: Collection[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `package` that imports its modules on first use.

    A package need not import all of itself for a caller that wants one module: jax
    alone takes a second, and much of the command line works without it. Its imports for
    type checkers say which modules other packages may use. `modules` are those that
    `open_all` imports, by default all; `names` are functions and classes that others
    may use -> their modules.
    """
    _unopened[package] = modules

    def get(name: str) -> Any:
        if name in names:
            module = import_module(f"{package}.{names[name]}")
            found = getattr(module, name)
            setattr(sys.modules[package], name, found)
            return found
        wanted = f"{package}.{name}"
        try:
            return import_module(wanted)
        except ModuleNotFoundError as error:
            if error.name != wanted:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
