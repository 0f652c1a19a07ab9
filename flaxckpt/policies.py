"""Preservation policies: which steps of a directory stay.

A policy is pure: it sees every checkpoint and names those that it keeps. A step stays
if any policy keeps it. The newest step and pinned steps always stay, and with no
policy at all everything stays but temporary steps: of them the two newest stay, until
there is a newer step that is not temporary.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

from flaxckpt import _util, errors

__all__ = [
    "BestN",
    "EveryNSecs",
    "EveryNSteps",
    "LatestN",
    "OnSteps",
    "PreservationPolicy",
    "Ranked",
    "WithoutMetric",
    "decide",
]


class Ranked(Protocol):
    """What a policy may know of a checkpoint."""

    @property
    def step(self) -> int:
        """The number of completed training steps."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were saved with the step, or added to it later."""

    @property
    def created(self) -> float:
        """When its save began, in seconds since 1970 by the clock of that machine."""

    @property
    def temporary(self) -> bool:
        """Whether it was saved to stay only until there is a newer one that is not."""


class PreservationPolicy(Protocol):
    """Anything that can say which checkpoints to keep. `str()` of it is shown."""

    def preserved(self, checkpoints: Sequence[Ranked], /) -> AbstractSet[int]:
        """Names the steps to keep.

        Args:
            checkpoints: All committed checkpoints of a directory, each step once, the
                oldest first; pinned and temporary ones too.

        Returns:
            The steps that this policy keeps; steps not in `checkpoints` are ignored.
        """


@dataclass(frozen=True, slots=True)
class LatestN(PreservationPolicy):
    """Keeps the `n` newest checkpoints; temporary ones neither count nor stay."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("LatestN", self.n))

    def __str__(self) -> str:
        return f"LatestN({self.n})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return set(sorted(c.step for c in _permanent(checkpoints))[-self.n :])


@dataclass(frozen=True, slots=True)
class BestN(PreservationPolicy):
    """Keeps the `n` checkpoints with the best `metric`; ties go to the newer.

    A checkpoint whose metric is missing, NaN or infinite is never among the best; add
    `WithoutMetric` to keep those that have not been measured.
    """

    n: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("BestN", self.n))
        if not self.metric or not isinstance(self.metric, str):
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
class WithoutMetric(PreservationPolicy):
    """Keeps each checkpoint that does not have `metric`; temporary ones do not stay.

    A metric that is NaN or infinite is there.

    Source: `keep_checkpoints_without_metrics` of Orbax and T5X.
    """

    metric: str

    def __post_init__(self) -> None:
        if not self.metric or not isinstance(self.metric, str):
            raise errors.OptionError(
                f"WithoutMetric wants the name of a metric, got {self.metric!r}"
            )

    def __str__(self) -> str:
        return f"WithoutMetric({self.metric!r})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in _permanent(checkpoints) if self.metric not in c.metrics}


@dataclass(frozen=True, slots=True)
class EveryNSteps(PreservationPolicy):
    """Keeps each checkpoint whose step is a multiple of `n`; 0 is one.

    Temporary ones neither count nor stay.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("EveryNSteps", self.n))

    def __str__(self) -> str:
        return f"EveryNSteps({self.n})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in _permanent(checkpoints) if c.step % self.n == 0}


@dataclass(frozen=True, slots=True)
class EveryNSecs(PreservationPolicy):
    """Keeps the oldest checkpoint, and each that is `secs` younger than the last kept.

    Their ages are those written down when they were saved. Where the clock has gone
    back, counting begins anew, and that checkpoint is kept. Temporary ones neither
    count nor stay.
    """

    secs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "secs", _secs(self.secs))

    def __str__(self) -> str:
        return f"EveryNSecs({self.secs:g})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        kept: set[int] = set()
        last = math.inf  # so that the oldest is kept
        for checkpoint in sorted(_permanent(checkpoints), key=lambda c: c.step):
            # Compared with kept ones only: what is deleted must not change the rest.
            if not 0 <= checkpoint.created - last < self.secs:
                kept.add(checkpoint.step)
                last = checkpoint.created
        return kept


