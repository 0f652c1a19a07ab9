"""One save and its restores, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from benchmarks import states, timing
from benchmarks.contenders import Contender, Session
from benchmarks.samples import Sample, Series
from benchmarks.states import PyTree

Part = Callable[[PyTree], PyTree]
"""Selects the part of a state, abstract or not, to restore."""


def whole(state: PyTree) -> PyTree:
    """Returns the whole state."""
    return state


def measure(
    case: str,
    contender: Contender,
    state: PyTree,
    abstract_state: PyTree,
    directory: Path,
    *,
    check: bool,
    label: str = "",
    parts: Mapping[str, Part] | None = None,
) -> Iterator[Sample]:
    """Saves `state` and restores it.

    The figures are `blocking` (until the save call returns), `commit` (until the
    contender reports the save as complete), `size`, and for each part `restore` and
    `restore and use`, which ends when every leaf has been used in a computation.

    Args:
        case: The case of the samples.
        contender: The contender.
        state: The state to save.
        abstract_state: The state to restore.
        directory: A directory for temporary checkpoints.
        check: True to compare the restored values with `state`; not timed.
        label: A prefix of the name of each figure.
        parts: Name of the figure -> part to restore; by default `restore`: everything.
    """

    def sample(figure: str, value: float) -> Sample:
        series = Series(case, label + figure, contender.name)
        return Sample(series, value, "bytes" if figure == "size" else "s")

    with timing.scratch(directory) as scratch:
        session = contender.open(scratch)
        start = time.perf_counter()
        session.save(1, state)
        blocking = time.perf_counter() - start
        session.wait()
        commit = time.perf_counter() - start
        yield sample("blocking", blocking)
        yield sample("commit", commit)
        yield sample("size", _size(scratch / "1"))
        if contender.restores:
            for figure, part in (parts or {"restore": whole}).items():
                timing.settle()
                restored, restore, use = _restore(session, part(abstract_state))
                yield sample(figure, restore)
                yield sample(f"{figure} and use", restore + use)
                if check:
                    states.check_equal(restored, part(state))
                del restored
        session.close()


def _restore(session: Session, abstract_state: PyTree) -> tuple[PyTree, float, float]:
    restored, restore = timing.measure(
        lambda: jax.block_until_ready(session.restore(1, abstract_state))
    )
    _, use = timing.measure(states.use, restored)
    return restored, restore, use


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())
