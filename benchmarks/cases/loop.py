"""The cost of a save for a training loop that donates its state.

The stall of a save is the time of a loop with saves minus the time of the same loop
without, divided by the number of saves: the blocked time, and the time that the
background save takes from training.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from benchmarks import contenders, states, timing
from benchmarks.contenders import Contender, Session
from benchmarks.samples import Rows, Sample, Series, Settings

CASE = "loop"
_NAMES = ("flaxckpt", "orbax")
_NO_SAVES = "no saves"
_SAVE_EVERY = 10
_SAVES = 3
_BATCH = 128

TrainStep: TypeAlias = Callable[[TrainState], tuple[TrainState, jax.Array]]


def run(settings: Settings) -> Rows:
    """Measures loops with and without saves."""
    layers, width = (2, 32) if settings.quick else (8, 2048)
    selected, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    abstract_state = states.on(
        jax.devices("cpu")[0], states.perceptron(layers=layers, width=width)
    )
    original = states.fill(abstract_state)
    batch = jax.random.normal(jax.random.key(0), (_BATCH, width))
    train_step = functools.partial(_train_step, batch=batch)
    for contender in selected.values():
        _check(contender, original, abstract_state, train_step, settings.directory)

    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for turn in timing.turns([_NO_SAVES, *selected], settings.rounds):
        state = states.copy(original)
        with timing.scratch(settings.directory) as scratch:
            if turn.contender == _NO_SAVES:
                duration = _loop(state, train_step, lambda step, state: None)
            else:
                session = selected[turn.contender].open(scratch)
                duration = _loop(state, train_step, session.save)
                session.wait()
                session.close()
        del state
        if turn.is_timed:
            seconds[turn.contender].append(duration)
            yield Sample(Series(CASE, "whole loop", turn.contender), duration)
    for name in selected:
        for with_saves, without in zip(seconds[name], seconds[_NO_SAVES], strict=True):
            yield Sample(Series(CASE, "stall", name), (with_saves - without) / _SAVES)


def _loop(
    state: TrainState, train_step: TrainStep, save: Callable[[int, TrainState], None]
) -> float:
    """Trains as many steps after the last save as before the first; returns seconds."""
    start = time.perf_counter()
    for step in range(1, _SAVE_EVERY * (_SAVES + 1) + 1):
        state, loss = train_step(state)
        jax.block_until_ready(loss)  # as a loop that prints its loss
        if step % _SAVE_EVERY == 0 and step <= _SAVE_EVERY * _SAVES:
            save(step, state)
    jax.block_until_ready(state)
    return time.perf_counter() - start


@functools.partial(jax.jit, donate_argnums=0)
def _train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: states.PyTree) -> jax.Array:
        values = batch
        for layer in params.values():
            values = jnp.tanh(values @ layer["kernel"] + layer["bias"])
        return jnp.mean(values**2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def _check(
    contender: Contender,
    original: TrainState,
    abstract_state: TrainState,
    train_step: TrainStep,
    directory: Path,
) -> None:
    """Checks that a save has the state at the call, although the loop donates it."""
    with timing.scratch(directory) as scratch:
        session: Session = contender.open(scratch)
        state = states.copy(original)
        session.save(1, state)
        for _ in range(2):
            state, _ = train_step(state)
        session.wait()
        states.check_equal(session.restore(1, abstract_state), original)
        session.close()
