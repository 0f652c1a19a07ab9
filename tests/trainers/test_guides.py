"""The guides of trainers that are installed here run, block by block."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests import ROOT
from tests.helpers.documents import blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("trainer", ["tunix", "maxtext", "kauldron"])
def test_every_code_block_of_guide_runs(trainer, tmp_path, monkeypatch):
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"doc_{trainer}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if trainer == "tunix":  # the guide replaces its class
        checkpoint_manager = importlib.import_module("tunix.sft.checkpoint_manager")
        theirs = checkpoint_manager.CheckpointManager
        monkeypatch.setattr(checkpoint_manager, "CheckpointManager", theirs)
    document = ROOT / "docs" / "migration" / f"{trainer}.md"
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.language == "python":
            exec(compile(block.code, str(document), "exec"), module.__dict__)
