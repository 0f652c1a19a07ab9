"""Operations of several processes, which succeed or fail in all processes.

Each process reports to process 0, and process 0 announces the result to all processes.
Messages are short texts in jax's coordination service or in files of a shared
directory, never on devices, so a thread may wait here while the devices train.

Errors name late processes. A process is late if it misses the deadline of a stage, and
dead if its heartbeats stop.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flaxckpt import _storage, _util, errors
from flaxckpt._distributed import heartbeat, key_value
from flaxckpt._distributed.messages import (
    LATE,
    STOPPED,
    ApartError,
    Failure,
    Messages,
    failed_processes,
)
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

TIMEOUT_SECS = 600.0
"""Default of the seconds that processes wait for each other."""

USES_FILES = False
"""True to use files even if jax has a coordination service."""

_SLICE_SECS = 0.25
_GRACE_SECS = 30.0
"""Seconds for other processes to stop after a process has failed."""

_MARGIN = 2
"""Factor on the timeout of other processes: process 0 may itself be waiting."""


_REFUSED = "flaxckpt/refused"

_HAS_LEFT = "answers no more calls: it has closed the run, or its program ends"

_LONGEST_TEXT = 1000


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    """Converts errors of the key-value store to the failure of process 0.

    Raises:
        ApartError: The store cannot be reached.
    """
    try:
        yield
    except OSError as error:
        message = f"its coordination service has ended: {error}"
        raise ApartError([Failure(0, LATE, message)]) from None


# ---- who is there ------------------------------------------------------------------


class ProcessGroup:
    """The processes of a job: this is process `index`, and `store` has the messages."""

    def __init__(self, store: key_value.KeyValueStore, index: int, count: int) -> None:
        self.store = store
        self.index = index
        self.count = count
        self._counts: collections.Counter[str] = collections.Counter()
        self._open: dict[Operation, None] = {}  # in their order
        self._joined: dict[str, str] = {}
        self._listening: collections.Counter[str] = collections.Counter()
        self._opened: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        # Series -> operations whose messages process 0 deletes later.
        self._ended: dict[str, list[str]] = {}
        self.heartbeats = heartbeat.Heartbeats(store, index, self._poll_failures)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def begin(
        self, kind: str, directory: Path, what: str, *, timeout_secs: float
    ) -> Operation:
        """Begins a joint operation of a `kind`, such as `save`.

        All processes begin the same operations in the same order. A job may use several
        run directories at a time. `what` is for messages. Raises OptionError in a fork
        of a process of the job.
        """
        if os.getpid() != self._pid:
            raise errors.OptionError(
                f"cannot begin {what}: this is a fork of process {self.index} of"
                f" {self.count}, not a process of the job; save and restore in the"
                " processes of the job"
            )
        # Count failed operations too, so that all processes use the same numbers.
        name = f"flaxckpt/{_place(directory)}/{kind}"
        with self._lock:
            number = self._counts[name]
            self._counts[name] += 1
            earlier = tuple(self._ended.get(_series(name), ()))
        operation = Operation(self, f"{name}/{number}", what, timeout_secs, earlier)
        self._open[operation] = None
        self.heartbeats.start()
        return operation

    def call(
        self, kind: str, directory: Path, what: str, *, timeout_secs: float
    ) -> Operation:
        """Begins an operation, as process 0, at any time; the others `join` it."""
        token = secrets.token_hex(4)
        name, key = f"{kind}.{token}", _call_key(kind, directory)
        operation = self.begin(name, directory, what, timeout_secs=timeout_secs)
        left = f"{key}/left/{self._listening[key]}"
        operation.find_left = lambda: map(int, self.store.list(left))
        with _service_errors():
            self.store.set(key, f"{token} {what}")
        return operation

    def listen(self, kind: str, directory: Path) -> Callable[[], None]:
        """Begins to answer calls of a kind, in all processes in the same order.

        Returns:
            A function that tells process 0 that this process answers no more calls. It
            raises OSError if the job has ended.
        """
        key = _call_key(kind, directory)
        self._listening[key] += 1
        left = f"{key}/left/{self._listening[key]}/{self.index}"
        return lambda: self.store.set(left, "")

    def join(
        self, kind: str, directory: Path, *, timeout_secs: float
    ) -> Operation | None:
        """Begins the operation that process 0 has called; None without a new one.

        Raises:
            ConnectionError: The job ends.
        """
        key = _call_key(kind, directory)
        try:
            token, _, what = self.store.get(key, 0).partition(" ")
        except TimeoutError:
            return None
        if self._joined.get(key) == token:
            return None
        self._joined[key] = token
        return self.begin(f"{kind}.{token}", directory, what, timeout_secs=timeout_secs)

    def note_opened(self, directory: Path) -> None:
        """Notes that this process has opened a run; starts heartbeats.

        Does nothing in a fork.
        """
        if os.getpid() != self._pid:
            return
        place = _place(directory)
        self._opened[place] += 1
        if self._refused[place]:
            self._tell_refusal(place, None)
        self.heartbeats.start()

    def note_refused(self, directory: Path, error: Exception) -> None:
        """Tells the other processes why this one cannot open a run.

        Raises:
            OSError: The messages cannot be sent.
        """
        if os.getpid() == self._pid:
            self._tell_refusal(_place(directory), _failure(self.index, error))

    def _tell_refusal(self, place: str, failure: Failure | None) -> None:
        self._refused[place] += 1
        key = f"{_REFUSED}/{place}/{self.index}/{self._refused[place]}"
        self.store.set(key, json.dumps([self._opened[place], failure]))

    def find_refused(self, place: str) -> list[Failure]:
        """Returns the failures of processes that could not open what this one has.

        Each attempt has its key: a message that comes late hides no later attempt.
        """
        latest: dict[str, tuple[int, str]] = {}
        for key, text in self.store.list(f"{_REFUSED}/{place}").items():
            index, _, attempt = key.partition("/")
            latest[index] = max(latest.get(index, (0, "")), (int(attempt), text))
        rows = [json.loads(text) for _, text in latest.values()]
        return [
            Failure(*failure)
            for opened, failure in rows
            if failure is not None and opened < self._opened[place]
        ]

    def end(self, operation: Operation, *, all_reported: bool) -> None:
        """Forgets an operation; deletes its messages when no process needs them."""
        self._open.pop(operation, None)
        if self.index != 0:
            return
        read = operation.earlier if all_reported else ()
        series = _series(operation.name)
        with self._lock:
            left = [name for name in self._ended.get(series, ()) if name not in read]
            self._ended[series] = [*left, operation.name]
        for name in read:
            with contextlib.suppress(OSError):
                self.store.delete(name)

    def _poll_failures(self) -> None:
        for operation in list(self._open):
            operation.poll_failures()


def _place(directory: Path) -> str:
    text = str(directory).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:12]


def _failure(process: int, error: BaseException) -> Failure:
    kind = STOPPED if isinstance(error, ApartError) else type(error).__name__
    text = errors.one_line(error, _LONGEST_TEXT)
    # The text of other errors, such as a KeyError, may be no more than a name.
    if not isinstance(error, errors.CheckpointError | OSError | ApartError):
        text = ": ".join(filter(None, (kind, text)))
    return Failure(process, kind, text or kind)


def _call_key(kind: str, directory: Path) -> str:
    return f"flaxckpt/call/{_place(directory)}/{kind}"


def _series(name: str) -> str:
    """Returns the series of an operation, by its name.

    Each process takes part in the operations of a series one after the other. Those of
    threads of their own, such as `copies.100`, are beside those of the calling thread:
    whoever reports there may still read what process 0 has told here.
    """
    _, place, kind, *_ = name.split("/")
    base, dot, _ = kind.partition(".")
    return f"{place}/{base if dot else ''}"


class Operation:
    """A joint operation of all processes.

    Each stage has a name. The operation succeeds, or fails with the same `ApartError`
    in all processes that can be reached. `earlier` are those of its series that had
    ended before: all processes that take part in this one have left them.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        what: str,
        timeout_secs: float,
        earlier: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.what = what
        self.earlier = earlier
        self.is_first = group.index == 0
        self._group = group
        self._messages = Messages(group.store, name, group.index)
        _, self._place, *_ = name.split("/")
        self._timeout_secs = timeout_secs
        self._failures: tuple[Failure, ...] = ()
        self._is_over = False
        self._all_reported = False
        self._apart: ApartError | None = None
        self.is_wanted: Callable[[], bool] = lambda: True  # False ends its waits
        self.find_left: Callable[[], Iterable[int]] = tuple  # those that will not join

    @property
    def index(self) -> int:
        return self._group.index

    @property
    def count(self) -> int:
        return self._group.count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self) -> None:
        self._group.end(self, all_reported=self._all_reported)

    # ---- stages: values of JSON, so that tuples become lists ------------------------

    def first(
        self, stage: str, mine: Callable[[], JSON], *, is_patient: bool = False
    ) -> Any:
        """Returns a value of process 0, in all processes. Process 0 does not wait.

        Args:
            stage: The stage.
            mine: Returns the value; called on process 0.
            is_patient: True to wait as long as process 0 sends heartbeats: it no longer
                fails if others stop waiting.

        Raises:
            ApartError: Process 0 has failed, is late, or sends no heartbeats.
        """
        if self.is_first:
            text = json.dumps(mine())
            with _service_errors():
                self._messages.announce(stage, text)
            return json.loads(text)
        return json.loads(self._await(stage, is_patient=is_patient))

    def report(self, stage: str, mine: JSON = None) -> None:
        """Reports to process 0 that this process has reached a stage.

        Raises:
            ApartError: The messages cannot be sent.
        """
        if not self.is_first:
            with _service_errors():
                self._messages.report(stage, json.dumps(mine))

    @_service_errors()
    def gather(self, stage: str, mine: JSON = None) -> list[Any]:
        """Returns, in process 0, the reports of all processes when they reach a stage.

        Raises:
            ApartError: A process has failed or is late. All processes receive the
                error.
        """
        reports = {0: json.dumps(mine)}
        begin = time.monotonic()
        deadline = begin + self._timeout_secs
        late: dict[int, Failure] = {}
        waiting = collections.deque(range(1, self.count))
        while waiting:
            report = self._messages.get_report(stage, waiting[0], _SLICE_SECS)
            if report is not None:
                reports[waiting.popleft()] = report
                continue
            for refused in self._group.find_refused(self._place):
                self._messages.fail(refused)
            failed = failed_processes(self._messages.failures())
            if failed or late:
                deadline = min(deadline, time.monotonic() + _GRACE_SECS)
            reasons = {
                process: reason
                for process in waiting
                if (reason := self._lateness(process, stage, begin, deadline))
            }
            reasons |= dict.fromkeys({*self.find_left()} & {*waiting}, _HAS_LEFT)
            # Some may have come while another was awaited.
            reports |= self._messages.reports(stage) if reasons else {}
            for process in list(waiting):
                if process in failed or process in reports:
                    waiting.remove(process)
                elif reason := reasons.get(process):
                    waiting.remove(process)
                    late[process] = Failure(process, LATE, reason)
                    self._messages.fail(late[process])
        failures = self._messages.failures()
        self._all_reported = not late
        if failures:
            apart = self._end(failures)
            failed = failed_processes(failures)
            self._messages.wait_for_confirmations(reports.keys() - failed - {0})
            raise apart
        return [json.loads(reports[process]) for process in range(self.count)]

    def exchange(self, stage: str, mine: JSON = None) -> list[Any]:
        """Returns the values of all processes, in all processes.

        Raises:
            ApartError: A process has failed or is late.
        """
        self.report(stage, mine)
        values: list[Any] = self.first(stage, lambda: self.gather(stage, mine))
        return values

    def poll_failures(self) -> None:
        """Records failures of other processes; called each second by the heartbeat."""
        if not self._failures:
            self._failures = self._messages.failures()

    def check(self) -> None:
        """Raises an error if another process has failed.

        Raises:
            ApartError: A process has failed.
        """
        if self._failures:
            raise ApartError(self._failures)

    # ---- its end -----------------------------------------------------------------

    def fail(self, error: BaseException, *, stage: str = "") -> None:
        """Reports the failure of this process to the other processes.

        Args:
            error: The failure.
            stage: As process 0, wait up to 30 s until all processes have reached this
                stage or have stopped, even if messages are lost for a while: the files
                they write may then be removed. Without a stage, waits for no process.
        """
        if self._is_over:
            return
        self._is_over = True
        failure = _failure(self.index, error)
        self._failures = (*self._failures, failure)
        deadline = time.monotonic() + _GRACE_SECS
        while True:
            try:
                self._messages.fail(failure)
                if self.is_first:
                    if stage:
                        self._settle(stage, deadline)
                    self._end(self._messages.failures())
            except OSError as lost:
                if not stage or time.monotonic() > deadline:
                    _log.debug("%s: could not report the failure: %s", self.what, lost)
                    return
                time.sleep(_SLICE_SECS)  # the others may still write
            else:
                return

    def outcome(self) -> ApartError:
        """Returns the failures that process 0 announced; call after `fail`."""
        if self.is_first:
            return self._apart or ApartError(self._failures)
        try:
            self._await("nothing")
        except ApartError as apart:
            return apart
        raise AssertionError(self.name)

    def _settle(self, stage: str, deadline: float) -> None:
        for process in range(1, self.count):
            while self._messages.get_report(stage, process, _SLICE_SECS) is None:
                is_dead = (
                    self._group.heartbeats.silent_secs(process) > heartbeat.SILENT_SECS
                )
                stopped = failed_processes(self._messages.failures())
                has_stopped = process in {*stopped, *self.find_left()}
                if is_dead or has_stopped or time.monotonic() > deadline:
                    break

    def _end(self, failures: Sequence[Failure]) -> ApartError:
        """Announces the end of the operation and its failures to all processes."""
        self._is_over = True
        self._apart = ApartError(failures)
        self._messages.end(self._apart)
        return self._apart

    def _lateness(
        self, process: int, stage: str, begin: float, deadline: float
    ) -> str | None:
        """Returns why a process counts as late; None if it may still come."""
        silent = self._group.heartbeats.silent_secs(process)
        if silent > heartbeat.SILENT_SECS:
            return (
                f"has sent no heartbeat for {silent:.0f} s, and has not reached"
                f" {stage!r} of {self.what}"
            )
        now = time.monotonic()
        if now <= deadline:
            return None
        return f"has not reached {stage!r} of {self.what} after {now - begin:.0f} s"

    def _await(self, stage: str, *, is_patient: bool = False) -> str:
        """Waits for the message of process 0 about a stage, and returns it."""
        begin = time.monotonic()
        usual_deadline = begin + _MARGIN * self._timeout_secs + _GRACE_SECS
        while True:
            if not self.is_wanted():
                raise ApartError([Failure(self.index, STOPPED, "it ends")])
            with _service_errors():
                with contextlib.suppress(TimeoutError):
                    return self._messages.announcement(stage, _SLICE_SECS)
                if (apart := self._messages.get_end()) is not None:
                    self._is_over = True
                    raise apart
                if not self._group.heartbeats.has_heard(0):  # a cheap look
                    for refused in self._group.find_refused(self._place):
                        if refused.process == 0:
                            raise ApartError([refused])
            is_endless = is_patient and self._group.heartbeats.has_heard(0)
            deadline = math.inf if is_endless else usual_deadline
            if reason := self._lateness(0, stage, begin, deadline):
                raise ApartError([Failure(0, LATE, reason)])


