"""A state on a GPU: the blocked time of a save, and the time of a copy to the host."""

from __future__ import annotations

import jax

from benchmarks import contenders, roundtrip, states, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "gpu"
_NAMES = ("flaxckpt", "orbax", "orbax v1")
_COPY = "device to host"


def run(settings: Settings) -> Rows:
    """Measures the case if jax has a GPU."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        yield Skip(CASE, "all", "jax has no GPU here")
        return
    yield from measure(settings, device)


def measure(settings: Settings, device: jax.Device) -> Rows:
    """Measures a state on `device`, and restores it to `device`."""
    selected, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    abstract_state = states.on(device, states.train_state(quick=settings.quick))
    original = states.fill(abstract_state)
    states.use(original)
    for turn in timing.turns([_COPY, *selected], settings.rounds):
        # A new copy each time: jax caches the host copy of an array.
        state = states.copy(original)
        if turn.contender == _COPY:
            timing.settle()
            # It starts all copies before it waits for the first.
            _, seconds = timing.measure(jax.device_get, state)
            samples = iter([Sample(Series(CASE, "blocking", _COPY), seconds)])
        else:
            samples = roundtrip.measure(
                CASE,
                selected[turn.contender],
                state,
                abstract_state,
                settings.directory,
                check=turn.is_first,
            )
        yield from (sample for sample in samples if turn.is_timed)
