"""Checkpoints that earlier versions wrote are read as they were written."""

import hashlib
import json
import shutil

import flax
import jax
import numpy as np
import optax
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from tests import GOLDEN
from tests.golden import make_flaxckpt, make_roles
from tests.helpers import strategies

OF_3 = GOLDEN / "flaxckpt-3-0.2.0"
RUNS = sorted(GOLDEN.glob("flaxckpt-1*/*"))
RUNS += [OF_3 / name for name in make_flaxckpt.LAYOUTS]
ITEM_RUNS = [*sorted(GOLDEN.glob("flaxckpt-2*/*")), OF_3 / "items/ocdbt"]
STEP = str(make_flaxckpt.STEP)


def test_golden_checkpoints_cover_every_version_and_layout():
    found = {f"{run.parent.name}/{run.name}" for run in RUNS}
    assert {"flaxckpt-1/files", "flaxckpt-1/ocdbt"} <= found
    assert all(run.is_dir() for run in RUNS)
    assert {"files", "ocdbt"} <= {run.name for run in ITEM_RUNS}
    versions = {manifest(run)["version"] for run in [*RUNS, *ITEM_RUNS]}
    assert versions == {1, 2, 3}


def manifest(run):
    return json.loads((run / STEP / "flaxckpt.json").read_text())


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def flax_of(run):
    """The version of flax that wrote a run."""
    return numbers(manifest(run)["versions"]["flax"])


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_loads_golden_checkpoint_with_and_without_template(run):
    wanted = make_flaxckpt.state()
    found = flaxckpt.load(run)
    if flax_of(run) <= numbers(flax.__version__):  # NNX's variables have gained fields
        assert jax.tree.structure(found["model"]) == jax.tree.structure(wanted["model"])
    for again in (found, flaxckpt.load(run, wanted)):
        assert set(again) == set(wanted)
        for name in wanted:
            strategies.assert_same_state(wanted[name], again[name])
        # Classes without their functions: a TrainState gets those from a template.
        for name in ("frozen", "scale", "numbers", "text", "empty", "int keys"):
            assert jax.tree.structure(again[name]) == jax.tree.structure(wanted[name])
        assert type(again["train"]) is type(wanted["train"])
        assert list(again["int keys"]) == [10, 9]


@pytest.mark.parametrize(
    "run", ITEM_RUNS, ids=lambda run: f"{run.parent.name}-{run.name}"
)
def test_restores_golden_items(run):
    ckpt = flaxckpt.Checkpointer(run, read_only=True, dataset_item="iter")
    wanted = make_flaxckpt.in_items(make_flaxckpt.state())
    batches = StepIndexed(lambda i: i)
    for found in (flaxckpt.load(run), ckpt.restore(wanted, dataset=batches)):
        for item in wanted:
            for name in wanted[item]:
                strategies.assert_same_state(wanted[item][name], found[item][name])
    assert next(batches) == make_flaxckpt.STEP
    older = make_flaxckpt.STEP - 1
    assert list(flaxckpt.load(run, step=older)) == ["first"]
    assert ckpt.metadata(older).deleted_items == ("second",)
    for step in (older, make_flaxckpt.STEP):
        assert ckpt.metadata(step).json == {"config": make_flaxckpt.METADATA}
        report = ckpt.verify(step)
        assert report.ok, str(report)
        assert report.extra == ()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_reads_metrics_metadata_and_dataset_of_golden_runs(run):
    ckpt = flaxckpt.Checkpointer(run, read_only=True)
    assert ckpt.steps() == [make_flaxckpt.STEP]
    assert ckpt.metrics(make_flaxckpt.STEP) == make_flaxckpt.METRICS
    assert ckpt.metadata(make_flaxckpt.STEP).custom == make_flaxckpt.METADATA
    assert ckpt.run_metadata == make_flaxckpt.METADATA
    batches = StepIndexed(lambda i: i)
    ckpt.restore(dataset=batches)
    assert next(batches) == make_flaxckpt.STEP


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_verifies_golden_checkpoint(run):
    report = flaxckpt.verify(run)
    assert report.ok, str(report)
    assert report.extra == ()


