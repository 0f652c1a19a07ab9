"""flaxckpt's hook within clu's own periodic actions, which need TensorFlow."""

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytest.importorskip("tensorflow", reason="needs tensorflow")
pytest.importorskip("tensorboard", reason="needs tensorboard")


def test_clu_periodic_callback_saves_and_resumes_exactly():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    printed = subprocess.run(
        [sys.executable, "-m", "examples.loops.clu_hooks"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
    ).stdout
    assert "bit for bit" in printed
