"""The table of replaced parts names parts that there are, and that tests replace."""

from tests import ROOT
from tests.helpers import seams


def test_each_seam_exists_and_is_used():
    folders = ("tests", "verification")
    files = {file for name in folders for file in (ROOT / name).rglob("*.py")}
    files -= {ROOT / "tests/helpers/seams.py"}
    texts = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for seam in seams.SEAMS:
        seams.current(seam)
    assert [seam for seam in seams.SEAMS if f'"{seam}"' not in texts] == []
