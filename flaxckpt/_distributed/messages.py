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

_CONFIRM_SECS = 5.0
"""Seconds to wait until processes confirm the end of an operation."""


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
        causes = [failure for failure in failures if failure.kind != STOPPED]
        self.failures = tuple(sorted(causes or failures))
        super().__init__("\n".join(map(str, self.failures)))


def failed_processes(failures: Iterable[Failure]) -> set[int]:
    return {failure.process for failure in failures}


class Messages:
    """Messages of a joint operation, whose unique name is the same in all processes."""

    def __init__(self, store: key_value.KeyValueStore, name: str, index: int) -> None:
        self._store = store
        self._name = name
        self._index = index

    def announce(self, stage: str, text: str) -> None:
        """Sends a message about a stage to all processes, as process 0."""
        self._store.set(f"{self._name}/{stage}", text)

    def announcement(self, stage: str, timeout_secs: float) -> str:
        """Returns the message of process 0 about a stage.

        Raises:
            TimeoutError: No message within the timeout.
        """
        return self._store.get(f"{self._name}/{stage}", timeout_secs)

    def report(self, stage: str, text: str) -> None:
        self._store.set(f"{self._name}/{stage}-of/{self._index}", text)

    def reports(self, stage: str) -> dict[int, str]:
        """Returns the reports about a stage until now: process -> its text."""
        texts = self._store.list(f"{self._name}/{stage}-of")
        return {int(process): text for process, text in texts.items()}

    def get_report(self, stage: str, process: int, timeout_secs: float) -> str | None:
        try:
            return self._store.get(f"{self._name}/{stage}-of/{process}", timeout_secs)
        except TimeoutError:
            return None

    # ---- failures -----------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        key = f"{self._name}/failed/{failure.process}"
        self._store.set(key, json.dumps(failure))

    def failures(self) -> tuple[Failure, ...]:
        texts = self._store.list(f"{self._name}/failed").values()
        return tuple(sorted(Failure(*json.loads(text)) for text in texts))

    def end(self, apart: ApartError) -> None:
        """Announces the end of the operation and its failures, as process 0."""
        self._store.set(f"{self._name}/over", json.dumps(apart.failures))

    def get_end(self) -> ApartError | None:
        """Returns the announced end and confirms it; None during the operation."""
        try:
            over = self._store.get(f"{self._name}/over", 0)
        except TimeoutError:
            return None
        self._store.set(f"{self._name}/heard/{self._index}", "")
        return ApartError([Failure(*row) for row in json.loads(over)])

    def wait_for_confirmations(self, processes: Iterable[int]) -> None:
        """Waits until processes confirm the end: the service may end with process 0."""
        deadline = time.monotonic() + _CONFIRM_SECS
        for process in processes:
            with contextlib.suppress(OSError):
                left = max(0.0, deadline - time.monotonic())
                self._store.get(f"{self._name}/heard/{process}", left)
