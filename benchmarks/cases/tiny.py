"""Thousands of tiny leaves: the cost per leaf."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import jax

from benchmarks import contenders, roundtrip, states, timing
from benchmarks.samples import Rows, Settings

CASE = "tiny"
_NAMES = ("flaxckpt", "orbax", "orbax v1", "safetensors", "numpy savez")
_SLOW = ("orbax", "orbax v1")
_SLOW_ROUNDS = 2
"""Rounds of contenders that take a minute each."""


def run(settings: Settings) -> Rows:
    """Measures both numbers of leaves."""
    few, many = (20, 200) if settings.quick else (2_000, 20_000)
    selected, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    for count in (few, many):
        yield from _measure(count, selected, settings, is_long=count == many)


def _measure(
    count: int,
    selected: Mapping[str, contenders.Contender],
    settings: Settings,
    *,
    is_long: bool,
) -> Rows:
    abstract_state = states.on(jax.devices("cpu")[0], states.tiny_leaves(count))
    original = states.fill(abstract_state)
    states.use(original)
    turn_counts: collections.Counter[str] = collections.Counter()
    # The smaller number has imported and compiled everything, so the larger number
    # needs no warm-up.
    for turn in timing.turns(list(selected), settings.rounds, warm_up=not is_long):
        turn_counts[turn.contender] += 1
        is_slow = is_long and turn.contender in _SLOW
        if is_slow and turn_counts[turn.contender] > _SLOW_ROUNDS:
            continue
        samples = roundtrip.measure(
            CASE,
            selected[turn.contender],
            states.copy(original),
            abstract_state,
            settings.directory,
            check=turn.is_first,
            label=f"{count:,} leaves: ",
        )
        yield from (sample for sample in samples if turn.is_timed)