# ---- which way ---------------------------------------------------------------------

_groups: dict[Path | None, ProcessGroup] = {}


def find_group(directory: Path) -> ProcessGroup | None:
    """Returns the processes of this job; None for a single process.

    All processes call this at the same point of the program, on the training thread:
    without the coordination service they agree on a directory by a collective.
    """
    if not _util.job.is_distributed():
        return None
    service = _util.processes.service() if has_service() else None
    key = directory if service is None else None
    if key not in _groups:
        index, count = _util.processes.process_index(), _util.processes.process_count()
        group = ProcessGroup(service or _file_store(directory), index, count)
        _groups.setdefault(key, group)
    return _groups[key]


def has_service() -> bool:
    """Returns True if the processes send messages by jax's coordination service."""
    return not USES_FILES and _util.processes.service() is not None


def note_opened(directory: Path) -> None:
    """Notes that this process has opened a run, whose loss is noticed from now on.

    Waits for no process. Without the coordination service, heartbeats start with the
    first operation.
    """
    if not has_service():
        return
    if (group := find_group(directory)) is not None:
        group.note_opened(directory)


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Tells the other processes if the block, which opens a run, fails."""
    try:
        yield
    except Exception as error:
        group = find_group(directory) if has_service() else None
        if group is not None:
            with contextlib.suppress(OSError):
                group.note_refused(directory, error)
        raise


def _file_store(directory: Path) -> key_value.FileStore:
    if _storage.paths.is_remote(directory):
        raise errors.OptionError(
            f"{directory}: this version of jax has no accessible coordination service,"
            " so several processes can save only to a file system"
        )
    # A unique name: files left by an earlier run must not be read.
    token = _util.processes.broadcast_bytes(secrets.token_bytes(8)).hex()
    return key_value.FileStore(directory / f"together.orbax-checkpoint-tmp-{token}")
