"""Disks of single processes that fail: no acknowledged step is lost, nor a value."""

import errno
import random

import pytest

from tests.distributed import jobs
from tests.faults import shim

pytestmark = pytest.mark.multiprocess

CALLS = {"saves": 60, "restores": 40}
"""About as many calls has a save, or a restore, in a process."""

FAULTS = {
    "saves": [
        {"what": errno.EIO, "sticky": False},
        {"what": errno.EIO, "sticky": True},
        {"what": errno.ENOSPC, "sticky": True, "counted": shim.GROWING},
        {"what": shim.SHORT, "sticky": False, "counted": shim.GROWING},
    ],
    "restores": [
        {"what": errno.EIO, "sticky": False, "counted": shim.READS},
        {"what": errno.EIO, "sticky": True, "counted": shim.READS},
        {"what": shim.SHORT, "sticky": True, "counted": shim.READS},
        {"what": errno.ENOSPC, "sticky": True, "counted": shim.GROWING},
    ],
}


def choose(kind, count):
    """Faults of all kinds, at random calls of random processes."""
    chance, faults = random.Random(count), FAULTS[kind]
    return [
        {
            "process": chance.randrange(2),
            "at": chance.randrange(1, CALLS[kind]),
            **faults[n % len(faults)],
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_failing_calls_in_saves_lose_no_acknowledged_step(tmp_path, library, count):
    do = [["save", 0], ["wait_for_copies"]]
    do += [["fail_in_saves", choose("saves", count)], ["save", count + 1]]
    said = jobs.run("parts", 2, tmp_path, do=do, copies=1, preload=library)["parts"]
    newest, faults = 0, 0
    for saves in zip(*(each["fail_in_saves"] for each in said), strict=True):
        step, left, _ = saves[0]
        if any(ended == "staging" for *_, ended in saves) or left == step:
            newest = step  # a save may fail after its last rename, and be whole
        assert {found for _, found, _ in saves} == {newest}, saves
        texts = [ended for *_, ended in saves if ended != "staging"]
        assert all("  process " in text or "copies" in text for text in texts), texts
        faults += bool(texts)
    assert faults, "a fault was seen"


@pytest.mark.slow
def test_failing_calls_in_restores_lose_no_step(tmp_path, library):
    do = [["save", 1], ["save", 2], ["wait_for_copies"]]
    do += [["fail_in_restores", choose("restores", 24)]]
    said = jobs.run("parts", 2, tmp_path, do=do, copies=1, preload=library)["parts"]
    for restores in zip(*(each["fail_in_restores"] for each in said), strict=True):
        for found, step in restores:
            assert step == 2, "what could not be read is whole"
            if found not in (1, 2):
                assert "cannot be read" in found or "could not be restored" in found
