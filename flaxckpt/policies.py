"""Preservation policies: the rules that decide which steps of a directory to keep.

A policy is a pure function of all checkpoints of a directory. A step is kept if any
policy keeps it. The newest step and pinned steps are always kept. Without policies,
all steps are kept except temporary steps: the two newest are kept until a newer
permanent step exists.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flaxckpt import _policy_forms, _util, errors

__all__ = [
    "BestN",
    "EveryNSecs",
    "EveryNSteps",
    "EveryNStepsClosest",
    "ExponentialSteps",
    "LatestDuration",
    "LatestN",
    "OnSteps",
    "PreservationPolicy",
    "Ranked",
    "WithoutMetric",
    "decide",
]


class Ranked(Protocol):
    """The properties of a checkpoint that policies may read."""

    @property
    def step(self) -> int:
        """The number of completed training steps."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics saved with the step or added later."""

    @property
    def created(self) -> float:
        """When the save started, in seconds since 1970, by that machine's clock."""

    @property
    def temporary(self) -> bool:
        """True if a newer permanent step replaces this checkpoint."""


class PreservationPolicy(Protocol):
    """The interface of a policy; reports show `str(policy)`."""

    def preserved(self, checkpoints: Sequence[Ranked], /) -> AbstractSet[int]:
        """Returns the steps to keep.

        Args:
            checkpoints: All committed checkpoints of a directory, including pinned and
                temporary ones, oldest first, without duplicate steps.

        Returns:
            The steps that this policy keeps; steps not in `checkpoints` are ignored.
        """


@_util.guessed_names.explain
@_policy_forms.register(
    "latest", "latest:3", lambda p: f"latest {p.n}", count_kept=lambda p: p.n
)
@dataclass(frozen=True, slots=True)
class LatestN(PreservationPolicy):
    """Keeps the `n` newest checkpoints; temporary checkpoints are ignored."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("LatestN", self.n))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return set(sorted(c.step for c in _permanent(checkpoints))[-self.n :])


@_util.guessed_names.explain
@_policy_forms.register(
    "latest_duration",
    "duration:24h",
    lambda p: f"last {_util.humanize.duration(p.secs)}",
    count_kept=None,
)
@dataclass(frozen=True, slots=True)
class LatestDuration(PreservationPolicy):
    """Keeps the checkpoints saved at most `secs` before the newest checkpoint.

    Ages are relative to the newest checkpoint and not to the present time, so an idle
    run loses nothing. A time that disagrees with the order of the steps shows no age,
    and the two longest times between saves count only as long as the third longest: the
    clock may have jumped. So a pause, too, may keep more checkpoints, and of three all
    stay. Temporary checkpoints are ignored.

    Source: `LatestDuration` of Orbax, with ages relative to the present time.
    """

    secs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "secs", _secs("LatestDuration", self.secs))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        ages = _known_ages(_permanent(checkpoints))
        return {step for step, age in ages.items() if age <= self.secs}


@_util.guessed_names.explain
@_policy_forms.register(
    "best",
    "best:1:eval/loss:min",
    lambda p: f"among {p.n} best {p.metric}",
    count_kept=lambda p: p.n,
)
@dataclass(frozen=True, slots=True)
class BestN(PreservationPolicy):
    """Keeps the `n` checkpoints with the best `metric`; the newer wins a tie.

    A checkpoint whose metric is missing, NaN or infinite is never among the best; add
    `WithoutMetric` to keep checkpoints that have not been evaluated. Until a checkpoint
    has the metric, `decide` keeps all.
    """

    n: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        _check_order(self.n, self.metric, self.mode)
        object.__setattr__(self, "n", _count("BestN", self.n))
        if not self.metric or not isinstance(self.metric, str):
            raise errors.OptionError(
                f"BestN needs the name of a metric, got {self.metric!r}"
            )
        if self.mode not in ("min", "max"):
            raise errors.OptionError(
                f"BestN needs mode 'min' or 'max', got {self.mode!r}"
            )

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        values = {c.step: c.metrics.get(self.metric) for c in checkpoints}
        return set(rank(values, self.mode)[: self.n])


@_util.guessed_names.explain
@_policy_forms.register(
    "without_metric",
    "without:eval/loss",
    lambda p: f"without {p.metric}",
    count_kept=None,
)
@dataclass(frozen=True, slots=True)
class WithoutMetric(PreservationPolicy):
    """Keeps each checkpoint without `metric`, except temporary checkpoints.

    A NaN or infinite metric counts as present.

    Source: `keep_checkpoints_without_metrics` of Orbax and T5X.
    """

    metric: str

    def __post_init__(self) -> None:
        if not self.metric or not isinstance(self.metric, str):
            raise errors.OptionError(
                f"WithoutMetric needs the name of a metric, got {self.metric!r}"
            )

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in _permanent(checkpoints) if self.metric not in c.metrics}


@_util.guessed_names.explain
@_policy_forms.register(
    "every_steps", "every:1000", lambda p: f"every {p.n}", count_kept=None
)
@dataclass(frozen=True, slots=True)
class EveryNSteps(PreservationPolicy):
    """Keeps each checkpoint whose step is a multiple of `n`, including 0.

    Temporary checkpoints are ignored.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("EveryNSteps", self.n))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in _permanent(checkpoints) if c.step % self.n == 0}


