"""Records what the real code does, as events of a protocol.

Actor 1 performs an operation. Right before one of its system calls, or requests, the
operation of actor 2 runs as a whole, as if actor 1 were paused there; or actor 1 is
killed there, and nothing that it does later has any effect.
"""

import contextlib
import itertools
import json
import os
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from flaxckpt._storage import bucket, commit_marker, leases, locks, rename
from flaxckpt._util import threads
from verification.model.engine import Event


class KilledError(BaseException):
    """An actor was killed: whatever else it tries has no effect."""


class Recorder:
    """Records events, and interrupts actor 1.

    Args:
        names: The name of each actor.
        at: The call of actor 1 before which it is interrupted, from 1; None for never.
        interrupt: Called then, with the call; returns True to kill actor 1.

    Attributes:
        events: The events so far.
        actor: The acting actor, from 1.
        calls: The number of calls of actor 1.
    """

    def __init__(
        self,
        *names: str,
        at: int | None = None,
        interrupt: Callable[[str], bool] = lambda call: False,
    ) -> None:
        self.events: list[Event] = []
        self.actor = 1
        self.calls = 0
        self._names = names
        self._at = at
        self.interrupt = interrupt
        self._dead: set[int] = set()

    def begin(self, call: str) -> None:
        """Called before a call of the acting actor."""
        if self.actor in self._dead:
            raise KilledError
        if self.actor == 1:
            self.calls += 1
            if self.calls == self._at and self.interrupt(call):
                self._dead.add(1)
                raise KilledError

    def emit(self, text: str) -> None:
        self.events.append(Event(f"{self._names[self.actor - 1]} {self.actor}", text))

    def is_named(self, name: str) -> bool:
        """Returns True if the acting actor has a name."""
        return self._names[self.actor - 1] == name

    def last(self) -> str:
        """Returns the last event of the acting actor."""
        name = f"{self._names[self.actor - 1]} {self.actor}"
        return next((e.text for e in reversed(self.events) if e.actor == name), "")

    @contextlib.contextmanager
    def acting(self, actor: int) -> Iterator[None]:
        """Another actor acts in the block."""
        before, self.actor = self.actor, actor
        try:
            yield
        finally:
            self.actor = before


class NoHeartbeat:
    """Replaces `Heartbeat`: the models have no events of background threads."""

    def __init__(self, *given: Any) -> None:
        pass

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def still() -> Iterator[None]:
    """In the block, nothing happens between two calls, however slow the machine is.

    No heartbeat comes, and the clock of locks advances by a microsecond a look.
    """
    ticks = itertools.count(1)
    clock = types.SimpleNamespace(
        monotonic=lambda: next(ticks) / 1e6, sleep=time.sleep, time=time.time
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "Heartbeat", NoHeartbeat)
        patch.setattr(locks, "time", clock)
        yield


# ---- requests to a store ----------------------------------------------------------

OBJECTS = {"data": "data", "manifest": "the manifest"}
OBJECTS[commit_marker.MARKER] = "the marker"


class Store:
    """Records the requests to a `ts.KvStore` as events of `model.commit`."""

    def __init__(self, real: Any, recorder: Recorder) -> None:
        self._real = real
        self._recorder = recorder
        self._holders: set[int] = set()

    def read(self, key: str, byte_range: Any = None) -> Any:
        self._recorder.begin(f"read {key}")
        return self._real.read(key, byte_range=byte_range)

    def list(self, *given: Any) -> Any:
        self._recorder.begin("list")
        return self._real.list(*given)

    def write(self, key: str, value: bytes | None, if_equal: Any = None) -> Any:
        self._recorder.begin(f"write {key}")
        future = self._real.write(key, value, if_equal=if_equal)
        is_done = bool(future.result().generation)
        is_new = if_equal == bucket._nothing()
        if key.endswith(locks.LOCK) and value and json.loads(value).get("is_free"):
            self._recorder.emit("frees the lock")
        elif key.endswith(locks.LOCK):
            self._lock(is_done, is_new=is_new, is_removed=value is None)
        elif name := OBJECTS.get(key.rpartition("/")[2]):
            if value is None:
                text = f"removes {name}" if is_done else "finds another marker"
            elif is_new:
                text = f"creates {name}" if is_done else f"finds {name}"
            else:
                text = f"replaces {name}" if is_done else f"cannot replace {name}"
            self._recorder.emit(text)
        return future

    def _lock(self, is_done: bool, *, is_new: bool, is_removed: bool) -> None:
        actor = self._recorder.actor
        if is_removed:
            self._recorder.emit("releases the lock")
        elif is_new and is_done:
            self._holders.add(actor)
            self._recorder.emit("creates the lock")
        elif actor in self._holders:
            self._recorder.emit("renews the lock" if is_done else "has lost the lock")
        elif not is_new:
            self._holders |= {actor} if is_done else set()
            text = "takes the lock over" if is_done else "is refused the lock"
            self._recorder.emit(text)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """In the block, this process is another one, to which all other locks are old."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_machine", lambda: "elsewhere")
        patch.setattr(locks, "_ABANDONED_SECS", 0.0)
        patch.setattr(locks, "_LOOK_SECS", 0.001)
        patch.setattr(commit_marker, "_locks", {})
        yield


@contextlib.contextmanager
def here() -> Iterator[None]:
    """In the block, this process is another one of the same machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_marker, "_locks", {})
        yield


