"""All functions of Orbax that write a state that flaxckpt reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

PyTree: TypeAlias = Any
Writer: TypeAlias = Callable[[Path, int, PyTree], Path]
"""(run directory, step, state) -> the checkpoint, `<run directory>/<step>`."""


def _v0_standard(root: Path, step: int, state: PyTree) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / str(step), state)
    return root / str(step)


def _v0_chunked(root: Path, step: int, state: PyTree) -> Path:
    chunked = ocp.SaveArgs(chunk_byte_size=64)
    save_args = jax.tree.map(lambda _: chunked, state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        args = ocp.args.PyTreeSave(state, save_args=save_args)
        checkpointer.save(root / str(step), args=args)
    return root / str(step)


def _v0_manager(root: Path, step: int, state: PyTree) -> Path:
    with ocp.CheckpointManager(root) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
    return root / str(step)


def _v0_manager_composite(root: Path, step: int, state: PyTree) -> Path:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, options=options) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardSave(state))
        manager.save(step, args=args, metrics={"loss": 0.5})
    return root / str(step)


def _v1_save(root: Path, step: int, state: PyTree) -> Path:
    v1.save(root / str(step), state)
    return root / str(step)


def _v1_files(root: Path, step: int, state: PyTree) -> Path:
    saving = v1.options.ArrayOptions.Saving(use_ocdbt=False)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save(root / str(step), state)
    return root / str(step)


def _v1_training(root: Path, step: int, state: PyTree) -> Path:
    with v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save(step, state, metrics={"loss": 0.5})
    return root / str(step)


def _flat(**options: Any) -> Writer:
    """Returns the writer of a handler of trees with these options."""

    def write(root: Path, step: int, state: PyTree) -> Path:
        handler = ocp.PyTreeCheckpointHandler(**options)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(root / str(step), args=ocp.args.PyTreeSave(state))
        return root / str(step)

    return write


_RICH: Final = dataclasses.replace(
    v1.options.PyTreeOptions.Saving().pytree_metadata_options, support_rich_types=True
)

WRITERS: Final[dict[str, Writer]] = {
    "v0_standard": _v0_standard,
    "v0_pytree": _flat(),
    "v0_zarr3": _flat(use_ocdbt=True, use_zarr3=True),
    "v0_files": _flat(use_ocdbt=False),
    "v0_files_zarr3": _flat(use_ocdbt=False, use_zarr3=True),
    "v0_uncompressed": _flat(use_compression=False),
    "v0_chunked": _v0_chunked,
    "v0_rich_types": _flat(pytree_metadata_options=_RICH),
    "v0_manager": _v0_manager,
    "v0_manager_composite": _v0_manager_composite,
    "v1_save": _v1_save,
    "v1_files": _v1_files,
    "v1_training": _v1_training,
}
"""The writers. The first eight are flat, `v0_manager` names the item `default`, the
others name it `state`; without a mention the store is OCDBT, and the arrays are zarr 2
in v0 and zarr 3 in v1, compressed by zstd."""