@_util.guessed_names.explain
@_policy_forms.register(
    "every_steps_closest",
    "closest:1000",
    lambda p: f"near every {p.n}",
    count_kept=None,
)
@dataclass(frozen=True, slots=True)
class EveryNStepsClosest(PreservationPolicy):
    """Keeps the checkpoint closest to each multiple of `n`, including 0.

    For runs that save at irregular steps. A step halfway between two multiples belongs
    to the multiple with an even factor; of two equally close steps, the later is kept.
    Temporary checkpoints are ignored.

    Source: `EveryNStepsClosest` of Orbax.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("EveryNStepsClosest", self.n))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        closest: dict[int, int] = {}
        for step in sorted(c.step for c in _permanent(checkpoints)):
            target = self.n * round(Fraction(step, self.n))
            best = closest.setdefault(target, step)
            if abs(step - target) <= abs(best - target):
                closest[target] = step
        return set(closest.values())


@_util.guessed_names.explain
@_policy_forms.register(
    "exponential_steps", "exponential:100:2", lambda _: "exponential", count_kept=None
)
@dataclass(frozen=True, slots=True)
class ExponentialSteps(PreservationPolicy):
    """Keeps each checkpoint whose step is 0, `n`, `n * base`, `n * base**2`, ….

    Temporary checkpoints are ignored.

    Source: `ExpStep` of Kauldron.
    """

    n: int
    base: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("ExponentialSteps", self.n))
        base = _to_int(self.base, 2)
        if base is None:
            raise errors.OptionError(
                "ExponentialSteps needs a base that is a whole number of at least 2,"
                f" got {self.base!r}"
            )
        object.__setattr__(self, "base", base)

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        steps = {c.step for c in _permanent(checkpoints)}
        kept = steps & {0}
        target, last = self.n, max(steps, default=0)
        while target <= last:
            kept |= steps & {target}
            target *= self.base
        return kept


@_util.guessed_names.explain
@_policy_forms.register(
    "every_secs",
    "secs:2h",
    lambda p: f"every {_util.humanize.duration(p.secs)}",
    count_kept=None,
)
@dataclass(frozen=True, slots=True)
class EveryNSecs(PreservationPolicy):
    """Keeps the oldest checkpoint, then each at least `secs` newer than the last kept.

    Ages are computed from the recorded creation times. If the clock was set back, the
    checkpoints before and after the change are kept and counting restarts there.
    Temporary checkpoints are ignored.
    """

    secs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "secs", _secs("EveryNSecs", self.secs))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        kept: set[int] = set()
        last = math.inf  # keeps the oldest
        ordered = sorted(_permanent(checkpoints), key=lambda c: c.step)
        for at, checkpoint in enumerate(ordered):
            # Deleting the others must not change the result: compare with steps that
            # stay, which are those on both sides of a clock that was set back.
            around = [c.created for c in ordered[max(at - 1, 0) : at + 2]]
            was_set_back = any(b < a for a, b in itertools.pairwise(around))
            if was_set_back or not 0 <= checkpoint.created - last < self.secs:
                kept.add(checkpoint.step)
                last = checkpoint.created
        return kept


@_util.guessed_names.explain
@_policy_forms.register(
    "on_steps", "steps:1,10", lambda _: "chosen step", count_kept=lambda p: len(p.steps)
)
@dataclass(frozen=True, slots=True)
class OnSteps(PreservationPolicy):
    """Keeps the given steps, temporary or not."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _steps(self.steps))

    def preserved(self, checkpoints: Sequence[Ranked], /) -> set[int]:
        return {c.step for c in checkpoints if c.step in self.steps}


