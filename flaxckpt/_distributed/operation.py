"""Several processes do one thing together, and know how it ended for all of them.

Each tells process 0 how it is, and process 0 tells all what has come of it. That goes
by short texts: through jax's coordination service, or by files that all processes see.
No device takes part, so a thread may wait here while the devices train.

Whoever is late is named. A process is late when it has not come after so many seconds,
and gone when it has not been heard of for a while.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from flaxckpt import _storage, _util, errors
from flaxckpt._distributed import heartbeat, key_value
from flaxckpt._distributed.messages import (
    LATE,
    STOPPED,
    ApartError,
    Failure,
    Notes,
    failed_in,
)

_log = logging.getLogger(__name__)

TIMEOUT_SECS = 600.0
"""How long processes wait for each other, if nothing else is said."""

USES_FILES = False
"""Whether files are used though there is the service."""

_SLICE_SECS = 0.25
_GRACE_SECS = 30.0
"""For the others to stop when one of them has failed."""

_MARGIN = 2
"""Process 0 may itself wait for somebody: the others wait so many times longer."""


_LONGEST_TEXT = 1000


# ---- who is there ------------------------------------------------------------------


class ProcessGroup:
    """The processes of a job.

    Args:
        texts: By which they tell each other.
        index: This process's number.
        count: How many there are.
    """

    def __init__(self, texts: key_value.Texts, index: int, count: int) -> None:
        self.texts = texts
        self.index = index
        self.count = count
        self._begun: collections.Counter[str] = collections.Counter()
        self._open: set[Operation] = set()
        # Whose texts process 0 has still to delete, by the directory they are about.
        self._over: dict[str, list[str]] = {}
        self._beats = heartbeat.Beats(texts, index, self._look)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def begin(
        self, kind: str, directory: Path, what: str, *, timeout_secs: float
    ) -> Operation:
        """Begins what all processes begin, in the same order.

        Args:
            kind: Such as `save`.
            directory: Of the run: several may be worked with at a time.
            what: For messages.
            timeout_secs: How long to wait for those that are behind.

        Raises:
            OptionError: This is a fork of one of the processes.
        """
        if os.getpid() != self._pid:
            raise errors.OptionError(
                f"cannot begin {what}: this is a fork of process {self.index} of"
                f" {self.count} that train together, and none of them: save and restore"
                " in those"
            )
        place = hashlib.sha256(
            str(directory).encode(errors="surrogateescape")
        ).hexdigest()[:12]
        # It counts those that fail, too: whoever fails here stays in step.
        name = f"flaxckpt/{place}/{kind}"
        with self._lock:
            number = self._begun[name]
            self._begun[name] += 1
        operation = Operation(self, f"{name}/{number}", what, timeout_secs)
        self._open.add(operation)
        self._beats.go_on()
        return operation

    def attend(self) -> None:
        """Beats from now on, whatever begins later; a fork does not."""
        if os.getpid() == self._pid:
            self._beats.go_on()

    def ended(self, operation: Operation, *, all_came: bool) -> None:
        """Forgets an operation. Its texts are deleted when all have gone on."""
        self._open.discard(operation)
        if self.index != 0:
            return
        place = operation.name.split("/")[1]
        with self._lock:
            over = self._over.pop(place, []) if all_came else []
            self._over.setdefault(place, []).append(operation.name)
        for name in over:
            with contextlib.suppress(OSError):
                self.texts.delete(name)

    def silent_secs(self, process: int) -> float:
        """For how long a process has not been heard of; 0 if it never was."""
        return self._beats.silent_secs(process)

    def _look(self) -> bool:
        under_way = list(self._open)
        for operation in under_way:
            operation.look()
        return bool(under_way)


class Operation:
    """One thing that all processes do together.

    Each stage has a name. It ends well, or with the same `ApartError` for all who can
    still be told.
    """

    def __init__(
        self, group: ProcessGroup, name: str, what: str, timeout_secs: float
    ) -> None:
        self.name = name
        self.what = what
        self.is_first = group.index == 0
        self._group = group
        self._notes = Notes(group.texts, name, group.index)
        self._timeout_secs = timeout_secs
        self._seen: tuple[Failure, ...] = ()
        self._is_over = False
        self._all_came = False
        self._apart: ApartError | None = None

    @property
    def index(self) -> int:
        """This process's number."""
        return self._group.index

    @property
    def count(self) -> int:
        """How many processes there are."""
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
        """Ends it for this process."""
        self._group.ended(self, all_came=self._all_came)

    # ---- stages ------------------------------------------------------------------

    def first(self, stage: str, mine: Callable[[], str]) -> str:
        """What process 0 says, and only it makes; it waits for nobody.

        Raises:
            ApartError: It has failed, or does not come.
        """
        if self.is_first:
            text = mine()
            self._notes.say(stage, text)
            return text
        return self._await(stage)

    def tell(self, stage: str, mine: str = "") -> None:
        """Tells process 0 that this one has come so far."""
        if not self.is_first:
            self._notes.tell(stage, mine)

    def gather(self, stage: str, mine: str = "") -> list[str]:
        """Waits, as process 0, until all have told that they have come so far.

        Raises:
            ApartError: Somebody has failed, or does not come. All are told.
        """
        found = {0: mine}
        begun = time.monotonic()
        deadline = begun + self._timeout_secs
        late: dict[int, Failure] = {}
        waiting = collections.deque(range(1, self.count))
        while waiting:
            told = self._notes.told(stage, waiting[0], _SLICE_SECS)
            if told is not None:
                found[waiting.popleft()] = told
                continue
            failed = failed_in(self._notes.failures())
            if failed or late:
                deadline = min(deadline, time.monotonic() + _GRACE_SECS)
            for process in list(waiting):
                if process in failed:
                    waiting.remove(process)
                elif why := self._is_late(process, stage, begun, deadline):
                    waiting.remove(process)
                    late[process] = Failure(process, LATE, why)
                    self._notes.fail(late[process])
        failures = self._notes.failures()
        self._all_came = not late
        if failures:
            apart = self._end(failures)
            self._notes.wait_until_heard(found.keys() - {0, *failed_in(failures)})
            raise apart
        return [found[process] for process in range(self.count)]

    def exchange(self, stage: str, mine: str = "") -> list[str]:
        """What all say, told to all.

        Raises:
            ApartError: Somebody has failed, or does not come.
        """
        self.tell(stage, mine)
        texts: list[str] = json.loads(
            self.first(stage, lambda: json.dumps(self.gather(stage, mine)))
        )
        return texts

    def look(self) -> None:
        """Looks whether somebody has failed; called again and again."""
        if not self._seen:
            self._seen = self._notes.failures()

    def check(self) -> None:
        """Ends what this process is at, if another one has failed.

        Raises:
            ApartError: One has.
        """
        if self._seen:
            raise ApartError(self._seen)

    # ---- its end -----------------------------------------------------------------

    def fail(self, error: BaseException, *, stage: str = "") -> None:
        """Tells the others that this one has failed; waits for nobody.

        Args:
            error: Why.
            stage: As process 0, wait a while until all have come so far or have
                stopped: what they write to may then be removed.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._notes.fail(self._own(error))
            if self.is_first:
                if stage:
                    self._settle(stage)
                self._end(self._notes.failures())
        except OSError as lost:
            _log.debug("%s: nobody could be told: %s", self.what, lost)

    def outcome(self) -> ApartError:
        """What has come of it for all, as process 0 sees it; after `fail`."""
        if self.is_first:
            return self._apart or ApartError(self._seen)
        try:
            self._await("nothing")
        except ApartError as apart:
            return apart
        raise AssertionError(self.name)

    def _own(self, error: BaseException) -> Failure:
        kind = STOPPED if isinstance(error, ApartError) else type(error).__name__
        text = " ".join(str(error).split())[:_LONGEST_TEXT]
        return Failure(self.index, kind, text or kind)

    def _settle(self, stage: str) -> None:
        deadline = time.monotonic() + _GRACE_SECS
        for process in range(1, self.count):
            while self._notes.told(stage, process, _SLICE_SECS) is None:
                gone = self._group.silent_secs(process) > heartbeat.SILENT_SECS
                stopped = process in failed_in(self._notes.failures())
                if gone or stopped or time.monotonic() > deadline:
                    break

    def _end(self, failures: Sequence[Failure]) -> ApartError:
        """Tells all that it has ended, and how."""
        self._is_over = True
        self._apart = ApartError(failures)
        self._notes.end(self._apart)
        return self._apart

    def _is_late(
        self, process: int, stage: str, begun: float, deadline: float
    ) -> str | None:
        """What is to be said of a process that will not come; None if it still may."""
        silent = self._group.silent_secs(process)
        if silent > heartbeat.SILENT_SECS:
            return (
                f"has not been heard of for {silent:.0f} s, and has not reached"
                f" {stage!r} of {self.what}"
            )
        now = time.monotonic()
        if now <= deadline:
            return None
        return f"has not reached {stage!r} of {self.what} after {now - begun:.0f} s"

    def _await(self, stage: str) -> str:
        """Waits for what process 0 says."""
        begun = time.monotonic()
        deadline = begun + _MARGIN * self._timeout_secs + _GRACE_SECS
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    return self._notes.said(stage, _SLICE_SECS)
                if (apart := self._notes.ended()) is not None:
                    self._is_over = True
                    raise apart
            except OSError as error:
                lost = f"its coordination service is gone: {error}"
                raise ApartError([Failure(0, LATE, lost)]) from None
            if why := self._is_late(0, stage, begun, deadline):
                raise ApartError([Failure(0, LATE, why)])


# ---- which way ---------------------------------------------------------------------

_groups: dict[Path | None, ProcessGroup] = {}


def group(directory: Path) -> ProcessGroup | None:
    """The processes of this job; None if there is only one.

    All of them call this at the same place of the program, on the thread that trains:
    without the coordination service they agree on a directory by a collective.
    """
    if not _util.processes.is_together():
        return None
    service = None if USES_FILES else _util.processes.service()
    key = directory if service is None else None
    if key not in _groups:
        index, count = _util.processes.process_index(), _util.processes.process_count()
        made = ProcessGroup(service or _files(directory), index, count)
        _groups.setdefault(key, made)
    return _groups[key]


def attend(directory: Path) -> None:
    """Begins to beat, so that whoever is lost from now on is missed.

    It waits for nobody: without the coordination service, the first operation begins.
    """
    if USES_FILES or _util.processes.service() is None:
        return
    if (found := group(directory)) is not None:
        found.attend()


def _files(directory: Path) -> key_value.Files:
    if not _storage.of(directory).has_directories:
        raise errors.OptionError(
            f"{directory}: this jax does not tell of its coordination service, without"
            " which several processes save to a file system only"
        )
    # A name of its own, or what an earlier run has left there would be believed.
    token = _util.processes.same_bytes(secrets.token_bytes(8)).hex()
    return key_value.Files(directory / f"together.orbax-checkpoint-tmp-{token}")
