"""A completed step of a loop, with its state, metrics and dataset."""

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
    """A completed step, with the values to save or functions to get them.

    Args:
        step: Number of the step.
        given: The passed values: `state`, `metrics` and `dataset`, or None.
        getters: Bound functions for values not passed, by the same names.

    Attributes:
        step: Number of the step.
        is_bound: Whether the state comes from a bound function.

    Raises:
        OptionError: The state was neither passed nor bound.
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
                "there is no state to save: call on_step(step, state), or pass the"
                " state with on_step.bind(state=lambda: state)"
            )

    def get(self, name: str) -> Any:
        """Returns the passed value, or the present value of the bound function.

        Does not call the function again for a state or metrics already kept at the
        report.
        """
        value = self._given[name]
        if name == "state" and value is None and self._state is not None:
            return self._state.state
        if name == "metrics" and value is None and self._metrics is not None:
            return self._metrics.state
        getter = self._getters.get(name)
        return getter() if value is None and getter is not None else value

    def metrics(self) -> Mapping[str, Any] | None:
        """Returns the metrics as numbers by name.

        Raises:
            OptionError: The metrics are not numbers by name.
        """
        return values(self.get("metrics"))

    # ---- for the end of the loop --------------------------------------------------

    def hold(self, before: Completed | None, *, ask: bool, ask_metrics: bool) -> None:
        """Keeps the state, metrics and dataset position for the end of the loop.

        Args:
            before: The step that was reported before.
            ask: Whether to get a bound state now. Otherwise it is read at the end, and
                belongs to this step if its own step counter agrees.
            ask_metrics: Whether to get bound metrics now.
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
        self._given["dataset"] = datasets.copy_position(self.get("dataset"))

    def says_itself(self) -> bool:
        """Returns True if the state's own step counter makes keeping it unnecessary.

        True for a bound state that the loop replaces whole, such as a `TrainState`.
        """
        state = self.get("state")
        is_one = self.is_bound and held.is_replaced_whole(state)
        return is_one and bool(_state.step_counter.read_counters(state))

    def let_state_go(self) -> None:
        """Releases the kept state."""
        self._state = None

    @property
    def fault(self) -> str:
        """Returns the reason why the state could not be kept, or an empty string."""
        return "" if self._state is None else self._state.fault

    def why_gone(self, *, check_step: bool, offset: int) -> str:
        """Returns the reason why the reported state is lost, or an empty string.

        Args:
            check_step: Whether the state's own step counter must agree.
            offset: Difference of the completed step and the step of the loop.
        """
        if self._state is not None:
            return self._state.why_gone() or self._why_wrong(check_step, offset)
        counts = (
            _state.step_counter.read_counters(self.get("state")) if check_step else {}
        )
        if not counts:
            return _UNKNOWN
        if self.step in counts.values():
            return ""
        # The step may be right, but the bound state has changed since the report.
        mismatch = _state.step_counter.describe_mismatch(self.get("state"), self.step)
        return f"its bound state was changed after the report: {mismatch} now"

    def _why_wrong(self, check_step: bool, offset: int) -> str:
        """Returns the reason why the reported state does not belong to the step."""
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
        gone = "the bound metrics may be those of a later step"
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
        """Returns True if the state certainly did not change since the report."""
        if self._state is None:
            return True  # `why_gone` has compared the state's step counter
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


_UNKNOWN = "its state is bound, and has no counter that tells the step"


def values(metrics: Any) -> Mapping[str, Any] | None:
    """Returns metrics as numbers by name; computes clu's metric collections.

    Raises:
        OptionError: The metrics are not numbers by name.
    """
    compute = getattr(metrics, "compute", None)
    found = compute() if compute else metrics
    if found is None or isinstance(found, Mapping):
        return found
    raise errors.OptionError(
        f"metrics must be numbers by name, such as {{'loss': 0.5}}, got {found!r:.80}"
    )
