"""Every save there ever was, and why it was deleted."""

import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import flaxckpt
from flaxckpt._inspect import history, listing, run_view
from flaxckpt._run.judge import Rules
from flaxckpt.policies import BestN, LatestN
from tests.helpers import faulty_store as faulty
from tests.helpers import run_files

STATE = {"w": jnp.arange(4.0)}


def make(path, losses=(0.9, 0.3, 0.5, 0.6, 0.7)):
    keep = [LatestN(2), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(path, keep=keep) as ckpt:
        for number, loss in enumerate(losses, 1):
            ckpt.save(100 * number, STATE, metrics={"loss": loss}).wait()


def explain(path):
    events = run_files.read_events(path)
    return history.explain_deletions(events, listing.listing(path))


def test_damaged_step_does_not_count_as_kept(tmp_path):
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.6)):
            ckpt.save(step, STATE, metrics={"loss": loss}).wait()
        file = tmp_path / "1/state/d/0.small.0"
        file.unlink()  # the other steps may share it
        file.write_bytes(b"")
        assert not ckpt.verify(1).ok
        for step, loss in ((4, 0.7), (5, 0.8)):
            ckpt.save(step, STATE, metrics={"loss": loss}).wait()
        assert ckpt.steps() == [3, 5]
        chosen = {2: [(3,), (1,)], 4: [(5,), (3,)]}
        assert kept(tmp_path) == chosen
        damaged = history.history(tmp_path)[0]
        assert "c.0" in damaged.damage
        best = history.rank(3, keep[1], history.history(tmp_path))
        assert (best.place, best.better) == (3, {1: 0.1, 2: 0.5})
        ckpt.delete(1)
        assert kept(tmp_path) == chosen  # by the journal, without the marker


def kept(path):
    """Returns each deleted step with the steps that the policies kept instead."""
    return {step: [v.kept for v in found] for step, found in explain(path).items()}


def test_history_keeps_deleted_steps(tmp_path):
    make(tmp_path)
    steps = history.history(tmp_path)
    assert [s.step for s in steps] == [100, 200, 300, 400, 500]
    assert [s.step for s in steps if s.exists] == [200, 400, 500]
    assert [s.metrics["loss"] for s in steps] == [0.9, 0.3, 0.5, 0.6, 0.7]
    for step in steps:
        assert step.blocked_secs <= step.total_secs
        assert step.bytes > 0
    assert steps[0].saved < steps[0].deleted < steps[2].deleted
    assert steps[0].reason == "no policy keeps it"


def test_explains_deletion_by_choice_of_each_policy(tmp_path):
    make(tmp_path)
    found = explain(tmp_path)
    latest, best = found[300]
    assert (latest.policy, latest.kept, latest.metric) == (
        "LatestN(2)",
        (400, 500),
        None,
    )
    assert (best.policy, best.kept) == ("BestN(1, 'loss', 'min')", (200,))
    assert best.metric == "loss"
    assert 500 not in found


def test_explains_deletion_by_policies_of_its_time(tmp_path):
    make(tmp_path)
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        ckpt.save(600, STATE)
    found = explain(tmp_path)
    assert len(found[300]) == 2
    [verdict] = found[200]
    assert (verdict.policy, verdict.kept) == ("LatestN(1)", (600,))


def test_history_uses_last_save_of_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE, metrics={"loss": 1.0}).wait()
        ckpt.save(1, STATE, metrics={"loss": 2.0}, on_exists="overwrite").wait()
        ckpt.add_metrics(1, {"acc": 0.5})
        ckpt.save(2, STATE).wait()
        ckpt.delete(2)
    one, two = history.history(tmp_path)
    assert one.metrics == {"loss": 2.0, "acc": 0.5}
    assert one.exists
    assert two.reason == "deleted on request"


def test_unrecorded_deletion_has_no_time_and_no_reason(tmp_path):
    make(tmp_path)
    shutil.rmtree(tmp_path / "400")
    gone = next(s for s in history.history(tmp_path) if s.step == 400)
    assert math.isnan(gone.deleted)
    assert gone.reason is None
    assert 400 not in explain(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    assert [s.step for s in history.history(tmp_path)] == [200, 500]


def test_orbax_run_has_history_of_existing_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["l"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            values = {"w": np.full(3, step, np.float32)}
            manager.save(step, args=ocp.args.StandardSave(values), metrics={"l": 1.0})
    steps = history.history(tmp_path)
    assert [(s.step, s.exists, s.metrics) for s in steps] == [
        (1, True, {"l": 1.0}),
        (2, True, {"l": 1.0}),
    ]
    assert listing.listing(tmp_path).keep is None


def test_listings_use_recorded_policies_on_disk_and_in_stores(tmp_path):
    for path in (tmp_path / "run", faulty.new_path("recorded")):
        make(path)
        found = listing.listing(path)
        assert found.keep == (LatestN(2), BestN(1, "loss", "min"))
        why = {step.step: step.why for step in found.steps}
        assert why[200] == ("BestN(1, 'loss', 'min')",)
        assert why[500] == ("newest", "LatestN(2)")
        assert "best" in found.steps[0].marks
        given = listing.listing(path, keep=[LatestN(1)])
        assert given.steps[0].why == ()


def test_explains_deletion_by_steps_of_its_time(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE, metrics={"loss": 1.0}).wait()
        ckpt.save(3, STATE, on_exists="overwrite").wait()
        ckpt.add_metrics(2, {"loss": 0.0})
        ckpt.delete(2)
    [verdict] = explain(tmp_path)[1]
    assert verdict.kept == (2, 3)
    assert 2 not in explain(tmp_path), "deleted on request"


def test_does_not_explain_pruning_by_other_policies(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(5)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE).wait()
    run_view.prune(tmp_path, Rules((LatestN(1),)), dry_run=False)
    assert explain(tmp_path) == {}
    gone = history.history(tmp_path)[0]
    assert gone.reason == "pruned, not kept by LatestN(1)"


def test_ignores_hostile_numbers_in_journal(tmp_path):
    make(tmp_path)
    huge = {"bytes": 10**400, "total_secs": 10**400, "metrics": {"a": 10**400, "b": 1}}
    event = {"time": 1.0, "kind": "committed", "step": 9, "path": "x", "details": huge}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    hostile = next(s for s in history.history(tmp_path) if s.step == 9)
    assert (hostile.bytes, hostile.total_secs, hostile.metrics) == (
        None,
        None,
        {"b": 1},
    )
