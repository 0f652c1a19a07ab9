"""A handler for Orbax's `CheckpointManager` that reads and writes in flaxckpt's way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from flaxckpt import _formats, _steps, _storage, errors
from flaxckpt._checkpoint import commit, restore, save
from flaxckpt._formats import locate
from flaxckpt._types import PathLike, PyTree
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt.transforms import Transform

try:
    from orbax import checkpoint as ocp
except ImportError as error:
    raise errors.OptionError(
        f"Orbax cannot be imported ({error}):\n  pip install 'flaxckpt[orbax]'"
    ) from error

__all__ = ["CheckpointHandler", "RestoreArgs", "SaveArgs"]


class CheckpointHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores an item of an Orbax step as a flaxckpt checkpoint.

    Programs keep their `CheckpointManager`; Orbax names, commits and deletes the steps:

    ```python
    manager = ocp.CheckpointManager(path, item_handlers=CheckpointHandler())
    manager.save(step, args=SaveArgs(state))
    state = manager.restore(step, args=RestoreArgs(abstract_state))
    ```

    The values are copied before `manager.save` returns. Orbax commits the step only
    after all files of the item are durable. The item has the checksums and exact types
    of flaxckpt: `flaxckpt.load` and `flaxckpt.verify` read the directory of the item,
    and so does Orbax's `StandardCheckpointHandler`. The handler also restores items
    that handlers of Orbax have saved, and items in object stores; it saves in file
    systems only.

    Args:
        layout: Chunks and encoding of arrays.
        transforms: Changes to apply to each state before it is saved, such as
            `transforms.cast`.

    Raises:
        OptionError: An option has the wrong type.
    """

    def __init__(
        self, *, layout: ArrayLayout | None = None, transforms: Sequence[Transform] = ()
    ) -> None:
        self._options = commit.SaveOptions(
            layout=check_layout(layout),
            transforms=transforms,
            items=_formats.items.Items(state=""),
        )

    # ---- called by Orbax -------------------------------------------------------------

    async def async_save(
        self, directory: PathLike, args: SaveArgs
    ) -> list[ocp.future.Future]:
        """Copies the values of a state, and returns the future of their write."""
        write = self._start(directory, args)

        async def work() -> None:
            write()

        # Waits until Orbax has made the directory, on a thread of Orbax.
        return [ocp.future.CommitFutureAwaitingContractedSignals(work(), name="item")]

    def save(self, directory: PathLike, args: SaveArgs) -> None:
        """Saves a state into the existing `directory`."""
        self._start(directory, args)()

    def restore(self, directory: PathLike, args: RestoreArgs | None = None) -> PyTree:
        """Returns the state in `directory`.

        Raises:
            DamagedCheckpointError: The item is of another step.
        """
        options = _check_args(args or RestoreArgs(), RestoreArgs)
        given = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
        }
        path = _storage.paths.resolve(directory)
        step = _steps.names.number(path.parent.name)
        if step is not None and _formats.items.is_native(path):
            locate.read_step(path, step)
        return restore.load(path, **given)

    def metadata(self, directory: PathLike) -> Any:
        """Returns the shapes and dtypes of the leaves, as Orbax's handler does."""
        return ocp.StandardCheckpointHandler().metadata(directory)

    # ---- saving ----------------------------------------------------------------------

    def _start(self, directory: PathLike, args: SaveArgs) -> Callable[[], object]:
        state = _check_args(args, SaveArgs).state
        path = _storage.paths.resolve(directory)
        if not _storage.of(path).can_rename:
            raise errors.OptionError(
                f"{path}: this handler saves in file systems only; in an object store,"
                " save with flaxckpt.Checkpointer, or with a handler of Orbax"
            )
        return save.save_item(path, state, self._options)


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save by a `CheckpointHandler`.

    Attributes:
        state: A TrainState, NNX objects, or any pytree that `flaxckpt.save` accepts.
    """

    state: PyTree


@ocp.args.register_with_handler(CheckpointHandler, for_restore=True)
@dataclasses.dataclass
class RestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a restore by a `CheckpointHandler`.

    Attributes:
        abstract_state: The state to restore, with arrays or `jax.ShapeDtypeStruct`s as
            leaves; None restores the saved classes. This and all others are arguments
            of `flaxckpt.load`.
    """

    abstract_state: PyTree = None
    _: dataclasses.KW_ONLY
    transforms: Sequence[Transform] = ()
    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] = "warn"
    optimizer: Literal["match", "exact", "reinit"] = "match"
    types: Sequence[type] = ()
    verify: bool = True
    memory_map: Literal["auto"] | bool = "auto"
    read_once: bool = False


def _check_args(args: Any, kind: type[Any]) -> Any:
    """Returns `args`, or raises OptionError if they are for another handler."""
    if not isinstance(args, kind):
        raise errors.OptionError(
            f"flaxckpt's CheckpointHandler wants args={kind.__name__}(…), got"
            f" {type(args).__name__}: both are in flaxckpt.integrations.orbax"
        )
    return args
