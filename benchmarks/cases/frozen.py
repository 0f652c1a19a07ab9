"""Bytes that a second save writes if 99 % of the state is unchanged."""

from __future__ import annotations

from pathlib import Path

import jax

from benchmarks import contenders, states, timing
from benchmarks.contenders import Contender
from benchmarks.samples import Rows, Sample, Series, Settings
from benchmarks.states import PyTree

CASE = "frozen"
_NAMES = ("flaxckpt", "orbax")


def run(settings: Settings) -> Rows:
    """Measures once, because sizes do not vary."""
    selected, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    abstract_state = states.on(jax.devices("cpu")[0], states.lora(quick=settings.quick))
    first = states.fill(abstract_state)
    adapters = states.fill(abstract_state["adapters"], seed=1)
    changed = {
        "same arrays": {"base": first["base"], "adapters": adapters},
        "equal arrays": {"base": states.copy(first["base"]), "adapters": adapters},
    }
    for contender in selected.values():
        for kind, second in changed.items():
            with timing.scratch(settings.directory) as scratch:
                both = _save_both(contender, scratch, first, second, abstract_state)
            figures = ("first save", f"second save, {kind}")
            for figure, written in zip(figures, both, strict=True):
                yield Sample(Series(CASE, figure, contender.name), written, "bytes")


def _save_both(
    contender: Contender,
    directory: Path,
    first: PyTree,
    second: PyTree,
    abstract_state: PyTree,
) -> tuple[int, int]:
    """Returns the bytes that each of two consecutive saves writes."""
    session = contender.open(directory)
    session.save(1, first)
    session.wait()
    before = _unshared_bytes(directory / "1")
    session.save(2, second)
    session.wait()
    states.check_equal(session.restore(1, abstract_state), first)
    states.check_equal(session.restore(2, abstract_state), second)
    session.close()
    return before, _unshared_bytes(directory / "2")


def _unshared_bytes(step: Path) -> int:
    """Returns the size of the files of a step that no other step shares."""
    statuses = [path.lstat() for path in step.rglob("*") if path.is_file()]
    return sum(status.st_size for status in statuses if status.st_nlink == 1)
