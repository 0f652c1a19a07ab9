"""Checks of the arguments passed by a loop to a `CheckpointCallback`."""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _util, errors
from flaxckpt._run.checkpointer import Checkpointer
from flaxckpt._types import JSON


def check_checkpointer(given: Any) -> None:
    """Raises OptionError for anything but a `Checkpointer`, such as its directory."""
    if isinstance(given, Checkpointer):
        return
    is_path = isinstance(given, str | os.PathLike)
    found = f"the path {str(given)!r}" if is_path else _util.arguments.describe(given)
    directory = repr(str(given)) if is_path else "directory"
    raise errors.OptionError(
        f"wanted a Checkpointer, got {found}: write"
        f" CheckpointCallback(Checkpointer({directory}), …)"
    )


def is_time(step: int, state: Any, *, is_bound: bool) -> bool:
    """Returns True if clu's call `hook(step, t)` passed the time for the state.

    A number is a time; raises OptionError if no function returns the state instead.
    """
    is_number = isinstance(state, numbers.Real)
    if not is_number and not (is_bound and _is_number_array(state)):
        return False
    if isinstance(state, bool) or not is_bound:
        raise errors.OptionError(
            f"wanted a state at step {step}, got {state!r:.80}: call on_step(step,"
            " state), or, for loops that call hook(step, t), pass the state with"
            " on_step.bind(state=lambda: state)"
        )
    return True


def _is_number_array(state: Any) -> bool:
    is_array = isinstance(state, jax.Array | np.ndarray) and state.ndim == 0
    return is_array and (
        jnp.issubdtype(state.dtype, np.floating)
        or jnp.issubdtype(state.dtype, np.integer)
    )


_ARGUMENTS = ("step", "state", "metrics", "dataset", "force")
_CLEARLY_ALIKE = 0.85
"""Similarity from which a name counts as a misspelling of a parameter."""


def check_extra(others: Mapping[str, Any]) -> None:
    """Raises OptionError for unknown keywords, unless passed by a loop of clu."""
    alike = _CLEARLY_ALIKE if "t" in others else 0.5
    wrong = {
        name: difflib.get_close_matches(name, _ARGUMENTS, 1, alike) for name in others
    }
    if "t" in others:
        wrong = {name: close for name, close in wrong.items() if close}
    if wrong:
        listed = " and ".join(
            f"{name}=" + (f" (did you mean {close[0]}=?)" if close else "")
            for name, close in wrong.items()
        )
        raise errors.OptionError(
            f"a CheckpointCallback takes no {listed}: it takes state=, metrics=,"
            " dataset= and force="
        )


def list_getters(**getters: object) -> dict[str, Callable[[], Any]]:
    """Returns functions that are not None; raises OptionError if one is no function."""
    functions: dict[str, Callable[[], Any]] = {}
    for name, get in getters.items():
        if callable(get):
            functions[name] = get
        elif get is not None:
            raise errors.OptionError(
                f"bind takes functions, got a {type(get).__name__} for {name}: write"
                f" bind({name}=lambda: {name})"
            )
    return functions


def json_getter(json: object) -> Callable[[int], Mapping[str, JSON]]:
    """Returns a function from a step to its items, from such a function or items."""
    if callable(json):
        return json
    if json is not None and not isinstance(json, Mapping):
        raise errors.OptionError(
            "json must be a dict, item -> JSON, or a function of the step that returns"
            f" such a dict, got a {type(json).__name__}: write json={{'config': …}}"
        )
    return lambda step: {} if json is None else json
