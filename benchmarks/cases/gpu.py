"""A state on a GPU: what saves cost a loop of donating steps, beside copies alone.

The pause of a save is the time from its call until the next step, which donates the
state, has ended, less the time of a step.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import contenders, memory, roundtrip, states, timing
from benchmarks.contenders import Contender, Session
from benchmarks.samples import Rows, Sample, Series, Settings, Skip
from benchmarks.states import PyTree

CASE = "gpu"
NO_SAVES = "no saves"
PINNED = "to pinned memory"
BESIDE = "step during a save"
_NAMES = (
    "flaxckpt",
    "flaxckpt pageable",
    "flaxckpt device",
    "flaxckpt device pageable",
    "orbax",
    "orbax v1",
)
_STEP_SECS = 0.02
_STEPS = 10
_MANY_SAVES = 50


def run(settings: Settings) -> Rows:
    """Measures the case if jax has a GPU."""
    try:
        device = jax.devices(settings.platform)[-1]
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
    loop = _Loop(device, settings)
    copies = _copies(device)
    for turn in timing.turns([*copies, *selected], settings.rounds):
        # A new copy each time: jax caches the host copy of an array.
        state = states.copy(original)
        if turn.contender in copies:
            timing.settle()
            _, seconds = timing.measure(copies[turn.contender], state)
            samples = iter([Sample(Series(CASE, "copy", turn.contender), seconds)])
        else:
            samples = _measure_contender(
                selected[turn.contender], state, original, abstract_state, loop
            )
            if turn.is_first:
                _check_donation(
                    selected[turn.contender], original, abstract_state, loop
                )
        for sample in samples:
            if turn.is_timed:
                yield sample
    for contender in selected.values():
        yield from _many_saves(contender, device, settings)


# ---- copies alone ---------------------------------------------------------------


def _copies(device: jax.Device) -> dict[str, Callable[[PyTree], object]]:
    """Returns the ways to copy a state, the limits of a save: name -> function."""
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    beside = jax.sharding.SingleDeviceSharding(device)
    program = jax.jit(lambda state: jax.tree.map(jnp.copy, state))

    def put(sharding: jax.sharding.Sharding) -> Callable[[PyTree], object]:
        return lambda state: jax.block_until_ready(
            jax.device_put(state, sharding, may_alias=False)
        )

    return {
        PINNED: put(pinned),
        # It starts all transfers before it waits for the first.
        "to pageable memory": jax.device_get,
        "within the device": lambda state: jax.block_until_ready(program(state)),
        "within the device, device_put": put(beside),
    }


# ---- a loop of donating steps ------------------------------------------------------


class _Loop:
    """Steps of some milliseconds that donate a state.

    Args:
        device: The device of the state.
        settings: The settings.

    Attributes:
        directory: A directory for temporary checkpoints.
    """

    def __init__(self, device: jax.Device, settings: Settings) -> None:
        self.directory = settings.directory
        size = 64 if settings.quick else 4096
        self._matrix = jax.device_put(jnp.eye(size), device)
        self._products = 1
        state = jax.device_put(jnp.zeros(3), device)
        for _ in range(3):  # the first compiles
            state, seconds = self.step(state)
        target = _STEP_SECS / 10 if settings.quick else _STEP_SECS
        self._products = 1000
        state, seconds = self.step(state)
        self._products = max(1, round(1000 * target / seconds))

    def step(self, state: PyTree) -> tuple[PyTree, float]:
        """Returns the next state, and the seconds of the step."""
        start = time.perf_counter()
        state, self._matrix = _step(state, self._matrix, self._products)
        jax.block_until_ready((state, self._matrix))
        return state, time.perf_counter() - start

    def steps(self, state: PyTree) -> tuple[PyTree, float]:
        """Returns the state after some steps, and the median seconds of a step."""
        seconds = []
        for _ in range(_STEPS):
            state, last = self.step(state)
            seconds.append(last)
        return state, statistics.median(seconds)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(state: PyTree, matrix: jax.Array, products: int) -> tuple[PyTree, jax.Array]:
    matrix = jax.lax.fori_loop(0, products, lambda _, m: jnp.tanh(m @ m), matrix)
    return jax.tree.map(lambda x: x + x.dtype.type(1), state), matrix


def _measure_contender(
    contender: Contender,
    state: PyTree,
    original: PyTree,
    abstract_state: PyTree,
    loop: _Loop,
) -> Iterator[Sample]:
    """Yields the figures of a save in a loop, and of a save and a restore."""
    with timing.scratch(loop.directory) as scratch:
        session = contender.open(scratch)
        yield from _save_in_loop(contender.name, session, state, loop)
        session.close()
    yield from roundtrip.measure(
        CASE,
        contender,
        states.copy(original),
        abstract_state,
        loop.directory,
        check=False,
    )


def _save_in_loop(
    name: str, session: Session, state: PyTree, loop: _Loop
) -> Iterator[Sample]:
    state, _ = loop.step(state)
    state, alone = loop.steps(state)
    start = time.perf_counter()
    session.save(1, state)
    state, _ = loop.step(state)
    pause = time.perf_counter() - start - alone
    yield Sample(Series(CASE, "pause", name), pause)
    waiting = threading.Thread(target=session.wait)
    waiting.start()
    beside = []
    while waiting.is_alive():
        state, seconds = loop.step(state)
        beside.append(seconds)
    waiting.join()
    if beside:
        yield Sample(Series(CASE, BESIDE, name), statistics.mean(beside))
    yield Sample(Series(CASE, BESIDE, NO_SAVES), alone)


def _check_donation(
    contender: Contender, original: PyTree, abstract_state: PyTree, loop: _Loop
) -> None:
    """Checks that a save has the state at the call, although the loop donates it."""
    with timing.scratch(loop.directory) as scratch:
        session = contender.open(scratch)
        state = states.copy(original)
        session.save(1, state)
        for _ in range(2):
            state, _ = loop.step(state)
        session.wait()
        states.check_equal(session.restore(1, abstract_state), original)
        session.close()


# ---- many saves -----------------------------------------------------------------


def _many_saves(
    contender: Contender, device: jax.Device, settings: Settings
) -> Iterator[Sample]:
    """Yields by how much memory grows from the tenth save to the last."""
    layers, width = (1, 32) if settings.quick else (4, 1024)
    abstract_state = states.on(device, states.perceptron(layers=layers, width=width))
    state = states.fill(abstract_state)
    before = (0, 0)
    with timing.scratch(settings.directory) as scratch:
        session = contender.open(Path(scratch))
        for number in range(1, _MANY_SAVES + 1):
            state = states.copy(state)
            session.save(number, state)
            session.wait()
            if number == 10:
                before = _memory(device)
        after = _memory(device)
        session.close()
    for kind, first, last in zip(("host", "device"), before, after, strict=True):
        series = Series(
            CASE, f"{kind} memory of {_MANY_SAVES - 10} saves", contender.name
        )
        yield Sample(series, last - first, "bytes")


def _memory(device: jax.Device) -> tuple[int, int]:
    """Returns the bytes in use of this process, and of the device, 0 if unknown."""
    timing.settle()
    stats = device.memory_stats() or {}
    return memory.resident_bytes(), stats.get("bytes_in_use", 0)
