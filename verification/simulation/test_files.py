"""Histories of files and jobs keep their guarantees, and find planted faults."""

import contextlib
import os
import subprocess
import sys

import pytest

from verification.simulation import (
    failures,
    files,
    jobs,
    kernel,
    pauses,
    pins,
    planted,
    stand_ins,
)

FOUND = {
    (files, 440): "an overwrite of a step that was just deleted",
    (files, 956): "an upload thread that cannot list the staging directory",
    (files, 1031): "an overwrite of a step that is deleted while it is checked",
    (files, 1183): "a staging directory whose owner cannot be read",
    (files, 3442): "a pin during an overwrite was lost",
    (files, 3591): "an empty run that cannot be listed",
    (files, 3727): "a temporary file beside the steps was left for ever",
    (files, 3858): "a check that took a failed replacement for a file being read",
    (files, 2336): "metrics were added while a step was uploaded: its copy was damaged",
    (files, 7240): "a pin was lost when a process died right after an overwrite",
    (pauses, 435): "a writer made its directory anew after a sweep, and published it",
    (pauses, 481): "a writer published its directory while it was swept",
    (jobs, 5): "a coordination service that ends before a report",
    (jobs, 7): "process 0 cannot report its failure",
    (jobs, 146): "messages in files that cannot be written",
    (jobs, 766): "a coordination service that is away while another process writes",
    (jobs, 2316): "a commit that takes longer than others wait",
    (jobs, 4021): "process 0 that dies before its first heartbeat",
    (jobs, 2894): "a deletion after the commit that takes longer than others wait",
}
"""Histories that found a defect, which has been mended since."""

MANY = 450
"""Histories of each kind; `make verification NAME=simulation` searches further."""

MOST_HISTORIES = 3000
"""The histories that find each planted fault: ten times as many as find it on average,
as any change of flaxckpt's calls changes them all."""

KINDS = (files, pauses, pins, jobs, failures)


@contextlib.contextmanager
def installed(histories, patches=None):
    """Gives flaxckpt's modules the stand-ins that the histories need."""
    patches = {**getattr(histories, "PATCHES", {}), **(patches or {})}
    with contextlib.ExitStack() as stack:
        for enter in histories.CONTEXTS:
            stack.enter_context(enter())
        stack.enter_context(stand_ins.installed(patches=patches))
        yield


def name(value):
    """Returns the name of a parameter of a test."""
    return getattr(value, "__name__", str(value)).rpartition(".")[2]


def _run(histories, seeds, patches=None):
    with installed(histories, patches):
        for seed in seeds:
            histories.history(seed)


@pytest.mark.parametrize("histories", KINDS, ids=name)
def test_sample_of_histories_is_sound(histories):
    _run(histories, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("histories", KINDS, ids=name)
def test_many_histories_are_sound(histories):
    _run(histories, range(MANY))


@pytest.mark.parametrize(("histories", "seed"), FOUND, ids=name)
def test_history_of_past_defect_is_sound(histories, seed):
    _run(histories, [seed])


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted.FAULTS_OF_FILES)
def test_detects_planted_fault(fault):
    histories, patches = planted.FAULTS_OF_FILES[fault]
    with pytest.raises(kernel.Violation) as found:
        _run(histories, range(MOST_HISTORIES), patches)
    for error in ("TypeError", "KeyError"):
        assert f"raised {error}" not in str(found.value), "it does not fit the code"


_TIMELINES = """
import os, re, sys
from verification.simulation import runner, test_files, tier
os.getpid = lambda: int(sys.argv[1])
for histories, seeds in [*((kind, 8) for kind in test_files.KINDS), (tier, 24)]:
    with runner.installed(histories):
        for seed in range(seeds):
            for line in histories.history(seed, is_traced=True):
                # Without the directory, and its digest.
                print(re.sub("simulation-[0-9]+|[0-9a-f]{12}", "", str(line)))
"""


@pytest.mark.slow
def test_seed_gives_same_history_in_every_process():
    timelines = {
        subprocess.run(
            [sys.executable, "-c", _TIMELINES, pid],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            check=True,
            capture_output=True,
        ).stdout
        for hashes, pid in (("1", "99999"), ("2", "100000"))
    }
    assert len(timelines) == 1
    assert timelines.pop()