def rank(values: Mapping[int, float | None], mode: Literal["min", "max"]) -> list[int]:
    """Returns the steps with a finite value, the best first; the newer wins a tie.

    Args:
        values: Step -> the value of a metric.
        mode: Which values are the best.
    """
    sign = 1 if mode == "max" else -1
    finite = [
        (sign * value, step)
        for step, value in values.items()
        if value is not None and math.isfinite(value)
    ]
    return [step for _, step in sorted(finite, reverse=True)]


def check(policies: object, option: str) -> tuple[PreservationPolicy, ...]:
    """Returns `policies` as a tuple.

    Args:
        policies: The argument to check.
        option: The name of the argument, for the message.

    Raises:
        OptionError: `policies` is not a list of policies.
    """
    example = f"write {option}=[LatestN(3)], or pass none to keep everything"
    if not isinstance(policies, Iterable) or isinstance(policies, str | Mapping):
        raise errors.OptionError(
            f"{option} must be a list of policies, got {policies!r:.80}: {example}"
        )
    listed = tuple(policies)
    for policy in listed:
        if isinstance(policy, type) or not callable(getattr(policy, "preserved", None)):
            raise errors.OptionError(
                f"{option} must be a list of policies, but contains"
                f" {_describe(policy)}: {example}"
            )
    return listed


def _describe(policy: object) -> str:
    if isinstance(policy, type):
        return f"the class {policy.__name__} instead of an instance"
    return f"{policy!r:.80}"


def decide(
    policies: Sequence[PreservationPolicy],
    checkpoints: Sequence[Ranked],
    *,
    pinned: Collection[int] = (),
    readers: Mapping[int, Collection[str]] | None = None,
) -> dict[int, list[str]]:
    """Returns the reasons to keep each step; a step without reasons may be deleted.

    Args:
        policies: A step is kept if any policy keeps it. Without policies, every
            permanent step is kept.
        checkpoints: All committed checkpoints of a directory, in any order. Checkpoints
            without the attribute `temporary` are permanent.
        pinned: Steps that are kept whatever the policies decide. Policies still count
            them: `LatestN(2)` does not keep an older step in place of a pinned one.
        readers: Step -> names of its current readers, which keep the step for now.
            Policies count these steps as well.

    Returns:
        Step -> reasons, the oldest step first. A reason is "newest", "temporary" (the
        two newest steps, until a newer permanent step exists), "pinned", "no policy",
        "being read by …" or a policy such as "LatestN(3)". Until a step has the metric
        of a `BestN`, every permanent step may be the best, and stays.

    Raises:
        OptionError: A policy returns something else than steps.
    """
    policies = check(policies, "policies")
    listed = tuple(checkpoints) if _util.arguments.is_list(checkpoints) else None
    if listed is None or not all(hasattr(each, "step") for each in listed):
        raise errors.OptionError(
            "checkpoints must be a list of objects with step and metrics, such as"
            f" flaxckpt.CheckpointMetadata, got {_util.arguments.describe(checkpoints)}"
        )
    ordered = sorted(listed, key=lambda c: c.step)
    reasons: dict[int, list[str]] = {c.step: [] for c in ordered}
    if ordered:
        reasons[ordered[-1].step].append("newest")
    # Keep two: if the newest is damaged, the step before it can still be restored.
    for checkpoint in ordered[-2:]:
        if all(_is_temporary(c) for c in ordered if c.step >= checkpoint.step):
            reasons[checkpoint.step].append("temporary")
    named = [("pinned", set(pinned))]
    for policy in policies:
        named.append((str(policy), _find_preserved(policy, ordered)))
        if is_undecided(policy, ordered):
            reason = f"{policy}, once a step has the metric"
            named.append((reason, {c.step for c in _permanent(ordered)}))
    if not policies:
        named.append(("no policy", {c.step for c in _permanent(ordered)}))
    for step, names in (readers or {}).items():
        named += [(f"being read by {name}", {step}) for name in sorted(names)]
    for reason, kept in named:
        for step in kept & reasons.keys():
            reasons[step].append(reason)
    return reasons


