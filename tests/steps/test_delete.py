"""Deletions by policies, at moments that nobody chose."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._steps import delete as steps_delete
from flaxckpt._steps import markers
from flaxckpt._storage import rename


def test_a_change_that_comes_during_a_deletion_keeps_the_step(tmp_path, monkeypatch):
    step = tmp_path / "1"
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": np.arange(4.0)}).wait()
    real = rename.withdraw

    def withdraw(final, aside):
        markers.mark_for_upload(final)
        real(final, aside)

    monkeypatch.setattr(rename, "withdraw", withdraw)
    with pytest.raises(errors.SaveFailedError, match="not uploaded"):
        steps_delete.delete(step)
    assert markers.is_marked_for_upload(step)
    steps_delete.delete(step, even_pinned=True)
    assert not step.exists()
