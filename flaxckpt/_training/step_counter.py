"""Step counters of states, and batches consumed from datasets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxckpt import _steps, _util, errors
from flaxckpt._types import PyTree

_log = logging.getLogger(__name__)


def to_completed(step: Any, offset: int) -> int:
    """Returns `offset` more than `step`; raises OptionError if it is no step number."""
    number = None
    with contextlib.suppress(Exception):  # others' arrays may raise anything
        if np.ndim(step) == 0 and not isinstance(step, str | bytes):
            number = int(step)
    is_bool = isinstance(step, bool) or getattr(step, "dtype", None) == np.bool_
    if number is None or number != step or is_bool:
        raise errors.OptionError(
            f"a step must be a whole number, got {_util.arguments.describe(step)}"
        )
    return _steps.names.check(number + offset)


def check(state: PyTree, completed: int, *, offset: int = 0) -> None:
    """Raises OptionError if the state's step counters disagree with the loop's step.

    Reads `step` of the state and, for a tuple, list or dict of several objects (an NNX
    model and its optimizer), of each element. A single counter that agrees is enough:
    the networks of a GAN may be trained in turns. Waits for the training step.
    """
    counts = read_counters(state)
    if counts and completed not in counts.values():
        raise errors.OptionError(
            f"this save is for step {completed}, but {_format(counts)}:"
            f" {_hint(counts, completed, offset)}"
        )


def _hint(counts: Mapping[str, int], completed: int, offset: int) -> str:
    """Returns advice on how to make the loop agree with the state's counters."""
    ahead = [name for name, count in counts.items() if count == completed + 1]
    if ahead and not offset:
        return (
            "the loop counts from 0: pass step_is='index' to CheckpointCallback. If the"
            " run continues from a step that was numbered from 0, start the loop at"
            f" int({ahead[0]}) + 1"
        )
    if ahead:
        return (
            "the state is one step ahead of the loop, whose index is"
            f" {completed - offset}: if the run continues from a step that was"
            f" numbered from 0, start the loop at index int({ahead[0]})"
        )
    if offset and completed - offset in counts.values():
        return "the loop counts completed steps: remove step_is='index'"
    return (
        "pass the number of completed steps, or check_step=False if the state counts"
        " otherwise"
    )


def describe_mismatch(state: PyTree, step: int) -> str:
    """Describes a restored state's counters if none equals `step`; else empty."""
    counts = read_counters(state)
    return "" if not counts or step in counts.values() else _format(counts)


def _format(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} is {count}" for name, count in counts.items())


def read_counters(state: PyTree) -> dict[str, int]:
    counts: dict[str, int] = {}
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
            counts[label] = count
    return counts


def _count(step: Any) -> int | None:
    """Returns `step` as an int; None for any value that cannot be a counter."""
    if isinstance(step, jax.Array) and not step.is_fully_addressable:
        step = step.addressable_data(0)
    try:
        value = np.asarray(step)
    except (TypeError, ValueError, RuntimeError):  # donated arrays raise RuntimeError
        return None
    is_counter = value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if is_counter else None


class Consumption:
    """Detects batches that leave a dataset before the loop uses them.

    A prefetcher takes batches in advance, which a restored run would skip. Two
    positions give the batches per step; with the initial one, those taken in advance.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._is_known = False
        self._each: int | None = None  # batches per step, if known

    def begin(self, step: int, position: int | None) -> None:
        """Records the dataset's position before the loop takes the first batch."""
        self._points = [] if position is None else [(step, position)]
        self._is_known = position is None

    @property
    def wants(self) -> bool:
        """True if another position would add information."""
        return bool(self._points) and not self._is_known

    def note(self, step: int, position: int | None) -> None:
        """Records the position after a step; warns once if the dataset is ahead."""
        if position is None or step <= self._points[-1][0]:
            return
        self._points.append((step, position))
        if len(self._points) < 3:
            return
        self._is_known = True
        (start, begun), (first, before), (last, now) = self._points
        each, rest = divmod(now - before, last - first)
        ahead = before - begun - each * (first - start)
        if rest == 0 and ahead == 0:
            self._each = each
        if each > 0 and rest == 0 and ahead > 0:
            _log.warning(
                "the dataset is %d batches ahead of the loop: a resumed run will skip"
                " them. Save the state of the outermost iterator, from which the loop"
                " takes batches, such as datasets.Buffered(iterator)",
                ahead,
            )

    def check_end(self, step: int, position: int | None) -> None:
        """Warns if batches were taken since the last reported step."""
        each = self._each
        if each is None and len(self._points) == 2 and not self._is_known:
            # Too many if some were taken in advance: then there is no warning.
            (start, begun), (first, before) = self._points
            each = (before - begun) // (first - start)
        if not each or position is None:
            return
        start, begun = self._points[0]
        more = position - begun - each * (step - start)
        if more > 0:
            _log.warning(
                "the loop has taken %d more batches than it used up to its last step,"
                " %d. The dataset is saved after these batches, so a resumed run will"
                " skip them. Call next(batches) when a step needs them, not in the head"
                " of the loop",
                more,
                step,
            )