def files(step):
    """The names of the files of a step."""
    return {str(file.relative_to(step)) for file in step.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the writer of today makes of the state that the golden runs hold."""
    folder = tmp_path_factory.mktemp("golden")
    make_flaxckpt.write(folder)
    return folder


@pytest.mark.parametrize("name", make_flaxckpt.LAYOUTS)
def test_written_files_match_the_newest_golden_release(written, name):
    now, then = manifest(written / name), manifest(OF_3 / name)
    assert now.keys() == then.keys()
    assert [row["path"] for row in now["leaves"]] == [
        row["path"] for row in then["leaves"]
    ]
    for row, golden in zip(now["leaves"], then["leaves"], strict=True):
        assert row == golden
    fixed = ("format", "version", "step", "ocdbt", "encoding", "metrics")
    for key in fixed:
        assert now.get(key) == then.get(key), key
    assert files(written / name / STEP) == files(OF_3 / name / STEP)


def changed(run, tmp_path, **changes):
    """A copy of a golden step, its manifest changed and with a fitting digest."""
    step = shutil.copytree(run / STEP, tmp_path / "changed")
    text = json.dumps(manifest(run) | changes, separators=(",", ":"))
    (step / "flaxckpt.json").write_text(text)
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    (step / "commit_success.txt").write_text(
        json.dumps({"flaxckpt.json": digest}, separators=(",", ":"))
    )
    return step


def test_rejects_newer_manifest_version_with_advice(tmp_path):
    step = changed(OF_3 / "ocdbt", tmp_path, version=4)
    with pytest.raises(errors.CheckpointFormatError) as info:
        flaxckpt.load(step)
    assert "has manifest version 4; this flaxckpt reads versions 1, 2 and 3" in str(
        info.value
    )
    assert "a newer one" in str(info.value)


def test_ignores_entries_added_by_later_release(tmp_path):
    leaves = [row | {"hue": "red"} for row in manifest(OF_3 / "ocdbt")["leaves"]]
    step = changed(OF_3 / "ocdbt", tmp_path, later={"a": 1}, leaves=leaves)
    found = flaxckpt.load(step)
    strategies.assert_same_state(make_flaxckpt.state()["numbers"], found["numbers"])
    assert flaxckpt.verify(step).ok


def test_rejects_newer_safetensors_version_with_advice(tmp_path):
    flaxckpt.save(tmp_path / "m", {"w": np.ones(2, np.float32)})
    flaxckpt.convert(tmp_path / "m", tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "later.safetensors").write_bytes(
        content.replace(rb"{\"version\":1,", rb"{\"version\":2,")
    )
    with pytest.raises(errors.CheckpointFormatError) as info:
        flaxckpt.load(tmp_path / "later.safetensors")
    assert "has version 2, this flaxckpt reads 1; use a newer one" in str(info.value)


@pytest.mark.parametrize("name", make_roles.CLASSES)
def test_corrects_wrong_roles_of_earlier_release(name):
    path, cls = make_roles.FOLDER / name, make_roles.CLASSES[name]
    saved = make_roles.state(cls)
    zeros = jax.tree.map(np.zeros_like, saved)
    strategies.assert_same_state(
        saved, flaxckpt.load(path, jax.tree.map(jax.numpy.zeros_like, saved))
    )
    network = saved["one"]["params"]
    role = flaxckpt.metadata(path).leaves["one/opt_state/0/mu/w"].role
    assert role == ("ScaleByAdamState", "mu", "w", "one/opt_state")
    clipped = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(network)
    wanted = {**zeros, "one": {"params": network, "opt_state": clipped}}
    found = flaxckpt.load(path, wanted)["one"]["opt_state"]
    strategies.assert_same_state(saved["one"]["opt_state"], found[1])
    fresh = optax.scale_by_adam().init(network)
    wanted = {"other": {"params": network, "opt_state": fresh}}
    found = flaxckpt.load(path, wanted, unused="ignore")["other"]["opt_state"]
    strategies.assert_same_state(fresh, found)
    swapped = {**saved["two"], "opts": (optax.sgd(1.0).init(network), (fresh,))}
    found = flaxckpt.load(path, {"two": swapped}, unused="ignore")["two"]["opts"]
    strategies.assert_same_state(fresh, found[1][0])
