"""GPT-2 small with AdamW: blocked time, commit, size and restore."""

from __future__ import annotations

import jax

from benchmarks import contenders, roundtrip, states, timing
from benchmarks.samples import Rows, Settings

CASE = "train_state"
_PARTS = {
    "restore": roundtrip.whole,
    "params only": lambda state: {"params": state.params},
}


def run(settings: Settings) -> Rows:
    """Measures saves and restores."""
    selected, skips = contenders.select(
        CASE, (*contenders.OF_LARGE_STATES, "raw write"), settings
    )
    yield from skips

    abstract_state = states.on(
        jax.devices("cpu")[0], states.train_state(quick=settings.quick)
    )
    original = states.fill(abstract_state)
    states.use(original)
    for turn in timing.turns(list(selected), settings.rounds):
        contender = selected[turn.contender]
        samples = roundtrip.measure(
            CASE,
            contender,
            states.copy(original),
            abstract_state,
            settings.directory,
            check=turn.is_first,
            parts=_PARTS if contender.restores_parts else None,
        )
        yield from (sample for sample in samples if turn.is_timed)
