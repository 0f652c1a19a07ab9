"""Cancellation of a save: decided once, either by a caller or by the commit."""

from __future__ import annotations

from flaxckpt import errors


class Cancellation:
    """The decision whether a save is cancelled or may commit; thread-safe.

    Holds no lock, which a forked process would wait for: `dict.setdefault` is atomic.
    """

    def __init__(self) -> None:
        self._decision: dict[str, str | None] = {}

    def cancel(self, message: str) -> None:
        """Cancels the save unless it is already decided; `message` is its error."""
        self._decision.setdefault("message", message)

    def check(self) -> None:
        """Raises SaveCancelledError if the save is cancelled."""
        if (message := self._decision.get("message")) is not None:
            raise errors.SaveCancelledError(message)

    def close(self) -> None:
        """Ends the time in which the save can be cancelled, or raises its error."""
        self._decision.setdefault("message", None)
        self.check()
