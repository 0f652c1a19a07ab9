"""Whether a run goes on from a checkpoint as if nothing had happened: tried out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _flax, _steps, _storage, errors
from flaxckpt._checkpointer import Checkpointer
from flaxckpt._info import LeafTable
from flaxckpt._types import PyTree
from flaxckpt.errors import Mismatch

_STEP = 0


def check(
    checkpointer: Checkpointer,
    state: PyTree,
    step_fn: Callable[..., Any],
    *,
    dataset: Any,
    fresh: PyTree | None,
) -> None:
    """Takes one step from a state, and from the same state restored; compares.

    Raises:
        ResumeMismatchError: They differ; all leaves that do are named.
    """
    directory = checkpointer.directory / f"resume{_steps.TEMPORARY}-{os.getpid()}"
    trial = checkpointer.sibling(directory)
    try:
        trial.save(_STEP, state, dataset=dataset).wait()

        def step(begin: PyTree) -> LeafTable:
            batch = () if dataset is None else (next(dataset),)
            made = step_fn(begin, *batch)
            # What is changed in place, as NNX objects are, need not be returned.
            return _table({"state": begin if made is None else made, "batch": batch})

        try:
            straight = step(_copied(state))
            _rewind(trial, state, dataset)
            _compare(
                straight,
                step(_copied(state)),
                "when the step is done twice from one state",
                "step_fn or the data are not deterministic, so that no run can be"
                " repeated: look for numpy's random numbers, the time, or a dataset"
                " that does not come back to where it was.",
            )
            begin = trial.restore(
                state if fresh is None else fresh, step=_STEP, dataset=dataset
            )
            _compare(
                straight,
                step(begin),
                "when the step is done from the restored state",
                "What differs is not saved, or comes back otherwise: see that it is a"
                " leaf of the state, or in the state of the dataset.",
            )
        finally:
            _rewind(trial, state, dataset)
    finally:
        _storage.remove_tree(directory)


def _rewind(trial: Checkpointer, state: PyTree, dataset: Any) -> None:
    if dataset is not None:
        trial.restore_dataset(dataset, step=_STEP)


def _copied(state: PyTree) -> PyTree:
    """A state of its own, which may be donated or changed in place."""
    flat = _flax.flatten(state)
    return flat.rebuild({path: _copy(leaf.source) for path, leaf in flat.table.items()})


def _copy(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.random.clone(value) if _is_key(value) else jnp.copy(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _table(tree: PyTree) -> LeafTable:
    return _flax.flatten(tree).table


def _compare(wanted: LeafTable, found: LeafTable, how: str, advice: str) -> None:
    mismatches = [
        Mismatch(path, _text(wanted, path), _text(found, path))
        for path in wanted | found
        if _bits(wanted, path) != _bits(found, path)
    ]
    if mismatches:
        raise errors.ResumeMismatchError(how, mismatches, advice)


def _bits(table: LeafTable, path: str) -> object:
    """What is equal if, and only if, a leaf is."""
    if path not in table:
        return None
    value = table[path].source
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(_data(value))
        return str(value.dtype), array.shape, array.tobytes()
    return type(value), value


def _text(table: LeafTable, path: str) -> str:
    if path not in table:
        return "nothing"
    value = table[path].source
    value = _data(value)
    if not isinstance(value, jax.Array | np.ndarray) or value.size == 0:
        return str(table[path].info) if hasattr(value, "shape") else repr(value)[:80]
    flat = np.asarray(value).ravel()
    shown = ", ".join(str(number) for number in flat[:3])
    return f"{table[path].info} of {shown}{', …' if flat.size > 3 else ''}"


def _data(value: Any) -> Any:
    """What can be shown and compared of a value: of random keys, their numbers."""
    is_key = isinstance(value, jax.Array) and _is_key(value)
    return jax.random.key_data(value) if is_key else value


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
