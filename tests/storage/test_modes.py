"""Modes of files and directories: who else may read a checkpoint."""

import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN

LAYOUTS = {
    "none": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr2": flaxckpt.ArrayLayout(zarr_version=2),
}


@pytest.fixture(params=[0o077, 0o000], ids=["umask 077", "umask 000"])
def _umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(root):
    """The modes of all directories, and of all files, at and below `root`."""
    directories, files = {root.stat().st_mode}, set()
    for path in root.rglob("*"):
        (directories if path.is_dir() else files).add(path.stat().st_mode)
    return {stat.S_IMODE(m) for m in directories}, {stat.S_IMODE(m) for m in files}


def state(value=1.0):
    return {
        "params": {"kernel": jnp.full((4, 4), value), "frozen": jnp.ones(3)},
        "name": "a",
        "step": 3,
    }


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_file_of_checkpoint_has_requested_mode(tmp_path, layout):
    path = tmp_path / "made" / "too" / "checkpoint"
    for overwrite in (False, True):
        flaxckpt.save(
            path, state(), layout=layout, permissions=0o750, overwrite=overwrite
        )
        assert modes(tmp_path / "made") == ({0o750}, {0o640})
    assert flaxckpt.verify(path).ok


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_files_of_run_and_later_additions_have_requested_mode(tmp_path, layout):
    run = tmp_path / "run"
    with flaxckpt.Checkpointer(
        run, permissions=0o750, layout=layout, metadata={"a": 1}, keep=[LatestN(3)]
    ) as ckpt:
        dataset = flaxckpt.datasets.StepIndexed(lambda step: step)
        ckpt.save(1, state(), metrics={"loss": 1.0}, dataset=dataset, temporary=True)
        ckpt.save(2, state(2.0), metrics={"loss": 1.0})
        ckpt.save(3, state(2.0), metadata={"b": 2}).wait()
        ckpt.save_params_only(3, {"params": state()["params"]})
        ckpt.add_metrics(2, {"loss": 2.0})
        ckpt.add_metrics(3, {"loss": 2.0})
        ckpt.pin(3)
        ckpt.save(3, state(3.0), on_exists="overwrite").wait()
    assert modes(run) == ({0o750}, {0o640})
    with flaxckpt.Checkpointer(run) as later:  # who pins need not know the mode
        later.pin(2)
        later.add_metrics(3, {"other": 1.0})
    assert modes(run / "2") == ({0o750}, {0o640})
    assert modes(run / "3") == ({0o750}, {0o640})
    assert all(report.ok for report in map(flaxckpt.verify, (run / "2", run / "3")))


@pytest.mark.usefixtures("_umask")
def test_uploaded_steps_keep_their_modes(tmp_path):
    run, staging = tmp_path / "run", tmp_path / "staging"
    with flaxckpt.Checkpointer(
        run, staging=staging, permissions=0o710, metadata={"a": 1}
    ) as ckpt:
        ckpt.save(1, state(), metrics={"loss": 1.0})
        ckpt.wait_for_uploads()
        ckpt.add_metrics(1, {"other": 1.0})
        ckpt.pin(1)
    assert modes(run) == ({0o710}, {0o600})
    assert modes(staging) == ({0o710}, {0o600})


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("name", ["copy", "model.safetensors", "shards", "a.msgpack"])
def test_converted_checkpoint_has_requested_mode(tmp_path, name):
    flaxckpt.save(tmp_path / "source", {"w": jnp.ones(3)})
    copy = tmp_path / "made" / name
    kind = "safetensors" if name == "shards" else None
    flaxckpt.convert(tmp_path / "source", copy, format=kind, permissions=0o750)
    assert modes(tmp_path / "made") == ({0o750}, {0o640})


