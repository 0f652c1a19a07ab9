"""Preservation policies, as tables and as rules that hold for every run."""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt import errors, policies
from flaxckpt.policies import (
    BestN,
    EveryNSecs,
    EveryNSteps,
    EveryNStepsClosest,
    ExponentialSteps,
    LatestDuration,
    LatestN,
    OnSteps,
    WithoutMetric,
)
from tests.helpers.any_policy import CLASSES, any_policy

LOSS = "eval/loss"
ACC = "eval/accuracy"


@dataclass(frozen=True)
class Saved:
    """As much of a checkpoint as a policy sees."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0
    temporary: bool = False


def run(acc=None, **losses):
    """Checkpoints from `s3=0.5` (a loss at step 3) and `acc={3: 0.5}`."""
    by_step = {int(name[1:]): {LOSS: value} for name, value in losses.items()}
    by_step |= {step: {ACC: value} for step, value in (acc or {}).items()}
    return [Saved(step, metrics) for step, metrics in by_step.items()]


def plain(*steps):
    return [Saved(step) for step in steps]


def at(*times):
    """Checkpoints 0, 1, 2, …, by when they were saved."""
    return [Saved(step, created=time) for step, time in enumerate(times)]


def brief(*steps, among=()):
    """Temporary checkpoints, among others that are not."""
    found = [Saved(step, {LOSS: float(step)}, step, temporary=True) for step in steps]
    return [*found, *(Saved(step, {LOSS: 0.5}, step) for step in among)]


def stays(chosen, checkpoints, pinned=()):
    decided = policies.decide(chosen, checkpoints, pinned=pinned)
    return [step for step, reasons in decided.items() if reasons]


KEPT = [
    (LatestN(1), plain(), set()),
    (LatestN(2), plain(0, 1, 2), {1, 2}),
    (LatestN(2), plain(2, 0, 1), {1, 2}),
    (LatestN(9), plain(0, 1), {0, 1}),
    (EveryNSteps(3), plain(0, 1, 3, 4, 6), {0, 3, 6}),
    (EveryNSteps(1), plain(0, 5), {0, 5}),
    (EveryNStepsClosest(10), plain(), set()),
    (EveryNStepsClosest(10), plain(3, 8, 14, 19, 28, 33), {3, 8, 19, 28}),
    (EveryNStepsClosest(10), plain(9, 11, 21, 19), {11, 21}),
    (EveryNStepsClosest(10), plain(5, 15, 25, 35), {5, 25, 35}),
    (EveryNStepsClosest(1), plain(0, 5), {0, 5}),
    (EveryNStepsClosest(2**60), plain(2**61 - 1, 2**61 + 2), {2**61 - 1}),
    (ExponentialSteps(100), plain(), set()),
    (
        ExponentialSteps(100),
        plain(0, 50, 100, 200, 300, 400, 800),
        {0, 100, 200, 400, 800},
    ),
    (ExponentialSteps(1, 3), plain(*range(250)), {0, 1, 3, 9, 27, 81, 243}),
    (ExponentialSteps(7, 10), plain(7, 70, 77, 7 * 10**18), {7, 70, 7 * 10**18}),
    (LatestDuration(10), at(), set()),
    (LatestDuration(10), at(5), {0}),
    (LatestDuration(10), at(0, 9, 10, 15, 20), {2, 3, 4}),
    (LatestDuration(0.5), at(0, 0.5, 0.75, 1.25), {1, 2, 3}),
    (LatestDuration(10), at(0, 100, 200), {0, 1, 2}),
    (LatestDuration(10), at(5, 9, 100, 12, 16, 20), {2, 3, 4, 5}),
    (LatestDuration(10), at(1000, 3, 14), {0, 1, 2}),
    (LatestDuration(10), at(0, math.nan, 9, 18), {0, 1, 2, 3}),
    (LatestDuration(10), at(0, 100, math.nan), {0, 1, 2}),
    (LatestDuration(10), list(reversed(at(0, 6, 12, 18))), {2, 3}),
    (EveryNSecs(10), at(), set()),
    (EveryNSecs(10), at(5), {0}),
    (EveryNSecs(10), at(5, 14, 15, 24.9, 25), {0, 2, 4}),
    (EveryNSecs(10), at(0, 9, 18, 27), {0, 2}),
    (EveryNSecs(0.5), at(0, 0.25, 0.5), {0, 2}),
    (EveryNSecs(10), at(0, 3, 2, 4), {0, 1, 2}),
    (EveryNSecs(10), at(1000, 3, 4, 13), {0, 1, 3}),
    (EveryNSecs(10), at(0, 5000, 20, 29, 30), {0, 1, 2, 4}),
    (EveryNSecs(10), at(0, math.nan, 1), {0, 1, 2}),
    (EveryNSecs(10), list(reversed(at(0, 9, 10))), {0, 2}),
    (EveryNSecs(10), at(5, 5, 6), {0}),
    (EveryNSecs(10), at(10, 9.5, 10), {0, 1}),
    (OnSteps([2, 4, 9]), plain(1, 2, 3, 4), {2, 4}),
    (OnSteps(()), plain(1), set()),
    (LatestN(2), brief(1, 3, 5, among=(2, 4)), {2, 4}),
    (EveryNSteps(2), brief(1, 2, 5, among=(3, 4)), {4}),
    (EveryNSecs(2), brief(0, 2, 4, among=(1, 3)), {1, 3}),
    (EveryNStepsClosest(4), brief(0, 4, 8, among=(3, 7)), {3, 7}),
    (ExponentialSteps(1), brief(1, 4, among=(2, 3, 8)), {2, 8}),
    (LatestDuration(2), brief(0, 2, 4, among=(1, 3)), {1, 3}),
    (LatestDuration(1), brief(2, 9, among=(1, 3, 5, 7)), {7}),
    (OnSteps({1, 2}), brief(1, among=(2, 3)), {1, 2}),
    (BestN(1, LOSS, "max"), brief(1, 5, among=(2, 3)), {5}),
    (BestN(1, LOSS, "min"), run(s0=0.1, s1=0.2), {0}),
    (BestN(1, LOSS, "max"), run(s0=0.1, s1=0.2), {1}),
    (BestN(2, LOSS, "min"), run(s1=0.3, s2=0.1, s3=0.2), {2, 3}),
    (BestN(1, LOSS, "min"), run(s1=0.1, s2=0.1), {2}),
    (BestN(1, LOSS, "max"), run(s1=0.1, s2=0.1), {2}),
    (BestN(1, LOSS, "min"), run(s1=0.0, s2=-0.0, s3=0.0), {3}),
    (BestN(1, LOSS, "min"), run(s1=math.nan, s2=0.1), {2}),
    (BestN(1, LOSS, "max"), run(s1=math.inf, s2=0.1), {2}),
    (BestN(1, LOSS, "min"), run(s1=-math.inf, s2=0.1), {2}),
    (BestN(3, LOSS, "min"), run(s1=math.nan, s2=0.1, s3=math.inf), {2}),
    (BestN(3, LOSS, "min"), [*plain(0), *run(s1=0.5)], {1}),
    (BestN(3, LOSS, "min"), run(acc={1: 0.5}), set()),
    (WithoutMetric(LOSS), [*plain(0, 3), *run(s1=0.5, s2=math.nan)], {0, 3}),
    (WithoutMetric(LOSS), run(acc={1: 0.5}), {1}),
    (WithoutMetric(ACC), brief(1, among=(2,)), {2}),
]


@pytest.mark.parametrize(("policy", "checkpoints", "kept"), KEPT)
def test_policy_keeps_expected_steps(policy, checkpoints, kept):
    assert policy.preserved(checkpoints) == kept


def test_expected_steps_are_known_for_each_policy():
    assert {type(policy) for policy, _, _ in KEPT} == {*CLASSES}


def test_decide_returns_every_reason_to_keep_step():
    decided = policies.decide(
        [LatestN(2), BestN(1, LOSS, "min"), EveryNSteps(4)],
        run(s3=0.3, s0=0.2, s1=0.1, s2=0.4, s4=math.nan),
        pinned=[1, 77],
    )
    assert decided == {
        0: ["EveryNSteps(4)"],
        1: ["pinned", f"BestN(1, '{LOSS}', 'min')"],
        2: [],
        3: ["LatestN(2)"],
        4: ["newest", "LatestN(2)", "EveryNSteps(4)"],
    }
    assert list(decided) == sorted(decided)


def test_keeps_all_steps_without_policy():
    assert policies.decide([], plain(0, 1)) == {
        0: ["no policy"],
        1: ["newest", "no policy"],
    }
    assert policies.decide([], []) == {}


def test_keeps_two_newest_temporary_steps_until_permanent_one():
    assert policies.decide([], brief(3, 4, among=(1, 2))) == {
        1: ["no policy"],
        2: ["no policy"],
        3: ["temporary"],
        4: ["newest", "temporary"],
    }
    assert stays([], brief(3, among=(1, 2))) == [1, 2, 3]
    assert stays([], brief(3, 4, 5)) == [4, 5]
    assert stays([], brief(3, 5, among=(1, 4))) == [1, 4, 5]
    assert stays([], brief(3, 4, among=(1, 5))) == [1, 5]
    assert stays([LatestN(1)], brief(3, 4, 5, among=(1, 2))) == [2, 4, 5]
    assert stays([], brief(1, 3, among=(5,)), pinned=[3]) == [3, 5]


def test_keeps_and_counts_steps_being_read():
    decided = policies.decide(
        [LatestN(2)], plain(1, 2, 3), readers={1: ["b:2", "a:1"], 9: ["c:3"], 3: []}
    )
    assert decided == {
        1: ["being read by a:1", "being read by b:2"],
        2: ["LatestN(2)"],
        3: ["newest", "LatestN(2)"],
    }


def test_steps_without_temporary_attribute_are_permanent():
    @dataclass
    class Plain:
        step: int
        metrics: dict

    saved = [Plain(1, {}), Plain(2, {})]
    assert stays([LatestN(1)], saved) == [2]
    assert stays([], saved) == [1, 2]


def test_accepts_any_object_with_preserved_as_policy():
    class Odd:
        def preserved(self, saved):
            assert [c.step for c in saved] == [1, 2, 3, 4], "the oldest first"
            return frozenset({1, 3, 5})

        def __str__(self):
            return "Odd"

    decided = policies.decide([Odd()], plain(4, 2, 1, 3))
    assert decided == {1: ["Odd"], 2: [], 3: ["Odd"], 4: ["newest"]}


class Returns:
    """A policy that returns a value, whatever the checkpoints."""

    def __init__(self, value):
        self.value = value

    def preserved(self, checkpoints):
        return self.value

    def __str__(self):
        return "mine"


@pytest.mark.parametrize(
    "value",
    [None, 2, {"2"}, "2", [Saved(2)], [2, None], {2.0: ""}, [True], [-1]],
    ids=repr,
)
def test_decide_rejects_policy_that_returns_no_steps(value):
    """Their steps would be deleted, and all others."""
    with pytest.raises(errors.OptionError, match="preserved of mine must return"):
        policies.decide([LatestN(1), Returns(value)], [Saved(1), Saved(2)])


@pytest.mark.parametrize(
    "value", [[2], (2,), {2: ""}, np.array([2]), {np.int64(2), 7}], ids=repr
)
def test_policy_may_return_steps_in_any_collection(value):
    reasons = policies.decide([Returns(value)], [Saved(1), Saved(2), Saved(3)])
    assert reasons == {1: [], 2: ["mine"], 3: ["newest"]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LatestN(0),
        lambda: LatestN(-1),
        lambda: LatestN(1.5),
        lambda: LatestN(True),
        lambda: EveryNSteps(0),
        lambda: EveryNStepsClosest(0),
        lambda: ExponentialSteps(0),
        lambda: ExponentialSteps(1, 1),
        lambda: ExponentialSteps(1, 2.0),
        lambda: LatestDuration(0),
        lambda: LatestDuration(datetime.timedelta(hours=1)),
        lambda: EveryNSecs(0),
        lambda: EveryNSecs(-1.0),
        lambda: EveryNSecs(math.nan),
        lambda: EveryNSecs(math.inf),
        lambda: EveryNSecs(True),
        lambda: EveryNSecs("1"),
        lambda: OnSteps([1.5]),
        lambda: OnSteps([-1]),
        lambda: OnSteps([True]),
        lambda: OnSteps(5),
        lambda: OnSteps(np.array([1.0])),
        lambda: EveryNSecs(np.float32("nan")),
        lambda: LatestN(np.float32(2)),
        lambda: BestN(1, (LOSS,), "min"),
        lambda: BestN(0, LOSS, "min"),
        lambda: BestN(1, "", "min"),
        lambda: BestN(1, LOSS, "lowest"),
        lambda: WithoutMetric(""),
        lambda: WithoutMetric((LOSS,)),
    ],
)
def test_policies_reject_invalid_arguments(make):
    with pytest.raises(errors.OptionError, match="needs"):
        make()


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("LatestN(3)", "must be a list of policies, got 'LatestN"),
        ({"a": LatestN(3)}, "must be a list of policies, got {'a'"),
        (3, "must be a list of policies, got 3"),
        ([LatestN], "contains the class LatestN instead of an instance"),
        ([LatestN(1), 3], "contains 3: write"),
    ],
)
def test_decide_rejects_invalid_lists_of_policies(keep, told):
    with pytest.raises(errors.OptionError, match=told):
        policies.decide(keep, [])


@pytest.mark.parametrize("saved", [None, 3, [3], "ab", [Saved(1), 3]], ids=repr)
def test_decide_rejects_invalid_lists_of_checkpoints(saved):
    with pytest.raises(
        errors.OptionError, match=r"objects with step and metrics, .* got"
    ):
        policies.decide([], saved)


def test_errors_explain_swapped_arguments_and_unknown_names():
    with pytest.raises(errors.OptionError, match=r'write BestN\(1, "loss", "min"\)'):
        BestN("loss", 1, "min")
    with pytest.raises(errors.UnknownNameError, match="EveryNSeconds"):
        _ = policies.EveryNSeconds
    with pytest.raises(AttributeError, match="LatestNum"):
        _ = policies.LatestNum


def test_best_n_compares_numbers_of_any_size():
    huge = [Saved(1, {LOSS: 1.2e308}), Saved(2, {LOSS: 1.1e308})]
    assert BestN(1, LOSS, "max").preserved(huge) == {1}
    negative = [Saved(1, {LOSS: -1.2e308}), Saved(2, {LOSS: -1.1e308})]
    assert BestN(1, LOSS, "min").preserved(negative) == {1}
    assert BestN(1, LOSS, "min").preserved(huge[::-1]) == {2}


def test_policies_accept_numpy_numbers():
    assert LatestN(np.int64(3)) == LatestN(3)
    assert EveryNSecs(np.float32(3)) == EveryNSecs(3)
    assert OnSteps(np.arange(3)) == OnSteps(range(3))
    assert ExponentialSteps(np.int8(3), np.int8(4)) == ExponentialSteps(3, 4)
    assert type(ExponentialSteps(np.int8(3), np.int8(4)).base) is int
    found = [LatestN(np.int8(3)), EveryNSecs(np.int8(3)), OnSteps(np.arange(3))]
    assert [*map(str, found)] == ["LatestN(3)", "EveryNSecs(3)", "OnSteps([0, 1, 2])"]
    assert [type(found[0].n), type(found[1].secs)] == [int, float]


# What T5X's tests pin, where the rules agree: its `keep=n` best plus the latest is
# [LatestN(1), BestN(n)]. T5X also keeps steps without metrics, and counts what a
# period keeps before it looks for the best; that is left out.


@pytest.mark.parametrize(
    ("keep", "before", "saved", "after"),
    [
        (2, [], 42, [42]),
        (2, [42], 43, [42, 43]),
        (2, [42, 43], 44, [43, 44]),
        (1, [43, 44], 45, [45]),
        (3, [45], 46, [45, 46]),
    ],
)
def test_latest_n_keeps_same_steps_as_t5x(keep, before, saved, after):
    assert stays([LatestN(keep)], plain(*before, saved)) == after


def test_pinning_changes_no_other_decision_as_in_t5x():
    assert stays([LatestN(1)], plain(42, 43), pinned=[42]) == [42, 43]
    assert stays([LatestN(1)], plain(42, 43, 44), pinned=[42]) == [42, 44]


@pytest.mark.parametrize(
    ("chosen", "checkpoints", "pinned", "after"),
    [
        (
            [LatestN(1), BestN(2, ACC, "max")],
            [*run(acc={42: 0.9, 43: 0.8, 44: 0.7}), *plain(45)],
            [],
            [42, 43, 45],
        ),
        (
            [LatestN(1), BestN(2, ACC, "min")],
            [*run(acc={42: 0.9, 43: 0.8, 45: 0.95, 46: 0.99}), *plain(47)],
            [],
            [42, 43, 47],
        ),
        (
            [LatestN(1), BestN(1, ACC, "max")],
            [*plain(41, 42), *run(acc={43: 0.6, 44: 0.5, 45: 0.4}), *plain(46)],
            [],
            [43, 46],
        ),
        (
            [LatestN(1), BestN(2, ACC, "max"), EveryNSteps(3)],
            run(acc={step: step / 10 for step in (0, 3, 5, 6, 7, 8, 9)}),
            [],
            [0, 3, 6, 8, 9],
        ),
        (
            [LatestN(1), BestN(2, ACC, "max")],
            [*run(acc={s: float(s in (42, 53)) for s in range(1, 101)}), *plain(101)],
            [],
            [42, 53, 101],
        ),
        (
            [LatestN(1), BestN(2, ACC, "max")],
            [*run(acc={42: 0.9, 43: 0.7, 44: 0.8}), *plain(45)],
            [43],
            [42, 43, 44, 45],
        ),
        (
            [LatestN(1), BestN(2, ACC, "max")],
            [*run(acc={42: 0.9, 43: 0.7, 44: 0.8}), *plain(45, 46, 47)],
            [],
            [42, 44, 47],
        ),
    ],
    ids=["max", "min", "few metrics", "period", "restart", "pinned", "unpinned"],
)
def test_best_and_latest_keep_same_steps_as_t5x(chosen, checkpoints, pinned, after):
    assert stays(chosen, checkpoints, pinned) == after


values = st.one_of(
    st.none(), st.floats(), st.sampled_from([0.0, 1.0]), st.integers(-3, 3)
)
times = st.one_of(st.integers(0, 100), st.floats(allow_nan=False))
runs = st.dictionaries(
    st.integers(0, 50), st.tuples(values, times, st.booleans()), max_size=12
).map(
    lambda by_step: [
        Saved(step, {} if value is None else {LOSS: value}, time, is_temporary)
        for step, (value, time, is_temporary) in by_step.items()
    ]
)
counts = st.integers(1, 6)
some_policy = any_policy(
    n=counts,
    base=st.integers(2, 4),
    secs=st.integers(1, 60),
    steps=st.sets(st.integers(0, 50), max_size=3),
    metric=st.just(LOSS),
)
some_policies = st.lists(some_policy, max_size=3)
some_steps = st.sets(st.integers(0, 50))


@given(some_policies, runs, some_steps)
def test_always_keeps_newest_and_pinned_steps(chosen, saved, pinned):
    steps = {c.step for c in saved}
    kept = stays(chosen, saved, pinned)
    assert steps & pinned <= set(kept) <= steps
    assert not steps or max(steps) in kept


@given(some_policies, runs)
def test_keeps_only_two_newest_unnamed_temporary_steps(chosen, saved):
    named = {s for p in chosen for s in p.preserved(saved)}
    temporary = {c.step for c in saved if c.temporary}
    for policy in chosen:
        if not isinstance(policy, BestN | OnSteps):
            permanent = [c for c in saved if not c.temporary]
            assert policy.preserved(saved) == policy.preserved(permanent)
    last = max((c.step for c in saved if not c.temporary), default=-1)
    newest = set(sorted(step for step in temporary if step > last)[-2:])
    assert set(stays(chosen, saved)) & temporary == temporary & (named | newest)


@given(st.integers(1, 60), runs)
def test_every_n_secs_drops_only_steps_soon_after_kept_one(secs, saved):
    permanent = sorted((c for c in saved if not c.temporary), key=lambda c: c.step)
    kept = EveryNSecs(secs).preserved(saved)
    last = None
    for checkpoint in permanent:
        if checkpoint.step in kept:
            last = checkpoint.created
        else:
            assert last is not None
            assert 0 <= checkpoint.created - last < secs


@given(counts, runs)
def test_every_n_steps_closest_keeps_closest_steps(n, saved):
    steps = {c.step for c in saved if not c.temporary}
    kept = EveryNStepsClosest(n).preserved(saved)

    def distance(step):
        return min(step % n, -step % n)

    for step in steps:
        targets = {step - step % n, step + -step % n}
        targets = {t for t in targets if abs(step - t) == distance(step)}
        assert any(abs(k - t) <= distance(step) for k in kept for t in targets)
    assert {step for step in steps if step % n == 0} <= kept <= steps


@given(st.integers(1, 60), runs)
def test_latest_duration_keeps_contiguous_end_of_run(secs, saved):
    permanent = sorted((c for c in saved if not c.temporary), key=lambda c: c.step)
    kept = LatestDuration(secs).preserved(saved)
    gone = [c for c in permanent if c.step not in kept]
    assert kept == {c.step for c in permanent[len(gone) :]}
    assert bool(kept) == bool(permanent)
    for at, c in enumerate(gone):  # it is no newer than any step after it
        known = min(each.created for each in permanent[at:])
        assert permanent[-1].created - known > secs or c.created != known


@given(st.integers(1, 40), st.integers(2, 15), st.data())
def test_clock_jump_deletes_nothing(secs, count, data):
    true = [10 * step for step in range(count)]
    at = data.draw(st.integers(0, count - 1))
    jump = data.draw(st.integers(11, 10**7)) * data.draw(st.sampled_from([-1, 1]))
    until = data.draw(st.sampled_from([at + 1, count]))  # set right again, or not
    told = [time + jump * (at <= step < until) for step, time in enumerate(true)]
    saved = [Saved(step, created=time) for step, time in enumerate(told)]
    young = {step for step, time in enumerate(true) if true[-1] - time <= secs}
    assert young <= LatestDuration(secs).preserved(saved)
    # Until the next kept step, no step is by so much newer that it had to stay.
    kept = EveryNSecs(secs).preserved(saved)
    for step in {*range(count)} - kept:
        last = max(k for k in kept if k < step)
        assert true[step] - true[last] < secs


some_jumps = st.integers(1, 10**7)


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_two_long_gaps_and_any_backward_jumps_delete_nothing(secs, count, data):
    """Jumps ahead, also to the right time after one back, and pauses."""
    steps = st.integers(0, count - 1)
    pauses = data.draw(st.dictionaries(steps, some_jumps, max_size=2))
    ahead = data.draw(st.dictionaries(steps, some_jumps, max_size=2 - len(pauses)))
    back = data.draw(st.dictionaries(steps, some_jumps))
    true, told = [], []
    now, shift = 0, 0
    for step in range(count):
        now += 10 + pauses.get(step, 0)
        shift += ahead.get(step, 0) - back.get(step, 0)
        true.append(now)
        told.append(now + shift)
    saved = [Saved(step, created=time) for step, time in enumerate(told)]
    young = {step for step, time in enumerate(true) if true[-1] - time <= secs}
    assert young <= LatestDuration(secs).preserved(saved)


def test_clock_jump_beside_pause_deletes_nothing():
    hours = 3600
    times = [0, hours / 6, 13 * hours, 13 * hours + hours / 6]
    for jumps in ((0, 0, 0, 72), (0, 0, 72, 72), (0, 72, 72, 72), (0, 0, 72, 144)):
        told = [t + jump * hours for t, jump in zip(times, jumps, strict=True)]
        assert LatestDuration(24 * hours).preserved(at(*told)) == {0, 1, 2, 3}


@given(
    st.one_of(
        st.builds(EveryNSteps, counts),
        st.builds(EveryNStepsClosest, counts),
        st.builds(ExponentialSteps, counts, st.integers(2, 4)),
        st.builds(LatestDuration, st.integers(14, 60)),  # three steps always stay
    ),
    runs,
)
def test_deleting_after_each_save_equals_deleting_at_end(policy, saved):
    ordered = sorted((c for c in saved if not c.temporary), key=lambda c: c.step)
    if isinstance(policy, LatestDuration):  # times that show no jump of the clock
        ordered = [Saved(i, created=7 * i) for i in range(len(ordered))]
    left = []
    for checkpoint in ordered:
        left.append(checkpoint)
        kept = stays([policy], left)
        left = [c for c in left if c.step in kept]
    assert [c.step for c in left] == stays([policy], ordered)


@given(some_policies, runs, some_steps, some_policy)
def test_one_more_policy_or_pin_never_deletes_more(chosen, saved, pinned, more):
    if chosen:
        assert set(stays(chosen, saved)) <= set(stays([*chosen, more], saved))
    assert set(stays(chosen, saved)) <= set(stays(chosen, saved, pinned))


@given(some_policies, runs, some_steps)
def test_deletion_of_unkept_steps_is_idempotent(chosen, saved, pinned):
    kept = stays(chosen, saved, pinned)
    left = [c for c in saved if c.step in kept]
    assert stays(chosen, left, pinned) == kept


@given(some_policy, runs, st.randoms(use_true_random=False))
def test_policy_depends_only_on_checkpoints(policy, saved, random):
    kept = policy.preserved(saved)
    random.shuffle(saved)
    assert policy.preserved(saved) == kept == policy.preserved(saved)


@given(counts, st.sampled_from(["min", "max"]), runs)
def test_best_n_keeps_best_finite_checkpoints(n, mode, saved):
    finite = {
        c.step: c.metrics[LOSS]
        for c in saved
        if LOSS in c.metrics and math.isfinite(c.metrics[LOSS])
    }
    kept = BestN(n, LOSS, mode).preserved(saved)
    assert kept <= set(finite), "NaN, infinite and missing metrics are never best"
    assert len(kept) == min(n, len(finite))
    sign = 1 if mode == "max" else -1
    for worse in finite.keys() - kept:
        for best in kept:
            assert (sign * finite[worse], worse) < (sign * finite[best], best)
