"""Preservation policies: which steps of a directory stay.

A policy is pure: it sees every checkpoint and names those that it keeps. A step stays
if any policy keeps it. The newest step and pinned steps always stay, and with no
policy at all everything stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

from flaxckpt import errors


class Ranked(Protocol):
    """What a policy may know of a checkpoint; `CheckpointMetadata` is one."""

    @property
    def step(self) -> int:
        """The number of completed training steps."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were saved with the step, or added to it later."""


class PreservationPolicy(Protocol):
    """Anything that can say which checkpoints to keep. `str()` of it is shown."""

    def preserved(self, checkpoints: Sequence[Ranked], /) -> AbstractSet[int]:
        """Names the steps to keep.

        Args:
            checkpoints: All committed checkpoints of a directory, each step once, the
                oldest first; pinned ones too.

        Returns:
            The steps that this policy keeps; steps not in `checkpoints` are ignored.
        """


@dataclass(frozen=True, slots=True)
class LatestN(PreservationPolicy):
    """Keeps the `n` newest checkpoints."""

    n: int

    def __post_init__(self) -> None:
        _check_count("LatestN", self.n)

    def __str__(self) -> str:
        return f"LatestN({self.n})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return set(sorted(c.step for c in checkpoints)[-self.n :])


@dataclass(frozen=True, slots=True)
class BestN(PreservationPolicy):
    """Keeps the `n` checkpoints with the best `metric`; ties go to the newer.

    A checkpoint whose metric is missing, NaN or infinite is never among the best.
    """

    n: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        _check_count("BestN", self.n)
        if not self.metric:
            raise errors.OptionError(
                f"BestN wants the name of a metric, got {self.metric!r}"
            )
        if self.mode not in ("min", "max"):
            raise errors.OptionError(
                f"BestN wants mode 'min' or 'max', got {self.mode!r}"
            )

    def __str__(self) -> str:
        return f"BestN({self.n}, {self.metric!r}, {self.mode!r})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        sign = 1 if self.mode == "max" else -1
        values = {c.step: c.metrics.get(self.metric) for c in checkpoints}
        scored = sorted(
            (sign * value, step)
            for step, value in values.items()
            if value is not None and math.isfinite(value)
        )
        return {step for _, step in scored[-self.n :]}


@dataclass(frozen=True, slots=True)
class EveryNSteps(PreservationPolicy):
    """Keeps each checkpoint whose step is a multiple of `n`; 0 is one."""

    n: int

    def __post_init__(self) -> None:
        _check_count("EveryNSteps", self.n)

    def __str__(self) -> str:
        return f"EveryNSteps({self.n})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in checkpoints if c.step % self.n == 0}


def decide(
    policies: Sequence[PreservationPolicy],
    checkpoints: Sequence[Ranked],
    *,
    pinned: Collection[int] = (),
) -> dict[int, list[str]]:
    """Says of every step why it stays; a step with no reason goes.

    Args:
        policies: A step stays if any of them keeps it. With none, everything stays.
        checkpoints: All committed checkpoints of a directory, in any order.
        pinned: Steps that stay whatever the policies say. They still count for the
            policies: `LatestN(2)` does not keep an older step in place of a pinned one.

    Returns:
        Step -> reasons, the oldest step first. A reason is "newest", "pinned",
        "no policy" or a policy, as in "LatestN(3)".
    """
    ordered = sorted(checkpoints, key=lambda c: c.step)
    reasons: dict[int, list[str]] = {c.step: [] for c in ordered}
    if ordered:
        reasons[ordered[-1].step].append("newest")
    named = [("pinned", set(pinned))]
    named += [(str(policy), set(policy.preserved(ordered))) for policy in policies]
    if not policies:
        named.append(("no policy", set(reasons)))
    for reason, kept in named:
        for step in kept & reasons.keys():
            reasons[step].append(reason)
    return reasons


def _check_count(name: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise errors.OptionError(
            f"{name} wants a whole number of at least 1, got {n!r}. To keep everything,"
            " pass no policy at all"
        )
