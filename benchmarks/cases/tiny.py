"""Thousands of tiny leaves, where all cost is per leaf."""

from __future__ import annotations

import collections

import jax

from benchmarks import contenders, roundtrip, states, timing
from benchmarks.samples import Rows, Settings

CASE = "tiny"
_NAMES = ("flaxckpt", "orbax", "orbax v1", "safetensors", "numpy savez")
_SLOW = ("orbax", "orbax v1")
_SLOW_ROUNDS = 2
"""Rounds of what takes a minute each."""


def run(settings: Settings) -> Rows:
    """Measures both numbers of leaves."""
    few, many = (20, 200) if settings.quick else (2_000, 20_000)
    found, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    for count in (few, many):
        yield from _measure(count, found, settings, is_long=count == many)


def _measure(
    count: int,
    found: list[contenders.Contender],
    settings: Settings,
    *,
    is_long: bool,
) -> Rows:
    by_name = {contender.name: contender for contender in found}
    abstract_state = states.on(jax.devices("cpu")[0], states.tiny_leaves(count))
    original = states.fill(abstract_state)
    states.use(original)
    turns_of: collections.Counter[str] = collections.Counter()
    # Imports and compilations were done for the smaller number, so the larger one
    # needs no warm-up.
    for turn in timing.turns(list(by_name), settings.rounds, warm_up=not is_long):
        turns_of[turn.contender] += 1
        is_slow = is_long and turn.contender in _SLOW
        if is_slow and turns_of[turn.contender] > _SLOW_ROUNDS:
            continue
        samples = roundtrip.measure(
            CASE,
            by_name[turn.contender],
            states.copy(original),
            abstract_state,
            settings.directory,
            check=turn.is_first,
            label=f"{count:,} leaves: ",
        )
        yield from (sample for sample in samples if turn.is_timed)
