"""The time between saves, chosen from the measured cost of a save."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from flaxckpt import _util, errors
from flaxckpt._checkpoint.save_handle import SaveHandle

_MIN_STEPS = 20
"""Steps without a save that are measured before the first save."""

_MAX_STEPS = 1000
_MAX_SAVES = 5
"""The numbers of recent steps and saves that a choice is based on."""

_SKIPPED_STEPS = 2
"""Steps at the beginning that are not measured: they compile."""

_IDLE_SHARE = 2
"""The time between saves is at least this multiple of the duration of a save, so that
there are steps without a save to compare with."""

_CHANGE = 1.2
"""Ratio of intervals from which a change is reported."""


class Choice(NamedTuple):
    """The chosen seconds between saves; `cost_secs` are what a save costs the loop."""

    interval_secs: float
    cost_secs: float
    save_secs: float
    reason: str


class SaveInterval:
    """Measures steps and saves, and chooses the time between saves.

    A save costs the time of the call that begins it, and the delay of the steps until
    it is durable. Saves may cost the fraction `overhead` of the loop's time. With the
    mean time between failures, `mtbf_secs`, the interval is at least the one at which
    saves and repeated work cost least together, `sqrt(2 * cost * mtbf)`: J. W. Young,
    "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9), 1974.
    """

    def __init__(
        self, overhead: float, mtbf_secs: float | None, clock: Callable[[], float]
    ) -> None:
        _util.arguments.check_positive("overhead", overhead)
        if overhead >= 1:
            raise errors.OptionError(
                "overhead must be a fraction of the training time between 0 and 1,"
                f" such as 0.01, got {overhead!r:.80}"
            )
        if mtbf_secs is not None:
            _util.arguments.check_positive("mtbf_secs", mtbf_secs)
            if not math.isfinite(mtbf_secs):
                raise errors.OptionError("mtbf_secs must be finite: leave it out")
        self._overhead = overhead
        self._mtbf_secs = mtbf_secs
        self._clock = clock
        self._skipped = 0
        self._steps: collections.deque[float] = collections.deque(maxlen=_MAX_STEPS)
        self._saves: collections.deque[_Cost] = collections.deque(maxlen=_MAX_SAVES)
        self._current: _Cost | None = None
        self._step_began: float | None = None
        self._choice: Choice | None = None
        self._reported: Choice | None = None

    def settings(self) -> dict[str, float | None]:
        return {"overhead": self._overhead, "mtbf_secs": self._mtbf_secs}

    def begin_step(self) -> None:
        self._step_began = self._clock()

    def end_step(self) -> Choice | None:
        """Records the end of a step; returns a choice that was not reported yet."""
        if self._step_began is None:
            return None
        secs, self._step_began = self._clock() - self._step_began, None
        if self._current is None:
            if self._skipped < _SKIPPED_STEPS:
                self._skipped += 1
            else:
                self._steps.append(secs)
            return None
        self._current.steps.append(secs)
        if not self._current.handle.done():
            return None
        cost, self._current = self._current, None
        try:
            save_secs = cost.handle.wait().total_secs
        except errors.CheckpointError:  # already reported
            return None
        self._saves.append(cost._replace(save_secs=save_secs))
        self._choice = self._choose()
        return self._new_choice(self._choice)

    def note_save(self, handle: SaveHandle, blocked_secs: float) -> None:
        """Records a save that the loop has begun, and the duration of the call."""
        self._current = _Cost(handle, blocked_secs, [])

    def is_due(self, saved_at: float) -> bool:
        """Returns True if it is time for a save, after one at the time `saved_at`."""
        if self._current is not None:
            return False
        if self._choice is None:
            return len(self._steps) >= _MIN_STEPS
        return self._clock() - saved_at >= self._choice.interval_secs

    def _choose(self) -> Choice:
        mean = statistics.fmean(self._steps) if self._steps else 0.0
        cost = statistics.median(save.total(mean) for save in self._saves)
        save_secs = statistics.median(save.save_secs for save in self._saves)
        bounds = {
            f"at most {self._overhead:.2%} of the time": cost / self._overhead,
            f"a save takes {save_secs:.2g} s": _IDLE_SHARE * save_secs,
        }
        if self._mtbf_secs is not None:
            bounds[f"a failure each {self._mtbf_secs:.3g} s"] = math.sqrt(
                2 * cost * self._mtbf_secs
            )
        reason = max(bounds, key=lambda name: bounds[name])
        interval = bounds[reason]
        return Choice(
            interval,
            cost,
            save_secs,
            f"a save each {interval:.3g} s, because it costs the loop {cost:.2g} s"
            f" ({reason})",
        )

    @property
    def reason(self) -> str:
        if self._choice is None:
            return "the cost of a save is measured"
        return self._choice.reason

    def _new_choice(self, choice: Choice) -> Choice | None:
        """Returns a choice if it differs from the one returned before."""
        before = self._reported
        if before is not None and (
            1 / _CHANGE < choice.interval_secs / before.interval_secs < _CHANGE
        ):
            return None
        self._reported = choice
        return choice


class _Cost(NamedTuple):
    """The measured times of a save, and of the steps beside it."""

    handle: SaveHandle
    blocked_secs: float
    steps: list[float]
    save_secs: float = 0.0

    def total(self, mean: float) -> float:
        """Returns the seconds that the loop lost if other steps take `mean` seconds."""
        return self.blocked_secs + max(0.0, sum(self.steps) - mean * len(self.steps))
