"""A run records its policies, and any program can apply them."""

import json
import time

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import configs, policies
from flaxckpt._inspect import run_view
from flaxckpt._policy_forms import FORMS
from flaxckpt._run import judge, settings
from flaxckpt._steps.event import Event
from flaxckpt.policies import BestN, LatestN
from tests.helpers import run_files

STATE = {"w": jnp.arange(4.0)}

ALL = [
    *(configs.parse_option("keep", form.example) for form in FORMS.values()),
    policies.ExponentialSteps(100, 3),  # not the default base
]


class Primes:
    """A policy of a user, which only the user's program can evaluate."""

    def preserved(self, checkpoints):
        return {c.step for c in checkpoints if c.step in (2, 3, 5, 7)}

    def __str__(self):
        return "Primes()"


def test_cases_cover_every_policy():
    ours = {cls.__name__ for cls in map(type, ALL)}
    not_policies = {"PreservationPolicy", "Ranked", "decide"}
    assert ours == set(policies.__all__) - not_policies


def test_reads_every_policy_as_recorded(tmp_path):
    items = {"opt_state": [LatestN(1)]}
    options = {"keep": ALL, "keep_dataset": [LatestN(2)], "keep_items": items}
    state = {"params": STATE, "opt_state": STATE}
    split = ("params", "opt_state")
    with flaxckpt.Checkpointer(tmp_path, items=split, **options) as ckpt:
        ckpt.save(1, state)
    rules = settings.read(tmp_path, {1: "1"}).rules
    assert list(rules.keep) == ALL
    assert rules.keep_items == {"dataset": (LatestN(2),), "opt_state": (LatestN(1),)}
    assert rules.items.state == ("params", "opt_state")


def test_custom_policy_may_keep_every_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[Primes(), LatestN(1)]) as ckpt:
        for step in (4, 5, 6):
            ckpt.save(step, STATE)
    keep = settings.read(tmp_path, {}).rules.keep
    assert [*map(str, keep)] == ["perhaps Primes()", "LatestN(1)"]
    ranked = flaxckpt.Checkpointer(tmp_path, read_only=True)
    kept = keep[0].preserved([ranked.metadata(step) for step in ranked.steps()])
    assert kept == {5, 6}


def test_policies_on_external_metrics_may_keep_every_step(tmp_path):
    keep = [BestN(1, "loss", "min"), LatestN(1)]
    elsewhere = {1: {"loss": 0.5}, 2: {"loss": 1.0}}
    with flaxckpt.Checkpointer(
        tmp_path, keep=keep, metrics_from=lambda: elsewhere
    ) as ckpt:
        ckpt.save(1, STATE)
    found = settings.read(tmp_path, {}).rules.keep
    assert [*map(str, found)] == ["perhaps BestN(1, 'loss', 'min')", "LatestN(1)"]


@pytest.mark.parametrize("is_staged", [False, True])
def test_reader_explains_by_recorded_policies(tmp_path, is_staged):
    staging = {"staging": tmp_path / "ssd"} if is_staged else {}
    run = tmp_path / "run"
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(run, keep=keep, **staging) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE, metrics={"loss": 1 / step if step < 3 else 2.0})
            ckpt.wait()
            ckpt.wait_for_uploads()
        wanted = ckpt.explain()
        assert wanted[2][0] == "BestN(1, 'loss', 'min')"
    reader = flaxckpt.Checkpointer(run, read_only=True, **staging)
    assert reader.explain() == wanted
    assert reader.prune(dry_run=True) == ()
    assert "best 2" in reader._repr_html_()
    other = flaxckpt.Checkpointer(run, keep=[LatestN(1)], read_only=True, **staging)
    assert other.prune(dry_run=True) == (2,)
    if not is_staged:
        assert run_view.survey(run).explain().reasons == wanted
    assert flaxckpt.Checkpointer(run, **staging).prune() == (), "it keeps all"


def test_records_settings_when_they_change(tmp_path):
    def count():
        events = run_files.read_events(tmp_path)
        return sum(event.kind == "configured" for event in events)

    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        assert settings.read(tmp_path, {}) is None
        for step in range(1, 4):
            ckpt.save(step, STATE).wait()
        assert count() == 1
        callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, preflight=False)
        for step in range(4, 8):
            callback(step, STATE)
    assert count() == 2
    assert settings.read(tmp_path, {}).callback == {"every_steps": 2}
    flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)], read_only=True).restore()
    assert settings.read(tmp_path, {}).rules.keep == (LatestN(1),)


