"""What each process has for itself, though it was forked from another.

A lock that another thread holds at a fork stays held in the child, where that thread is
not there to release it. So locks that a forked process may meet are made anew there, as
is what only the parent is to work off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object that each process makes for itself, also after a fork.

    A thread that forks while it holds a lock releases the one that it holds.

    ```python
    lock = PerProcess(threading.Lock)
    with lock.get():
        ...
    ```

    Args:
        make: Makes the object, when a process first asks for it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def get(self) -> T:
        """The object of this process."""
        pid = os.getpid()
        if pid not in self._made:
            self._made.setdefault(pid, self._make())  # in one step: threads have one
        return self._made[pid]


class lazy(Generic[T]):  # noqa: N801
    """A property that is computed when it is first asked for.

    Unlike `functools.cached_property` of Python 3.11, it holds no lock meanwhile, which
    a forked process would wait for; two threads may compute the same value.
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
        found = instance.__dict__[self._name] = self._compute(instance)
        return found
