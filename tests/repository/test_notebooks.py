"""The notebooks run from their first to their last cell, with the outputs shown."""

import pytest

from tests import ROOT

pytest.importorskip("nbclient", reason="nbclient is missing")

from tests.helpers import notebooks


@pytest.mark.slow
@pytest.mark.parametrize("file", notebooks.NOTEBOOKS, ids=lambda file: file.stem)
def test_outputs_match_fresh_run(file, tmp_path):
    shown, now = notebooks.read(file).cells, notebooks.execute(file, tmp_path).cells
    assert list(map(notebooks.words, now)) == list(map(notebooks.words, shown)), (
        "run python -m tests.helpers.notebooks, and read what has changed"
    )


@pytest.mark.parametrize("file", notebooks.NOTEBOOKS, ids=lambda file: file.stem)
def test_every_cell_was_run_in_order(file):
    cells = notebooks.read(file).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert cells[0].cell_type == "markdown"


def test_examples_list_every_notebook():
    listed = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert len(notebooks.NOTEBOOKS) == 4
    assert [
        n.name for n in notebooks.NOTEBOOKS if f"notebooks/{n.name}" not in listed
    ] == []
