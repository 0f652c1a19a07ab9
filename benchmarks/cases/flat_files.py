"""Restores from safetensors, beside our own format and the two obvious lines of code.

Sixteen arrays of 8 MiB, restored on the CPU and used. `flaxckpt converted` reads a file
that flaxckpt wrote, whose arrays are aligned and mapped; `flaxckpt safetensors` reads a
file of the safetensors package, whose arrays are not aligned and are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import flaxckpt
from benchmarks import states, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip
from benchmarks.states import PyTree

CASE = "flat_files"
_FILES, _CASTS = "restore and use", "bfloat16 to float32"

_Restores: TypeAlias = Mapping[str, Callable[[], PyTree]]


def run(settings: Settings) -> Rows:
    """Measures restores of one type, and restores with a cast."""
    try:
        import safetensors.flax
    except ImportError as error:
        yield Skip(CASE, "all", str(error))
        return
    rows = 16 if settings.quick else 1024
    shape = jax.ShapeDtypeStruct((rows, 2048), jnp.float32)
    abstract_state = {f"layer_{i}": {"kernel": shape} for i in range(16)}
    state = states.fill(abstract_state)
    with timing.scratch(settings.directory) as scratch:
        own, converted = scratch / "own", scratch / "converted.safetensors"
        wide, narrow = (scratch / f"{name}.safetensors" for name in ("f32", "bf16"))
        flaxckpt.save(own, state)
        flaxckpt.convert(own, converted)
        tensors = {f"{name}.kernel": layer["kernel"] for name, layer in state.items()}
        safetensors.flax.save_file(tensors, wide)
        halves = {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
        safetensors.flax.save_file(halves, narrow)

        def load(path: Path) -> Callable[[], PyTree]:
            return lambda: flaxckpt.load(path, abstract_state)

        def load_and_cast() -> PyTree:
            loaded = safetensors.flax.load_file(narrow)
            return {name: array.astype(jnp.float32) for name, array in loaded.items()}

        yield from _measure(
            settings,
            _FILES,
            {
                "flaxckpt": load(own),
                "flaxckpt converted": load(converted),
                "flaxckpt safetensors": load(wide),
                "safetensors.flax": lambda: safetensors.flax.load_file(wide),
            },
            tensors,
        )
        yield from _measure(
            settings,
            _CASTS,
            {"flaxckpt": load(narrow), "safetensors.flax": load_and_cast},
            {name: array.astype(jnp.float32) for name, array in halves.items()},
        )


def _measure(
    settings: Settings, figure: str, restores: _Restores, expected: PyTree
) -> Rows:
    for turn in timing.turns(list(restores), settings.rounds):
        timing.settle()
        restored, seconds = timing.measure(_restore_and_use, restores[turn.contender])
        if turn.is_first:
            _check_equal(restored, expected)
        del restored
        if turn.is_timed:
            yield Sample(Series(CASE, figure, turn.contender), seconds)


def _restore_and_use(restore: Callable[[], PyTree]) -> PyTree:
    restored = restore()
    states.use(restored)
    return restored


def _check_equal(restored: PyTree, expected: Mapping[str, jax.Array]) -> None:
    """Compares arrays bit for bit, in nested or in flat dicts.

    Raises:
        ValueError: They differ.
    """
    for name, array in expected.items():
        layer, _, leaf = name.rpartition(".")
        found = restored[name] if name in restored else restored[layer][leaf]
        if not np.array_equal(np.asarray(found), np.asarray(array)):
            raise ValueError(f"{name} was restored with other values")