def test_repeats_settings_periodically(tmp_path):
    events = []
    recorder = settings.Recorder(_Lines(events), judge.Rules(), "{step}")
    for _ in range(1000):
        recorder.record()
    assert len(events) == 10


class _Lines:
    """A journal that is full for a while."""

    def __init__(self, lines, fails=()):
        self.lines = lines
        self.fails = iter(fails)

    def record(self, kind, **details):
        if next(self.fails, False):
            return False
        self.lines.append((kind, details))
        return True


def test_retries_failed_settings_record_at_next_save():
    events = []
    lines = _Lines(events, fails=[True, True])
    recorder = settings.Recorder(lines, judge.Rules(), "{step}")
    for _ in range(5):
        recorder.record()
    assert len(events) == 1


VALID = {
    "keep": [{"policy": "LatestN", "n": 1}],
    "keep_items": {},
    "items": "state",
    "dataset_item": "dataset",
    "metrics_from": False,
    "step_format": "{step}",
    "callback": {},
}


def configured(**details):
    return Event("configured", None, "run", time.time(), VALID | details)


@pytest.mark.parametrize(
    "details",
    [
        {"keep": 3},
        {"keep": [3]},
        {"keep": [{"policy": "LatestN"}]},
        {"keep": [{"policy": "LatestN", "n": "many"}]},
        {"keep": [{"policy": "LatestN", "n": 1, "__class__": 2}]},
        {"keep": [{"policy": "LatestDuration", "secs": 10**400}]},
        {"keep_items": []},
        {"items": 7},
        {"callback": []},
        {"step_format": "no step"},
        {"keep_if": "of a later version"},
    ],
)
def test_ignores_unreadable_records(details, caplog):
    assert settings.last([configured()]).rules.keep == (LatestN(1),)
    assert settings.last([configured(**details)]) is None
    assert "are ignored" in caplog.text


def test_ignores_record_without_policies(tmp_path):
    """A line of a journal that is too long loses its details."""
    event = Event("configured", None, "run", time.time(), {})
    assert settings.last([event]) is None
    chosen = policies.OnSteps(range(100, 20000))
    with flaxckpt.Checkpointer(tmp_path, keep=[chosen, LatestN(1)]) as ckpt:
        ckpt.save(1, STATE)
    first, _ = settings.read(tmp_path, {}).rules.keep
    assert str(first).startswith("perhaps OnSteps([100, 101")


def test_policy_of_later_version_may_keep_every_step():
    [policy] = settings.last(
        [configured(keep=[{"policy": "Fibonacci", "start": 1}])]
    ).rules.keep
    assert str(policy) == "perhaps Fibonacci({'start': 1})"


def test_ignores_settings_of_other_step_format(tmp_path):
    raw = {"keep": [LatestN(10)], "step_format": "raw_{step}"}
    ema = {"keep": [LatestN(1)], "step_format": "ema_{step:04d}"}
    for options, steps in ((raw, (1, 2, 3)), (ema, (5,))):
        with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
            for step in steps:
                ckpt.save(step, STATE)
    assert settings.read(tmp_path, {1: "raw_1"}).rules.keep == (LatestN(10),)
    assert settings.read(tmp_path, {5: "ema_0005"}).rules.keep == (LatestN(1),)
    assert settings.read(tmp_path, {5: "5"}) is None


def test_staging_directory_has_no_own_settings(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with flaxckpt.Checkpointer(far, keep=[LatestN(1)], staging=near) as ckpt:
        ckpt.save(1, STATE)
    assert settings.read(far, {}).rules.keep == (LatestN(1),)
    assert settings.read(near, {}) is None


class Unprintable(Primes):
    def __str__(self):
        raise RuntimeError("a deleted array")


def test_unprintable_policy_does_not_fail_save(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[Unprintable()]) as ckpt:
        ckpt.save(2, STATE).wait()
    [policy] = settings.read(tmp_path, {}).rules.keep
    assert str(policy) == "perhaps Unprintable"


def test_journal_records_metric_values(tmp_path):
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
