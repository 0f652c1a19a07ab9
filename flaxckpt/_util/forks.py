"""Objects that each process creates for itself, even after a fork.

If another thread holds a lock during a fork, the lock stays locked in the child, which
does not have the thread that would release it. A forked process therefore creates its
own locks and its own queues of work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object that `make` creates separately in each process, also after a fork.

    A thread that forks while holding a lock releases the lock of its own process.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._objects: dict[int, T] = {}

    def get(self) -> T:
        pid = os.getpid()
        if pid not in self._objects:
            self._objects.setdefault(pid, self._make())  # atomic: threads share it
        return self._objects[pid]


class lazy(Generic[T]):  # noqa: N801
    """A property computed on first access.

    Unlike `functools.cached_property` of Python 3.11, it holds no lock during the
    computation, which a forked process would wait for; two threads may compute the
    same value.
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
