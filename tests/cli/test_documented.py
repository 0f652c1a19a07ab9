"""docs/cli.md has an example of each verb; tests/repository/test_docs.py runs them."""

from tests import ROOT
from tests.cli.test_process import VERBS
from tests.helpers.documents import blocks, commands


def test_documentation_covers_every_verb():
    told = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    shell = [block.code for block in blocks(told) if block.language == "sh"]
    assert {c.words[1] for code in shell for c in commands(code)} == set(VERBS)
