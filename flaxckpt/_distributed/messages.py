"""What the processes of a job write down of one thing that they do together.

Short texts by name, wherever `_distributed.key_value` keeps them. All of them see all.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flaxckpt._distributed import key_value

LATE = "late"
"""The kind of failure of a process that did not come."""

STOPPED = "stopped"
"""The kind of failure of one that has stopped because of another's."""

_HEARD_SECS = 5.0
"""For those that wait to hear that one has failed."""

_AT_ONCE_SECS = 0.001


class Failure(NamedTuple):
    """How it ended for one process.

    Attributes:
        process: Its number.
        kind: The class of its error, or `late`.
        text: What it says.
    """

    process: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"process {self.process}: {self.text}"


class ApartError(Exception):
    """Not all processes have come so far.

    Attributes:
        failures: Of those that have not, as far as is known.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        told = [each for each in failures if each.kind != STOPPED]
        self.failures = tuple(sorted(told or failures))
        super().__init__("\n".join(map(str, self.failures)))


def failed_in(failures: Iterable[Failure]) -> set[int]:
    """The processes that have failed."""
    return {failure.process for failure in failures}


class Notes:
    """The texts of one operation.

    Args:
        texts: Where they are kept.
        name: Of the operation, the same in all processes and in no other operation.
        index: This process's number.
    """

    def __init__(self, texts: key_value.Texts, name: str, index: int) -> None:
        self._texts = texts
        self._name = name
        self._index = index

    def say(self, stage: str, text: str) -> None:
        """As process 0, tells all of a stage."""
        self._texts.set(f"{self._name}/{stage}", text)

    def said(self, stage: str, timeout_secs: float) -> str:
        """What process 0 has said of a stage.

        Raises:
            TimeoutError: It has not yet.
        """
        return self._texts.get(f"{self._name}/{stage}", timeout_secs)

    def tell(self, stage: str, text: str) -> None:
        """Tells process 0 that this one has come so far."""
        self._texts.set(f"{self._name}/{stage}-of/{self._index}", text)

    def told(self, stage: str, process: int, timeout_secs: float) -> str | None:
        """What a process has told of a stage; None if it has not yet."""
        try:
            return self._texts.get(f"{self._name}/{stage}-of/{process}", timeout_secs)
        except TimeoutError:
            return None

    # ---- failures -----------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Notes how it ended for a process."""
        key = f"{self._name}/failed/{failure.process}"
        self._texts.set(key, json.dumps(failure))

    def failures(self) -> tuple[Failure, ...]:
        """Of all processes that have failed until now."""
        found = self._texts.list(f"{self._name}/failed")
        return tuple(sorted(Failure(*json.loads(text)) for text in found.values()))

    def end(self, apart: ApartError) -> None:
        """As process 0, tells all that it has ended, and how."""
        self._texts.set(f"{self._name}/over", json.dumps(apart.failures))

    def ended(self) -> ApartError | None:
        """How it has ended, and says that it was heard; None if it goes on."""
        try:
            over = self._texts.get(f"{self._name}/over", _AT_ONCE_SECS)
        except TimeoutError:
            return None
        self._texts.set(f"{self._name}/heard/{self._index}", "")
        return ApartError([Failure(*row) for row in json.loads(over)])

    def wait_until_heard(self, processes: Iterable[int]) -> None:
        """Gives those that wait the time to hear it: the service may end with us."""
        deadline = time.monotonic() + _HEARD_SECS
        for process in processes:
            with contextlib.suppress(OSError):
                left = max(0.0, deadline - time.monotonic())
                self._texts.get(f"{self._name}/heard/{process}", left)
