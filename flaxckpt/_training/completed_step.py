"""A completed step of a loop, with its state, metrics and dataset."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from flaxckpt import datasets, errors
from flaxckpt._training import kept_state, step_counter
from flaxckpt._training.kept_state import KeptState

_log = logging.getLogger(__name__)


class CompletedStep:
    """A completed step, with the values to save, or functions that return them."""

    def __init__(
        self, step: int, values: Mapping[str, Any], getters: Mapping[str, Any]
    ) -> None:
        self.step = step
        self._values = dict(values)
        self._getters = getters
        self._state: KeptState | None = None
        self._metrics: KeptState | None = None
        self.is_bound = values["state"] is None
        if self.is_bound and "state" not in getters:
            raise errors.OptionError(
                "there is no state to save: call on_step(step, state), or pass the"
                " state with on_step.bind(state=lambda: state)"
            )

    def get(self, name: str) -> Any:
        """Returns the value that was passed or kept, or that of the bound function."""
        value = self._values[name]
        if name == "state" and value is None and self._state is not None:
            return self._state.state
        if name == "metrics" and value is None and self._metrics is not None:
            return self._metrics.state
        getter = self._getters.get(name)
        return getter() if value is None and getter is not None else value

    def metrics(self) -> Mapping[str, Any] | None:
        """Returns the metrics as numbers by name; raises OptionError for others."""
        return metric_values(self.get("metrics"))

    # ---- for the end of the loop --------------------------------------------------

    def keep_values(
        self, before: CompletedStep | None, *, get_state: bool, get_metrics: bool
    ) -> None:
        """Keeps the state, metrics and dataset position for the end of the loop.

        Without `get_state`, the state is read at the end, and belongs to this step if
        its own step counter agrees. `before` is the step that was reported before.
        """
        if get_state or not self.is_bound:
            kept = None if before is None else before._state
            self._state = KeptState(self.get("state"), kept)
        metrics = self._values["metrics"]
        if get_metrics or metrics is not None:
            metrics = self.get("metrics")
        if metrics is not None:
            kept = None if before is None else before._metrics
            self._metrics = KeptState(metrics, kept)
        self._values["dataset"] = datasets.copy_position(self.get("dataset"))

    def has_own_counter(self) -> bool:
        """Returns True for a bound state replaced whole, such as a `TrainState`."""
        state = self.get("state")
        is_replaced = self.is_bound and kept_state.is_replaced_whole(state)
        return is_replaced and bool(step_counter.read_counters(state))

    def release_state(self) -> None:
        self._state = None

    @property
    def fault(self) -> str:
        """Returns the reason why the state could not be kept, or an empty string."""
        return "" if self._state is None else self._state.fault

    def why_gone(self, *, check_step: bool, offset: int) -> str:
        """Returns the reason why the reported state is lost, or an empty string."""
        if self._state is not None:
            reason = self._state.why_gone()
            if check_step and not reason:
                with self._reported_state():
                    state = self.get("state")
                    try:
                        step_counter.check(state, self.step, offset=offset)
                    except errors.OptionError as error:
                        reason = str(error)
            return reason
        counts = step_counter.read_counters(self.get("state")) if check_step else {}
        if not counts:
            return "its state is bound, and has no counter that gives the step"
        if self.step in counts.values():
            return ""
        # The step may be right, but the bound state has changed since the report.
        mismatch = step_counter.describe_mismatch(self.get("state"), self.step)
        return f"its bound state was changed after the report: {mismatch} now"

    @contextlib.contextmanager
    def reported_values(self) -> Iterator[None]:
        """Restores the reported values for the duration of the `with` block."""
        metrics = self._values["metrics"]
        reason = ""  # why the reported metrics are lost
        if self._metrics is not None:
            reason = self._metrics.why_gone()
        elif metrics is None and "metrics" in self._getters and not self._is_last():
            reason = "the bound metrics may be those of a later step"
        with self._reported_state(), contextlib.ExitStack() as stack:
            if reason:
                _log.warning(
                    "step %d is saved without its metrics: %s", self.step, reason
                )
                self._values["metrics"] = {}
            elif self._metrics is not None:
                self._values["metrics"] = stack.enter_context(
                    self._metrics.reported_state()
                )
            try:
                yield
            finally:
                self._values["metrics"] = metrics

    def _is_last(self) -> bool:
        """Returns True if the state certainly did not change since the report."""
        if self._state is None:
            return True  # `why_gone` has compared the state's step counter
        if self.is_bound:
            return self._state.matches(self._getters["state"]())
        return self._state.has_objects and self._state.matches(self._values["state"])

    @contextlib.contextmanager
    def _reported_state(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        passed = self._values["state"]
        with self._state.reported_state() as self._values["state"]:
            try:
                yield
            finally:
                self._values["state"] = passed


def metric_values(metrics: Any) -> Mapping[str, Any] | None:
    """Returns metrics as numbers, clu's computed; raises OptionError for others."""
    compute = getattr(metrics, "compute", None)
    numbers = compute() if compute else metrics
    if numbers is None or isinstance(numbers, Mapping):
        return numbers
    raise errors.OptionError(
        f"metrics must be numbers by name, such as {{'loss': 0.5}}, got {numbers!r:.80}"
    )
