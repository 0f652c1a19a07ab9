"""Lacking memory loses nothing; `python -m verification oom` has more."""

import pytest

from verification.oom import shim
from verification.oom.explore import OPERATIONS, explore


@pytest.fixture(scope="session")
def library():
    built = shim.build()
    if built is None:
        pytest.skip("failing allocations need a C compiler, and Linux")
    return built


def check(result):
    assert not result.problems, "\n".join(result.problems)
    told = result.by_outcome()
    assert told["MemoryError"] + told["SaveFailedError"] > 10
    # A few errors are swallowed, or turned into others, by Python, numpy and jaxlib.
    assert len(result.strange) <= 0.1 * told.total(), "\n".join(result.strange)


@pytest.mark.slow
def test_save_out_of_memory_loses_nothing(directory, library):
    result = explore(["FirstSave"], directory, library, first=350, every=700)
    check(result)
    assert {kind for _, kind, _ in result.outcomes} >= {"Python", "numpy", "threads"}


@pytest.mark.slow
def test_no_operation_out_of_memory_loses_anything(directory, library):
    result = explore(
        OPERATIONS,
        directory,
        library,
        workers=2,
        first=450,
        every=1800,
        every_other=10,  # all of them: `python -m verification oom`
    )
    check(result)
    assert {operation for operation, *_ in result.outcomes} == {*OPERATIONS}
