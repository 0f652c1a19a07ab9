"""Whatever is done to a run directory: what must stay is there, and why is told."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import flaxckpt
from flaxckpt.policies import BestN, EveryNSecs, EveryNSteps, LatestN, OnSteps

LOSS = "loss"
values = st.one_of(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, math.nan, math.inf, -math.inf]), st.floats()
)
metrics = st.one_of(st.just({}), st.builds(lambda value: {LOSS: value}, values))
some_policies = st.lists(
    st.one_of(
        st.builds(LatestN, st.integers(1, 4)),
        st.builds(EveryNSteps, st.integers(1, 5)),
        st.builds(EveryNSecs, st.sampled_from([1e-9, 1e9])),
        st.builds(OnSteps, st.sets(st.integers(0, 15), max_size=3)),
        st.builds(
            BestN, st.integers(1, 3), st.just(LOSS), st.sampled_from(["min", "max"])
        ),
    ),
    max_size=3,
)
steps = st.integers(0, 15)


class Retention(RuleBasedStateMachine):
    """A run directory, and what is known to have been done to it."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.metrics = {}
        self.pinned = set()
        self.temporary = set()
        self.keep = ()
        self.checkpointer = None

    @initialize(keep=some_policies)
    def begin(self, keep):
        self.keep = keep
        self.checkpointer = flaxckpt.Checkpointer(self.root, keep=keep)

    def teardown(self):
        if self.checkpointer is not None:
            self.checkpointer.close()
        shutil.rmtree(self.root)

    # ---- the model, independent of the policies' own code ----

    def best(self, policy):
        """Those that fewer than `n` others beat."""
        finite = {s: m[LOSS] for s, m in self.metrics.items() if LOSS in m}
        finite = {s: v for s, v in finite.items() if math.isfinite(v)}

        def beats(other, step):
            if finite[other] != finite[step]:
                return (finite[other] > finite[step]) == (policy.mode == "max")
            return other > step

        return {
            step for step in finite if sum(beats(o, step) for o in finite) < policy.n
        }

    def must_stay(self):
        stay = self.pinned | {max(self.metrics)}
        for policy in self.keep:
            permanent = sorted(self.metrics.keys() - self.temporary)
            if isinstance(policy, BestN):
                # Until a step has the metric, any permanent one may be the best.
                stay |= self.best(policy) or set(permanent)
            elif isinstance(policy, OnSteps):
                stay |= self.metrics.keys() & set(policy.steps)
            elif isinstance(policy, LatestN):
                stay |= set(permanent[-policy.n :])
            elif isinstance(policy, EveryNSteps):
                stay |= {step for step in permanent if step % policy.n == 0}
            else:
                stay |= set(permanent[:1])
        if not self.keep:
            stay |= self.metrics.keys() - self.temporary
        last = max(self.metrics.keys() - self.temporary, default=-1)
        return stay | set(sorted(s for s in self.temporary if s > last)[-2:])

    def forget(self, gone):
        for step in gone:
            del self.metrics[step]
            self.pinned.discard(step)
            self.temporary.discard(step)

    def check_deleted(self, deleted, spared):
        wanted = self.must_stay() | spared
        assert not wanted & set(deleted), "what must stay was deleted"
        if not any(isinstance(policy, EveryNSecs) for policy in self.keep):
            assert self.metrics.keys() - wanted == set(deleted)
        self.forget(deleted)

    # ---- what is done ----

    @rule(step=steps, found=metrics, temporary=st.booleans())
    def save(self, step, found, temporary):
        state = {"w": np.full(2, float(step))}
        result = self.checkpointer.save(
            step, state, metrics=found, temporary=temporary, on_exists="overwrite"
        ).wait()
        self.metrics[step] = found
        (self.temporary.add if temporary else self.temporary.discard)(step)
        self.check_deleted(result.deleted_steps, spared={step})
        np.testing.assert_array_equal(
            self.checkpointer.restore(step=step)["w"], state["w"]
        )

    @precondition(lambda self: self.metrics)
    @rule(data=st.data(), value=values)
    def add_metrics(self, data, value):
        step = data.draw(st.sampled_from(sorted(self.metrics)))
        self.checkpointer.add_metrics(step, {LOSS: value})
        self.metrics[step] = {LOSS: value}

    @precondition(lambda self: self.metrics)
    @rule(data=st.data())
    def pin(self, data):
        step = data.draw(st.sampled_from(sorted(self.metrics)))
        self.checkpointer.pin(step)
        self.pinned.add(step)

    @precondition(lambda self: self.metrics)
    @rule(data=st.data())
    def unpin(self, data):
        step = data.draw(st.sampled_from(sorted(self.metrics)))
        self.checkpointer.unpin(step)
        self.pinned.discard(step)

    @precondition(lambda self: self.metrics)
    @rule(data=st.data())
    def delete(self, data):
        step = data.draw(st.sampled_from(sorted(self.metrics)))
        self.checkpointer.delete(step)
        self.forget([step])

    @precondition(lambda self: self.metrics)
    @rule()
    def prune(self):
        dry = self.checkpointer.prune(dry_run=True)
        explained = self.checkpointer.explain()
        assert dry == tuple(step for step, why in explained.items() if not why)
        assert self.checkpointer.prune() == dry
        assert all(self.checkpointer.explain().values()), "what is left stays"
        self.check_deleted(dry, spared=set())

    @rule()
    def restart(self):
        def seen(checkpointer):
            return (
                checkpointer.steps(),
                checkpointer.explain(),
                checkpointer.best_step(LOSS, "min"),
                checkpointer.best_step(LOSS, "max"),
            )

        before = seen(self.checkpointer)
        self.checkpointer.close()
        self.checkpointer = flaxckpt.Checkpointer(self.root, keep=self.keep)
        assert seen(self.checkpointer) == before

    # ---- what holds ----

    @invariant()
    def what_is_there_is_what_was_not_deleted(self):
        if self.checkpointer is not None:
            assert self.checkpointer.steps() == sorted(self.metrics)
            assert list(self.checkpointer.explain()) == sorted(self.metrics)

    @invariant()
    def what_must_stay_has_a_reason(self):
        if self.metrics:
            explained = self.checkpointer.explain()
            assert all(explained[step] for step in self.must_stay())
            for policy in self.keep:
                if isinstance(policy, BestN):
                    named = {s for s, why in explained.items() if str(policy) in why}
                    assert named == self.best(policy)


TestRetention = Retention.TestCase
TestRetention.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None
)
