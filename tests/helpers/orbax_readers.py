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


def _opened(
    open_it: Callable[[Path], Any], read: Callable[[Any, Path, int, PyTree], PyTree]
) -> Reader:
    """Returns the reader that opens the run directory, or something else."""

    def reader(root: Path, step: int, abstract: PyTree) -> PyTree:
        with open_it(root) as opened:
            return read(opened, root, step, abstract)

    return reader


def _of_item(
    checkpointer: Callable[[], Any], read: Callable[[Any, Path, PyTree], PyTree]
) -> Reader:
    """Returns the reader of the item with a checkpointer."""
    return _opened(
        lambda _: checkpointer(),
        lambda c, root, step, abstract: read(c, root / str(step) / "state", abstract),
    )


def _of_step(ask: Callable[[PyTree], Any]) -> Reader:
    """Returns the reader with a manager, whose arguments depend on the state."""
    return _opened(
        ocp.CheckpointManager,
        lambda m, _, step, abstract: m.restore(
            step, args=ocp.args.Composite(state=ask(abstract))
        )["state"],
    )


def _manager_of_state(root: Path) -> ocp.CheckpointManager:
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardRestore, ocp.StandardCheckpointHandler())
    return ocp.CheckpointManager(root, handler_registry=handlers)


def _pytree_restore(abstract: PyTree) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    )


_training = v1.training.Checkpointer

READERS: Final[dict[str, Reader]] = {
    "v0_standard": _of_item(
        ocp.StandardCheckpointer, lambda c, path, _: c.restore(path)
    ),
    "v0_standard_target": _of_item(
        ocp.StandardCheckpointer, lambda c, path, abstract: c.restore(path, abstract)
    ),
    "v0_pytree": _of_item(ocp.PyTreeCheckpointer, lambda c, path, _: c.restore(path)),
    "v0_pytree_target": _of_item(
        lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        lambda c, path, abstract: c.restore(path, args=_pytree_restore(abstract)),
    ),
    "v0_metadata": _of_item(
        ocp.StandardCheckpointer, lambda c, path, _: c.metadata(path).item_metadata.tree
    ),
    "v0_manager": _opened(
        ocp.CheckpointManager, lambda m, _, step, __: m.restore(step)["state"]
    ),
    "v0_manager_standard": _of_step(lambda _: ocp.args.StandardRestore()),
    "v0_manager_standard_target": _of_step(ocp.args.StandardRestore),
    "v0_manager_pytree_target": _of_step(_pytree_restore),
    "v0_manager_metadata": _opened(
        _manager_of_state, lambda m, _, step, __: m.item_metadata(step)["state"].tree
    ),
    "v1_load": lambda root, step, _: v1.load(root / str(step)),
    "v1_load_target": lambda root, step, abstract: v1.load(root / str(step), abstract),
    "v1_metadata": lambda root, step, _: v1.metadata(root / str(step)).metadata,
    "v1_checkpointables": lambda root, step, _: v1.load_checkpointables(
        root / str(step)
    )["state"],
    "v1_training": _opened(_training, lambda c, _, step, __: c.load(step)),
    "v1_training_target": _opened(
        _training, lambda c, _, step, abstract: c.load(step, abstract)
    ),
    "v1_training_checkpointables": _opened(
        _training, lambda c, _, step, __: c.load_checkpointables(step)["state"]
    ),
    "v1_training_metadata": _opened(
        _training, lambda c, _, step, __: c.metadata(step).metadata
    ),
}
"""The readers. Readers that end in `_target` need an abstract state, with a sharding
at every array; those that end in `_metadata` return shapes and dtypes, no values;
the others ignore the abstract state."""
