"""A step that a loop has completed, and what it has to save."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from flaxckpt import _state, datasets, errors
from flaxckpt._training import held
from flaxckpt._training.held import Held

_log = logging.getLogger(__name__)


class Completed:
    """A step that is completed, and where to get what it has to save.

    Args:
        step: Its number.
        given: What was passed with it: `state`, `metrics` and `dataset`, or None.
        getters: Functions that give what was not passed, by the same names.

    Attributes:
        step: The same.
        is_bound: Whether the state was not passed.

    Raises:
        OptionError: Nobody knows the state.
    """

    def __init__(
        self, step: int, given: Mapping[str, Any], getters: Mapping[str, Any]
    ) -> None:
        self.step = step
        self._given = dict(given)
        self._getters = getters
        self._state: Held | None = None
        self._metrics: Held | None = None
        self.is_bound = given["state"] is None
        if self.is_bound and "state" not in getters:
            raise errors.OptionError(
                "there is no state to save: call on_step(step, state), or tell"
                " where it is with on_step.bind(state=lambda: state)"
            )

    def get(self, name: str) -> Any:
        """The value that was passed, or the present value of the bound function.

        A bound state, or bound metrics, that were asked for when the step was reported
        are not asked for again.
        """
        value = self._given[name]
        if name == "state" and value is None and self._state is not None:
            return self._state.state
        if name == "metrics" and value is None and self._metrics is not None:
            return self._metrics.state
        getter = self._getters.get(name)
        return getter() if value is None and getter is not None else value

    def metrics(self) -> Mapping[str, Any] | None:
        """Its metrics as numbers by name.

        Raises:
            OptionError: They are something else.
        """
        return values(self.get("metrics"))

    # ---- for the end of the loop --------------------------------------------------

    def hold(self, before: Completed | None, *, ask: bool, ask_metrics: bool) -> None:
        """Keeps the state, metrics and dataset position for the end of the loop.

        Args:
            before: The step that was reported before.
            ask: Whether a bound state is asked for now. Else it is asked for at the
                end, and is that of this step if its own step counter says so.
            ask_metrics: Whether bound metrics are asked for now.
        """
        if ask or not self.is_bound:
            known = None if before is None else before._state
            self._state = Held(self.get("state"), known)
        metrics = self._given["metrics"]
        if ask_metrics or metrics is not None:
            metrics = self.get("metrics")
        if metrics is not None:
            known = None if before is None else before._metrics
            self._metrics = Held(metrics, known)
        self._given["dataset"] = datasets.held(self.get("dataset"))

    def says_itself(self) -> bool:
        """Whether the state need not be kept, because it has a step counter of its own.

        That is so for a bound state that is replaced as a whole, as a `TrainState` is.
        """
        state = self.get("state")
        is_one = self.is_bound and held.is_replaced_whole(state)
        return is_one and bool(_state.step_counter.found(state))

    def let_state_go(self) -> None:
        """Keeps its state no more."""
        self._state = None

    @property
    def fault(self) -> str:
        """The reason why the state could not be kept; empty if there is none."""
        return "" if self._state is None else self._state.fault

    def why_gone(self, *, check_step: bool, offset: int) -> str:
        """The reason why the reported state is lost; empty if it can still be saved.

        Args:
            check_step: Whether the state's own step counter has to agree.
            offset: What was added to the step that the loop has passed.
        """
        if self._state is not None:
            return self._state.why_gone() or self._why_wrong(check_step, offset)
        counts = _state.step_counter.found(self.get("state")) if check_step else {}
        if not counts:
            return _UNKNOWN
        if self.step in counts.values():
            return ""
        # The loop may be right: this is not the state that it has reported.
        mismatch = _state.step_counter.mismatch(self.get("state"), self.step)
        return f"its state is bound, and was changed after the report: {mismatch} now"

    def _why_wrong(self, check_step: bool, offset: int) -> str:
        """Why the step may not be saved with the state that was reported."""
        if check_step:
            with self._as_reported():
                try:
                    _state.step_counter.check(
                        self.get("state"), self.step, offset=offset
                    )
                except errors.OptionError as error:
                    return str(error)
        return ""

    @contextlib.contextmanager
    def as_reported(self) -> Iterator[None]:
        """Restores the reported values for the duration of the `with` block."""
        metrics = self._given["metrics"]
        has_later = metrics is None and "metrics" in self._getters
        gone = "those that are bound may be of a later step"
        if self._metrics is not None:
            has_later, gone = True, self._metrics.why_gone()
        elif has_later and self._is_last():
            gone = ""
        with self._as_reported(), contextlib.ExitStack() as stack:
            if has_later and gone:
                _log.warning(
                    "step %d is saved without its metrics: %s", self.step, gone
                )
                self._given["metrics"] = {}
            elif self._metrics is not None:
                self._given["metrics"] = stack.enter_context(self._metrics.put_back())
            try:
                yield
            finally:
                self._given["metrics"] = metrics

    def _is_last(self) -> bool:
        """Whether the state cannot have changed since the report."""
        if self._state is None:
            return True  # its counter said so
        if self.is_bound:
            return self._state.is_of(self._getters["state"]())
        return self._state.has_objects and self._state.is_of(self._given["state"])

    @contextlib.contextmanager
    def _as_reported(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        given = self._given["state"]
        with self._state.put_back() as self._given["state"]:
            try:
                yield
            finally:
                self._given["state"] = given


_UNKNOWN = "it is bound, and nothing in it says of which step it is"


def values(metrics: Any) -> Mapping[str, Any] | None:
    """Metrics as numbers by name; clu's collections are computed now.

    Raises:
        OptionError: They are something else.
    """
    compute = getattr(metrics, "compute", None)
    found = compute() if compute else metrics
    if found is None or isinstance(found, Mapping):
        return found
    raise errors.OptionError(
        f"metrics must be numbers by name, such as {{'loss': 0.5}}, got {found!r:.80}"
    )
