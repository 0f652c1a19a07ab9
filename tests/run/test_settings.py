"""A run records its policies, and any program can apply them."""

import json
import re
import time

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import configs, policies
from flaxckpt.policies import BestN, LatestN
from tests.helpers import any_policy, command_line, run_files, seams

STATE = {"w": jnp.arange(4.0)}

ALL = [
    *(configs.parse_option("keep", option) for _, option, _ in any_policy.in_guide()),
    policies.ExponentialSteps(100, 3),  # not the default base
]


def recorded(run, *options):
    """Returns the recorded policies, as `explain` shows them; None without any."""
    text = " ".join(command_line.run("explain", run, *options).split())
    found = re.search(r"policies: (.*)", text)
    assert found or "the policies of the run are unknown" in text, text
    return found and found[1]


def records(run):
    """Returns the settings in the journal of a run, the oldest first."""
    events = run_files.read_events(run)
    return [event.details for event in events if event.kind == "configured"]


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
        ckpt.save(1, state, metrics={"eval/loss": 1.0})
    assert recorded(tmp_path) == ", ".join(map(str, ALL))
    [record] = records(tmp_path)
    assert record["items"] == ["params", "opt_state"]
    assert record["keep_items"] == {
        "dataset": [{"policy": "LatestN", "n": 2}],
        "opt_state": [{"policy": "LatestN", "n": 1}],
    }


def test_custom_policy_may_keep_every_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[Primes(), LatestN(1)]) as ckpt:
        for step in (4, 5, 6):
            ckpt.save(step, STATE)
    assert recorded(tmp_path) == "perhaps Primes(), LatestN(1)"
    reader = flaxckpt.Checkpointer(tmp_path, read_only=True)
    assert reader.explain()[5] == ["perhaps Primes()"]
    assert reader.prune(dry_run=True) == ()


def test_policies_on_external_metrics_may_keep_every_step(tmp_path):
    keep = [BestN(1, "loss", "min"), LatestN(1)]
    elsewhere = {1: {"loss": 0.5}, 2: {"loss": 1.0}}
    with flaxckpt.Checkpointer(
        tmp_path, keep=keep, metrics_from=lambda: elsewhere
    ) as ckpt:
        ckpt.save(1, STATE)
    assert recorded(tmp_path) == "perhaps BestN(1, 'loss', 'min'), LatestN(1)"


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
        listed = command_line.read_json("explain", run)
        assert listed == {str(step): [*why] for step, why in wanted.items()}
    assert flaxckpt.Checkpointer(run, **staging).prune() == (), "it keeps all"


def test_records_settings_when_they_change(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, STATE).wait()
        assert len(records(tmp_path)) == 1
        callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, preflight=False)
        for step in range(4, 8):
            callback(step, STATE)
    assert [each["callback"] for each in records(tmp_path)] == [{}, {"every_steps": 2}]
    flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)], read_only=True).restore()
    assert recorded(tmp_path) == "LatestN(1)"


def test_repeats_settings_periodically(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "settings.recorded_again_after", 3)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(7):
            ckpt.save(step, STATE).wait()
    assert len(records(tmp_path)) == 3


def test_retries_failed_settings_record_at_next_save(tmp_path):
    journal = tmp_path / "events.jsonl"
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        journal.mkdir()  # so that no line can be added
        ckpt.save(1, STATE).wait()
        ckpt.save(2, STATE).wait()
        journal.rmdir()
        for step in range(3, 6):
            ckpt.save(step, STATE).wait()
    assert len(records(tmp_path)) == 1


VALID = {
    "keep": [{"policy": "LatestN", "n": 1}],
    "keep_items": {},
    "items": "state",
    "dataset_item": "dataset",
    "metrics_from": False,
    "step_format": "{step}",
    "callback": {},
}


@pytest.fixture
def configure(tmp_path):
    """Returns the function that records settings in a run with a step."""
    flaxckpt.Checkpointer(tmp_path).save(1, STATE).wait()

    def record(details):
        event = {"kind": "configured", "step": None, "path": "run", "details": details}
        line = json.dumps(event | {"time": time.time()})
        (tmp_path / "events.jsonl").write_text(f"{line}\n")
        return tmp_path

    return record


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
def test_ignores_unreadable_records(details, configure, caplog):
    assert recorded(configure(VALID)) == "LatestN(1)"
    assert recorded(configure(VALID | details)) is None
    assert "are ignored" in caplog.text


def test_ignores_record_without_policies(configure, tmp_path):
    """A line of a journal that is too long loses its details."""
    assert recorded(configure({})) is None
    chosen = policies.OnSteps(range(100, 20000))
    with flaxckpt.Checkpointer(tmp_path, keep=[chosen, LatestN(1)]) as ckpt:
        ckpt.save(2, STATE)
    assert recorded(tmp_path).startswith("perhaps OnSteps([100, 101")


def test_policy_of_later_version_may_keep_every_step(configure):
    run = configure(VALID | {"keep": [{"policy": "Fibonacci", "start": 1}]})
    assert recorded(run) == "perhaps Fibonacci({'start': 1})"


def test_ignores_settings_of_other_step_format(tmp_path):
    raw = {"keep": [LatestN(10)], "step_format": "raw_{step}"}
    ema = {"keep": [LatestN(1)], "step_format": "ema_{step:04d}"}
    for options, steps in ((raw, (1, 2, 3)), (ema, (5,))):
        with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
            for step in steps:
                ckpt.save(step, STATE)
    flaxckpt.save(tmp_path / "7", STATE)
    for template, found in (
        ("raw_{step}", "LatestN(10)"),
        ("ema_{step:04d}", "LatestN(1)"),
        ("{step}", None),
    ):
        assert recorded(tmp_path, "--step-format", template) == found


def test_staging_directory_has_no_own_settings(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with flaxckpt.Checkpointer(far, keep=[LatestN(1)], staging=near) as ckpt:
        ckpt.save(1, STATE)
    assert recorded(far) == "LatestN(1)"
    assert recorded(near) is None


class Unprintable(Primes):
    def __str__(self):
        raise RuntimeError("a deleted array")


def test_unprintable_policy_does_not_fail_save(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[Unprintable()]) as ckpt:
        ckpt.save(2, STATE).wait()
    assert recorded(tmp_path) == "perhaps Unprintable"


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
