"""A step that a loop has completed, and what it has to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from flaxckpt import _counters, errors


class Completed:
    """A step that is completed, and where to get what it has to save.

    Args:
        step: Its number.
        given: What was passed with it: `state`, `metrics` and `dataset`, or None.
        getters: Functions that give what was not passed, by the same names.

    Raises:
        OptionError: Nobody knows the state.
    """

    def __init__(
        self, step: int, given: Mapping[str, Any], getters: Mapping[str, Any]
    ) -> None:
        self.step = step
        self._given = given
        self._getters = getters
        if given["state"] is None and "state" not in getters:
            raise errors.OptionError(
                "there is no state to save: call on_step(step, state), or tell"
                " where it is with on_step.bind(state=lambda: state)"
            )

    def get(self, name: str) -> Any:
        """What was passed, or else what was bound gives now."""
        value = self._given[name]
        getter = self._getters.get(name)
        return getter() if value is None and getter is not None else value

    def metrics(self) -> Mapping[str, Any] | None:
        """Its metrics as numbers by name.

        Raises:
            OptionError: They are something else.
        """
        return values(self.get("metrics"))

    def is_gone(self, *, check_step: bool) -> str:
        """Why the state is not that of the step any more; empty if it still is."""
        leaves = jax.tree.leaves(self._given["state"])
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            return "its arrays were donated to a step that was not reported"
        try:
            if check_step:
                _counters.check(self.get("state"), self.step)
        except errors.OptionError as error:
            return f"steps have followed that were not reported: {error}"
        return ""


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
