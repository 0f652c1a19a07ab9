"""How many steps a state says that it has done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from flaxckpt import errors
from flaxckpt._types import PyTree


def check(state: PyTree, completed: int) -> None:
    """Refuses a state that counts its steps, and has done another number of them.

    Looked at are `step` of the state (`TrainState`, a dict) and, where a state is a
    tuple, list or dict of several things (an NNX model and its optimizer), of each. One
    that agrees is enough: the networks of a GAN may be trained in turns. This waits for
    the step that computes the counter.

    Raises:
        OptionError: None agrees.
    """
    found = dict(_found(state))
    if found and completed not in found.values():
        listed = ", ".join(f"{name} is {count}" for name, count in found.items())
        hint = (
            "the loop counts from 0: pass step_is='index'"
            if completed + 1 in found.values()
            else "pass the number of completed steps, or check_step=False if the state"
            " counts otherwise"
        )
        raise errors.OptionError(
            f"this save is called step {completed}, but {listed}: {hint}"
        )


def _found(state: PyTree) -> Iterator[tuple[str, int]]:
    """Where a state keeps its step counters, and what they say."""
    parts: dict[str, Any] = {"state": state}
    if isinstance(state, Mapping):
        parts |= {f"state[{name!r}]": part for name, part in state.items()}
    elif isinstance(state, tuple | list):
        parts |= {f"state[{i}]": part for i, part in enumerate(state)}
    for name, part in parts.items():
        if isinstance(part, Mapping):
            count, label = _count(part.get("step")), f"{name}['step']"
        else:
            count, label = _count(getattr(part, "step", None)), f"{name}.step"
        if count is not None:
            yield label, count


def _count(step: Any) -> int | None:
    """`step` as a number; None if it is no counter."""
    if isinstance(step, jax.Array) and not step.is_fully_addressable:
        step = step.addressable_data(0)
    try:
        value = np.asarray(step)
    except (TypeError, ValueError):
        return None
    is_counter = value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if is_counter else None
