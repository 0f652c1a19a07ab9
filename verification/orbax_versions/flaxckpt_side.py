"""Writes checkpoints for Orbax with flaxckpt, and reads those of Orbax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import flaxckpt
from verification.orbax_versions import states

LAYOUTS: Final = {
    "raw": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "compact": flaxckpt.ArrayLayout(codec="compact"),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2),
}


def write(directory: Path) -> None:
    """Writes states in all layouts below `directory`, and steps with several items."""
    for layout_name, layout in LAYOUTS.items():
        # The kind of a leaf that is no array has no part in the codec or zarr version.
        all_states = layout_name == "raw"
        for name in states.STATES if all_states else states.ARRAYS:
            root = directory / layout_name / name
            with flaxckpt.Checkpointer(root, layout=layout) as checkpointer:
                checkpointer.save(states.STEP, states.STATES[name]())
    for name, items in states.ITEMS.items():
        state = states.items_state() if name == states.TWO_ITEMS else states.arrays()
        with flaxckpt.Checkpointer(directory / "items" / name, items=items) as run:
            run.save(
                states.STEP,
                state,
                metrics=states.METRICS,
                json={"config": states.CONFIG},
            )


def read(directory: Path) -> dict[str, dict[str, str]]:
    """Reads the checkpoints below `directory`: writer -> state -> outcome."""
    return {
        writer.name: {
            root.name: outcome(partial(read_state, root))
            for root in sorted(writer.iterdir())
            if (root / str(states.STEP)).is_dir()
        }
        for writer in sorted(directory.iterdir())
    }


def read_state(root: Path) -> str:
    """Returns how a step reads, with and without a state to restore into."""
    step = root / str(states.STEP)
    found = flaxckpt.metadata(step)
    saved = ({}, {})
    if root.parent.name == states.COMPOSITE:
        saved = (states.METRICS, {"config": states.CONFIG})
    if (found.metrics, found.json) != saved:
        return f"{states.WRONG}: {found.metrics}, {found.json}"
    has_items = root.name == states.TWO_ITEMS
    state = states.items_state() if has_items else states.STATES[root.name]()
    outcomes = (
        states.compare(flaxckpt.load(step), state),
        states.compare(
            flaxckpt.load(root, states.abstract(state)), state, has_target=True
        ),
    )
    return next((o for o in outcomes if o != states.EQUAL), states.EQUAL)


def outcome(function: Callable[[], str]) -> str:
    try:
        return function()
    except flaxckpt.errors.CheckpointError as error:
        return f"refused: {type(error).__name__}: {error}"[:400]
