"""Histories of files and jobs keep their guarantees, and find planted faults."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.simulation import filesystem, kernel, kinds, planted_files, stand_ins

FOUND = {
    ("files", 440): "an overwrite of a step that was just deleted",
    ("files", 956): "an upload thread that cannot list the staging directory",
    ("files", 1031): "an overwrite of a step that is deleted while it is checked",
    ("files", 1183): "a staging directory whose owner cannot be read",
    ("files", 3442): "a pin during an overwrite was lost",
    ("files", 3591): "an empty run that cannot be listed",
    ("files", 3727): "a temporary file beside the steps was left for ever",
    ("pauses", 435): "a writer made its directory anew after a sweep, and published it",
    ("pauses", 481): "a writer published its directory while it was swept",
    ("jobs", 5): "a coordination service that ends before a report",
    ("jobs", 7): "process 0 cannot report its failure",
    ("jobs", 146): "messages in files that cannot be written",
}
"""Histories that found a defect, which has been mended since."""

SHARDS = 8
SHARD = 1000
"""Histories of each kind in a shard."""

MOST_HISTORIES = 1000
"""The histories that find each planted fault."""


@contextlib.contextmanager
def installed(kind, patches=None):
    """Yields the function for histories of a kind, with the stand-ins it needs."""
    history, own = kinds.KINDS[kind]
    with (
        filesystem.installed(),
        stand_ins.installed(patches={**own, **(patches or {})}),
    ):
        yield history


def _run(kind, seeds, patches=None):
    with installed(kind, patches) as history:
        for seed in seeds:
            history(seed)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_sample_of_histories(kind):
    _run(kind, range(30))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_many_histories(kind, shard):
    _run(kind, range(shard * SHARD, (shard + 1) * SHARD))


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_a_history_that_found_a_defect(kind, seed):
    _run(kind, [seed])


@pytest.mark.parametrize("fault", planted_files.FAULTS)
def test_a_planted_fault_is_found(fault):
    kind, patches = planted_files.FAULTS[fault]
    with pytest.raises(kernel.Violation):
        _run(kind, range(MOST_HISTORIES), patches)


_TIMELINES = """
import re
from tests.simulation import kinds, test_files
for kind in kinds.KINDS:
    with test_files.installed(kind) as history:
        for seed in range(8):
            for line in history(seed, is_traced=True):
                # Without the directory, and its digest.
                print(re.sub("simulation-[0-9]+|[0-9a-f]{12}", "", str(line)))
"""


@pytest.mark.slow
def test_a_seed_is_one_history_in_every_process():
    timelines = {
        subprocess.run(
            [sys.executable, "-c", _TIMELINES],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            check=True,
            capture_output=True,
        ).stdout
        for hashes in "12"
    }
    assert len(timelines) == 1
    assert timelines.pop()
