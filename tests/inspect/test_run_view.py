"""Runs seen from outside: how their steps are called, why they stay, how they go."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._inspect import listing as inspect_listing
from flaxckpt._inspect import run_view as inspect_run_view
from flaxckpt._run.judge import Rules
from flaxckpt.policies import BestN, EveryNSteps, LatestN
from tests.helpers import run_files
from tests.helpers.files import without_permissions


def make_run(root, steps=(10, 20, 30), **options):
    with flaxckpt.Checkpointer(root, **options) as run:
        for step in steps:
            run.save(step, {"w": np.full(3, step)}, metrics={"loss": 1 / step})
    return root


@pytest.mark.parametrize(
    "template", ["{step}", "step_{step}", "{step:08d}", "a-{step:03d}"]
)
def test_opens_runs_with_any_step_format(tmp_path, template):
    make_run(tmp_path / "run", step_format=template)
    pruned = inspect_run_view.prune(
        tmp_path / "run", Rules((EveryNSteps(20),)), dry_run=True
    )
    assert [*pruned.reasons] == [10, 20, 30]
    assert pruned.deleted == (10,)
    found = inspect_listing.listing(tmp_path / "run", keep=[EveryNSteps(20)])
    assert [step.why for step in found.steps] == [(), ("EveryNSteps(20)",), ("newest",)]


def test_listing_agrees_with_the_checkpointer(tmp_path):
    keep = [LatestN(1), BestN(1, "loss", "max")]
    make_run(tmp_path / "run")
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep, read_only=True) as run:
        explained = run.explain()
    found = inspect_listing.listing(tmp_path / "run", keep=keep)
    assert {step.step: [*step.why] for step in found.steps} == explained
    assert [step.marks for step in found.steps] == [("best",), (), ("latest",)]


def test_damaged_steps_are_listed_and_never_pruned(tmp_path):
    root = make_run(tmp_path / "run", (10, 20, 30, 40))
    run_files.mark_damaged(root / "10", "it is bad")
    (root / "20" / "flaxckpt.json").write_text("{")
    shutil.rmtree(root / "40" / "state")
    (root / "40" / "flaxckpt.json").unlink()
    (root / "50").mkdir()
    found = {step.step: step for step in inspect_listing.listing(root).steps}
    assert [*found] == [10, 20, 30, 40]
    assert found[10].damage == "it is bad"
    assert found[30].marks == ("latest",)
    assert "restore another step" in found[40].damage
    with pytest.raises(errors.SaveFailedError, match="step 40 is incomplete"):
        inspect_run_view.prune(root, Rules((LatestN(1),)), dry_run=False)
    make_run(root, (60,))
    pruned = inspect_run_view.prune(root, Rules((LatestN(1),)), dry_run=False)
    assert pruned.deleted == (20, 30)
    assert (root / "10").is_dir()
    assert (root / "40").is_dir()


def test_a_former_step_counts_for_nobody(tmp_path):
    root = make_run(tmp_path / "run")
    for name in ("flaxckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (root / "30" / name).unlink()
    keep = [BestN(1, "loss", "min"), LatestN(1)]
    [*_, former] = inspect_listing.listing(root, keep=keep).steps
    assert (former.step, former.marks, former.is_counted) == (30, ("damaged",), False)
    with flaxckpt.Checkpointer(root, keep=keep, read_only=True) as run:
        explained = run.explain()
        assert run.best_step("loss", "min") == 20
    assert explained[30] == [*former.why] == [f"damaged: {former.damage}"]
    for dry_run in (True, False):
        with pytest.raises(errors.SaveFailedError, match="step 30 is incomplete"):
            inspect_run_view.prune(root, Rules(tuple(keep)), dry_run=dry_run)


def test_prune_counts_only_unshared_bytes_as_freed(tmp_path):
    frozen = {"frozen": np.arange(150_000.0)}
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.save(step, {**frozen, "n": step}).wait()
    found = inspect_run_view.prune(tmp_path / "run", Rules((LatestN(1),)), dry_run=True)
    assert found.deleted == (1, 2)
    assert 0 < found.bytes < 100_000
    alone = inspect_run_view.prune(
        tmp_path / "run", Rules((EveryNSteps(7),)), dry_run=True
    )
    assert alone.bytes == found.bytes


def test_nothing_is_made_where_nothing_is(tmp_path):
    for call in (
        lambda path: inspect_run_view.prune(path, Rules((LatestN(1),)), dry_run=False),
        lambda path: inspect_run_view.set_pinned(path, [1], pinned=True),
        inspect_listing.listing,
        inspect_listing.disk_usage,
    ):
        with pytest.raises(errors.CheckpointNotFoundError):
            call(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_look_leaves_no_trace(tmp_path):
    root = make_run(tmp_path / "run")
    before = sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))
    inspect_listing.listing(root, keep=[LatestN(1)])
    inspect_listing.disk_usage(root)
    inspect_run_view.prune(root, Rules((LatestN(1),)), dry_run=True)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))


def test_pinning_takes_all_or_none(tmp_path):
    root = make_run(tmp_path / "run")
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 7"):
        inspect_run_view.set_pinned(root, [10, 7], pinned=True)
    assert not run_files.is_pinned(root / "10")
    inspect_run_view.set_pinned(root, [10, 20], pinned=True)
    assert inspect_listing.listing(root).steps[1].marks == ("pinned",)


def test_listing_reports_denied_permissions():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        root = make_run(Path(name) / "run")
        (root / "30" / "state").chmod(0)
        with without_permissions():
            found = inspect_listing.listing(root).steps[2]
        assert "permission denied" in found.damage
        (root / "30").chmod(0)
        with without_permissions():
            found = inspect_listing.listing(root).steps[2]
            report = flaxckpt.verify(root, step=30)
        assert "permission denied" in found.damage
        assert report.path == str(root / "30")
        assert report.unread
        assert not report.problems
        (root / "30").chmod(0o755)
        (root / "30" / "state").chmod(0o755)
