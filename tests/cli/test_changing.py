"""Verbs that change a run: text, JSON and exit codes."""

import errno
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, LatestN
from tests.helpers import chunks, run_files, system_calls
from tests.helpers.files import largest_file


def steps(path):
    return flaxckpt.Checkpointer(path, read_only=True).steps()


# ---- explain and prune -----------------------------------------------------------


def test_explain_reports_why_each_step_stays(here, command):
    lines = command.text("explain", "run", "-k", "best:1:loss:min")
    assert lines[1:] == [
        " 100  nothing: would be deleted",
        " 200  BestN(1, 'loss', 'min') with 1",
        " 300  newest",
    ]
    found = command.json("explain", "run", "-k", "every:200")
    assert found == {"100": [], "200": ["EveryNSteps(200)"], "300": ["newest"]}
    spaced = ["-k", "closest:150", "-k", "exponential:50:4", "-k", "duration:1d"]
    assert command.json("explain", "run", *spaced) == {
        "100": ["LatestDuration(86400)"],
        "200": [
            "EveryNStepsClosest(150)",
            "ExponentialSteps(50, 4)",
            "LatestDuration(86400)",
        ],
        "300": ["newest", "EveryNStepsClosest(150)", "LatestDuration(86400)"],
    }
    assert command.json("explain", "run")["100"] == ["no policy"]
    assert command.text("explain", "empty") == ["empty has no steps yet"]
    assert "is a checkpoint" in command.refuses("explain", "w.msgpack")


def test_explain_and_ls_use_recorded_policies_of_run(here, command):
    keep = [LatestN(2), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer("own", keep=keep) as run:
        for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, 0.6), (5, 0.7)):
            run.save(step, {"n": step}, metrics={"loss": loss}).wait()
    lines = command.text("explain", "own")
    assert lines[1:] == [
        "   2  BestN(1, 'loss', 'min') with 0.3",
        "   4  LatestN(2)",
        "   5  newest, LatestN(2)",
        "policies: LatestN(2), BestN(1, 'loss', 'min')",
    ]
    [best] = [row for row in command.text("ls", "own")[:-1] if "best" in row]
    assert best.split()[0] == "2"
    saved, deleted, latest, best = command.text("explain", "own", 3)
    assert saved.endswith(" with loss=0.5")
    assert deleted.endswith(": no policy keeps it")
    assert latest == "  LatestN(2) kept 4, 5"
    assert best == "  BestN(1, 'loss', 'min') kept 2 (0.3); step 3 had 0.5"
    assert command.text("explain", "own", 2)[1:] == [
        "kept by BestN(1, 'loss', 'min')",
        "  lowest loss: 0.3, of 5 saved; next is step 3 with 0.5",
    ]
    highest = command.text("explain", "own", 5, "-k", "best:2:loss:max")[1:]
    assert highest == [
        "kept by newest, BestN(2, 'loss', 'max')",
        "  loss: 0.7, number 2 from the highest of 5 saved; step 1 with 0.9 was better,"
        " but is gone; next is step 4 with 0.6",
    ]
    kept_by = command.text("explain", "own")[1]
    assert kept_by.split("  ")[-1] == "BestN(1, 'loss', 'min') with 0.3"
    [found] = command.json("explain", "own", 2)["rankings"]
    assert (found["place"], found["next"], found["next_value"]) == (1, 3, 0.5)
    assert command.json("explain", "own", 3)["verdicts"][0]["kept"] == [4, 5]
    for verb in ("explain", "ls", "prune"):
        refused = command.refuses(verb, "own", "-k", "best:1:los:min")
        assert "has a finite metric 'los'" in refused
        assert refused.endswith("the steps have loss\n")
    refused = command.refuses("explain", "own", 6)
    assert "never had one" in refused
    assert "the nearest steps are 4, 5" in refused
    assert command.text("prune", "own")[-1] == "nothing to delete"


def test_rejects_metric_of_damaged_step_only(here, command):
    with flaxckpt.Checkpointer("own") as run:
        for step, name in ((1, "loss"), (2, "other"), (3, "other")):
            run.save(step, {"n": step}, metrics={name: 0.5}).wait()
    run_files.mark_damaged(here / "own" / "1", "w: its checksum is another")
    for verb in ("explain", "prune"):
        refused = command.refuses(verb, "own", "-k", "best:1:loss:min")
        assert "has a finite metric 'loss'" in refused


