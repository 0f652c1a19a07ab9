"""A restore while the training step compiles, compared with one after the other.

The files are read from the disk, as by a job that restarts on another machine.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

import flaxckpt
from benchmarks import contenders, states, timing
from benchmarks.samples import Rows, Sample, Series, Settings

CASE = "overlap"
_BATCH = 8

Action: TypeAlias = Callable[[], object]


def run(settings: Settings) -> Rows:
    """Measures a restore and a compilation, alone, in sequence, and side by side."""
    selected, skips = contenders.select(CASE, ("flaxckpt",), settings)
    yield from skips
    if not selected:
        return
    layers, width = (2, 32) if settings.quick else (60, 1056)
    abstract_state = states.on(
        jax.devices("cpu")[0], states.perceptron(layers=layers, width=width)
    )
    batch = jax.ShapeDtypeStruct((_BATCH, width), jnp.float32)
    with timing.scratch(settings.directory) as scratch:
        path = scratch / "1"
        original = states.fill(abstract_state)
        flaxckpt.save(path, original)
        states.check_equal(_overlapped(path, abstract_state, batch)[0], original)
        del original
        actions = _actions(path, abstract_state, batch)
        for turn in timing.turns(list(actions), settings.rounds):
            timing.settle()
            _forget_cached(path)
            _, seconds = timing.measure(actions[turn.contender])
            if turn.is_timed:
                yield Sample(Series(CASE, turn.contender, "flaxckpt"), seconds)


def _actions(
    path: Path, abstract_state: TrainState, batch: jax.ShapeDtypeStruct
) -> dict[str, Action]:
    """Returns the actions to measure, by the names of their figures."""

    def restore() -> object:
        state = flaxckpt.load(path, abstract_state)
        states.use(state)
        return state

    def compile_step() -> object:
        return _compile(abstract_state, batch)

    def overlapped() -> None:
        state, _ = _overlapped(path, abstract_state, batch)
        states.use(state)

    return {
        "restore": restore,
        "compile": compile_step,
        "restore, then compile": lambda: (restore(), compile_step()),
        "restore while compiling": overlapped,
    }


def _forget_cached(directory: Path) -> None:
    """Drops the files of a checkpoint from the page cache, where the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _overlapped(
    path: Path, abstract_state: TrainState, batch: jax.ShapeDtypeStruct
) -> tuple[Any, object]:
    loading = flaxckpt.load_async(path, abstract_state)
    step = _compile(abstract_state, batch)
    return loading.wait(), step


_seeds = itertools.count()
"""A different constant for each compilation, so that no cache has it."""


def _compile(abstract_state: TrainState, batch: jax.ShapeDtypeStruct) -> object:
    """Compiles a training step ahead of time, without its values."""
    seed = next(_seeds)

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: states.PyTree) -> jax.Array:
            values = batch + seed
            for layer in params.values():
                values = jnp.tanh(values @ layer["kernel"] + layer["bias"])
            return jnp.mean(values**2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return jax.jit(train_step, donate_argnums=0).lower(abstract_state, batch).compile()
