"""Locks in object stores, for writers and deleters of checkpoints.

A lock is an object whose holder changes it again and again, by conditional writes. One
that has not changed for a while, or whose process is dead, is taken over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from flaxckpt import _util, errors
from flaxckpt._storage import store_options
from flaxckpt._storage.paths import RemotePath

if TYPE_CHECKING:
    from flaxckpt._storage.stored_value import StoredValue

_log = logging.getLogger(__name__)

LOCK = ".orbax-checkpoint-tmp-writing"
"""Suffix of the key of a lock, after the key of the checkpoint."""

_BEAT_SECS = 10.0
_ABANDONED_SECS = 45.0
"""Seconds without a change after which a lock counts as abandoned."""

_LATE_SECS = 30.0
"""Seconds after which a request has taken effect, or never does."""

_FRESH_SECS = _ABANDONED_SECS - _LATE_SECS
"""Seconds after a renewal within which a request may still be sent under the lock: it
takes effect before others may take over."""

_FRESH_TRIES = 3
"""Renewals in a row, in a store where each takes longer than `_FRESH_SECS`."""

_PATIENCE_SECS = 60.0
_LOOK_SECS = 0.5


class _Holder(NamedTuple):
    """The content of a lock; times are of the holder's `time.monotonic`.

    Requests of dead holders before it may take effect until `until`; if `is_free`, the
    lock is only there for a sweep after that time.
    """

    id: str
    machine: str
    pid: int
    started: str
    beat: float = 0.0
    until: float = 0.0
    is_free: bool = False

    def content(self) -> bytes:
        defaults = self._field_defaults
        fields = self._asdict().items()
        return json.dumps(
            {name: value for name, value in fields if value != defaults.get(name)}
        ).encode()


class Lock:
    """A held lock, until released or taken over.

    `release` leaves the object for a sweep if `is_left`, at first if it was inherited.
    """

    def __init__(
        self, path: RemotePath, holder: _Holder, generation: bytes, *, inherited: bool
    ) -> None:
        self.path = path
        self.is_inherited = self.is_left = inherited
        self._holder = holder
        self._generation = generation
        self._guard = threading.Lock()
        self._is_lost = False
        _living.add(holder.id)
        self._heartbeat: _util.threads.Heartbeat | None = None
        with contextlib.suppress(RuntimeError):  # no new threads: stays young a while
            self._heartbeat = _util.threads.Heartbeat(
                self._beat, _BEAT_SECS, "flaxckpt store lock"
            )

    def _beat(self) -> bool:
        """Renews the lock; returns False to stop the heartbeat."""
        try:
            return self._renew()
        except errors.StoreError:
            return True

    def _renew(self) -> bool:
        with self._guard:
            holder = self._holder._replace(beat=time.monotonic())
            generation = self.path.store.exchange(
                _key(self.path), holder.content(), self._generation
            )
            if generation is None:
                self._is_lost = True
                return False
            self._generation, self._holder = generation, holder
            return True

    def check(self) -> None:
        """Renews an old lock; call it before each request that could do harm.

        Raises CheckpointExistsError if another process has taken over the lock.
        """
        for _ in range(_FRESH_TRIES):  # the pause may come during a renewal, too
            age = time.monotonic() - self._holder.beat
            if not self._is_lost and age <= _FRESH_SECS:
                return
            self.confirm()

    def confirm(self) -> None:
        """Renews the lock; raises CheckpointExistsError if another process has it."""
        if self._is_lost or not self._renew():
            raise errors.CheckpointExistsError(
                f"{self.path} was taken over by another writer, because this process"
                f" did not renew its lock for {_ABANDONED_SECS:g} s; this process"
                " neither commits nor removes anything"
            )

    def leave(self) -> None:
        """Lets `release` leave the lock: a request under it may still take effect."""
        self.is_left = True
        _pending[self._holder.id] = time.monotonic() + _LATE_SECS

    @store_options.cleanup()
    def release(self) -> None:
        """Releases the lock; after a failure, a later sweep removes its object.

        A sweep also removes one that was taken over: late requests may have an effect.
        """
        if os.getpid() != self._holder.pid:
            return  # in a forked child: the parent holds the lock
        if self._heartbeat is not None:
            self._heartbeat.stop()
        _living.discard(self._holder.id)
        store, key = self.path.store, _key(self.path)
        try:
            if self.is_left:
                is_old = time.monotonic() - self._holder.beat > _ABANDONED_SECS
                if self._is_lost or (is_old and not self._renew()):
                    # Leave one all the same, unless another process holds it now.
                    store.create(key, self._holder.content())
            elif self._is_lost:
                pass
            elif self._holder.until:  # even if it has passed: objects may have come
                free = self._holder._replace(is_free=True)
                store.exchange(key, free.content(), self._generation)
            else:
                store.delete(key, self._generation)
        except errors.StoreError as error:
            _log.warning(
                "could not release the lock of %s for now: %s", self.path, error
            )


_living: set[str] = set()
"""IDs of the locks that this process holds."""

_pending: dict[str, float] = {}
"""ID of a lock of this process that was left -> time until which a request under it may
take effect."""

os.register_at_fork(after_in_child=_living.clear)


def _key(path: RemotePath) -> str:
    return path.key + LOCK


@contextlib.contextmanager
def lock(path: RemotePath, *, patient: bool = False) -> Iterator[Lock]:
    """Holds the lock of a checkpoint, which need not exist, in the `with` block.

    If `patient`, waits up to a minute. Raises CheckpointExistsError if another process
    holds the lock; StoreError if the store is unreachable.
    """
    lock = _acquire(path, patient=patient)
    try:
        yield lock
    except errors.StoreError:
        lock.leave()  # requests may still arrive, or the work is half done
        raise
    finally:
        lock.release()


def _acquire(path: RemotePath, *, patient: bool) -> Lock:
    store, key, holder = path.store, _key(path), _self()
    watched: StoredValue | None = None
    begin = unchanged_since = last_seen = time.monotonic()
    while True:
        holder = holder._replace(beat=time.monotonic())
        if (generation := store.create(key, holder.content())) is not None:
            return Lock(path, holder, generation, inherited=False)
        read_begin = time.monotonic()
        current = store.read(key)
        if time.monotonic() - read_begin > _BEAT_SECS:
            unchanged_since = time.monotonic()  # the holder could not renew, either
        if current is None:  # released just now, or the bucket is missing
            if time.monotonic() - last_seen > store.options.deadline_secs:
                raise errors.StoreError(
                    f"cannot lock {path}: could not create {store.url}/{key} within"
                    f" {store.options.deadline_secs:g} s, although it does not exist;"
                    " check that the bucket exists"
                )
            time.sleep(_LOOK_SECS)
            continue
        last_seen = time.monotonic()
        status = _status(current)
        if watched is None or watched.generation != current.generation:
            has_changed = watched is not None
            watched, unchanged_since = current, time.monotonic()
            is_patient = patient and unchanged_since - begin <= _PATIENCE_SECS
            is_held = status == "held" or (status == "unknown" and has_changed)
            if is_held and not is_patient:
                raise errors.CheckpointExistsError(
                    f"{path} is being written by {_name(current)}: wait for it, or"
                    " save another step"
                )
        is_abandoned = time.monotonic() - unchanged_since > _ABANDONED_SECS
        if status in ("dead", "free") or is_abandoned:
            until = 0.0 if is_abandoned else _until(current)
            if (lock := _replace(path, current, until)) is not None:
                return lock
            continue
        time.sleep(_LOOK_SECS)


def _replace(path: RemotePath, current: StoredValue, until: float) -> Lock | None:
    """Replaces a lock by one of this process; None if it has changed since."""
    now = time.monotonic()
    holder = _self()._replace(beat=now, until=until if until > now else 0.0)
    generation = path.store.exchange(_key(path), holder.content(), current.generation)
    if generation is None:
        return None
    return Lock(path, holder, generation, inherited=True)


def _self() -> _Holder:
    pid = os.getpid()
    return _Holder(secrets.token_hex(8), _machine(), pid, _started(pid))


def _machine() -> str:
    """Returns an ID of this machine, boot and PID namespace (container)."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(f"{Path('/proc/self/ns/pid').readlink()}")
    return " ".join(parts)


