"""Triggers of saves: rules on step numbers and on time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection
from typing import NamedTuple

from flaxckpt import _steps, _util, errors
from flaxckpt._training.save_interval import SaveInterval
from flaxckpt._types import JSON

_MOST_RECORDED = 100
"""Numbers of `on_steps` in the record of a run's settings."""


class Due(NamedTuple):
    """Reason for a save; `temporary` if only the time asked for it."""

    reason: str
    temporary: bool = False


class Triggers:
    """Decides after each step about a save: any trigger makes a save due."""

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_secs: float | None,
        interval: SaveInterval | None = None,
        on_steps: Collection[int],
        save_first: bool,
        clock: Callable[[], float],
    ) -> None:
        if every_secs is not None:
            _util.arguments.check_positive("every_secs", every_secs)
            if interval is not None:
                raise errors.OptionError(
                    "every_secs and overhead both set the time between saves: pass one"
                )
        if every_steps is not None:
            every_steps = _util.arguments.check_int("every_steps", every_steps)
            _util.arguments.check_positive("every_steps", every_steps)
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._interval = interval
        self._on_steps = sorted(_util.arguments.check_ints("on_steps", on_steps))
        self._save_first = save_first
        self._clock = clock
        self._saved_at = clock()
        self._has_begun = False

    def settings(self) -> dict[str, JSON]:
        """Returns the arguments that were given, in JSON types."""
        given = {
            "every_steps": self._every_steps,
            "every_secs": self._every_secs,
            "on_steps": self._on_steps[:_MOST_RECORDED],
            "save_first": self._save_first,
            **(self._interval.settings() if self._interval is not None else {}),
        }
        return {
            name: _steps.event.plain(value) for name, value in given.items() if value
        }

    @property
    def has_clock(self) -> bool:
        return self._every_secs is not None or self._interval is not None

    def restart_clock(self) -> None:
        """Restarts the clock, after a save or at the start of training."""
        self._saved_at = self._clock()

    def time_is_up(self) -> bool:
        """Returns True if the time between saves has passed on this machine."""
        if self._interval is not None:
            return self._interval.is_due(self._saved_at)
        return (
            self._every_secs is not None
            and self._clock() - self._saved_at >= self._every_secs
        )

    def due(self, completed: int, previous: int, *, time_is_up: bool) -> Due | None:
        """Returns the reason to save after a step, or after one since `previous`."""
        is_first, self._has_begun = not self._has_begun, True
        if completed <= 0:
            return None
        n = self._every_steps
        if n is not None and completed // n > previous // n:
            return Due(f"every {n} steps")
        passed = bisect.bisect_right(self._on_steps, completed)
        if passed and self._on_steps[passed - 1] > previous:
            return Due(f"step {self._on_steps[passed - 1]} of on_steps")
        if is_first and self._save_first and previous == 0:
            return Due("the first step")
        if time_is_up and self._interval is not None:
            return Due(self._interval.reason, temporary=True)
        if time_is_up:
            return Due(f"{self._every_secs:g} s since the last save", temporary=True)
        return None
