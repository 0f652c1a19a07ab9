"""All functions of stock Orbax that read the item `state` of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import orbax.checkpoint as ocp
from orbax.checkpoint import v1

PyTree: TypeAlias = Any
Reader: TypeAlias = Callable[[Path, int, PyTree], PyTree]
"""(run directory, step, abstract state) -> the state as Orbax reads it."""


def _v0_standard(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(step) / "state")


def _v0_standard_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(step) / "state", abstract)


def _v0_pytree(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(step) / "state")


def _v0_pytree_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            root / str(step) / "state", args=_pytree_restore(abstract)
        )


def _v0_metadata(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(root / str(step) / "state")
    return metadata.item_metadata.tree


def _v0_manager(root: Path, step: int, abstract: PyTree) -> PyTree:
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step)["state"]


def _v0_manager_standard(root: Path, step: int, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=ocp.args.StandardRestore())
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=args)["state"]


def _v0_manager_standard_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=args)["state"]


def _v0_manager_pytree_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    args = ocp.args.Composite(state=_pytree_restore(abstract))
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=args)["state"]


def _v0_manager_metadata(root: Path, step: int, abstract: PyTree) -> PyTree:
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardRestore, ocp.StandardCheckpointHandler())
    with ocp.CheckpointManager(root, handler_registry=handlers) as manager:
        return manager.item_metadata(step)["state"].tree


def _v1_load(root: Path, step: int, abstract: PyTree) -> PyTree:
    return v1.load(root / str(step))


def _v1_load_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    return v1.load(root / str(step), abstract)


def _v1_metadata(root: Path, step: int, abstract: PyTree) -> PyTree:
    return v1.metadata(root / str(step)).metadata


def _v1_checkpointables(root: Path, step: int, abstract: PyTree) -> PyTree:
    return v1.load_checkpointables(root / str(step))["state"]


def _v1_training(root: Path, step: int, abstract: PyTree) -> PyTree:
    with v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load(step)


def _v1_training_target(root: Path, step: int, abstract: PyTree) -> PyTree:
    with v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load(step, abstract)


def _v1_training_checkpointables(root: Path, step: int, abstract: PyTree) -> PyTree:
    with v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load_checkpointables(step)["state"]


def _v1_training_metadata(root: Path, step: int, abstract: PyTree) -> PyTree:
    with v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.metadata(step).metadata


def _pytree_restore(abstract: PyTree) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    )


READERS: Final[dict[str, Reader]] = {
    "v0_standard": _v0_standard,
    "v0_standard_target": _v0_standard_target,
    "v0_pytree": _v0_pytree,
    "v0_pytree_target": _v0_pytree_target,
    "v0_metadata": _v0_metadata,
    "v0_manager": _v0_manager,
    "v0_manager_standard": _v0_manager_standard,
    "v0_manager_standard_target": _v0_manager_standard_target,
    "v0_manager_pytree_target": _v0_manager_pytree_target,
    "v0_manager_metadata": _v0_manager_metadata,
    "v1_load": _v1_load,
    "v1_load_target": _v1_load_target,
    "v1_metadata": _v1_metadata,
    "v1_checkpointables": _v1_checkpointables,
    "v1_training": _v1_training,
    "v1_training_target": _v1_training_target,
    "v1_training_checkpointables": _v1_training_checkpointables,
    "v1_training_metadata": _v1_training_metadata,
}
"""The readers. Readers that end in `_target` need an abstract state, with a sharding
at every array; those that end in `_metadata` return shapes and dtypes, no values;
the others ignore the abstract state."""
