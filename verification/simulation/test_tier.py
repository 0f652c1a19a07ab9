"""Histories of the local tier keep their guarantees, and find planted faults."""

import pytest

from verification.simulation import planted_tier, runner, tier

FOUND: dict[int, str] = {}
"""Histories that found a defect, which has been mended since."""

MOST_HISTORIES = 600
"""The histories that find each planted fault: many times as many as find it on average,
as any change of flaxckpt's calls changes them all."""


def _run(seeds):
    assert not list(runner.find_violations(tier, seeds))


def test_a_sample_of_histories():
    _run(range(6))


@pytest.mark.slow
def test_many_histories():
    _run(range(200))


@pytest.mark.parametrize("seed", FOUND)
def test_a_history_that_found_a_defect(seed):
    _run([seed])


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted_tier.FAULTS)
def test_a_planted_fault_is_found(fault):
    histories, patches = planted_tier.FAULTS[fault]
    seeds = range(MOST_HISTORIES)
    _, found = next(runner.find_violations(histories, seeds, patches))
    for error in ("TypeError", "KeyError"):
        assert f"raised {error}" not in str(found), "it does not fit the code"
