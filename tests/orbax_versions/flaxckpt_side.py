"""Writes checkpoints for Orbax with flaxckpt, and reads those of Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import flaxckpt
from flaxckpt._checkpoint import save as saving
from flaxckpt._checkpoint.commit import SaveOptions, SaveRequest
from flaxckpt.formats._native.items import Items
from tests.orbax_versions import states

LAYOUTS: Final = {
    "files": flaxckpt.ArrayLayout(store="files"),
    "ocdbt": flaxckpt.ArrayLayout(store="ocdbt"),
    "files, zstd": flaxckpt.ArrayLayout(store="files", codec="zstd"),
    "files, compact": flaxckpt.ArrayLayout(store="files", codec="compact"),
    "ocdbt, compact": flaxckpt.ArrayLayout(store="ocdbt", codec="compact"),
    "files, zarr 2": flaxckpt.ArrayLayout(store="files", zarr_version=2),
    "ocdbt, zarr 2": flaxckpt.ArrayLayout(store="ocdbt", zarr_version=2),
}

ARRAYS: Final = ("arrays", "TrainState", "bfloat16, float8, int4")
"""States that are written in all layouts."""


def write(directory: Path) -> None:
    """Writes states in all layouts below `directory`, and steps of runs."""
    for layout_name, layout in LAYOUTS.items():
        all_states = layout_name in ("files", "ocdbt")
        for name in states.STATES if all_states else ARRAYS:
            root = directory / layout_name / name
            with flaxckpt.Checkpointer(root, layout=layout) as checkpointer:
                checkpointer.save(states.STEP, states.STATES[name]())
    for name in ("steps", "metrics"):
        with flaxckpt.Checkpointer(directory / "steps" / name) as checkpointer:
            checkpointer.save(states.STEP, states.arrays(), metrics=states.METRICS)
    state = states.items_state()
    save_items(directory / "steps" / "two items", state, Items(tuple(state)))
    save_items(directory / "steps" / "item default", states.arrays(), Items("default"))


def save_items(root: Path, state: Any, items: Items) -> None:
    request = SaveRequest(
        path=root / str(states.STEP),
        options=SaveOptions(items=items),
        step=states.STEP,
    )
    saving.write_snapshot(saving.take_snapshot(request, state))


def read(directory: Path) -> dict[str, dict[str, str]]:
    """Reads the checkpoints below `directory`: writer -> state -> outcome."""
    return {
        writer.name: {
            root.name: outcome(lambda r=root: read_state(r))
            for root in sorted(writer.iterdir())
            if (root / str(states.STEP)).is_dir()
        }
        for writer in sorted(directory.iterdir())
    }


def read_state(root: Path) -> str:
    """Returns how the step of a run reads, with and without a state to restore into."""
    step = root / str(states.STEP)
    if root.name == "two items":
        state = states.items_state()
        found = {name: flaxckpt.load(step / name, state[name]) for name in state}
        return states.compare(found, state, has_target=True)
    state = states.STATES[root.name]()
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
