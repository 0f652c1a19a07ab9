"""Every save there ever was, and why it was deleted."""

import json
import shutil
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxckpt
from flaxckpt.policies import BestN, LatestDuration, LatestN
from tests.helpers import command_line
from tests.helpers import faulty_store as faulty

STATE = {"w": jnp.arange(4.0)}


@pytest.fixture(params=["", "staging"])
def staging(request, tmp_path_factory):
    """Steps are in the run directory alone, or before in another one, too."""
    return tmp_path_factory.mktemp("ssd") / "run" if request.param else None


def make(path, staging=None, losses=(0.9, 0.3, 0.5, 0.6, 0.7)):
    keep = [LatestN(2), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(path, keep=keep, staging=staging) as ckpt:
        for number, loss in enumerate(losses, 1):
            ckpt.save(100 * number, STATE, metrics={"loss": loss}).wait()
            ckpt.wait_for_uploads()


def explain(path, step, code=0):
    """Returns what is known of a step that exists or existed."""
    return command_line.read_json("explain", path, step, code=code)


def history(path, *steps):
    return [explain(path, step) for step in steps]


def chosen(found):
    """Returns each policy with the steps that it kept instead of a step."""
    return [(verdict["policy"], verdict["kept"]) for verdict in found["verdicts"]]


def test_damaged_step_does_not_count_as_kept(tmp_path):
    best = BestN(1, "loss", "min")
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1), best]) as ckpt:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.6)):
            ckpt.save(step, STATE, metrics={"loss": loss}).wait()
        file = tmp_path / "1/state/d/0.small.0"
        file.unlink()  # the other steps may share it
        file.write_bytes(b"")
        assert not ckpt.verify(1).ok
        for step, loss in ((4, 0.7), (5, 0.8)):
            ckpt.save(step, STATE, metrics={"loss": loss}).wait()
        assert ckpt.steps() == [3, 5]
        wanted = [
            [("LatestN(1)", [3]), (str(best), [1])],
            [("LatestN(1)", [5]), (str(best), [3])],
        ]
        assert [*map(chosen, history(tmp_path, 2, 4))] == wanted
        assert "c.0" in explain(tmp_path, 1, code=1)["damage"]
        [ranking] = explain(tmp_path, 3)["rankings"]
        assert (ranking["place"], ranking["better"]) == (3, {"1": 0.1, "2": 0.5})
        ckpt.delete(1)  # by the journal, without the marker
        assert [*map(chosen, history(tmp_path, 2, 4))] == wanted


def test_history_keeps_deleted_steps(tmp_path):
    make(tmp_path)
    steps = history(tmp_path, 100, 200, 300, 400, 500)
    assert [s["deleted"] is None for s in steps] == [False, True, False, True, True]
    assert [s["metrics"]["loss"] for s in steps] == [0.9, 0.3, 0.5, 0.6, 0.7]
    for step in steps:
        assert step["blocked_secs"] <= step["total_secs"]
        assert step["bytes"] > 0
    assert steps[0]["saved"] < steps[0]["deleted"] < steps[2]["deleted"]
    assert steps[0]["reason"] == "no policy keeps it"


def test_explains_deletion_by_choice_of_each_policy(tmp_path, staging):
    make(tmp_path, staging)
    best = "BestN(1, 'loss', 'min')"
    found = explain(tmp_path, 300)
    assert chosen(found) == [("LatestN(2)", [400, 500]), (best, [200])]
    assert [verdict["metric"] for verdict in found["verdicts"]] == [None, "loss"]
    assert chosen(explain(tmp_path, 100)) == [("LatestN(2)", [200, 300]), (best, [200])]
    assert explain(tmp_path, 500)["verdicts"] == []


def test_explains_deletion_by_policies_of_its_time(tmp_path):
    make(tmp_path)
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        ckpt.save(600, STATE)
    assert len(explain(tmp_path, 300)["verdicts"]) == 2
    assert chosen(explain(tmp_path, 200)) == [("LatestN(1)", [600])]


