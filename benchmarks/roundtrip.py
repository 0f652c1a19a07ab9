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
"""Cuts what to restore out of a state, abstract or not."""


def whole(state: PyTree) -> PyTree:
    """All of a state."""
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

    The figures are `blocking` (until the contender lets its caller go on), `commit`
    (until it calls the save complete), `size`, and for each part `restore` and
    `restore and use`, which goes on until every leaf has been computed with.

    Args:
        case: For the samples, like `label`.
        contender: Who.
        state: What to save.
        abstract_state: What to restore.
        directory: Where; what is written there is deleted.
        check: Whether what comes back is compared with `state`, outside of all times.
        label: What to put before the name of each figure.
        parts: Name of the figure -> what to restore; by default all, as `restore`.
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
    restored, restore = timing.timed(_restored, session, abstract_state)
    _, use = timing.timed(states.use, restored)
    return restored, restore, use


def _restored(session: Session, abstract_state: PyTree) -> PyTree:
    return jax.block_until_ready(session.restore(1, abstract_state))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())