def test_error_names_deleted_step(here, command):
    with flaxckpt.Checkpointer("own run", keep=[LatestN(2)]) as run:
        for step in (1, 2, 3):
            run.save(step, {"n": step}).wait()
        with pytest.raises(errors.CheckpointNotFoundError, match="step 1 was deleted"):
            run.restore(step=1)
    why = f"step 1 was deleted, and `flaxckpt explain '{here / 'own run'}' 1` says why"
    for verb in (("show", "--step"), ("diff", "-a")):
        assert why in command.refuses(verb[0], "own run", verb[1], 1)
    with pytest.raises(errors.CheckpointNotFoundError, match="says why"):
        flaxckpt.load("own run", step=1)
    assert command.refuses("show", "own run", "--step", 7).endswith("steps 2, 3\n")


def test_policies_of_unrecorded_run_are_unknown(here, command):
    (here / "run" / "events.jsonl").unlink()
    assert "are unknown: pass --keep" in command.text("explain", "run")[-1]
    assert "has recorded no policies" in command.refuses("prune", "run")
    _, why = command.text("explain", "run", 100)
    assert why.startswith("kept by the policies of the run, which are unknown")


def test_explain_exits_with_1_for_damaged_step(here, command):
    run_files.mark_damaged(here / "run" / "200", "w: its checksum is another")
    found = command.json("explain", "run", code=1)
    assert found["200"] == ["damaged: w: its checksum is another"]


def test_prune_requires_policies(here, command):
    told = command.refuses("prune", "run", "--yes")
    assert "--keep latest:3" in told
    assert "--config FILE" in told
    assert steps("run") == [100, 200, 300]


def test_prune_without_yes_deletes_nothing(here, command):
    lines = command.text("prune", "run", "-k", "latest:1")
    assert lines[1].split() == ["100", "would", "be", "deleted"]
    assert lines[-1].startswith("would delete 2 steps, ")
    found = command.json("prune", "run", "-k", "latest:1")
    assert (found["dry_run"], found["deleted"]) == (True, [100, 200])
    assert steps("run") == [100, 200, 300]


def test_prune_deletes_steps_without_reason_to_stay(here, command):
    found = command.json("prune", "run", "-k", "best:1:loss:min", "--yes")
    assert (found["dry_run"], found["deleted"]) == (False, [100])
    assert found["bytes"] > 0
    assert steps("run") == [200, 300]
    lines = command.text("prune", "run", "-k", "latest:1", "-y")
    assert lines[-1].startswith("deleted 1 step, ")
    assert steps("run") == [300]
    assert (
        command.text("prune", "run", "-k", "latest:1", "-y")[-1] == "nothing to delete"
    )


def test_prune_keeps_unmeasured_steps_on_request(here, command):
    with flaxckpt.Checkpointer("run") as run:
        run.save(400, {"n": 1}).wait()
        run.save(500, {"n": 1}, metrics={"loss": 9.0})
    keep = ["-k", "best:1:loss:min", "-k", "without:loss"]
    found = command.json("explain", "run", *keep)
    assert found["400"] == ["WithoutMetric('loss')"]
    command("prune", "run", *keep, "--yes")
    assert steps("run") == [200, 400, 500]
    keep = ["-k", "best:1:los:min", "-k", "without:los"]
    assert command.text("prune", "run", *keep)[-1] == "nothing to delete"


def test_explain_names_best_good_step_beside_damaged_better_one(here, command):
    keep = [LatestN(2), BestN(2, "loss", "min")]
    with flaxckpt.Checkpointer("own", keep=keep) as run:
        for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5)):
            run.save(step, {"n": np.ones(9)}, metrics={"loss": loss}).wait()
    assert not any(line.startswith("best ") for line in command.text("explain", "own"))
    largest_file(Path("own/2/state")).unlink()
    clause = "step 2 with 0.3 would be better, but is damaged"
    counted = "policies count it until flaxckpt verify --mark marks it"
    lines = command.text("explain", "own", code=1)
    assert f"best loss: 0.5, lowest, at step 3; {clause}; {counted}" in _joined(lines)
    assert command.text("explain", "own", 2, code=1)[-1] == counted
    [*_, ranking] = command.text("explain", "own", 3)
    assert f"number 2 from the lowest of 3 saved; {clause}; {counted};" in ranking
    command.text("verify", "own", "--all", "--mark", code=1)
    lines = command.text("explain", "own", code=1)
    assert f"best loss: 0.5, lowest, at step 3; {clause} policies:" in _joined(lines)
    assert counted not in command.text("explain", "own", 2, code=1)
    assert f"{clause}; next is" in command.text("explain", "own", 3)[-1]


