"""A checkpoint is deleted at any moment while it is loaded: every format says so."""

import builtins
import io
import os
import shutil

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores
from tests.helpers.golden_cases import CASES, Case, assert_same, find

LOOKS = [
    (os, "stat"),
    (os, "lstat"),
    (os, "open"),
    (os, "scandir"),
    (os, "listdir"),
    (io, "open"),
    (builtins, "open"),
]
"""Functions with which Python looks at files; a deletion happens before a call."""


class Deletion:
    """Deletes `path` before the call number `moment` of a function of `LOOKS`."""

    def __init__(self, path, moment):
        self.path, self.moment = path, moment
        self.calls = 0
        self.is_done = False

    def wrap(self, function):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls > self.moment and not self.is_done:
                self.is_done = True
                trash = self.path.with_name("trash")
                self.path.rename(trash)
                if trash.is_dir():
                    shutil.rmtree(trash)
                else:
                    trash.unlink()
            return function(*args, **kwargs)

        return call


def copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[pytest.mark.slow] * (case.format == "t5x")
        )
        for case in CASES
    ],
)
def test_deletion_during_load_yields_whole_state_or_error(case, tmp_path, monkeypatch):
    delete_at_every_moment(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("is_old", [False, True])
def test_deletion_of_own_checkpoint_yields_whole_state_or_error(
    is_old, tmp_path, monkeypatch
):
    leaves = {"w": np.arange(12.0).reshape(3, 4), "step": 3, "name": "run"}
    flaxckpt.save(tmp_path / "saved", leaves)
    if is_old:
        old_stores.make_directories(tmp_path / "saved")
    case = Case("saved", tmp_path / "saved", leaves)
    delete_at_every_moment(case, tmp_path, monkeypatch)


def delete_at_every_moment(case, tmp_path, monkeypatch):
    moment, refused, whole, unnamed = 0, 0, 0, []
    while True:
        path = tmp_path / f"{moment}" / case.path.name
        path.parent.mkdir()
        copy(case.path, path)
        deletion = Deletion(path, moment)
        with monkeypatch.context() as patched:
            for module, name in LOOKS:
                patched.setattr(module, name, deletion.wrap(getattr(module, name)))
            try:
                state = flaxckpt.load(path)
            except errors.CheckpointError as error:
                refused += 1
                unnamed += [] if str(path) in str(error) else [repr(error)]
                state = None
        if state is not None:
            for leaf, value in case.leaves.items():
                loaded = find(state, leaf)
                is_array = isinstance(value, np.ndarray)
                assert_same(np.asarray(loaded) if is_array else loaded, value)
            whole += 1
        if not deletion.is_done:
            break
        moment += 1
    assert refused
    assert not unnamed, "every error names the path"
    assert refused + whole == moment + 1
