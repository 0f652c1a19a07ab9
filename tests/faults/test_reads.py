"""Whatever cannot be read, values are exact, or an error says that they are not there.

The N-th of the calls that read, list or look fails, or reads less than it was asked to.
By default some N of each scenario are tried; `FLAXCKPT_EVERY_FAULT=1` tries all, which
takes hours.
"""

import collections
import errno
import os
import random

import pytest

from tests.faults import scenarios, shim
from tests.helpers import slow

EVERY = bool(os.environ.get("FLAXCKPT_EVERY_FAULT"))
TRIED = {"read": 4, "written": 3}
"""How many calls fail of a scenario that reads, and of one that writes."""

FAULTS = {
    "one error": {"what": errno.EIO, "sticky": False},
    "broken disk": {"what": errno.EIO, "sticky": True},
    "short read": {"what": shim.SHORT, "sticky": False},
    "short reads": {"what": shim.SHORT, "sticky": True},
}


ENDED = {0, 3}  # done, or failed as it should


def outcomes(worker, directory, scenario, fault, tried):
    """How a scenario ends, with each fault; and all that is wrong."""
    base, work = directory / "base", directory / "work"
    assert worker("prepare", scenario=scenario, base=base)["code"] == 0
    request = {"scenario": scenario, "base": base, "work": work, **FAULTS[fault]}
    request["counted"] = shim.READS
    calls = worker("run", at=0, **(request | {"what": shim.COUNT}))["seen"]
    assert calls >= 10
    chosen = range(1, calls + 1)
    if not EVERY:
        chance = random.Random(f"{scenario} {fault}")
        chosen = sorted(chance.sample(chosen, min(tried, calls)))
    ended, problems = collections.Counter(), []
    for at in chosen:
        done = worker("run", at=at, **request)
        restored = [row[1] for row in done["rows"] if row[0] == "restored"]
        ended[done["code"], *restored] += 1
        found = done["problems"]
        if done["code"] == "hang":
            found.append("it hangs")
        elif done["code"] not in ENDED | ({1} if scenario == "JustEnds" else set()):
            told = [row[1] for row in done["rows"] if row[0] == "unexpected"]
            found.append(f"wrong values, or an error not of flaxckpt: {told}")
        problems += [f"call {at} of {calls}: {problem}" for problem in found]
    return ended, problems


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", slow.all_but(scenarios.READING, ["Reads"]))
def test_read_faults_yield_exact_values_or_errors(worker, directory, scenario, fault):
    ended, problems = outcomes(worker, directory, scenario, fault, TRIED["read"])
    assert not problems, "\n".join(problems)
    if "short" in fault:
        assert {code for code, *_ in ended} == {0}, "the rest is read, too"
        assert {step for _, *steps in ended for step in steps} <= {1, 2}


@pytest.mark.parametrize(
    "scenario", slow.all_but(scenarios.SCENARIOS, ["NewStep", "Retention"])
)
def test_read_errors_during_run_lose_nothing(worker, directory, scenario):
    _, problems = outcomes(worker, directory, scenario, "one error", TRIED["written"])
    assert not problems, "\n".join(problems)