@contextlib.contextmanager
def processes(recorder: Recorder) -> Iterator[None]:
    """In the block, each actor is a process, and knows that the others are dead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: recorder.actor)
        patch.setattr(
            locks, "_started", lambda pid: "now" if pid == recorder.actor else ""
        )
        yield


# ---- calls of the file system -----------------------------------------------------

CALLS = ("open", "utime", "stat", "listdir", "rename", "unlink", "rmdir", "fsync")


@contextlib.contextmanager
def system_calls(
    recorder: Recorder, observe: Callable[..., str | None]
) -> Iterator[None]:
    """Records calls of `os` in the block, of the thread that enters it.

    Args:
        recorder: Gets the events.
        observe: Returns the event of a call, or None, from its name, its path (relative
            to a descriptor, if the call was), its other arguments, and its result or
            OSError.
    """

    actors = get_ident()

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            if get_ident() != actors:  # of pytest, jax or TensorStore
                return real(path, *args, **options)
            recorder.begin(f"{name} {path}")
            try:
                result = real(path, *args, **options)
            except OSError as error:
                if text := observe(name, path, args, error):
                    recorder.emit(text)
                raise
            if text := observe(name, path, args, result):
                recorder.emit(text)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name))
        yield


class Step:
    """Tells the events of `verification.model.reading` by calls on a step."""

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self._path = str(path)
        self._recorder = recorder
        self._leases: dict[int, set[str]] = {}

    def __call__(self, call: str, path: Any, args: Any, result: Any) -> str | None:
        name = os.fspath(path) if not isinstance(path, int) else ""
        is_done = not isinstance(result, OSError)
        act = self._reader if self._recorder.is_named("reader") else self._deleter
        return act(call, name, args, result, is_done)

    def _reader(
        self, call: str, name: str, args: Any, result: Any, is_done: bool
    ) -> str | None:
        last = self._recorder.last()
        if call == "open" and name == self._path and not last:
            return "opens the step" if is_done else "finds no step"
        if call == "open" and name.startswith(leases.READING):
            return "makes its lease" if is_done else "finds no step"
        if call == "listdir" and last == "makes its lease":
            is_seen = is_done and leases.DELETING in result
            return None if is_seen else "sees no deletion"
        if call == "stat" and name == f"{self._path}/{leases.DELETING}":
            return "sees a deletion" if is_done else "sees no deletion"
        if call == "stat" and name == self._path and last == "sees no deletion":
            return "sees the step" if is_done else "sees no step"
        if call == "unlink" and name.startswith(leases.READING):
            return "removes its lease"
        return None

    def _deleter(
        self, call: str, name: str, args: Any, result: Any, is_done: bool
    ) -> str | None:
        last = self._recorder.last()
        if name == f"{self._path}/{leases.DELETING}":
            if call == "utime" and is_done:
                return "announces the deletion"
            if call == "open":
                return "announces the deletion" if is_done else "finds no step"
            if call == "unlink" and last in ("finds a reader", "restores the name"):
                return "retracts the deletion"
        if call == "listdir" and (name == self._path or last == "removes the name"):
            found = (
                {n for n in result if n.startswith(leases.READING)}
                if is_done
                else set()
            )
            self._leases[self._recorder.actor] = found
            return None if found else "finds no reader"
        waiting = self._leases.get(self._recorder.actor, set())
        if call == "stat" and Path(name).name in waiting:
            waiting.discard(Path(name).name)
            if is_done:
                waiting.clear()
                return "finds a reader"
            return None if waiting else "finds no reader"
        if call == "rename" and name == self._path:
            return "removes the name" if is_done else "finds no step"
        if call == "rename" and args[0] == self._path:
            return "restores the name"
        if call in ("unlink", "rmdir") and last == "finds no reader" and is_done:
            return "removes the files"
        return None


_exchange_atomically = rename.exchange_atomically


class Names:
    """Tells the events of `model.replace` by the calls on names of directories.

    Args:
        final: The path of the step.
        new: The new directory of the overwriter.
        recorder: Gets the events.
    """

    def __init__(self, final: Path, new: Path, recorder: Recorder) -> None:
        self._final, self._new = str(final), str(new)
        self._recorder = recorder

    def __call__(self, call: str, path: Any, args: Any, result: Any) -> str | None:
        is_done = not isinstance(result, OSError)
        if call == "fsync":
            is_root = os.fspath(Path(f"/proc/self/fd/{path}").readlink()) == str(
                Path(self._final).parent
            )
            return "syncs" if is_root else None
        source = "" if isinstance(path, int) else os.fspath(path)
        if self._recorder.is_named("sweeper"):
            if call == "rename" and os.fspath(args[0]) == self._final:
                return "restores the step" if is_done else "is refused"
            if call == "rename":
                return "sets a directory aside" if is_done else "finds nothing"
            is_leftover = source.startswith(f"{self._final}.")
            return "removes a directory" if call == "rmdir" and is_leftover else None
        if call == "rmdir" and source == self._new:
            return "removes its directory"
        if call != "rename":
            return None
        target = os.fspath(args[0])
        if source == self._final:
            return "renames the step" if is_done else "finds no step"
        if source == self._new:
            return "publishes" if is_done else "finds a step"
        if target == self._new:
            return "renames the old step" if is_done else "finds no old step"
        return "restores the step"

    def exchange(self, one: Path, other: Path) -> bool:
        """Replaces `rename.exchange_atomically`."""
        self._recorder.begin("exchange")
        try:
            is_done = _exchange_atomically(one, other)
        except OSError:
            self._recorder.emit("finds no step")
            raise
        self._recorder.emit("exchanges the names")
        return is_done
