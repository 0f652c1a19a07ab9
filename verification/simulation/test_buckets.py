"""Histories of a bucket keep their guarantees, and planted faults are found."""

import os
import subprocess
import sys

import pytest

from verification.simulation import (
    buckets,
    kernel,
    planted,
    process_state,
    runner,
    runs,
    seeds,
)

SHARDS = 4
SHARD = 2500
"""Histories in a shard; `make verification NAME=simulation` searches further."""

MOST_HISTORIES = {buckets: 20_000, runs: 3000}
"""The histories that find each planted fault: several times as many as find the rarest
on average, as any change of flaxckpt's requests changes them all."""


def assert_sound(some, histories=buckets):
    violations = runner.find_violations(histories, some)
    assert not {seed: str(error) for seed, error in violations}


def assert_found(histories, patches):
    found = next(
        runner.find_violations(histories, range(MOST_HISTORIES[histories]), patches),
        None,
    )
    assert found is not None
    assert "raised TypeError" not in str(found[1]), "the fault does not fit the code"


@pytest.mark.slow
def test_sample_of_histories_is_sound():
    assert_sound(range(500))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_histories_are_sound(shard):
    assert_sound(range(shard * SHARD, (shard + 1) * SHARD))


@pytest.mark.slow
def test_sample_of_whole_run_histories_is_sound():
    assert_sound(range(100), runs)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(2))
def test_many_whole_run_histories_are_sound(shard):
    assert_sound(range(shard * 1000, (shard + 1) * 1000), runs)


def test_histories_of_past_defects_are_sound():
    assert_sound(seeds.BUCKETS)
    assert_sound(seeds.RUNS, runs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted.FAULTS_OF_BUCKETS)
def test_detects_planted_fault(fault):
    assert_found(buckets, planted.FAULTS_OF_BUCKETS[fault])


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted.FAULTS_OF_RUNS)
def test_detects_planted_fault_in_whole_runs(fault):
    assert_found(runs, planted.FAULTS_OF_RUNS[fault])


def test_violation_has_readable_timeline():
    faults = planted.FAULTS_OF_BUCKETS["no lock"]
    seed, _ = next(runner.find_violations(buckets, range(100), faults))
    with runner.installed(buckets, faults), pytest.raises(kernel.Violation) as caught:
        buckets.history(seed, is_traced=True)
    lines = [str(line) for line in caught.value.timeline]
    assert any("commit_success.txt" in line for line in lines)
    assert max(map(len, lines)) < 200


_TIMELINES = """
import re
from verification.simulation import buckets, runner, runs
for histories in (buckets, runs):
    with runner.installed(histories):
        for seed in range(20):
            for line in histories.history(seed, is_traced=True):
                # Without digests, of the time and the process, the directory, and
                # the random identifiers of databases.
                random = "sha256:[0-9a-f]+|simulation-[0-9]+|(?<=manifest.ocdbt).*"
                print(re.sub(random, "", str(line)))
"""


@pytest.mark.slow
def test_seed_gives_same_history_in_every_process():
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
    assert timelines.pop().count(b"\n") > 1000


def test_all_module_state_is_known():
    unknown = process_state.mutable_state() - set(process_state.known_state())
    assert not unknown, "swap the attribute in process_state, or say why it is harmless"
