"""A simulated file system: the real one in a directory, with a point at each call.

`installed` replaces the functions of `os`, so that pathlib, shutil and tempfile use the
stand-ins, too. Below the directory of the world that runs, each call is a point:
another task may run before it, the process may crash, or the call may fail or take its
time. Times of files are those of the world. Locks are real, and a dead process loses
its own.
"""

# ruff: noqa: PTH112, PTH120
import builtins
import contextlib
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import seams
from verification.simulation import kernel

NAME = "files"
"""The name of a `FileSystem` in `World.shared`."""


class Weather(NamedTuple):
    """Chances of faults in one history.

    Attributes:
        is_local: Whether locks are relied on; else, the age of a directory is.
        has_locks: Whether the file system has locks.
        can_exchange: Whether two names can be exchanged in one step.
        slow: The chance that a call takes up to `slowest_secs`.
        slowest_secs: The longest time of a call.
        fails: The chance that a call fails.
    """

    is_local: bool = True
    has_locks: bool = True
    can_exchange: bool = True
    slow: float = 0.0
    slowest_secs: float = 10.0
    fails: float = 0.0


_ERRORS = (errno.EIO, errno.ENOSPC)


class FileSystem:
    """The files of a world.

    Args:
        world: The world.
        root: An empty directory.
        weather: The chances of faults.

    Attributes:
        root: The directory.
        weather: The chances of faults; it may change.
        on_change: Called after each change with the call and its paths.
    """

    def __init__(self, world: kernel.World, root: Path, weather: Weather) -> None:
        self.root = root
        self.weather = weather
        self.on_change: Callable[[str, tuple[str, ...]], object] = lambda *args: None
        self._world = world
        self._prefix = f"{root}/"
        self._issued: set[int] = set()
        self._locked: dict[int, kernel.Process] = {}
        self._directories: dict[int, str] = {}
        self._is_observed = False
        world.shared[NAME] = self

    def close(self) -> None:
        """Closes what dead processes have left open; call after the world has ended."""
        for descriptor in self._directories:
            with contextlib.suppress(OSError):
                _real.close(descriptor)
        self._directories.clear()

    # ---- calls --------------------------------------------------------------------

    def owns(self, path: object, directory: int | None) -> bool:
        """Returns True for a call of a simulated process on a path below the root."""
        if self._world.task is None or self._is_observed:
            return False
        if directory is not None or isinstance(path, int):
            return True
        return os.fspath(path).startswith(self._prefix)  # type: ignore[call-overload]

    def call(self, name: str, path: object, *, can_fail: bool = True) -> None:
        """Another task may run; raises what becomes of the call instead of its effect.

        Raises:
            OSError: The call fails.
        """
        world, weather = self._world, self.weather
        what = f"{name} {self._short(path)}" if world.is_traced else name
        world.point(what)
        if weather.slow and world.random.random() < weather.slow:
            world.sleep(weather.slowest_secs * world.random.random())
        if can_fail and weather.fails and world.random.random() < weather.fails:
            code = world.random.choice(_ERRORS)
            world.record(what, errno.errorcode[code])
            raise OSError(code, os.strerror(code), str(path))

    def note(self, name: str, *paths: str) -> None:
        """Records a change that was made."""
        # What happens inside of temporary directories would hide the rest.
        if self._world.is_traced and "-tmp-" not in os.path.dirname(paths[-1]):
            self._world.record(f"{name} {' -> '.join(map(self._short, paths))}")
        with self.observing():
            self.on_change(name, paths)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Lets the `with` block use files without a trace."""
        before, self._is_observed = self._is_observed, True
        try:
            yield
        finally:
            self._is_observed = before

    def full(self, path: object, directory: int | None = None) -> str:
        """Returns the path of an argument of a call."""
        if isinstance(path, int):
            return _real.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path)  # type: ignore[arg-type]
        if directory is not None:
            return f"{_real.readlink(f'/proc/self/fd/{directory}')}/{text}"
        return text

    def _short(self, path: object) -> str:
        text = str(path)
        return text[len(self._prefix) :] if text.startswith(self._prefix) else text

    # ---- times --------------------------------------------------------------------

    def stamp(self, path: Any, directory: int | None = None) -> None:
        """Gives a file the time of the world."""
        nanoseconds = int((kernel.EPOCH + self._world.now) * 1e9) + len(self._issued)
        self._issued.add(nanoseconds)
        with contextlib.suppress(FileNotFoundError):
            _real.utime(path, ns=(nanoseconds, nanoseconds), dir_fd=directory)

    def has_time(self, status: os.stat_result) -> bool:
        """Returns False for a file that changed since `stamp`."""
        return status.st_mtime_ns in self._issued

    # ---- locks --------------------------------------------------------------------

    def lock(self, descriptor: int, operation: int) -> None:
        """Locks a file; waits in virtual time."""
        if operation == fcntl.LOCK_UN:
            _real.flock(descriptor, operation)
            self._locked.pop(descriptor, None)
            return
        while True:
            self.call("flock", descriptor, can_fail=False)
            if not self.weather.has_locks:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            for other, process in list(self._locked.items()):
                if not process.is_alive:
                    _real.flock(other, fcntl.LOCK_UN)
                    del self._locked[other]
            try:
                _real.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                self._world.sleep(0.05)
                continue
            self._locked[descriptor] = self._world.task.process  # type: ignore[union-attr]
            return

    def opened(self, descriptor: int, path: str, flags: int) -> None:
        """Notes a descriptor that a simulated process has opened."""
        if flags & os.O_CREAT and not self.has_time(_real.fstat(descriptor)):
            self.stamp(descriptor)
            self.stamp(os.path.dirname(path))
            self.note("create", path)
        if flags & os.O_DIRECTORY:
            self._directories[descriptor] = path

    def synced(self, descriptor: int) -> None:
        """Notes a file or directory that a simulated process has synced."""

    def closed(self, descriptor: int) -> None:
        """Forgets a descriptor before it is closed, with its lock."""
        self._locked.pop(descriptor, None)
        self._directories.pop(descriptor, None)


# ---- stand-ins --------------------------------------------------------------------


class _Real:
    """The real functions."""

    def __init__(self) -> None:
        names = "close fstat fsync listdir lstat mkdir open readlink rename replace"
        names += " link rmdir scandir stat unlink remove utime write"
        for name in names.split():
            setattr(self, name, getattr(os, name))
        self.flock = fcntl.flock
        self.io_open = io.open
        self.exchange = seams.current("rename.exchange_atomically")


_real: Any = _Real()


def _files() -> FileSystem | None:
    world = kernel.current()
    return None if world is None else world.shared.get(NAME)


def _change_one(name: str) -> Callable[..., Any]:
    """Returns the stand-in of a call that makes or removes a name."""
    real = getattr(_real, name)
    is_made = name == "mkdir"

    def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        files = _files()
        if files is None or not files.owns(path, dir_fd):
            return real(path, *args, dir_fd=dir_fd, **more)
        full = files.full(path, dir_fd)
        files.call(name, full)
        real(path, *args, dir_fd=dir_fd, **more)
        if is_made:
            files.stamp(full)
        files.stamp(os.path.dirname(full))
        files.note(name, full)
        return None

    return call


def _change_two(name: str) -> Callable[..., Any]:
    """Returns the stand-in of a call with an old and a new name."""
    real = getattr(_real, name)

    def call(old: Any, new: Any, **more: Any) -> Any:
        files = _files()
        if files is None or not (files.owns(old, None) or files.owns(new, None)):
            return real(old, new, **more)
        paths = files.full(old), files.full(new)
        files.call(name, paths[1])
        real(old, new, **more)
        for path in paths:
            files.stamp(os.path.dirname(path))
        files.note(name, *paths)
        return None

    return call


def _look(name: str) -> Callable[..., Any]:
    """Returns the stand-in of a call that lists a directory."""
    real = getattr(_real, name)

    def call(path: Any = ".") -> Any:
        files = _files()
        if files is not None and files.owns(path, None):
            files.call(name, path)
        return real(path)

    return call


def _status(name: str) -> Callable[..., Any]:
    real = getattr(_real, name)

    def call(path: Any, *, dir_fd: int | None = None, **more: Any) -> Any:
        files = _files()
        if dir_fd is not None:
            more["dir_fd"] = dir_fd
        if files is None or not files.owns(path, dir_fd):
            return real(path, **more)
        files.call(name, path)
        status = real(path, **more)
        if not files.has_time(status):  # written to by C, or outside of the world
            files.stamp(path, dir_fd)
            status = real(path, **more)
        return status

    return call


def _open(
    path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    files = _files()
    if files is None or not files.owns(path, dir_fd):
        return _real.open(path, flags, mode, dir_fd=dir_fd)
    full = files.full(path, dir_fd)
    files.call("open", full)
    descriptor = _real.open(path, flags, mode, dir_fd=dir_fd)
    files.opened(descriptor, full, flags)
    return descriptor


def _close(descriptor: int) -> None:
    files = _files()
    if files is not None:
        files.closed(descriptor)
    _real.close(descriptor)


def _io_open(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
    files = _files()
    if files is None or isinstance(file, int) or not files.owns(file, None):
        return _real.io_open(file, mode, *args, **more)
    files.call("open", file)
    return _real.io_open(file, mode, *args, **more)


def _fsync(descriptor: int) -> None:
    files = _files()
    if files is not None and files.owns(descriptor, None):
        if not files.has_time(_real.fstat(descriptor)):  # written to by C
            files.stamp(descriptor)
        files.call("fsync", descriptor)
        files.synced(descriptor)


def _utime(path: Any, times: Any = None, *, dir_fd: int | None = None, **more: Any):
    files = _files()
    if files is None or times or more or not files.owns(path, dir_fd):
        return _real.utime(path, times, dir_fd=dir_fd, **more)
    files.call("utime", path)
    _real.stat(path, dir_fd=dir_fd)  # raises FileNotFoundError
    files.stamp(path, dir_fd)
    files.note("touch", files.full(path, dir_fd))
    return None


def _write(descriptor: int, content: Any) -> int:
    files = _files()
    size = _real.write(descriptor, content)
    if files is not None and files.owns(descriptor, None):
        files.stamp(descriptor)
    return size


def _flock(descriptor: int, operation: int) -> None:
    files = _files()
    if files is None or files._world.task is None:
        _real.flock(descriptor, operation)
    else:
        files.lock(descriptor, operation)


def _exchange(one: Path, other: Path) -> bool:
    files = _files()
    if files is None or not files.owns(one, None):
        return _real.exchange(one, other)
    if not files.weather.can_exchange:
        return False
    paths = str(one), str(other)
    files.call("exchange", paths[1])
    is_done = _real.exchange(one, other)
    files.stamp(os.path.dirname(paths[1]))
    files.note("exchange", *paths)
    return is_done


def _is_local(path: object) -> bool:
    files = _files()
    return True if files is None else files.weather.is_local


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replaces the functions of `os` during the `with` block.

    Enter it before `stand_ins.installed`, which copies the functions.
    """
    replaced = [
        *[(os, n, _change_one(n)) for n in ("mkdir", "unlink", "remove", "rmdir")],
        *[(os, n, _change_two(n)) for n in ("rename", "replace", "link")],
        *[(os, n, _look(n)) for n in ("listdir", "scandir")],
        *[(os, n, _status(n)) for n in ("stat", "lstat", "fstat")],
        *[(os, "open", _open), (os, "close", _close), (os, "utime", _utime)],
        *[(os, "fsync", _fsync), (os, "write", _write), (fcntl, "flock", _flock)],
        *[(io, "open", _io_open), (builtins, "open", _io_open)],
        (*seams.find("rename.exchange_atomically"), _exchange),
        (*seams.find("filesystem.is_local"), _is_local),
    ]
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, new in replaced:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in real:
            setattr(owner, name, old)


@contextlib.contextmanager
def directory(name: str) -> Iterator[Path]:
    """Yields an empty directory in memory, and removes it at the end."""
    parent = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path("/tmp")
    # Messages are cut after some characters: paths have one length in all processes.
    root = parent / f"flaxckpt-simulation-{os.getpid():010}-{name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
