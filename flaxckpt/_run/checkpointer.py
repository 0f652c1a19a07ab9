"""The checkpoints of one run: a directory of steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flaxckpt import _arrays, _checkpoint, _distributed, _storage, errors
from flaxckpt._arrays.zarr.array_layout import ArrayLayout, checked_layout
from flaxckpt._run import card, metrics, restoring, retention, run_saver
from flaxckpt._run import staging as run_staging
from flaxckpt._run.events import sinks as events_sinks
from flaxckpt._types import JSON, PathLike, PyTree
from flaxckpt.formats import _locate
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms


def _name_methods(cls: type) -> type:
    """Names the methods of private base classes after the public class.

    Python's own errors, such as "missing 1 required positional argument", name a method
    by its `__qualname__`.
    """
    for base in cls.__mro__[1:-1]:
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function):
                function.__qualname__ = f"{cls.__qualname__}.{name}"
    return cls


@_name_methods
class Checkpointer(run_saver.RunSaver):
    """Saves, finds, restores and retires the steps under one directory.

    One save is under way at a time. Steps are always listed from the directory
    itself, so that a restart, or another process, sees the same.

    ```python
    with Checkpointer("run", keep=[LatestN(3), BestN(1, "eval/loss", "min")]) as ckpt:
        ckpt.save(100, state, metrics={"eval/loss": 0.7})
    ```

    Args:
        directory: Made if it is missing, unless `read_only`.
        keep: Preservation policies; a step stays if any keeps it. The newest and
            pinned steps always stay, and without policies only temporary steps go.
        keep_dataset: Policies for the states of dataset iterators: of a step that stays
            and that none of them keeps, the state is deleted alone. Without any, states
            stay as long as their steps.
        metrics_from: Gives metrics that are measured elsewhere, step -> name -> number,
            whenever steps are ranked. Those stored with a step count first.
        layout: How arrays are cut and encoded.
        max_concurrent_bytes: Bytes on their way to or from storage at one time.
        transforms: What to change on the way to the checkpoint, at every save. A
            restore into a state undoes those that can be undone.
        step_format: Names of steps: `{step}`, `step_{step}`, `{step:08d}`.
        read_only: Refuses to save or delete.
        metadata: JSON of your own about the whole run, kept where Orbax keeps its
            root metadata. It replaces what is there.
        sinks: Who is told of events: functions of an `Event`, or loggers of clu, W&B,
            MLflow or TensorBoard. They are told on the thread that calls.
        peer_timeout_secs: Where several processes train, how long one waits in a save
            or a restore for others that are behind.
        read_once: Where several processes train, whether large arrays that several of
            them need are read in parts, and sent by the devices from one to another.
        staging: A directory on a fast disk of this machine. Steps are saved there, and
            uploaded to `directory` behind the training; what is only in one of them is
            found and restored all the same. For one process.
        keep_staging: Policies for the steps in `staging`; those that are not uploaded
            stay there, too.

    Attributes:
        events: What happens to the checkpoints. Unless `read_only`, it is also kept in
            `events.jsonl` in the directory.
        lineage: What this run began from, the nearest first; recorded in every step.
            Restoring a step sets it to what is recorded there.
        restored_step: The step that was restored last; None if none was.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: Sequence[PreservationPolicy] = (),
        layout: ArrayLayout | None = None,
        max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES,
        transforms: Sequence[Transform] = (),
        step_format: str = "{step}",
        read_only: bool = False,
        metadata: Mapping[str, JSON] | None = None,
        sinks: Sequence[events_sinks.Sink] = (),
        keep_dataset: Sequence[PreservationPolicy] = (),
        metrics_from: Callable[[], metrics.MetricsByStep] | None = None,
        peer_timeout_secs: float = _distributed.operation.TIMEOUT_SECS,
        read_once: bool = False,
        staging: PathLike | None = None,
        keep_staging: Sequence[PreservationPolicy] = run_staging.KEEP,
    ) -> None:
        self._options = _checkpoint.request.SaveOptions(
            layout=checked_layout(layout),
            transforms=_transforms.checked(transforms),
            max_concurrent_bytes=max_concurrent_bytes,
        )
        super().__init__(
            directory,
            retention.Rules.of(keep, keep_dataset, metrics_from),
            self._options,
            step_format=step_format,
            read_only=read_only,
            metadata=metadata,
            sinks=sinks,
            peer_timeout_secs=peer_timeout_secs,
            staging=staging,
            keep_staging=keep_staging,
        )
        self.restored_step: int | None = None
        self._peer_timeout_secs = peer_timeout_secs
        self._read_once = read_once
        self._restores = restoring.Restores(
            self._run,
            self._options.transforms,
            self._processes,
            self._saves.end,
            read_only=read_only,
        )

    def sibling(self, directory: PathLike) -> Checkpointer:
        """Another directory, whose steps are written as these are, and all kept."""
        return Checkpointer(
            directory,
            layout=self._options.layout,
            max_concurrent_bytes=self._options.max_concurrent_bytes,
            transforms=self._options.transforms,
            step_format=self._run.format.template,
            peer_timeout_secs=self._peer_timeout_secs,
            read_once=self._read_once,
        )

    # ---- restoring --------------------------------------------------------------

    def restore(
        self,
        abstract_state: PyTree | None = None,
        *,
        step: int | None = None,
        dataset: Any = None,
        fallback: bool = True,
        transforms: Sequence[Transform] = (),
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] = "warn",
        optimizer: Literal["match", "exact", "reinit"] = "match",
        types: Sequence[type] = (),
        verify: bool = True,
        memory_map: Literal["auto"] | bool = "auto",
    ) -> PyTree:
        """Restores a step, by default the newest.

        Args:
            abstract_state: What to restore; see `flaxckpt.load`.
            step: Exactly this step.
            dataset: An iterator to put where the saved one stood.
            fallback: Whether an older step is taken, with a warning, if the newest is
                damaged. Never if `step` is given. What is proved to be damaged is then
                marked, unless `read_only`: see `damaged`.
            transforms: As in `flaxckpt.load`, like those that follow.
            missing: See there.
            unused: See there.
            optimizer: See there.
            types: See there.
            verify: See there.
            memory_map: See there.

        Returns:
            A state like `abstract_state`, every leaf filled.

        Raises:
            CheckpointNotFoundError: There is no step, or not this one.
            CheckpointError: As `flaxckpt.load` says.
        """
        options = self._plan_options(
            missing=missing,
            unused=unused,
            optimizer=optimizer,
            transforms=transforms,
            types=types,
            verify=verify,
            memory_map=memory_map,
        )
        return self._restored(abstract_state, step, dataset, fallback, options)

    def restore_latest(
        self, abstract_state: PyTree, *, dataset: Any = None
    ) -> tuple[PyTree, int]:
        """Restores the newest step that is not damaged, and says which it is.

        Raises:
            CheckpointError: As for `restore`.
        """
        options = self._plan_options()
        state = self._restored(abstract_state, None, dataset, True, options)
        assert self.restored_step is not None
        self._saves.forget_beyond(self.restored_step)
        return state, self.restored_step

    def _restored(
        self,
        abstract_state: PyTree | None,
        step: int | None,
        dataset: Any,
        fallback: bool,
        options: _checkpoint.plan.Options,
    ) -> PyTree:
        with self._delivering():
            found = self._restores.restore(
                abstract_state,
                step=step,
                dataset=dataset,
                fallback=fallback,
                options=options,
            )
            self.lineage, self.restored_step = found.lineage, found.step
            self._saves.own(found.step)
        return found.state

    def _plan_options(self, **given: Any) -> _checkpoint.plan.Options:
        return _checkpoint.plan.Options(
            max_concurrent_bytes=self._options.max_concurrent_bytes,
            read_once=self._read_once,
            **given,
        )

    def load_source(
        self,
        source: PathLike,
        abstract_state: PyTree,
        *,
        step: int | None = None,
        transforms: Sequence[Transform] = (),
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] = "warn",
        optimizer: Literal["match", "exact", "reinit"] = "reinit",
    ) -> tuple[PyTree, int]:
        """Loads another checkpoint for this run to begin from.

        What it began from is recorded in every step that is saved from here on.

        Args:
            source: A checkpoint in any format, or a run directory.
            abstract_state: What to load; see `flaxckpt.load`.
            step: Which step of a run directory; by default the newest.
            transforms: What to change in it first.
            missing: See `flaxckpt.load`.
            unused: See there.
            optimizer: See there. With `reinit`, the step counter beside the optimizer
                keeps its value in `abstract_state`, too.

        Returns:
            The state, and the step that its counters say: 0 with `reinit`, or if it has
            none.

        Raises:
            OptionError: Its counters disagree.
            CheckpointError: As for `flaxckpt.load`.
        """
        options = self._plan_options(
            missing=missing,
            unused=unused,
            optimizer=optimizer,
            transforms=transforms,
            keeps_steps=optimizer == "reinit",
        )
        path = _storage.local.resolve(source)
        with self._delivering():
            state, self.lineage = self._restores.load_source(
                path, step, abstract_state, options
            )
        return state, 0 if options.keeps_steps else _checkpoint.restore.step_of(state)

    def restore_dataset(self, dataset: Any, *, step: int | None = None) -> None:
        """Puts an iterator where it stood at a step, by default the newest.

        Raises:
            CheckpointNotFoundError: There is no step, or not this one.
            DatasetStateError: None was saved, or the iterator does not take its state.
        """
        self.wait()
        number = self.latest_step() if step is None else step
        if number is None:
            raise errors.CheckpointNotFoundError(f"{self.directory} has no steps")
        path = self._run.path(number)
        _checkpoint.restore.restore_dataset(_locate.read_step(path, number), dataset)

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """A card for notebooks, of what is there now; no array is read."""
        return card.of_run(self, self._run.path)
