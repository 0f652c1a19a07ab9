"""flaxckpt's hook within clu's own periodic actions, which need TensorFlow."""

import pytest

from tests import ROOT
from tests.helpers import programs

pytest.importorskip("tensorflow", reason="needs tensorflow")
pytest.importorskip("tensorboard", reason="needs tensorboard")


def test_clu_periodic_callback_saves_and_resumes_exactly():
    done = programs.run("-m", "examples.loops.clu_hooks", cwd=ROOT, timeout=None)
    assert "bit for bit" in done.stdout