def test_explains_steps_deleted_together_by_what_was_there(tmp_path, monkeypatch):
    keep = [LatestDuration(5)]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(1, 5):  # of three, the last two gaps show no age
            monkeypatch.setattr(time, "time", lambda step=step: 1000.0 + 10 * step)
            ckpt.save(step, STATE).wait()
        assert ckpt.steps() == [4]
    verdict = [("LatestDuration(5)", [4])]
    assert [*map(chosen, history(tmp_path, 1, 2, 3))] == [verdict] * 3


def test_history_uses_last_save_of_step(tmp_path, staging):
    with flaxckpt.Checkpointer(tmp_path, staging=staging) as ckpt:
        ckpt.save(1, STATE, metrics={"loss": 1.0}).wait()
        ckpt.save(1, STATE, metrics={"loss": 2.0}, on_exists="overwrite").wait()
        ckpt.add_metrics(1, {"acc": 0.5})
        ckpt.save(2, STATE).wait()
        ckpt.wait_for_uploads()
        ckpt.delete(2)
    one, two = history(tmp_path, 1, 2)
    assert one["metrics"] == {"loss": 2.0, "acc": 0.5}
    assert one["deleted"] is None
    assert two["reason"] == "deleted on request"


def test_unrecorded_deletion_has_no_time_and_no_reason(tmp_path, staging):
    make(tmp_path, staging)
    shutil.rmtree(tmp_path / "400")
    gone = explain(tmp_path, 400)
    assert (gone["deleted"], gone["reason"], gone["verdicts"]) == ("NaN", None, [])
    (tmp_path / "events.jsonl").unlink()
    assert "the nearest steps are 200, 500" in command_line.run(
        "explain", tmp_path, 400, code=2
    )


def test_orbax_run_has_history_of_existing_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["l"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            values = {"w": np.full(3, step, np.float32)}
            manager.save(step, args=ocp.args.StandardSave(values), metrics={"l": 1.0})
    for step in history(tmp_path, 1, 2):
        assert (step["deleted"], step["metrics"]) == (None, {"l": 1.0})
    assert command_line.read_json("ls", tmp_path)["keep"] is None


def test_listings_use_recorded_policies_on_disk_and_in_stores(tmp_path):
    for path in (tmp_path / "run", faulty.new_path("recorded")):
        make(path)
        found = command_line.read_json("ls", path)
        assert found["keep"] == [{"n": 2}, {"n": 1, "metric": "loss", "mode": "min"}]
        why = {step["step"]: step["why"] for step in found["steps"]}
        assert why[200] == ["BestN(1, 'loss', 'min')"]
        assert why[500] == ["newest", "LatestN(2)"]
        assert "best" in found["steps"][0]["marks"]
        given = command_line.read_json("ls", path, "--keep=latest:1")
        assert given["steps"][0]["why"] == []


def test_explains_deletion_by_steps_of_its_time(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE, metrics={"loss": 1.0}).wait()
        ckpt.save(3, STATE, on_exists="overwrite").wait()
        ckpt.add_metrics(2, {"loss": 0.0})
        ckpt.delete(2)
    assert chosen(explain(tmp_path, 1)) == [("LatestN(2)", [2, 3])]
    assert explain(tmp_path, 2)["verdicts"] == [], "deleted on request"


def test_does_not_explain_pruning_by_other_policies(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(5)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE).wait()
    command_line.run("prune", tmp_path, "--keep=latest:1", "--yes")
    for gone in history(tmp_path, 1, 2):
        assert gone["verdicts"] == []
        assert gone["reason"] == "pruned, not kept by LatestN(1)"


def test_ignores_hostile_numbers_in_journal(tmp_path):
    make(tmp_path)
    huge = {"bytes": 10**400, "total_secs": 10**400, "metrics": {"a": 10**400, "b": 1}}
    event = {"time": 1.0, "kind": "committed", "step": 9, "path": "x", "details": huge}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    hostile = explain(tmp_path, 9)
    assert (hostile["bytes"], hostile["total_secs"]) == (None, None)
    assert hostile["metrics"] == {"b": 1}