def test_explain_names_best_existing_step_after_deletion(here, command):
    """Step 1 was the best; only its number of saves back let it go."""
    with flaxckpt.Checkpointer("own", keep=[LatestN(3)]) as run:
        for step, loss in ((1, 0.1), (2, 0.3), (3, 0.3), (4, 0.5)):
            run.save(step, {"n": step}, metrics={"loss": loss}).wait()
    keep = ["--keep", "latest:2", "--keep", "best:1:loss:min"]
    gone = "step 1 with 0.1 was better, but is gone"
    lines = _joined(command.text("explain", "own", *keep))
    assert f"best loss: 0.3, lowest, at step 3; {gone}" in lines
    lines = _joined(command.text("explain", "own", 3, *keep))
    assert f"number 2 from the lowest of 4 saved; {gone}; next is step 2" in lines
    largest_file(Path("own/3/state")).unlink()
    lost = "step 3 with 0.3 would be better, but is damaged"
    command.text("verify", "own", "3", "--mark", code=1)
    largest_file(Path("own/2/state")).unlink()
    lines = _joined(command.text("explain", "own", *keep, code=1))
    assert f"best loss: 0.5, lowest, at step 4; {lost}; {gone}" in lines


def test_explain_names_newer_of_equal_steps_as_kept(here, command):
    with flaxckpt.Checkpointer("own", keep=[BestN(1, "loss", "min")]) as run:
        for step, loss in ((1, 0.5), (2, 0.5)):
            run.save(step, {"n": step}, metrics={"loss": loss}).wait()
        run.prune()
    lines = _joined(command.text("explain", "own", 1))
    ending = "kept 2 (0.5); step 1 had 0.5, and the newer of equal steps is kept"
    assert lines.endswith(ending)


def _joined(lines):
    return " ".join(lines)


def test_prune_reads_policies_from_config(here, command):
    (here / "run.json").write_text('{"keep": [{"on_steps": [100]}]}')
    command("prune", "run", "--config", "run.json", "--yes")
    assert steps("run") == [100, 300]


def test_prune_deletes_dataset_states_per_config(here, command):
    with flaxckpt.Checkpointer("with data") as run:
        for step in (1, 2, 3):
            run.save(step, {"n": step}, dataset=StepIndexed(lambda i: i, start=step))
    settings = {"keep": [{"latest": 3}], "keep_dataset": [{"latest": 1}]}
    (here / "run.json").write_text(json.dumps(settings))
    command("prune", "with data", "--config", "run.json")
    assert flaxckpt.metadata("with data", step=1).has_dataset
    command("prune", "with data", "--config", "run.json", "--yes")
    found = [flaxckpt.metadata("with data", step=s).has_dataset for s in (1, 2, 3)]
    assert found == [False, False, True]


def test_prune_rejects_unknown_metric(here, command):
    told = command.refuses("prune", "run", "-k", "best:1:los:min", "--yes")
    assert "no step of" in told
    assert told.endswith("the steps have loss\n")
    assert steps("run") == [100, 200, 300]


def test_prune_exits_with_1_after_failed_deletion(here, command, monkeypatch):
    system_calls.fail(monkeypatch, os, "rename", errno.EACCES, "100")
    lines = command.text("prune", "run", "-k", "latest:1", "--yes", code=1)
    assert lines[1].split(maxsplit=1) == ["100", "could not be deleted"]
    assert lines[-1] == "deleted 1 of 2 steps"
    found = command.json("prune", "run", "-k", "latest:1", "--yes", code=1)
    assert (found["deleted"], found["left"]) == ([], [100])
    assert (here / "run" / "100").is_dir()