@pytest.mark.parametrize("layout", ["none", "zstd"])
def test_new_mode_does_not_change_files_of_earlier_steps(tmp_path, layout):
    asked = {1: 0o700, 2: 0o755, 3: 0o755}
    frozen = jax.random.normal(jax.random.key(0), (2**19,))
    for step, mode in asked.items():
        with flaxckpt.Checkpointer(
            tmp_path / "run", permissions=mode, layout=LAYOUTS[layout]
        ) as ckpt:
            ckpt.save(step, state() | {"frozen": frozen})
    for step, mode in asked.items():
        assert modes(tmp_path / "run" / str(step)) == ({mode}, {mode & 0o666})
    found = [
        (tmp_path / f"run/{step}/state/d/0.0/frozen").stat().st_ino for step in asked
    ]
    assert found[0] != found[1]
    assert found[1] == found[2], "equal files of equal modes are still shared"


def test_unfinished_checkpoint_is_private_to_its_owner(tmp_path, monkeypatch):
    seen = []
    rename = os.rename

    def watch(source, final, **kwargs):
        seen.append((modes(tmp_path / os.fspath(source)), str(final)))
        return rename(source, final, **kwargs)

    def look(*args, **kwargs):
        [unfinished] = [p for p in tmp_path.iterdir() if p.is_dir()]
        seen.append((stat.S_IMODE(unfinished.stat().st_mode), unfinished.name))
        return pwrite(*args, **kwargs)

    pwrite = os.write
    monkeypatch.setattr(os, "write", look)
    monkeypatch.setattr(os, "rename", watch)
    before = os.umask(0)
    try:
        flaxckpt.save(tmp_path / "a", state(), permissions=0o750)
    finally:
        os.umask(before)
    private = [mode for mode, name in seen if name != str(tmp_path / "a")]
    assert private
    assert set(private) == {0o700}
    assert [mode for mode, name in seen if name == str(tmp_path / "a")] == [
        ({0o750}, {0o640})
    ]


def test_directories_inherit_setgid_bit(tmp_path):
    tmp_path.chmod(0o2770)
    flaxckpt.save(tmp_path / "a", state(), permissions=0o750)
    if tmp_path.stat().st_mode & stat.S_ISGID:
        directories, files = modes(tmp_path / "a")
        assert (directories, files) == ({0o2750}, {0o640})


@pytest.mark.usefixtures("_umask")
def test_step_saved_without_mode_keeps_mode_from_umask(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state(), metrics={"loss": 1.0}).wait()
        saved = modes(tmp_path / "run" / "1")
        ckpt.pin(1)
        ckpt.add_metrics(1, {"other": 1.0})
    assert modes(tmp_path / "run" / "1") == saved
    assert saved in [({0o700}, {0o600}), ({0o777}, {0o666})]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (750, "750, which is 0o1356: write 0o750"),
        (0o640, "got 0o640: write 0o740"),
        (0o550, "0o550: write 0o750"),
        (-1, "-0o1"),
        (0o1777, "0o1777"),
        ("750", "'750'"),
        (True, "True"),
        (np.float32(1), "1.0"),
    ],
)
def test_error_names_invalid_mode(tmp_path, given, told):
    for call in (
        lambda: flaxckpt.save(tmp_path / "a", state(), permissions=given),
        lambda: flaxckpt.Checkpointer(tmp_path / "a", permissions=given),
    ):
        with pytest.raises(errors.OptionError, match="such as 0o750") as caught:
            call()
        assert str(caught.value).endswith(told)
    assert not list(tmp_path.iterdir())


def test_rejects_modes_in_object_stores(tmp_path, store_path):
    path = store_path("memory")
    for call in (
        lambda: flaxckpt.save(f"{path}/a", state(), permissions=0o750),
        lambda: flaxckpt.Checkpointer(path, permissions=0o750),
        lambda: flaxckpt.Checkpointer(path, staging=tmp_path / "b", permissions=0o750),
    ):
        with pytest.raises(errors.OptionError, match="objects in a store have no mode"):
            call()
    assert not list(tmp_path.iterdir())
