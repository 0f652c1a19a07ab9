"""Runs seen from outside: how their steps are called, why they stay, how they go."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN, LatestN
from tests.helpers import command_line, run_files
from tests.helpers.files import without_permissions


def make_run(root, steps=(10, 20, 30), **options):
    with flaxckpt.Checkpointer(root, **options) as run:
        for step in steps:
            run.save(step, {"w": np.full(3, step)}, metrics={"loss": 1 / step})
    return root


def list_steps(path, *options, code=0):
    """Returns what `flaxckpt ls` says of the steps of a run; 1 is for damage."""
    return command_line.read_json("ls", path, *options, code=code)["steps"]


def prune(path, *options):
    """Returns what `flaxckpt prune` says; it deletes steps only with `--yes`."""
    return command_line.read_json("prune", path, *options)


@pytest.mark.parametrize(
    "template", ["{step}", "step_{step}", "{step:08d}", "a-{step:03d}"]
)
def test_opens_runs_with_any_step_format(tmp_path, template):
    make_run(tmp_path / "run", step_format=template)
    pruned = prune(tmp_path / "run", "--keep", "every:20")
    assert [*pruned["reasons"]] == ["10", "20", "30"]
    assert pruned["deleted"] == [10]
    found = list_steps(tmp_path / "run", "--keep", "every:20")
    assert [step["why"] for step in found] == [[], ["EveryNSteps(20)"], ["newest"]]


def test_listing_agrees_with_the_checkpointer(tmp_path):
    keep = [LatestN(1), BestN(1, "loss", "max")]
    make_run(tmp_path / "run")
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep, read_only=True) as run:
        explained = run.explain()
    options = ("--keep", "latest:1", "--keep", "best:1:loss:max")
    found = list_steps(tmp_path / "run", *options)
    assert {step["step"]: step["why"] for step in found} == explained
    assert [step["marks"] for step in found] == [["best"], [], ["latest"]]


def test_lists_but_never_prunes_damaged_steps(tmp_path):
    root = make_run(tmp_path / "run", (10, 20, 30, 40))
    run_files.mark_damaged(root / "10", "it is bad")
    (root / "20" / "flaxckpt.json").write_text("{")
    shutil.rmtree(root / "40" / "state")
    (root / "40" / "flaxckpt.json").unlink()
    (root / "50").mkdir()
    found = {step["step"]: step for step in list_steps(root, code=1)}
    assert [*found] == [10, 20, 30, 40]
    assert found[10]["damage"] == "it is bad"
    assert found[30]["marks"] == ["latest"]
    assert "restore another step" in found[40]["damage"]
    latest = ("--keep", "latest:1", "--yes")
    told = command_line.run("prune", root, *latest, code=1)
    assert "step 40 is incomplete" in told
    make_run(root, (60,))
    assert prune(root, *latest)["deleted"] == [20, 30]
    assert (root / "10").is_dir()
    assert (root / "40").is_dir()


def test_incomplete_step_counts_for_no_policy(tmp_path):
    root = make_run(tmp_path / "run")
    for name in ("flaxckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (root / "30" / name).unlink()
    keep = [BestN(1, "loss", "min"), LatestN(1)]
    options = ("--keep", "best:1:loss:min", "--keep", "latest:1")
    [*_, former] = list_steps(root, *options, code=1)
    assert (former["step"], former["marks"]) == (30, ["damaged"])
    assert not former["is_counted"]
    with flaxckpt.Checkpointer(root, keep=keep, read_only=True) as run:
        explained = run.explain()
        assert run.best_step("loss", "min") == 20
    assert explained[30] == former["why"] == [f"damaged: {former['damage']}"]
    for asked in ((), ("--yes",)):
        told = command_line.run("prune", root, *options, *asked, code=1)
        assert "step 30 is incomplete" in told


def test_prune_counts_only_unshared_bytes_as_freed(tmp_path):
    frozen = {"frozen": np.arange(150_000.0)}
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.save(step, {**frozen, "n": step}).wait()
    found = prune(tmp_path / "run", "--keep", "latest:1")
    assert found["deleted"] == [1, 2]
    assert 0 < found["bytes"] < 100_000
    alone = prune(tmp_path / "run", "--keep", "every:7")
    assert alone["bytes"] == found["bytes"]


def test_commands_create_nothing_at_missing_path(tmp_path):
    path = tmp_path / "nowhere"
    for call in (
        ("prune", path, "--keep", "latest:1", "--yes"),
        ("pin", path, 1),
        ("ls", path),
        ("du", path),
    ):
        assert "there is no checkpoint" in command_line.run(*call, code=2)
    assert not (tmp_path / "nowhere").exists()


def test_read_only_commands_change_nothing(tmp_path):
    root = make_run(tmp_path / "run")
    before = sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))
    list_steps(root, "--keep", "latest:1")
    command_line.run("du", root)
    prune(root, "--keep", "latest:1")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))


def test_pin_takes_all_steps_or_none(tmp_path):
    root = make_run(tmp_path / "run")
    assert "no step 7" in command_line.run("pin", root, 10, 7, code=2)
    assert not run_files.is_pinned(root / "10")
    command_line.run("pin", root, 10, 20)
    assert list_steps(root)[1]["marks"] == ["pinned"]


def test_listing_reports_denied_permissions():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        root = make_run(Path(name) / "run")
        (root / "30" / "state").chmod(0)
        with without_permissions():
            found = list_steps(root, code=1)[2]
        assert "permission denied" in found["damage"]
        (root / "30").chmod(0)
        with without_permissions():
            found = list_steps(root, code=1)[2]
            report = flaxckpt.verify(root, step=30)
        assert "permission denied" in found["damage"]
        assert report.path == str(root / "30")
        assert report.unread
        assert not report.problems
        (root / "30").chmod(0o755)
        (root / "30" / "state").chmod(0o755)