def test_prune_exits_with_1_for_incomplete_newest_step(here, command):
    (here / "run/300/state/d/0.small.0").unlink()
    told = command.refuses("prune", "run", "-k", "latest:1", "--yes", code=1)
    assert "step 300 is incomplete" in told
    assert steps("run") == [100, 200, 300]


def test_prune_supports_orbax_runs(here, command):
    command("prune", "orbax", "-k", "latest:1", "--yes")
    assert sorted(p.name for p in (here / "orbax").glob("step_*")) == ["step_2"]


def test_prune_rejects_runs_of_files(here, command):
    (here / "files").mkdir()
    for step in (1, 2):
        (here / "files" / f"checkpoint_{step}").write_bytes(
            (here / "w.msgpack").read_bytes()
        )
    told = command.refuses("prune", "files", "-k", "latest:1", "--yes")
    assert "are not directories" in told


# ---- pin and unpin ------------------------------------------------------------------


def test_pin_keeps_steps_and_unpin_releases_them(here, command):
    assert command.text("pin", "run", 100, 200) == ["pinned steps 100, 200 of run"]
    assert run_files.is_pinned(here / "run" / "100")
    command("prune", "run", "-k", "latest:1", "--yes")
    assert steps("run") == [100, 200, 300]
    found = command.json("unpin", "run", 100)
    assert found == {"path": str(here / "run"), "steps": [100], "pinned": False}
    command("prune", "run", "-k", "latest:1", "--yes")
    assert steps("run") == [200, 300]


def test_pin_changes_nothing_if_one_step_is_missing(here, command):
    assert "has no step 7" in command.refuses("pin", "run", 100, 7)
    assert not run_files.is_pinned(here / "run" / "100")
    assert "does not exist" in command.refuses("pin", "nowhere", 1)
    assert not (here / "nowhere").exists()


# ---- convert ------------------------------------------------------------------------


def test_convert_makes_another_format(here, command):
    [line] = command.text("convert", "run", "out.safetensors", "--only", "params/.*")
    assert line.startswith("wrote out.safetensors: ")
    assert [*flaxckpt.metadata("out.safetensors").leaves] == [
        "params/dense/kernel",
        "params/dense/bias",
    ]
    found = command.json("convert", "orbax", "again", "--step", 1)
    assert found["path"] == str(here / "again")
    assert flaxckpt.load("again")["w"].tolist() == [[1.0] * 3] * 2


def test_convert_changes_leaves(here, command):
    command(
        *("convert", "run", "out", "--drop", "opt_state/.*", "--drop", "step"),
        *("--rename", r"params/dense/(.*)=\1", "--cast", "kernel=bfloat16"),
    )
    found = flaxckpt.load("out")
    assert found.keys() == {"kernel", "bias"}
    assert found["kernel"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(found["bias"], np.zeros(3))


def test_convert_names_the_option_that_narrows_integers(here, command):
    flaxckpt.save("wide", {"step": jnp.int32(4)})
    words = ["convert", "wide", "narrow", "--cast", "s.*=int8"]
    told = command.refuses(*words)
    assert told.startswith("flaxckpt: --cast 's.*=int8' would lose values of integers")
    assert told.endswith("\nPass --lossy to allow this.\n")
    command(*words, "--lossy")
    assert flaxckpt.load("narrow")["step"].dtype == jnp.int8
    flaxckpt.save("odd", {"w": jnp.ones(2, jnp.uint4)})
    told = command.refuses("convert", "odd", "odd.safetensors")
    assert "Change them, as --cast PATTERN=DTYPE --lossy or" in told


def test_convert_rejects_existing_targets_and_bad_options(here, command):
    assert "w.msgpack" in command.refuses("convert", "orbax", "w.msgpack")
    command("convert", "orbax", "w.msgpack", "--overwrite", "--format", "msgpack")
    assert "must be PATTERN=DTYPE" in command.refuses(
        "convert", "orbax", "x", "--cast", "w"
    )
    told = command.refuses("convert", "orbax", "x", "--lossy")
    assert "--lossy has an effect only with --cast" in told
    assert "does not exist" in command.refuses("convert", "nowhere", "x")


def test_convert_exits_with_1_for_damaged_values(here, command):
    chunks.flip(here / "run/300/state", "params.dense.kernel/c.0.0")
    assert "params/dense/kernel" in command.refuses("convert", "run", "out", code=1)
    assert not (here / "out").exists()