def _find_preserved(
    policy: PreservationPolicy, checkpoints: Sequence[Ranked]
) -> set[int]:
    """Returns the steps that a policy keeps.

    Anything else would be no step of the run, so that all its steps were deleted.
    """
    kept: object = policy.preserved(checkpoints)
    listed = list(kept) if isinstance(kept, Iterable) else [None]
    steps = {_to_int(step, 0) for step in listed}
    if None in steps:
        raise errors.OptionError(
            f"the method preserved of {policy} must return the steps to keep, as a set"
            " of int: write {checkpoint.step for checkpoint in …}; it returned"
            f" {kept!r:.80}"
        )
    return {step for step in steps if step is not None}


def is_undecided(policy: PreservationPolicy, checkpoints: Sequence[Ranked]) -> bool:
    """Returns True for a `BestN` of a metric that no checkpoint has."""
    return isinstance(policy, BestN) and not policy.preserved(checkpoints)


def _known_ages(checkpoints: Sequence[Ranked]) -> dict[int, float]:
    """Returns step -> how much older it is than the newest, at least.

    A clock may jump between two saves, both ways. No step is newer than one after it,
    and the two longest times between saves count as long as the third longest: one may
    be a jump, the other a pause. The number is fixed, so that a deletion ages no step.
    """
    ordered = sorted(checkpoints, key=lambda c: c.step, reverse=True)
    times = itertools.accumulate(
        (math.inf if math.isnan(c.created) else c.created for c in ordered), min
    )
    gaps = [
        0.0 if math.isinf(later) else later - earlier
        for later, earlier in itertools.pairwise(times)
    ]
    most = sorted(gaps)[-3] if len(gaps) > 2 else 0.0
    ages = itertools.accumulate((min(gap, most) for gap in gaps), initial=0.0)
    return {c.step: age for c, age in zip(ordered, ages, strict=False)}


def _permanent(checkpoints: Sequence[Ranked]) -> list[Ranked]:
    return [c for c in checkpoints if not _is_temporary(c)]


def _is_temporary(checkpoint: Ranked) -> bool:
    # Checkpoint types of users may lack the attribute.
    return bool(getattr(checkpoint, "temporary", False))


def _to_int(number: object, least: int) -> int | None:
    """Returns `number` as an int; None if not an integer, or less than `least`."""
    if isinstance(number, bool):
        return None
    try:
        whole = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None
    return whole if whole >= least else None


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        raise _util.guessed_names.unknown_name(__name__, name)


def _count(name: str, n: object) -> int:
    count = _to_int(n, 1)
    if count is None:
        raise errors.OptionError(
            f"{name} needs a whole number of at least 1, got {n!r}. To keep everything,"
            " pass no policy at all"
        )
    return count


def _check_order(n: object, metric: object, mode: object) -> None:
    """Raises OptionError for a `BestN` that got its metric first."""
    if isinstance(n, str):
        example = _util.guessed_names.read_answers()["BestN"][_util.guessed_names.CALL]
        answer = _util.guessed_names.fill_in(example, [n, metric, mode])
        raise errors.OptionError(
            f"BestN takes the number before the metric, got n={n!r}: {answer}"
        )


def _secs(name: str, secs: object) -> float:
    # numpy.float32 is a Real, too.
    is_number = isinstance(secs, numbers.Real) and not isinstance(secs, bool)
    if not is_number or not 0 < (seconds := float(secs)) < math.inf:  # type: ignore[arg-type]
        raise errors.OptionError(
            f"{name} needs a positive number of seconds, got {secs!r}. To keep"
            " everything, pass no policy at all"
        )
    return seconds


def _steps(steps: object) -> frozenset[int]:
    if not isinstance(steps, Iterable):
        raise errors.OptionError(
            f"OnSteps needs a list of steps, got {steps!r:.80}: write OnSteps([1000])"
        )
    chosen = set()
    for step in steps:
        number = _to_int(step, 0)
        if number is None:
            raise errors.OptionError(
                f"OnSteps needs whole numbers from 0, got {step!r}"
            )
        chosen.add(number)
    return frozenset(chosen)
