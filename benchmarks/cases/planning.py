"""Seconds to plan the save of very many leaves, on the caller's thread."""

from __future__ import annotations

from pathlib import Path

import jax

from benchmarks import states, timing
from benchmarks.samples import Rows, Sample, Series, Settings
from benchmarks.states import PyTree
from flaxckpt._checkpoint import save as checkpoint_save
from flaxckpt._checkpoint.commit import SaveRequest

CASE = "planning"


def run(settings: Settings) -> Rows:
    """Measures two numbers of leaves, to show that time is linear in the number."""
    counts = (100, 1_000) if settings.quick else (10_000, 100_000)
    cpu = jax.devices("cpu")[0]
    filled = {
        f"{count:,} leaves": states.fill(states.on(cpu, states.tiny_leaves(count)))
        for count in counts
    }
    for turn in timing.turns(list(filled), settings.rounds):
        timing.settle()
        path = settings.directory / "never-written"
        _, seconds = timing.measure(_plan, path, filled[turn.contender])
        if turn.is_timed:
            yield Sample(Series(CASE, turn.contender, "flaxckpt"), seconds)


def _plan(path: Path, state: PyTree) -> object:
    return checkpoint_save.take_snapshot(SaveRequest(path=path), state)
