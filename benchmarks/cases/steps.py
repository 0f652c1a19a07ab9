"""Seconds to open a directory of 1,000 steps and find the newest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax

from benchmarks import contenders, states, timing
from benchmarks.contenders import Contender
from benchmarks.samples import Rows, Sample, Series, Settings

CASE = "steps"
_NAMES = ("flaxckpt", "orbax")


def run(settings: Settings) -> Rows:
    """Measures in directories that all rounds share."""
    steps = 10 if settings.quick else 1_000
    selected, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    with timing.scratch(settings.directory) as scratch:
        for contender in selected.values():
            _make_steps(contender, scratch / contender.name, steps)
        for turn in timing.turns(list(selected), settings.rounds):
            timing.settle()
            contender = selected[turn.contender]
            session, opening = timing.measure(contender.open, scratch / contender.name)
            latest, listing = timing.measure(session.latest_step)
            session.close()
            if latest != steps:
                raise ValueError(f"{turn.contender} found {latest}, not {steps}")
            if turn.is_timed:
                series = Series(CASE, f"{steps:,} steps: open", turn.contender)
                yield Sample(series, opening + listing)


def _make_steps(contender: Contender, directory: Path, steps: int) -> None:
    """Saves one step, and creates the others as hard links to its files."""
    session = contender.open(directory)
    session.save(
        1, states.fill(states.on(jax.devices("cpu")[0], states.tiny_leaves(10)))
    )
    session.wait()
    session.close()
    for step in range(2, steps + 1):
        shutil.copytree(directory / "1", directory / str(step), copy_function=os.link)
