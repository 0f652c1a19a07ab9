"""Objects that each process creates for itself, even after a fork.

A lock that another thread holds during a fork stays locked in the child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object that `make` creates separately in each process, also after a fork."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._objects: dict[int, T] = {}

    def get(self) -> T:
        pid = os.getpid()
        if pid not in self._objects:
            self._objects.setdefault(pid, self._make())  # atomic: threads share it
        return self._objects[pid]


class lazy(Generic[T]):  # noqa: N801
    """A property computed on first access, perhaps twice by two threads.

    Unlike `functools.cached_property` of Python 3.11, it holds no lock, for which a
    forked process would wait.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | lazy[T]:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
