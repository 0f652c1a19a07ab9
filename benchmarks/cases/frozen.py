"""Bytes that a second save writes, if 99 % of the state have not changed."""

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
    """Measures it once: sizes do not vary."""
    found, skips = contenders.select(CASE, _NAMES, settings)
    yield from skips
    abstract_state = states.on(jax.devices("cpu")[0], states.lora(quick=settings.quick))
    first = states.fill(abstract_state)
    adapters = states.fill(abstract_state["adapters"], seed=1)
    changed = {
        "same arrays": {"base": first["base"], "adapters": adapters},
        "equal arrays": {"base": states.copy(first["base"]), "adapters": adapters},
    }
    for contender in found:
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
    """The bytes that each of two saves in a row has written."""
    session = contender.open(directory)
    session.save(1, first)
    session.wait()
    before = _own_bytes(directory / "1")
    session.save(2, second)
    session.wait()
    states.check_equal(session.restore(1, abstract_state), first)
    states.check_equal(session.restore(2, abstract_state), second)
    session.close()
    return before, _own_bytes(directory / "2")


def _own_bytes(step: Path) -> int:
    """Size of the files of a step that are not those of another, too."""
    found = [path.lstat() for path in step.rglob("*") if path.is_file()]
    return sum(status.st_size for status in found if status.st_nlink == 1)
