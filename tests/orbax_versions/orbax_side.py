"""Reads checkpoints of flaxckpt with the Orbax of an environment, and writes others.

    python -m tests.orbax_versions.orbax_side OURS THEIRS

Reads what is below OURS, writes below THEIRS, and prints the outcomes as JSON. Runs in environments with Orbax, jax and Flax, but without flaxckpt.
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

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import orbax.checkpoint as ocp

from tests.orbax_versions import states

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


def standard(root: Path, abstract: PyTree) -> PyTree:
    args = ocp.args.StandardRestore()
    return with_checkpointer(
        ocp.Checkpointer(ocp.StandardCheckpointHandler()),
        lambda c: c.restore(root / str(STEP) / ITEM, args=args),
    )


def standard_target(root: Path, abstract: PyTree) -> PyTree:
    args = ocp.args.StandardRestore(abstract)
    return with_checkpointer(
        ocp.Checkpointer(ocp.StandardCheckpointHandler()),
        lambda c: c.restore(root / str(STEP) / ITEM, args=args),
    )


def pytree(root: Path, abstract: PyTree) -> PyTree:
    return with_checkpointer(
        ocp.PyTreeCheckpointer(), lambda c: c.restore(root / str(STEP) / ITEM)
    )


def pytree_target(root: Path, abstract: PyTree) -> PyTree:
    args = pytree_restore(abstract)
    return with_checkpointer(
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        lambda c: c.restore(root / str(STEP) / ITEM, args=args),
    )


def manager(root: Path, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=ocp.args.StandardRestore())
    return with_manager(root, lambda m: m.restore(STEP, args=args)[ITEM])


def manager_target(root: Path, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    return with_manager(root, lambda m: m.restore(STEP, args=args)[ITEM])


def manager_pytree_target(root: Path, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=pytree_restore(abstract))
    return with_manager(root, lambda m: m.restore(STEP, args=args)[ITEM])


def v1_load(root: Path, abstract: PyTree) -> PyTree:
    return load(root / str(STEP))


def v1_load_target(root: Path, abstract: PyTree) -> PyTree:
    return load(root / str(STEP), abstract)


READERS: Final[dict[str, Reader]] = {
    "StandardCheckpointer": standard,
    "StandardCheckpointer, target": standard_target,
    "PyTreeCheckpointer": pytree,
    "PyTreeCheckpointer, target": pytree_target,
    "CheckpointManager": manager,
    "CheckpointManager, target": manager_target,
    "CheckpointManager, PyTreeRestore, target": manager_pytree_target,
    "v1.load": v1_load,
    "v1.load, target": v1_load_target,
}


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


def pytree_restore(abstract: PyTree) -> Any:
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)


def load(*args: Any) -> PyTree:
    """Calls the `load` of v1, under its name in this version."""
    return (v1.load if hasattr(v1, "load") else v1.load_pytree)(*args)


# ---- writers ---------------------------------------------------------------------


def write_manager(root: Path, state: PyTree) -> None:
    args = ocp.args.StandardSave(state)

    def save(manager: Any) -> None:
        manager.save(STEP, args=args)
        manager.wait_until_finished()

    with_checkpointer(ocp.CheckpointManager(root), save)


def write_composite(root: Path, state: PyTree) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state), config=ocp.args.JsonSave(states.CONFIG)
    )

    def save(manager: Any) -> None:
        manager.save(STEP, args=args, metrics=states.METRICS)
        manager.wait_until_finished()

    names = ("state", "config")
    with_checkpointer(
        ocp.CheckpointManager(root, options=options, item_names=names), save
    )


def write_two_items(root: Path, state: PyTree) -> None:
    args = {name: ocp.args.StandardSave(branch) for name, branch in state.items()}

    def save(manager: Any) -> None:
        manager.save(STEP, args=ocp.args.Composite(**args))
        manager.wait_until_finished()

    with_checkpointer(ocp.CheckpointManager(root, item_names=tuple(state)), save)


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


WRITERS: Final[dict[str, Writer]] = {
    "CheckpointManager": write_manager,
    "CheckpointManager, Composite": write_composite,
    "StandardCheckpointer": write_standard,
    "PyTreeCheckpointer": write_pytree,
    "PyTreeCheckpointer, files": write_files,
    "PyTreeCheckpointer, zarr 3": write_zarr3,
    "v1.save": write_v1,
}


def save_flat(handler: Any, root: Path, args: Any) -> None:
    with_checkpointer(
        ocp.Checkpointer(handler), lambda c: c.save(root / str(STEP), args=args)
    )


# ---- steps and items -------------------------------------------------------------


def list_steps(root: Path) -> str:
    def check(manager: Any) -> str:
        found = manager.all_steps(), manager.latest_step()
        return states.EQUAL if found == ([STEP], STEP) else f"wrong: {found}"

    return with_manager(root, check)


def read_metrics(root: Path) -> str:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    args = ocp.args.Composite(metrics=ocp.args.JsonRestore())
    found = with_checkpointer(
        ocp.CheckpointManager(root, options=options, item_names=(ITEM,)),
        lambda m: (m.best_step(), m.restore(STEP, args=args)["metrics"]),
    )
    return states.EQUAL if found == (STEP, states.METRICS) else f"wrong: {found}"


def restore_two_items(root: Path) -> str:
    """Reads the branches of a TrainState's dict that are items of their own."""
    state = states.items_state()
    args = ocp.args.Composite(
        **{
            name: ocp.args.StandardRestore(states.abstract(branch))
            for name, branch in state.items()
        }
    )
    found = with_manager(root, lambda m: m.restore(STEP, args=args), tuple(state))
    found = {name: found[name] for name in state}
    return states.compare(found, state, has_target=True)


