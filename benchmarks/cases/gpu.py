"""A state on a GPU: how long a save blocks, beside the copy to the host alone."""

from __future__ import annotations

import jax

from benchmarks import contenders, roundtrip, states, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "gpu"
_NAMES = ("flaxckpt", "orbax", "orbax v1")
_COPY = "device to host"


def run(settings: Settings) -> Rows:
    """Measures it, if jax has a GPU."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        yield Skip(CASE, "all", "jax has no GPU here")
        return
    yield from measure(settings, device)


def measure(settings: Settings, device: jax.Device) -> Rows:
    """Measures a state on `device`; what is restored is put there again."""
    found, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    by_name = {contender.name: contender for contender in found}
    abstract_state = states.on(device, states.train_state(quick=settings.quick))
    original = states.fill(abstract_state)
    states.use(original)
    for turn in timing.turns([_COPY, *by_name], settings.rounds):
        # A new copy every time: jax keeps the host's values of arrays it has copied.
        state = states.copy(original)
        if turn.contender == _COPY:
            timing.settle()
            # It starts the copies of all arrays before it waits for the first.
            _, seconds = timing.timed(jax.device_get, state)
            samples = iter([Sample(Series(CASE, "blocking", _COPY), seconds)])
        else:
            samples = roundtrip.measure(
                CASE,
                by_name[turn.contender],
                state,
                abstract_state,
                settings.directory,
                check=turn.is_first,
            )
        yield from (sample for sample in samples if turn.is_timed)
