"""What a training loop needs of a `Checkpointer` and its user does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, Unpack

from flaxckpt import _checkpoint, _distributed, _storage, errors
from flaxckpt._run import restoring, run_steps, saving
from flaxckpt._types import PathLike, PyTree

_log = logging.getLogger(__name__)

_MOST_SAVES_BY_SINKS = 8
"""How many saves, each begun by a sink because of another, the end of a run awaits."""


class Trainer(Protocol):
    """A training loop that saves with a `Checkpointer` and is called at its end."""

    def before_close(self) -> None:
        """Saves the last step, if it is not saved yet."""
        ...

    def after_close(self) -> None:
        """Ends the loop's part, when all saves are durable or have failed."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Ends the loop's part after an error: nothing more is saved."""
        ...

    def give_way(self) -> None:
        """Ends the loop's part because another loop goes on."""
        ...


class Session:
    """The parts of one `Checkpointer`, for the training loop that saves with it.

    Args:
        run: The steps of the run.
        saves: Saves them.
        restores: Restores them.
        processes: The processes that train together.
        read_only: Whether nothing may be written or deleted.

    Attributes:
        run: The same.
        saves: The same.
        trainers: The loops that are called at the end.
    """

    def __init__(
        self,
        run: run_steps.RunSteps,
        saves: saving.Saves,
        restores: restoring.Restores,
        processes: _distributed.agreement.Processes,
        *,
        read_only: bool,
    ) -> None:
        self.run = run
        self.saves = saves
        self.trainers: tuple[Trainer, ...] = ()
        self._restores = restores
        self._processes = processes
        self._read_only = read_only

    def check_writable(self, action: str) -> None:
        """Raises ReadOnlyError if the checkpointer was opened with `read_only`."""
        if self._read_only:
            raise errors.ReadOnlyError(
                f"cannot {action} in {self.run.directory}: it was opened with"
                " read_only=True"
            )

    def load_source(
        self,
        source: PathLike,
        abstract_state: PyTree,
        *,
        step: int | None = None,
        **options: Unpack[restoring.RestoreKeywords],
    ) -> tuple[PyTree, int]:
        """Loads another checkpoint as the state that this run begins with.

        Every step that is saved from here on records the source in its lineage.

        Args:
            source: A checkpoint in any format, or a run directory.
            abstract_state: What to load; see `flaxckpt.load`.
            step: The step of a run directory; by default the newest.
            **options: See `flaxckpt.load`. With `optimizer="reinit"`, the step counter
                beside the optimizer keeps its value in `abstract_state`, too.

        Returns:
            The state, and the step that its counters say: 0 with `reinit`, or if the
            state has none.

        Raises:
            OptionError: The counters disagree.
            CheckpointError: As for `flaxckpt.load`.
        """
        path = _storage.local.resolve(source)
        with self.run.events.delivery():
            state, self.saves.lineage = self._restores.load_source(
                path, step, abstract_state, **options
            )
        is_new = options.get("optimizer") == "reinit"
        return state, 0 if is_new else _checkpoint.restore.step_of(state)

    # ---- several processes ------------------------------------------------------

    def on_first_process(self, action: str, act: Callable[[], Any]) -> Any:
        """Calls `act` on process 0, and returns its JSON result on all processes.

        All processes call this at the same place.
        """
        together = self._processes.begin("once", action)
        with _distributed.agreement.ending(together):
            return _distributed.agreement.first_says(together, "done", act)

    def has_steps(self) -> bool:
        """Whether the run has steps, good or damaged, as process 0 sees them.

        All processes call this at the same place.
        """
        together = self._processes.begin("look", "the steps")
        with _distributed.agreement.ending(together, saving=False):
            self.saves.end()
            return bool(
                _distributed.agreement.first_says(together, "there", self.run.has_any)
            )

    # ---- the end ----------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Has the checkpointer call `trainer` at its end."""
        if trainer not in self.trainers:
            self.trainers = (*self.trainers, trainer)

    def detach(self, trainer: Trainer) -> None:
        """Undoes `attach`."""
        self.trainers = tuple(each for each in self.trainers if each is not trainer)

    def settle(self) -> None:
        """Waits for the save under way, and for the saves that sinks begin meanwhile.

        A sink that begins a save at each event would go on for ever: after some saves,
        sinks are not called any more.

        Raises:
            CheckpointError: A save has failed.
        """
        for _ in range(_MOST_SAVES_BY_SINKS):
            self.saves.wait()
            if not self.saves.is_under_way():
                return
        _log.warning(
            "a sink of events begins a save whenever one has ended: it is told no more"
        )
        self.saves.end()
