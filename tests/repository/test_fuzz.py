"""Runs each target of `fuzz` for some seconds, with new inputs each time.

What they must not do is in `fuzz.targets`; `python -m verification fuzz` gives
them more time, and leads them to code that no input has reached.
"""

import json
import os

import pytest

from tests import ROOT
from tests.helpers import programs, slow
from verification.fuzz import targets

SECS = float(os.environ.get("FUZZ_SECS", "3"))


QUICK = ("msgpack", "own")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(targets.TARGETS, QUICK))
def test_changed_inputs_are_read_or_rejected(name, tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    process = programs.run(
        *("-m", "verification.fuzz", name, f"--secs={SECS}"),
        *(f"--seed={seed}", f"--keep={tmp_path}"),
        code=None,
        cwd=ROOT,
        timeout=SECS + 300,
        XLA_FLAGS="",
    )
    found = {file.name: file.read_bytes().hex() for file in tmp_path.iterdir()}
    told = f"seed {seed}: {process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    assert process.returncode == 0, f"{told}\n{json.dumps(found)[:20_000]}"
    assert not found
    assert " inputs" in process.stdout


QUICK = ("msgpack", "own")


@pytest.mark.parametrize("name", slow.all_but(targets.TARGETS, QUICK))
def test_seed_inputs_exist_and_are_small(name):
    seeds = targets.seeds(name)
    assert seeds
    assert max(map(len, seeds)) < 16_384
