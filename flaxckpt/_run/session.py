"""Parts of a `Checkpointer` for training loops, not for users."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

from flaxckpt import _distributed, _storage, errors
from flaxckpt._checkpoint.planner import RestoreOptions
from flaxckpt._run import judge, restoring, run_steps, saving, settings
from flaxckpt._types import PathLike, PyTree

_log = logging.getLogger(__name__)

_MOST_SAVES_BY_SINKS = 8
"""Maximal number of saves begun by sinks that the end of a run waits for."""


class Trainer(Protocol):
    """A training loop, called when its `Checkpointer` closes."""

    def before_close(self) -> None: ...

    def after_close(self) -> None:
        """Cleans up after all saves are durable or failed."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Cleans up after an error, without another save."""
        ...

    def give_way(self) -> None:
        """Cleans up when another loop takes over."""
        ...


@dataclasses.dataclass
class Session:
    """The parts of a `Checkpointer`, which closes `trainers`, for its training loop."""

    run: run_steps.RunSteps
    saves: saving.Saves
    restores: restoring.Restores
    processes: _distributed.agreement.Processes
    read_only: bool
    trainers: tuple[Trainer, ...] = ()

    def check_writable(self, action: str) -> None:
        """Raises ReadOnlyError if the checkpointer is read-only."""
        if self.read_only:
            raise errors.ReadOnlyError(
                f"cannot {action} in {self.run.directory}: it was opened with"
                " read_only=True; open another Checkpointer without it"
            )

    def rules(self) -> judge.Rules:
        """Returns the rules of retention; of a reader without, the recorded rules."""
        rules = self.run.rules
        if not self.read_only or rules.keep or rules.keep_items:
            return rules
        return settings.read_rules(self.run.directory, self.run.paths()) or rules

    def load_source(
        self,
        source: PathLike,
        abstract_state: PyTree,
        options: RestoreOptions,
        *,
        step: int | None = None,
    ) -> tuple[PyTree, int]:
        """Loads another checkpoint as the initial state of this run.

        Every later step records the source in its lineage. With `optimizer="reinit"`,
        the step counter also keeps its value in `abstract_state`.
        Returns the state and its step: 0, unless the steps of the source continue.
        Raises OptionError if the step counters disagree.
        """
        path = _storage.paths.resolve(source)
        with self.run.events.delivery():
            state, self.saves.lineage, start = self.restores.load_source(
                path, step, abstract_state, options
            )
        return state, start

    # ---- several processes ------------------------------------------------------

    def on_first_process(self, action: str, act: Callable[[], Any]) -> Any:
        """Returns the JSON result of process 0 to all, which call this at one point."""
        operation = self.processes.begin("once", action)
        with _distributed.agreement.closing(operation):
            return _distributed.agreement.broadcast(operation, "done", act)

    def has_steps(self) -> bool:
        """Returns True if process 0 sees steps of the run, good or damaged.

        With parts, any process counts, as the disk of process 0 may be new. All
        processes call this at the same point.
        """
        operation = self.processes.begin("look", "the steps")
        with _distributed.agreement.closing(
            operation, _distributed.agreement.restore_error
        ):
            self.saves.end()
            if operation is not None and self.run.is_in_parts:
                return any(operation.exchange("there", self.run.has_any()))
            return bool(
                _distributed.agreement.broadcast(operation, "there", self.run.has_any)
            )

    # ---- the end ----------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Adds a loop that the checkpointer calls when closed."""
        if trainer not in self.trainers:
            self.trainers = (*self.trainers, trainer)

    def detach(self, trainer: Trainer) -> None:
        self.trainers = tuple(each for each in self.trainers if each is not trainer)

    def settle(self) -> None:
        """Waits for the save in progress, and for saves begun by sinks meanwhile.

        A sink that begins a save at each event would go on forever: after 8 saves,
        sinks are no longer called. Raises CheckpointError if one failed.
        """
        for _ in range(_MOST_SAVES_BY_SINKS):
            self.saves.wait()
            if not self.saves.is_under_way():
                return
        _log.warning(
            "an event sink begins another save after each save, so no more events are"
            " delivered to the sinks"
        )
        self.saves.end()
