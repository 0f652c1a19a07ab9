"""Check that a run resumed from a checkpoint repeats a training step exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _state, _storage, _util, datasets, errors
from flaxckpt._run.checkpointer import Checkpointer, beside, resume, session_of
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch

Values: TypeAlias = dict[LeafPath, Any]

_STEP = 1
_GIVEN = "given"
"""Key of the state passed to `step_fn`, with its values after the call."""


def check(
    checkpointer: Checkpointer,
    state: PyTree,
    step_fn: Callable[..., Any],
    *,
    dataset: Any,
    fresh: PyTree | None,
) -> None:
    """Compares a step from the trained state with a step from the restored state.

    The first step gives the state to save: its types may differ from those of `state`.
    Raises ResumeMismatchError if the results differ.
    """
    _util.arguments.check_function("step_fn", step_fn, "of a state and a batch")
    with _trial_directory(checkpointer) as directory:
        trial = beside(checkpointer, directory)

        def step(begin: PyTree) -> tuple[PyTree, Values]:
            batch = () if dataset is None else (_next_batch(dataset),)
            returned = step_fn(begin, *batch)
            # A function that changes NNX objects in place may return None.
            result = begin if returned is None else returned
            values = {"state": result, _GIVEN: begin, "batch": batch}
            return result, _state.flax_state.leaves_by_path(values)

        with _position_kept(dataset, directory) as rewind:
            given = _copy_state(state)
            result, expected = step(given)
            rewind()
            _compare(
                expected,
                step(_copy_state(state))[1],
                "when the step is repeated from the same state",
                "step_fn or the data are not deterministic, so no run can be repeated:"
                " look for numpy's random numbers, the time, or a dataset that does"
                " not return to its position.",
            )
            paths = _state.flax_state.leaves_by_path(state).keys()
            take_state = _state.flax_state.locate_state(result, paths)
            trained = given if take_state is None else take_state(result)
            trial.save(_STEP, trained, dataset=dataset).wait()
            _, expected = step(_copy_state(trained))
            begin, _ = resume(trial, state if fresh is None else fresh, dataset=dataset)
            _compare(
                expected,
                step(begin)[1],
                "when the step is repeated from the restored state",
                "These values are not saved, or are restored differently: check that"
                " they are leaves of the state, with the types that a step gives them"
                " (jax.eval_shape(step_fn, state)), or part of the dataset's state.",
            )


@contextlib.contextmanager
def _position_kept(dataset: Any, directory: Path) -> Iterator[Callable[[], None]]:
    """Yields a function that returns a dataset to its position; the end calls it."""
    files = None if dataset is None else datasets.state_files(dataset)

    def rewind() -> None:
        if files is not None:
            datasets.set_state(dataset, files, path=directory)

    try:
        yield rewind
    finally:
        rewind()


@contextlib.contextmanager
def _trial_directory(checkpointer: Checkpointer) -> Iterator[Path]:
    """Creates a directory beside the steps; removes the directory at the end."""
    place = session_of(checkpointer).run.saves_in
    with contextlib.ExitStack() as stack:
        final = place / _storage.temporary.RESUME
        try:
            new = stack.enter_context(_storage.transaction.begin(final))
        except OSError as error:
            raise errors.SaveFailedError(
                f"cannot make a directory in {place}: {error}; no step could be saved"
                " there, either. Check that it is writable and has space"
            ) from error
        yield new.directory


def _copy_state(state: PyTree) -> PyTree:
    """Returns a copy of a state, to be donated or changed in place."""
    flat = _state.flax_state.flatten(state)
    return flat.rebuild(
        {path: _copy_leaf(leaf.source) for path, leaf in flat.table.items()}
    )


def _copy_leaf(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.random.clone(value) if _is_key(value) else jnp.copy(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _next_batch(dataset: Any) -> Any:
    try:
        return next(dataset)
    except StopIteration:
        raise errors.DatasetStateError(
            "the dataset has no batch left for a trial step: pass dataset= with at"
            " least one more batch"
        ) from None


def _compare(wanted: Values, found: Values, how: str, advice: str) -> None:
    mismatches = [
        Mismatch(path, _describe(wanted, path), _describe(found, path))
        for path in wanted | found
        if not _is_donated(wanted, path)
        and not _is_donated(found, path)
        and not _is_same(wanted, found, path)
        and not _is_same_number(wanted.get(path), found.get(path))
    ]
    # Do not report a leaf twice if it was changed in place and returned.
    returned = [m for m in mismatches if not m.leaf.startswith(f"{_GIVEN}/")]
    if mismatches:
        raise errors.ResumeMismatchError(how, returned or mismatches, advice)


def _is_donated(values: Values, path: LeafPath) -> bool:
    value = values.get(path)
    return isinstance(value, jax.Array) and value.is_deleted()


def _is_same(wanted: Values, found: Values, path: LeafPath) -> bool:
    if path not in wanted or path not in found:
        return False
    return _state.bits.is_same(wanted[path], found[path])


def _is_same_number(wanted: Any, found: Any) -> bool:
    """Returns True if a scalar came back as an equal Python number."""
    is_number = isinstance(found, int | float | complex)
    is_scalar = isinstance(wanted, jax.Array) and wanted.shape == ()
    return is_number and is_scalar and not _is_key(wanted) and bool(wanted == found)


def _describe(values: Values, path: LeafPath) -> str:
    if path not in values:
        return "nothing"
    value = _state.bits.key_data(values[path])
    if not isinstance(value, jax.Array | np.ndarray):
        return repr(value)[:80]
    name = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    flat = np.asarray(value).ravel()
    shown = ", ".join(str(number) for number in flat[:3])
    return f"{name} of {shown}{', …' if flat.size > 3 else ''}"


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