def _started(pid: int) -> str:
    """Returns the start time of a process; empty if dead or unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _holder(lock: StoredValue) -> _Holder | None:
    try:
        holder = _Holder(**json.loads(lock.value))
        return holder._replace(beat=float(holder.beat), until=float(holder.until))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _name(lock: StoredValue) -> str:
    holder = _holder(lock)
    if holder is None:
        return "an unknown process"
    host = str(holder.machine).partition(" ")[0]
    return errors.printable(f"{host}:{holder.pid}"[:100])


_Status = Literal["held", "unknown", "left", "free", "dead"]
"""Who uses a lock.

held: Its process, which is alive.
unknown: Perhaps a process that cannot be seen from here.
left: Nobody, but requests of this process may still take effect. They would replace or
    remove objects of the next holder.
free: Nobody, but requests of a dead process may still take effect. They may only add
    objects, so the lock may have another holder, but may not be removed.
dead: Nobody.
"""


def _status(lock: StoredValue) -> _Status:
    holder, now = _holder(lock), time.monotonic()
    is_here = holder is not None and holder.machine == _machine()
    if holder is not None and holder.is_free:
        return "dead" if is_here and now >= _until(lock) else "free"
    if holder is None or not is_here:
        return "unknown"
    if holder.pid != os.getpid():
        return "held" if _started(holder.pid) == holder.started else "dead"
    if holder.id in _living:
        return "held"
    return "left" if now < _pending.get(holder.id, 0.0) else "dead"


def _until(lock: StoredValue) -> float:
    """Returns the monotonic time until which requests of an unused lock take effect."""
    holder, now, pid = _holder(lock), time.monotonic(), os.getpid()
    if holder is None or holder.machine != _machine():
        return now + _LATE_SECS
    if holder.is_free or (holder.pid, holder.started) == (pid, _started(pid)):
        until = holder.until
    else:
        until = max(holder.until, holder.beat + _ABANDONED_SECS)
    return min(until, now + _ABANDONED_SECS)  # whatever is in the object


# ---- locks of dead holders --------------------------------------------------------


_seen: dict[str, tuple[bytes, float]] = {}
"""Checkpoint -> generation of a lock that nobody may use, and when first seen."""


def take_over(path: RemotePath) -> Lock | None:
    """Returns the lock of a dead holder, taken over, or None; raises StoreError."""
    store, key = path.store, _key(path)
    begin = time.monotonic()
    current = store.read(key)
    if current is None:
        return None
    status, until = _status(current), _until(current)
    if status not in ("held", "dead"):
        if time.monotonic() - begin > _BEAT_SECS:
            _seen.clear()  # the holders could not renew, either
        seen = _seen.get(f"{path}")
        if seen is None or seen[0] != current.generation:
            seen = _seen[f"{path}"] = current.generation, time.monotonic()
        if time.monotonic() - seen[1] > _ABANDONED_SECS:
            status, until = "dead", 0.0
    if status != "dead":
        return None
    if (lock := _replace(path, current, until)) is not None:
        _seen.pop(f"{path}", None)
    return lock


def is_locked(path: RemotePath) -> bool:
    """Returns True if a lock of the checkpoint exists, of any holder."""
    return path.store.has(_key(path))
