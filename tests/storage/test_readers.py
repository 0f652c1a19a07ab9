"""A reader and several deletions of one step, at moments that nobody chose."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import faulty_store, run_files, seams, strategies


def state(step):
    params = {"w": np.arange(4.0) + step}
    return {"params": params, "opt_state": {"mu": np.full(3, step)}}


def saved(path, **options):
    with flaxckpt.Checkpointer(path, **options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait()
    return path / "1"


def late_reader(step):
    """Returns the lease of a reader that begins although a deletion was announced.

    Another deletion has found an earlier reader, and has removed the announcement.
    """
    (step / run_files.DELETING).unlink()
    return run_files.add_lease(step)


def test_delete_item_rejects_item_being_read(tmp_path, monkeypatch):
    step = saved(tmp_path, items=("params", "opt_state"))
    real, readers = seams.current("rename.withdraw"), []

    def withdraw(directory, aside):
        if not readers:
            readers.append(late_reader(step))
        real(directory, aside)

    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            seams.replace(patch, "rename.withdraw", withdraw)
            with pytest.raises(errors.SaveFailedError, match="is being read"):
                ckpt.delete(1, item="opt_state")
        assert (step / "opt_state").is_dir()
        readers[0].unlink()
        strategies.assert_same({"params": state(1)["params"]}, ckpt.restore(step=1))


def test_sweep_spares_interrupted_deletion_under_reader(tmp_path, monkeypatch):
    step = saved(tmp_path)
    real = seams.current("rename.withdraw")

    def withdraw(final, aside):
        late_reader(step)
        real(final, aside)
        raise KeyboardInterrupt  # as if killed here

    with monkeypatch.context() as patch, flaxckpt.Checkpointer(tmp_path) as ckpt:
        seams.replace(patch, "rename.withdraw", withdraw)
        with pytest.raises(KeyboardInterrupt):
            ckpt.delete(1)
    flaxckpt.Checkpointer(tmp_path)
    [left] = tmp_path.glob("1.*")
    assert (left / "flaxckpt.json").is_file()
    [lease] = left.glob(f"{run_files.READING}*")
    lease.unlink()
    flaxckpt.Checkpointer(tmp_path)
    assert not left.exists()


def test_new_steps_skips_step_without_marker(monkeypatch):
    path = faulty_store.new_path("no-marker")
    step = saved(path)
    real = seams.current("leases.make")

    def lease(path):
        """The step is deleted after the reader has found it."""
        made = real(path)
        if path == step:
            for key in step.keys():  # noqa: SIM118
                if not key.startswith(run_files.READING):
                    (step / key).unlink()
        return made

    seams.replace(monkeypatch, "leases.make", lease)
    with flaxckpt.Checkpointer(path, read_only=True) as ckpt:
        assert list(ckpt.new_steps(timeout_secs=0, poll_secs=0.01)) == [2]
    assert not step.keys()
