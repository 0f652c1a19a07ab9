"""Runs the notebooks; `python -m tests.helpers.notebooks` writes their outputs."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

from tests import ROOT

NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))

_WORD = re.compile(r"\b[A-Za-z_]{3,}\b")
_UNFINISHED = re.compile(r"\.orbax-checkpoint-tmp[\w-]*")
"""The end of a name that is there if a kill came in time."""


def read(file):
    return nbformat.read(file, as_version=4)


def execute(file, directory):
    """Returns the notebook after a run in a kernel of its own, in which jax may be
    configured."""
    notebook = read(file)
    programs = Path(sys.executable).parent
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "IPYTHONDIR": str(directory / "ipython"),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "100",
    }
    environment.pop("XLA_FLAGS", None)
    work = directory / "work"
    work.mkdir()
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(work)}},
    )
    client.execute(env=environment)
    return nbformat.from_dict(_without(notebook, f"{work}/"))


def words(cell):
    """Returns the words of a cell's outputs, sorted, as stdout and stderr race.

    Numbers differ from run to run.
    """
    outputs = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", ())
    ]
    text = _UNFINISHED.sub("", "\n".join(outputs))
    return sorted(_WORD.findall(text))


def _without(value, text):
    """Returns JSON without `text` in its strings."""
    if isinstance(value, str):
        return value.replace(text, "")
    if isinstance(value, list):
        return [_without(each, text) for each in value]
    if isinstance(value, dict):
        return {key: _without(each, text) for key, each in value.items()}
    return value


def main():
    for file in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            notebook = execute(file, Path(directory))
        notebook.metadata.pop("language_info", None)  # has the version of Python
        nbformat.write(notebook, file)
        sys.stdout.write(f"{file.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