@dataclass(frozen=True, slots=True)
class OnSteps(PreservationPolicy):
    """Keeps these steps, temporary or not."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _steps(self.steps))

    def __str__(self) -> str:
        return f"OnSteps({sorted(self.steps)})"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in checkpoints if c.step in self.steps}


def checked(policies: object, option: str) -> tuple[PreservationPolicy, ...]:
    """`policies` as a tuple.

    Args:
        policies: What was passed for policies.
        option: As what, for the message.

    Raises:
        OptionError: It is something else than policies.
    """
    example = f"write {option}=[LatestN(3)], or pass none to keep everything"
    if not isinstance(policies, Iterable) or isinstance(policies, str | Mapping):
        raise errors.OptionError(
            f"{option} must be a list of policies, got {policies!r:.80}: {example}"
        )
    found = tuple(policies)
    for policy in found:
        if isinstance(policy, type) or not callable(getattr(policy, "preserved", None)):
            raise errors.OptionError(
                f"{option} must be a list of policies, got {_shown(policy)} in it:"
                f" {example}"
            )
    return found


def _shown(policy: object) -> str:
    if isinstance(policy, type):
        return f"the class {policy.__name__}, not one of its objects"
    return f"{policy!r:.80}"


def decide(
    policies: Sequence[PreservationPolicy],
    checkpoints: Sequence[Ranked],
    *,
    pinned: Collection[int] = (),
    readers: Mapping[int, Collection[str]] | None = None,
) -> dict[int, list[str]]:
    """Says of every step why it stays; a step with no reason goes.

    Args:
        policies: A step stays if any of them keeps it. With none, every step stays that
            is not temporary.
        checkpoints: All committed checkpoints of a directory, in any order. What does
            not say whether it is `temporary` is not.
        pinned: Steps that stay whatever the policies say. They still count for the
            policies: `LatestN(2)` does not keep an older step in place of a pinned one.
        readers: Step -> who reads it, so that it stays for now. They count likewise.

    Returns:
        Step -> reasons, the oldest step first. A reason is "newest", "temporary" (of
        the two newest, as long as no step is newer that is not), "pinned", "no policy",
        "being read by …" or a policy, as in "LatestN(3)".
    """
    policies = checked(policies, "policies")
    listed = tuple(checkpoints) if _util.arguments.is_list(checkpoints) else None
    if listed is None or not all(hasattr(each, "step") for each in listed):
        raise errors.OptionError(
            "checkpoints must be a list of what has a step and metrics, such as"
            f" flaxckpt.CheckpointMetadata, got {_util.arguments.found(checkpoints)}"
        )
    ordered = sorted(listed, key=lambda c: c.step)
    reasons: dict[int, list[str]] = {c.step: [] for c in ordered}
    if ordered:
        reasons[ordered[-1].step].append("newest")
    # Two: if the newest is damaged, no more is lost than what came after the other.
    for checkpoint in ordered[-2:]:
        if all(_is_temporary(c) for c in ordered if c.step >= checkpoint.step):
            reasons[checkpoint.step].append("temporary")
    named = [("pinned", set(pinned))]
    named += [(str(policy), set(policy.preserved(ordered))) for policy in policies]
    if not policies:
        named.append(("no policy", {c.step for c in _permanent(ordered)}))
    for step, names in (readers or {}).items():
        named += [(f"being read by {name}", {step}) for name in sorted(names)]
    for reason, kept in named:
        for step in kept & reasons.keys():
            reasons[step].append(reason)
    return reasons


def _permanent(checkpoints: Sequence[Ranked]) -> list[Ranked]:
    return [c for c in checkpoints if not _is_temporary(c)]


def _is_temporary(checkpoint: Ranked) -> bool:
    # Whoever ranks checkpoints of their own need not know of temporary ones.
    return bool(getattr(checkpoint, "temporary", False))


def _whole(number: object, least: int) -> int | None:
    """A whole number of any kind as a plain int; None if it is none, or too small."""
    if isinstance(number, bool):
        return None
    try:
        found = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None
    return found if found >= least else None


def _count(name: str, n: object) -> int:
    count = _whole(n, 1)
    if count is None:
        raise errors.OptionError(
            f"{name} wants a whole number of at least 1, got {n!r}. To keep everything,"
            " pass no policy at all"
        )
    return count


def _secs(secs: object) -> float:
    # A float32 of numpy's is such a number, too.
    is_number = isinstance(secs, numbers.Real) and not isinstance(secs, bool)
    if not is_number or not 0 < (found := float(secs)) < math.inf:  # type: ignore[arg-type]
        raise errors.OptionError(
            f"EveryNSecs wants a positive number of seconds, got {secs!r}. To keep"
            " everything, pass no policy at all"
        )
    return found


def _steps(steps: object) -> frozenset[int]:
    if not isinstance(steps, Iterable):
        raise errors.OptionError(
            f"OnSteps wants a list of steps, got {steps!r:.80}: write OnSteps([1000])"
        )
    chosen = set()
    for step in steps:
        number = _whole(step, 0)
        if number is None:
            raise errors.OptionError(
                f"OnSteps wants whole numbers from 0, got {step!r}"
            )
        chosen.add(number)
    return frozenset(chosen)
