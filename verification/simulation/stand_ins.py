"""Stand-ins for what flaxckpt's modules import: time, threads, processes, tokens.

`installed` replaces each attribute of a module of flaxckpt that is the real module (or
a real function of one) by its stand-in, and puts the real one back at the end. So a new
module of flaxckpt is covered without a change here. Third-party modules keep the real
ones.

Stand-ins have only what flaxckpt uses: another name of `threading` raises
AttributeError.
"""

import contextlib
import importlib
import inspect
import itertools
import os
import pkgutil
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from tests.helpers import seams
from verification.simulation import kernel, process_state


def _world() -> kernel.World:
    world = kernel.current()
    assert world is not None, "a stand-in is used outside of all worlds"
    return world


# ---- time and processes -----------------------------------------------------------


def _monotonic() -> float:
    world = kernel.current()
    return time.monotonic() if world is None else 1000.0 + world.now


def _time() -> float:
    world = kernel.current()
    if world is None:
        return time.time()
    jump = 0.0 if world.task is None else world.task.process.clock_secs
    return kernel.EPOCH + world.now + jump


def _time_ns() -> int:
    return int(_time() * 10**9)


def _sleep(secs: float) -> None:
    world = kernel.current()
    if world is None:
        time.sleep(secs)
    else:
        world.sleep(secs)


def _process() -> kernel.Process:
    task = _world().task
    assert task is not None
    return task.process


def _getpid() -> int:
    world = kernel.current()
    if world is None or world.task is None:
        return os.getpid()
    return world.task.process.pid


def _token_hex(nbytes: int = 32) -> str:
    world = kernel.current()
    if world is None:
        return secrets.token_hex(nbytes)
    return world.random.randbytes(nbytes).hex()


def _uuid4() -> uuid.UUID:
    world = kernel.current()
    if world is None:
        return uuid.uuid4()
    return uuid.UUID(int=next(world.shared.setdefault("uuids", itertools.count(1))))


def _gethostname() -> str:
    return _process().machine


def _started(pid: int) -> str:
    """Stands in for `locks._started`: whether a process of this machine is alive."""
    process = _world().processes.get(pid)
    is_here = process is not None and process.machine == _process().machine
    return str(pid) if is_here and process.is_alive else ""


# ---- threads ----------------------------------------------------------------------


class Lock:
    """Like `threading.Lock`: whoever acquires or releases it may be interrupted."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[kernel.Ticket] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = _world()
        world.point("a lock")
        until = None if timeout < 0 else world.now + timeout
        while self._is_held:
            left = None if until is None else until - world.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiting.append(world.ticket())
            world.wait("a lock", left)
        self._is_held = True
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        _world().wake_all(self._waiting)

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class RLock(Lock):
    """Like `threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: kernel.Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = _world().task
        if self._owner is not task and not super().acquire(blocking, timeout):
            return False
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not _world().task:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Event:
    """Like `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[kernel.Ticket] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _world().wake_all(self._waiting)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        world = _world()
        until = None if timeout is None else world.now + timeout
        while not self._is_set:
            left = None if until is None else until - world.now
            if left is not None and left <= 0:
                break
            self._waiting.append(world.ticket())
            world.wait("an event", left)
        return self._is_set


