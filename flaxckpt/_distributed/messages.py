"""Messages between the processes of a job about a joint operation.

Messages are short texts by name in a `_distributed.key_value` store. Every process sees
every message.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flaxckpt._distributed import key_value

LATE = "late"
"""Kind of failure of a process that missed a deadline."""

STOPPED = "stopped"
"""Kind of failure of a process stopped by another process's failure."""

_HEARD_SECS = 5.0
"""Seconds to wait until processes confirm the end of an operation."""

_AT_ONCE_SECS = 0.001


class Failure(NamedTuple):
    """Failure of a process.

    Attributes:
        process: Index of the process.
        kind: The class of its error, or `late`.
        text: The error message.
    """

    process: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"process {self.process}: {self.text}"


class ApartError(Exception):
    """Processes have failed to reach a stage.

    Attributes:
        failures: Known failures of these processes.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        told = [each for each in failures if each.kind != STOPPED]
        self.failures = tuple(sorted(told or failures))
        super().__init__("\n".join(map(str, self.failures)))


def failed_in(failures: Iterable[Failure]) -> set[int]:
    """Returns the indices of failed processes."""
    return {failure.process for failure in failures}


class Notes:
    """Messages of a joint operation.

    Args:
        texts: Key-value store of the messages.
        name: Unique name of the operation, the same in all processes.
        index: Index of this process.
    """

    def __init__(self, texts: key_value.KeyValueStore, name: str, index: int) -> None:
        self._texts = texts
        self._name = name
        self._index = index

    def say(self, stage: str, text: str) -> None:
        """Sends a message about a stage to all processes, as process 0."""
        self._texts.set(f"{self._name}/{stage}", text)

    def said(self, stage: str, timeout_secs: float) -> str:
        """Returns the message of process 0 about a stage.

        Raises:
            TimeoutError: No message within the timeout.
        """
        return self._texts.get(f"{self._name}/{stage}", timeout_secs)

    def tell(self, stage: str, text: str) -> None:
        """Reports to process 0 that this process has reached a stage."""
        self._texts.set(f"{self._name}/{stage}-of/{self._index}", text)

    def told(self, stage: str, process: int, timeout_secs: float) -> str | None:
        """Returns the report of a process about a stage; None without a report."""
        try:
            return self._texts.get(f"{self._name}/{stage}-of/{process}", timeout_secs)
        except TimeoutError:
            return None

    # ---- failures -----------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Records the failure of a process."""
        key = f"{self._name}/failed/{failure.process}"
        self._texts.set(key, json.dumps(failure))

    def failures(self) -> tuple[Failure, ...]:
        """Returns all failures recorded until now."""
        found = self._texts.list(f"{self._name}/failed")
        return tuple(sorted(Failure(*json.loads(text)) for text in found.values()))

    def end(self, apart: ApartError) -> None:
        """Announces the end of the operation and its failures, as process 0."""
        self._texts.set(f"{self._name}/over", json.dumps(apart.failures))

    def ended(self) -> ApartError | None:
        """Returns the announced end and confirms it; None during the operation."""
        try:
            over = self._texts.get(f"{self._name}/over", _AT_ONCE_SECS)
        except TimeoutError:
            return None
        self._texts.set(f"{self._name}/heard/{self._index}", "")
        return ApartError([Failure(*row) for row in json.loads(over)])

    def wait_until_heard(self, processes: Iterable[int]) -> None:
        """Waits until processes confirm the end: the service may end with process 0."""
        deadline = time.monotonic() + _HEARD_SECS
        for process in processes:
            with contextlib.suppress(OSError):
                left = max(0.0, deadline - time.monotonic())
                self._texts.get(f"{self._name}/heard/{process}", left)
