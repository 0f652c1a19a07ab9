"""Reads checkpoints of flaxckpt with a release of Orbax, and writes others.

    python -m verification.orbax_versions.orbax_side OURS THEIRS

Reads all checkpoints below OURS, writes below THEIRS, and prints the outcomes as JSON.
Runs in environments with Orbax, jax and Flax, but without flaxckpt.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

# Before jax is imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import orbax.checkpoint as ocp

from verification.orbax_versions import states

try:
    from orbax.checkpoint import v1
except ImportError:
    try:
        import orbax.checkpoint.experimental.v1 as v1
    except ImportError:
        v1 = None

PyTree: TypeAlias = Any
Reader: TypeAlias = Callable[[Path, PyTree], PyTree]
"""(run directory, abstract state) -> the item `state` of its step."""
Writer: TypeAlias = Callable[[Path, PyTree], None]

STEP: Final = states.STEP
ITEM: Final = "state"

# ---- readers ---------------------------------------------------------------------


def of_item(handler: Any, ask: Callable[[PyTree], Any]) -> Reader:
    """Returns the reader of an item: `ask` maps an abstract state to its arguments."""

    def read(root: Path, abstract: PyTree) -> PyTree:
        args = ask(abstract)
        return with_checkpointer(
            ocp.Checkpointer(handler()),
            lambda c: c.restore(root / str(STEP) / ITEM, args=args),
        )

    return read


def of_step(ask: Callable[[PyTree], Any]) -> Reader:
    """Returns the reader of a step, as `of_item` of an item."""

    def read(root: Path, abstract: PyTree) -> PyTree:
        args = ocp.args.Composite(state=ask(abstract))
        return with_manager(root, lambda m: m.restore(STEP, args=args)[ITEM])

    return read


def anything(abstract: PyTree) -> Any:
    return ocp.args.StandardRestore()


def pytree_restore(abstract: PyTree) -> Any:
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)


def pytree(root: Path, abstract: PyTree) -> PyTree:
    return with_checkpointer(
        ocp.PyTreeCheckpointer(), lambda c: c.restore(root / str(STEP) / ITEM)
    )


def v1_load(root: Path, abstract: PyTree) -> PyTree:
    return v1.load(root / str(STEP))


def v1_load_target(root: Path, abstract: PyTree) -> PyTree:
    return v1.load(root / str(STEP), abstract)


READERS: Final[dict[str, Reader]] = {
    "StandardRestore": of_item(ocp.StandardCheckpointHandler, anything),
    "StandardRestore, target": of_item(
        ocp.StandardCheckpointHandler, ocp.args.StandardRestore
    ),
    "PyTreeCheckpointer": pytree,
    "PyTreeRestore, target": of_item(ocp.PyTreeCheckpointHandler, pytree_restore),
    "CheckpointManager": of_step(anything),
    "CheckpointManager, target": of_step(ocp.args.StandardRestore),
    "CheckpointManager, PyTreeRestore, target": of_step(pytree_restore),
}
if hasattr(v1, "load"):  # in 0.11, v1 finds only an item `pytree`
    READERS |= {"v1.load": v1_load, "v1.load, target": v1_load_target}


def with_checkpointer(checkpointer: Any, function: Callable[[Any], Any]) -> Any:
    try:
        return function(checkpointer)
    finally:
        checkpointer.close()


def with_manager(
    root: Path, function: Callable[[Any], Any], item_names: tuple[str, ...] = (ITEM,)
) -> Any:
    return with_checkpointer(
        ocp.CheckpointManager(root, item_names=item_names), function
    )


# ---- writers ---------------------------------------------------------------------


def write_manager(root: Path, state: PyTree) -> None:
    save_step(ocp.CheckpointManager(root), ocp.args.StandardSave(state))


def write_composite(root: Path, state: PyTree) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state), config=ocp.args.JsonSave(states.CONFIG)
    )
    names = ("state", "config")
    manager = ocp.CheckpointManager(root, options=options, item_names=names)
    save_step(manager, args, metrics=states.METRICS)


def write_two_items(root: Path, state: PyTree) -> None:
    args = {name: ocp.args.StandardSave(branch) for name, branch in state.items()}
    manager = ocp.CheckpointManager(root, item_names=tuple(state))
    save_step(manager, ocp.args.Composite(**args))


def write_standard(root: Path, state: PyTree) -> None:
    args = ocp.args.StandardSave(state)
    save_flat(ocp.StandardCheckpointHandler(), root, args)


def write_pytree(root: Path, state: PyTree) -> None:
    save_flat(ocp.PyTreeCheckpointHandler(), root, ocp.args.PyTreeSave(state))


def write_files(root: Path, state: PyTree) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    save_flat(handler, root, ocp.args.PyTreeSave(state))


def write_zarr3(root: Path, state: PyTree) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    save_flat(handler, root, ocp.args.PyTreeSave(state))


def write_v1(root: Path, state: PyTree) -> None:
    (v1.save if hasattr(v1, "save") else v1.save_pytree)(root / str(STEP), state)


def write_checkpointables(root: Path, state: PyTree) -> None:
    v1.save_checkpointables(root / str(STEP), state)


OWN: Final = states.COMPOSITE
"""The writer whose checkpoints are like those of flaxckpt."""

WRITERS: Final[dict[str, Writer]] = {
    "CheckpointManager": write_manager,
    OWN: write_composite,
    "StandardSave": write_standard,
    "PyTreeSave": write_pytree,
    "PyTreeSave, files": write_files,
    "PyTreeSave, zarr 3": write_zarr3,
}
if v1 is not None:
    WRITERS |= {"v1.save": write_v1}


def save_step(manager: Any, args: Any, **options: Any) -> None:
    def save(manager: Any) -> None:
        manager.save(STEP, args=args, **options)
        manager.wait_until_finished()

    with_checkpointer(manager, save)


def save_flat(handler: Any, root: Path, args: Any) -> None:
    with_checkpointer(
        ocp.Checkpointer(handler), lambda c: c.save(root / str(STEP), args=args)
    )


# ---- items -----------------------------------------------------------------------


def list_steps(root: Path) -> str:
    found = with_manager(
        root / "item state", lambda m: (m.all_steps(), m.latest_step())
    )
    return equal(found, ([STEP], STEP))


def read_metrics(root: Path) -> str:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    args = ocp.args.Composite(metrics=ocp.args.JsonRestore())
    manager = ocp.CheckpointManager(
        root / "item state", options=options, item_names=(ITEM,)
    )
    found = with_checkpointer(
        manager, lambda m: (m.best_step(), m.restore(STEP, args=args)["metrics"])
    )
    return equal(found, (STEP, states.METRICS))


def read_json(root: Path) -> str:
    args = ocp.args.Composite(config=ocp.args.JsonRestore())
    found = with_manager(
        root / "item state", lambda m: m.restore(STEP, args=args)["config"], ("config",)
    )
    return equal(found, states.CONFIG)


def restore_two_items(root: Path) -> str:
    state = states.items_state()
    args = {
        name: ocp.args.StandardRestore(states.abstract(branch))
        for name, branch in state.items()
    }
    found = with_manager(
        root / states.TWO_ITEMS,
        lambda m: m.restore(STEP, args=ocp.args.Composite(**args)),
        tuple(state),
    )
    found = {name: found[name] for name in state}
    return states.compare(found, state, has_target=True)


def restore_default_item(root: Path) -> str:
    """Reads the item `default` like programs that save a single item."""
    state = states.arrays()
    args = ocp.args.StandardRestore(states.abstract(state))
    found = with_checkpointer(
        ocp.CheckpointManager(root / "item default"),
        lambda m: m.restore(STEP, args=args),
    )
    return states.compare(found, state, has_target=True)


def load_pytree_item(root: Path) -> str:
    state = states.arrays()
    load = v1.load if hasattr(v1, "load") else v1.load_pytree
    found = load(root / "item pytree" / str(STEP), states.abstract(state))
    return states.compare(found, state, has_target=True)


def equal(found: Any, saved: Any) -> str:
    return states.EQUAL if found == saved else f"wrong: {found}"


ITEMS: Final[dict[str, Callable[[Path], str]]] = {
    "steps of a `CheckpointManager`": list_steps,
    "metrics, best step": read_metrics,
    "JSON items": read_json,
    "several items": restore_two_items,
    "an item `default`, with `StandardRestore`": restore_default_item,
}
if v1 is not None:
    ITEMS["an item `pytree`, with v1"] = load_pytree_item


# ---- both directions -------------------------------------------------------------


def outcome(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"[:400]


def write(directory: Path) -> dict[str, Any]:
    """Writes all states by all writers: writer -> state -> outcome."""
    results: dict[str, Any] = {}
    for writer, function in WRITERS.items():
        (directory / writer).mkdir()
        results[writer] = {
            name: outcome(partial(save, function, directory / writer / name, create()))
            for name, create in states.STATES.items()
        }
    items_writers = {"CheckpointManager, two items": write_two_items}
    if hasattr(v1, "save_checkpointables"):
        items_writers["v1.save_checkpointables"] = write_checkpointables
    for writer, function in items_writers.items():
        (directory / writer).mkdir()
        name, state = states.TWO_ITEMS, states.items_state()
        root = directory / writer / name
        results[writer] = {name: outcome(partial(save, function, root, state))}
    return results


def save(writer: Writer, root: Path, state: PyTree) -> str:
    writer(root, state)
    return states.EQUAL


def read(directory: Path) -> dict[str, Any]:
    """Reads the states of all runs below `directory`: state -> reader -> outcome."""
    results = {}
    for state_name, create in states.STATES.items():
        root = directory / state_name
        if (root / str(STEP)).is_dir():
            read_one = partial(read_state, root=root, state=create())
            results[state_name] = {
                reader: outcome(partial(read_one, reader)) for reader in READERS
            }
    return results


def read_state(reader: str, root: Path, state: PyTree) -> str:
    found = READERS[reader](root, states.abstract(state))
    return states.compare(found, state, has_target=reader.endswith("target"))


def main() -> None:
    warnings.simplefilter("ignore")
    ours, theirs = (Path(arg).resolve() for arg in sys.argv[1:])
    results = {
        "writes": write(theirs),
        "reads own": read(theirs / OWN),
        "reads": {
            layout.name: read(layout)
            for layout in sorted(ours.iterdir())
            if layout.name != "items"
        },
        "reads items": {
            name: outcome(partial(function, ours / "items"))
            for name, function in ITEMS.items()
        },
    }
    assert "flaxckpt" not in sys.modules
    sys.stdout.write(f"\n{json.dumps(results)}\n")
    sys.stdout.flush()
    # Some versions leave threads behind after a refused save, and never exit.
    os._exit(0)


if __name__ == "__main__":
    main()