class Condition:
    """Like `threading.Condition`."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self._waiting: list[kernel.Ticket] = []

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *args: object) -> None:
        self._lock.__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        world = _world()
        self._waiting.append(world.ticket())
        self._lock.release()
        try:
            return world.wait("a condition", timeout)
        finally:
            self._lock.acquire()

    def wait_for(
        self, predicate: Callable[[], Any], timeout: float | None = None
    ) -> Any:
        world = _world()
        until = None if timeout is None else world.now + timeout
        while not (answer := predicate()):
            left = None if until is None else until - world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return answer

    def notify(self, n: int = 1) -> None:
        waiting = [ticket for ticket in self._waiting if ticket.is_valid()]
        self._waiting = waiting[n:]
        _world().wake_all(waiting[:n])

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Thread:
    """Like `threading.Thread`, as a task of the running process."""

    ident = None

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str = "thread",
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = _world().task.is_daemon if daemon is None else daemon
        self._run = lambda: target(*args, **(kwargs or {}))
        self._task: kernel.Task | None = None

    def start(self) -> None:
        world = _world()
        process = world._running().process
        self._task = world.spawn(process, self._begin, self.name, is_daemon=self.daemon)

    def _begin(self) -> None:
        _world().task.locals[Thread] = {"thread": self}
        self._run()

    def join(self, timeout: float | None = None) -> None:
        world = _world()
        until = None if timeout is None else world.now + timeout
        while not self._task.is_ended:
            left = None if until is None else until - world.now
            if left is not None and left <= 0:
                return
            self._task.joining.append(world.ticket())
            world.wait(f"the end of {self._task}", left)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_ended


class _MainThread(Thread):
    """The first thread of a process."""

    def __init__(self) -> None:
        super().__init__(name="main", daemon=False)

    def is_alive(self) -> bool:
        return any(task.name == "main" for task in _process().tasks)


def _current_thread() -> Thread:
    return _world().task.locals.setdefault(Thread, {"thread": _MainThread()})["thread"]


class Local:
    """Like `threading.local`."""

    __slots__ = ("__weakref__",)

    @property
    def __dict__(self) -> dict[str, Any]:
        return _world().task.locals.setdefault(self, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


# ---- installing them --------------------------------------------------------------

_MODULES: dict[ModuleType, dict[str, Any]] = {
    os: {"getpid": _getpid, "nice": lambda increment: 0},
    secrets: {"token_hex": _token_hex},
    socket: {"gethostname": _gethostname},
    threading: {
        "Condition": Condition,
        "Event": Event,
        "Lock": Lock,
        "RLock": RLock,
        "Thread": Thread,
        "current_thread": _current_thread,
        "local": Local,
        "main_thread": _MainThread,
    },
    time: {
        "monotonic": _monotonic,
        "perf_counter": _monotonic,
        "sleep": _sleep,
        "time": _time,
        "time_ns": _time_ns,
    },
    uuid: {"uuid4": _uuid4},
}

_PATCHES: dict[tuple[ModuleType, str], Any] = {
    seams.find("locks.started"): _started,
    seams.find("locks.machine"): _gethostname,
}


def _import_all() -> None:
    """Imports all modules of the packages of flaxckpt that are in use."""
    for name in [name for name in sys.modules if name.startswith("flaxckpt._")]:
        path = vars(sys.modules[name]).get("__path__", ())
        for found in pkgutil.walk_packages(path, f"{name}."):
            importlib.import_module(found.name)


@contextlib.contextmanager
def installed(
    modules: Mapping[ModuleType, Mapping[str, Any]] | None = None,
    patches: Mapping[tuple[Any, str], Any] | None = None,
) -> Iterator[None]:
    """Gives flaxckpt's modules the stand-ins during the `with` block.

    Args:
        modules: Further stand-ins: real module -> name -> stand-in.
        patches: Further attributes to replace: (module or class, name) -> stand-in.

    Raises:
        TypeError: A function does not take the arguments of the one that it replaces.
    """
    process_state.remember()
    _import_all()
    stand_ins = _stand_ins(modules or {})
    process_state.stand_ins = stand_ins
    replaced: list[tuple[Callable[[Any], None], Any]] = []

    def replace(put: Callable[[Any], None], old: Any, new: Any) -> None:
        replaced.append((put, old))
        put(new)

    try:
        for module in _flaxckpt_modules():
            for put, value in [*_attributes(module), *_default_factories(module)]:
                if id(value) in stand_ins:
                    replace(put, value, stand_ins[id(value)])
        for (owner, name), new in {**_PATCHES, **(patches or {})}.items():
            _check_fits(name, vars(owner)[name], new)
            replace(_setter(owner, name), vars(owner)[name], new)
        yield
    finally:
        for put, old in reversed(replaced):
            put(old)
        process_state.stand_ins = {}


def _check_fits(name: str, old: Any, new: Any) -> None:
    if not isinstance(old, FunctionType):
        return
    parameters = inspect.signature(old).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    try:
        inspect.signature(new).bind(*positional, **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"the stand-in of {name} does not fit: {error}") from None


def _stand_ins(more: Mapping[ModuleType, Mapping[str, Any]]) -> dict[int, Any]:
    """Returns the ID of a real module, function or class -> stand-in."""
    found: dict[int, Any] = {}
    for module in {**_MODULES, **more}:
        names = {**_MODULES.get(module, {}), **more.get(module, {})}
        proxy = ModuleType(module.__name__)
        if module is not threading:
            vars(proxy).update(vars(module))
        vars(proxy).update(names)
        found[id(module)] = proxy
        found |= {id(vars(module)[name]): new for name, new in names.items()}
    return found


def _flaxckpt_modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "flaxckpt"
    ]


def _attributes(module: ModuleType) -> Iterator[tuple[Callable[[Any], None], Any]]:
    for name, value in [*vars(module).items()]:
        yield _setter(module, name), value


def _default_factories(
    module: ModuleType,
) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yields what the constructors of dataclasses call for missing fields."""
    for value in [*vars(module).values()]:
        init = vars(value).get("__init__") if isinstance(value, type) else None
        if isinstance(init, FunctionType):
            for cell in init.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    yield _cell_setter(cell), cell.cell_contents


def _setter(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


def _cell_setter(cell: Any) -> Callable[[Any], None]:
    return lambda value: setattr(cell, "cell_contents", value)
