"""The notebooks run from their first to their last cell, and have no outputs in git."""

import os
import sys
from pathlib import Path

import pytest

from tests import ROOT

nbformat = pytest.importorskip("nbformat", reason="nbclient is missing")
nbclient = pytest.importorskip("nbclient", reason="nbclient is missing")

PROGRAMS = Path(sys.executable).parent
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))


def read(notebook):
    return nbformat.read(notebook, as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_cell_runs(notebook, tmp_path):
    """In a kernel of its own, in which jax may be configured."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JAX_PLATFORMS": "cpu",
    }
    environment.pop("XLA_FLAGS", None)
    (tmp_path / "work").mkdir()
    client = nbclient.NotebookClient(
        read(notebook),
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "work")}},
    )
    client.execute(env=environment)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_outputs_are_stripped(notebook):
    cells = read(notebook).cells
    assert [c for c in cells if c.get("outputs") or c.get("execution_count")] == []
    assert cells[0].cell_type == "markdown"


def test_every_notebook_is_in_the_list_of_examples():
    listed = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 4
    assert [n.name for n in NOTEBOOKS if f"notebooks/{n.name}" not in listed] == []