def restore_default_item(root: Path) -> str:
    """Reads the item `default` as a manager without names of items does."""
    state = states.arrays()
    args = ocp.args.StandardRestore(states.abstract(state))
    found = with_checkpointer(
        ocp.CheckpointManager(root), lambda m: m.restore(STEP, args=args)
    )
    return states.compare(found, state, has_target=True)


STEPS: Final[dict[str, Callable[[Path], str]]] = {
    "steps": list_steps,
    "metrics": read_metrics,
    "two items": restore_two_items,
    "item default": restore_default_item,
}


# ---- both directions -------------------------------------------------------------


def outcome(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"[:400]


def read(directory: Path) -> dict[str, Any]:
    """Reads all states below `directory`, and the same states of this Orbax.

    Returns:
        The layout, state and reader, each -> the outcome. The layout `own` is the state
        as this Orbax writes it.
    """
    results: dict[str, Any] = {"steps": {}}
    for name, function in STEPS.items():
        root = directory / "steps" / name
        results["steps"][name] = outcome(partial(function, root))
    saved = {name: create() for name, create in states.STATES.items()}
    for name, state in saved.items():
        root = directory / "own" / name
        outcome(partial(save, write_composite, root, state))
    for layout in sorted(path.name for path in directory.iterdir()):
        if layout == "steps":
            continue
        results[layout] = {}
        for root in sorted((directory / layout).iterdir()):
            results[layout][root.name] = {
                name: outcome(partial(read_state, name, root, saved[root.name]))
                for name in READERS
                if v1 is not None or not name.startswith("v1")
            }
    return results


def read_state(reader: str, root: Path, state: PyTree) -> str:
    found = READERS[reader](root, states.abstract(state))
    return states.compare(found, state, has_target=reader.endswith("target"))


def write(directory: Path) -> dict[str, Any]:
    """Writes all states by all writers below `directory`; returns the outcomes."""
    results: dict[str, Any] = {}
    for writer, function in WRITERS.items():
        if writer.startswith("v1") and v1 is None:
            continue
        results[writer] = {}
        for name, create in states.STATES.items():
            root = directory / writer / name
            root.parent.mkdir(parents=True, exist_ok=True)

            results[writer][name] = outcome(partial(save, function, root, create()))
    root = directory / "two items" / "two items"
    root.parent.mkdir(parents=True)
    results["two items"] = {
        "two items": outcome(partial(save, write_two_items, root, states.items_state()))
    }
    return results


def save(writer: Writer, root: Path, state: PyTree) -> str:
    writer(root, state)
    return states.EQUAL


def main() -> None:
    warnings.simplefilter("ignore")
    ours, theirs = (Path(arg).resolve() for arg in sys.argv[1:])
    results = {"read": read(ours), "written": write(theirs)}
    assert "flaxckpt" not in sys.modules
    sys.stdout.write(f"\n{json.dumps(results)}\n")
    sys.stdout.flush()
    # Some versions leave threads behind after a refused save, and never exit.
    os._exit(0)


if __name__ == "__main__":
    main()
