"""A reader and several deletions of one step, at moments that nobody chose."""

import contextlib

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._run import edit
from flaxckpt._steps import delete as steps_delete
from flaxckpt._steps import names as steps_names
from flaxckpt._storage import leases
from tests.helpers import faulty_store, seams, strategies

FORMAT = steps_names.StepFormat()


def state(step):
    params = {"w": np.arange(4.0) + step}
    return {"params": params, "opt_state": {"mu": np.full(3, step)}}


def saved(path, **options):
    with flaxckpt.Checkpointer(path, **options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait()
    return path / "1"


def late_reader(step):
    """Returns a reader that begins although a deletion was announced.

    Another deletion has found an earlier reader, and has removed the announcement.
    """
    with contextlib.suppress(errors.SaveFailedError), leases.deletion(step):
        lease = leases.Lease(step)
        raise leases.in_use_error(step, [])
    assert not leases.is_being_deleted(step)
    return lease


def test_delete_item_rejects_item_being_read(tmp_path, monkeypatch):
    step = saved(tmp_path, items=("params", "opt_state"))
    real, readers = seams.current("disk.withdraw_name"), []

    def withdraw_name(directory, aside):
        if not readers:
            readers.append(late_reader(step))
        return real(directory, aside)

    with monkeypatch.context() as patch:
        seams.replace(patch, "disk.withdraw_name", withdraw_name)
        with pytest.raises(errors.SaveFailedError, match="is being read"):
            edit.delete_item(step, "opt_state")
    assert (step / "opt_state").is_dir()
    readers[0].release()
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        strategies.assert_same({"params": state(1)["params"]}, ckpt.restore(step=1))


def test_sweep_spares_interrupted_deletion_under_reader(tmp_path, monkeypatch):
    step = saved(tmp_path)
    real, readers = seams.current("rename.withdraw"), []

    def withdraw(final, aside):
        readers.append(late_reader(step))
        real(final, aside)
        raise KeyboardInterrupt  # as if killed here

    seams.replace(monkeypatch, "rename.withdraw", withdraw)
    with pytest.raises(KeyboardInterrupt):
        steps_delete.delete(step, find_foreign=lambda path: [])
    steps_delete.sweep(tmp_path, FORMAT)
    [left] = tmp_path.glob("1.*")
    assert (left / "flaxckpt.json").is_file()
    readers[0].release()
    steps_delete.sweep(tmp_path, FORMAT)
    assert not left.exists()


def test_step_vanishing_under_reader_counts_as_deleted(tmp_path, monkeypatch):
    step = saved(tmp_path)
    (step / leases.DELETING).touch()
    real = leases.unexpired

    def unexpired(path, names):
        names = list(names)
        if step.exists():
            step.rename(tmp_path / "aside")
        return real(path, names)

    seams.replace(monkeypatch, "leases.unexpired", unexpired)
    assert leases.is_being_deleted(step)


def test_new_steps_skips_step_without_marker(monkeypatch):
    path = faulty_store.new_path("no-marker")
    step = saved(path)
    real = leases.Lease

    def lease(path):
        """The step is deleted after the reader has found it."""
        made = real(path)
        if path == step:
            for key in step.keys():  # noqa: SIM118
                if not leases.is_lease(key):
                    (step / key).unlink()
        return made

    seams.replace(monkeypatch, "leases.make", lease)
    with flaxckpt.Checkpointer(path, read_only=True) as ckpt:
        assert list(ckpt.new_steps(timeout_secs=0, poll_secs=0.01)) == [2]
    assert not step.keys()
