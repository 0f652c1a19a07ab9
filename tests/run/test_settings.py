"""A run records its policies, and any program can apply them."""

import json
import time

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import policies
from flaxckpt._run import retention, settings
from flaxckpt._steps import journal
from flaxckpt._steps.event import Event
from flaxckpt.policies import BestN, LatestN

STATE = {"w": jnp.arange(4.0)}

ALL = [
    policies.BestN(2, "eval/loss", "min"),
    policies.EveryNSecs(3600.0),
    policies.EveryNSteps(1000),
    policies.EveryNStepsClosest(500),
    policies.ExponentialSteps(100, 3),
    policies.LatestDuration(86400.0),
    policies.LatestN(3),
    policies.OnSteps([10, 1]),
    policies.WithoutMetric("eval/loss"),
]


class Primes:
    """A policy of a user, which only the user's program can evaluate."""

    def preserved(self, checkpoints):
        return {c.step for c in checkpoints if c.step in (2, 3, 5, 7)}

    def __str__(self):
        return "Primes()"


def test_every_policy_of_ours_is_known():
    ours = {cls.__name__ for cls in map(type, ALL)}
    not_policies = {"PreservationPolicy", "Ranked", "decide"}
    assert ours == set(policies.__all__) - not_policies


def test_every_policy_is_read_as_it_was_recorded(tmp_path):
    items = {"opt_state": [LatestN(1)]}
    options = {"keep": ALL, "keep_dataset": [LatestN(2)], "keep_items": items}
    state = {"params": STATE, "opt_state": STATE}
    split = ("params", "opt_state")
    with flaxckpt.Checkpointer(tmp_path, items=split, **options) as ckpt:
        ckpt.save(1, state)
    rules = settings.read(tmp_path).rules
    assert list(rules.keep) == ALL
    assert rules.keep_items == {"dataset": (LatestN(2),), "opt_state": (LatestN(1),)}
    assert rules.items.state == ("params", "opt_state")


def test_a_policy_of_the_user_may_keep_every_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[Primes(), LatestN(1)]) as ckpt:
        for step in (4, 5, 6):
            ckpt.save(step, STATE)
    keep = settings.read(tmp_path).rules.keep
    assert [*map(str, keep)] == ["perhaps Primes()", "LatestN(1)"]
    ranked = flaxckpt.Checkpointer(tmp_path, read_only=True)
    kept = keep[0].preserved([ranked.metadata(step) for step in ranked.steps()])
    assert kept == {5, 6}


def test_policies_on_metrics_from_elsewhere_may_keep_every_step(tmp_path):
    keep = [BestN(1, "loss", "min"), LatestN(1)]
    elsewhere = {1: {"loss": 0.5}, 2: {"loss": 1.0}}
    with flaxckpt.Checkpointer(
        tmp_path, keep=keep, metrics_from=lambda: elsewhere
    ) as ckpt:
        ckpt.save(1, STATE)
    found = settings.read(tmp_path).rules.keep
    assert [*map(str, found)] == ["perhaps BestN(1, 'loss', 'min')", "LatestN(1)"]


def test_settings_are_recorded_when_they_change_and_now_and_then(tmp_path):
    def count():
        events = journal.read(tmp_path / "events.jsonl")
        return sum(event.kind == "configured" for event in events)

    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        assert settings.read(tmp_path) is None
        for step in range(1, 4):
            ckpt.save(step, STATE).wait()
        assert count() == 1
        callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, preflight=False)
        for step in range(4, 8):
            callback(step, STATE)
    assert count() == 2
    assert settings.read(tmp_path).callback == {"every_steps": 2}
    flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)], read_only=True).restore()
    assert settings.read(tmp_path).rules.keep == (LatestN(1),)


def test_settings_outlive_the_oldest_lines_of_a_journal(tmp_path):
    events = []
    recorder = settings.Recorder(_Lines(events), retention.Rules())
    for _ in range(1000):
        recorder.record()
    assert len(events) == 10


class _Lines:
    def __init__(self, lines):
        self.record = lambda kind, **details: lines.append((kind, details))


@pytest.mark.parametrize(
    "details",
    [
        {"keep": 3},
        {"keep": [3]},
        {"keep": [{"policy": "LatestN"}]},
        {"keep": [{"policy": "LatestN", "n": "many"}]},
        {"keep": [{"policy": "LatestN", "n": 1, "__class__": 2}]},
        {"keep_items": []},
        {"items": 7},
        {"callback": []},
    ],
)
def test_records_that_cannot_be_read_are_ignored(details, caplog):
    event = Event("configured", None, "run", time.time(), details)
    assert settings.last([event]) is None
    assert "are ignored" in caplog.text


def test_a_policy_of_a_later_version_may_keep_every_step():
    details = {"keep": [{"policy": "Fibonacci", "start": 1}]}
    event = Event("configured", None, "run", time.time(), details)
    [policy] = settings.last([event]).rules.keep
    assert str(policy) == "perhaps Fibonacci({'start': 1})"


def test_the_journal_has_the_values_of_metrics(tmp_path):
    huge = {f"metric {i}" * 20: float(i) for i in range(2000)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE, metrics={"loss": 0.5, "odd": float("nan")}).wait()
        ckpt.add_metrics(1, {"eval": {"loss": 0.25}})
        ckpt.save(2, STATE, metrics=huge)
    text = (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    lines = map(json.loads, text.splitlines())
    by_kind = {(e["kind"], e["step"]): e["details"] for e in lines}
    assert by_kind["committed", 1]["metrics"] == {"loss": 0.5, "odd": "nan"}
    assert by_kind["measured", 1]["metrics"] == {"eval/loss": 0.25}
    assert by_kind["committed", 2].keys() == {"bytes", "blocked_secs", "total_secs"}
