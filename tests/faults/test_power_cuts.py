"""What was acknowledged survives a power cut, whatever of the rest is lost."""

import json
import os
import random
import shutil

import pytest

from tests.faults import power, scenarios
from tests.helpers import slow

CUT = [
    "FirstSave",
    "NewStep",
    "OverDirectories",
    "Encoded",
    "Retention",
    "DatasetsLetGo",
    "Overwrite",
    "Delete",
    "AddMetrics",
    "Pins",
]
STATES = 20  # of each, drawn from all that differ
EVERY = bool(os.environ.get("FLAXCKPT_EVERY_FAULT"))


def problems_of(worker, directory, scenario, *, most=STATES):
    """Yields what is wrong after cuts at all calls; each with the call.

    Args:
        worker: The process that runs the scenario.
        directory: Where the run and its journal are.
        scenario: The name of the scenario.
        most: How many states are looked at, drawn from all that differ.
    """
    base, work, journal = (directory / name for name in ("base", "work", "journal"))
    assert worker("prepare", scenario=scenario, base=base)["code"] == 0
    rows = scenarios.Log.read(base / "log")
    disk = power.Disk(base / "run")
    done = worker("record", scenario=scenario, base=base, journal=journal)
    assert done["code"] == 0
    calls = disk.replay(journal.read_bytes())
    assert calls > 10
    chance = random.Random(scenario)
    different = {}
    for when in range(calls + 1):
        told = [json.loads(text) for at, text in disk.notes if at < when]
        for lost in disk.losses(when, chance):
            state = disk.state(disk.applied(when, lost))
            different[power.digest(state), len(told)] = when, state, told
    states = list(different.values())
    chosen = states if EVERY else chance.sample(states, min(most, len(states)))
    for when, state, told in [*chosen, states[-1]]:
        power.put(state, work / "run")
        found = worker("look", scenario=scenario, work=work, rows=rows + told)
        yield from (f"cut at call {when}: {each}" for each in found["problems"])
        shutil.rmtree(work)


@pytest.mark.parametrize("scenario", slow.all_but(CUT, ["Pins"]))
def test_power_cut_loses_no_acknowledged_save(worker, directory, scenario):
    problems = list(problems_of(worker, directory, scenario))
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_detects_save_without_syncs(worker, directory):
    missing = {"is gone", "cannot be read"}  # until a state shows it
    for problem in problems_of(worker, directory, "Careless", most=1000):
        missing -= {sign for sign in missing if sign in problem}
        if not missing:
            break
    assert not missing
