"""Programs of histories: trainers and readers, which use a `Checkpointer`.

The ledger outside of all processes knows their saves. What it sees of the storage, and
what it checks there, is left to its subclasses.
"""

import abc
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

import flaxckpt
from flaxckpt import errors, policies
from verification.simulation import kernel

PARTS = ("v", "w")
"""The arrays of a state."""

OPERATIONS: Mapping[str, int] = {
    "save": 6,
    "overwrite": 2,
    "restore": 2,
    "pin": 2,
    "unpin": 1,
    "delete": 1,
    "measure": 1,
    "prune": 1,
    "reopen": 1,
}
"""What trainers do with their steps -> how often, relative to the others."""


class Setting(NamedTuple):
    """What all processes of a history agree on.

    Attributes:
        run: The run directory.
        staging: The staging directory of the first job, or None.
        latest: Retention keeps this number of newest steps; 0 for all.
        has_best: Whether retention keeps the step with the lowest loss as well.
    """

    run: Path
    staging: Path | None
    latest: int
    has_best: bool

    @property
    def keep(self) -> list[policies.PreservationPolicy]:
        """The policies."""
        best = [policies.BestN(1, "loss", "min")] if self.has_best else []
        return [policies.LatestN(self.latest), *best] if self.latest else []


class Save:
    """A save, whose state holds its number.

    Attributes:
        token: Its number.
        step: Its step.
        loss: Its metric.
        directory: Where it is saved.
        is_acknowledged: Whether it has succeeded.
    """

    def __init__(self, token: int, step: int, loss: float, directory: Path) -> None:
        self.token = token
        self.step = step
        self.loss = loss
        self.directory = directory
        self.is_acknowledged = False

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state to save."""
        return {name: np.array([self.token]) for name in PARTS}

    def __str__(self) -> str:
        return f"save {self.token} of step {self.step}"


class Reading(NamedTuple):
    """A read of a step under a lease."""

    path: Path
    token: int
    lease: str
    inode: int = 0


class Ledger(abc.ABC):
    """What was asked for and acknowledged.

    Args:
        world: The world.
        setting: What all processes agree on.
        parts: The arrays of each state.

    Attributes:
        saves: Number of a save -> the save.
        doing: PID -> what its main thread does.
        began: PID -> since when.
        disturbing: Operations of users that change what policies look at.
        disturbed: When the last of them ended.
        left: Directory and save -> why the save is not there any more.
        pinned: Step -> whether it surely is.
        last_pinned: PID -> the step that it pinned last.
        readings: The reads under way.
        touched: Lease -> its last sign of life.
        leases: PID -> its last lease.
        lost_uploads: The failures of uploads that did not find a step in staging.
    """

    def __init__(
        self, world: kernel.World, setting: Setting, parts: tuple[str, ...] = PARTS
    ) -> None:
        self.world = world
        self.parts = parts
        self.setting = setting
        self.saves: dict[int, Save] = {}
        self.doing: dict[int, str] = {}
        self.began: dict[int, float] = {}
        self.disturbing = 0
        self.disturbed = -1.0
        self.left: dict[tuple[Path, int], str] = {}
        self.pinned: dict[Path, bool] = {}
        self.last_pinned: dict[int, Path] = {}
        self.readings: list[Reading] = []
        self.touched: dict[str, float] = {}
        self.leases: dict[int, str] = {}
        self.lost_uploads: list[str] = []

    @property
    @abc.abstractmethod
    def may_fail(self) -> bool:
        """Whether a fault may make a restore fail."""

    @property
    @abc.abstractmethod
    def may_restore_older(self) -> bool:
        """Whether a fault may keep a restore from the newest step."""

    @abc.abstractmethod
    def check_there(self, save: Save) -> None:
        """Checks that an acknowledged save is there, or was removed on purpose."""

    @abc.abstractmethod
    def find_reading(self, path: Path, lease: str) -> Reading | None:
        """Returns the read of a step; None if its lease does not protect it."""

    # ---- what processes report ----------------------------------------------------

    @contextlib.contextmanager
    def operation(self, what: str, *, disturbs: bool = False) -> Iterator[None]:
        """Notes what the main thread of a process does."""
        pid = self.world.task.process.pid
        self.world.record(what)
        self.doing[pid], self.began[pid] = what, self.world.now
        self.disturbing += disturbs
        try:
            yield
        except errors.CheckpointError as error:
            self.world.record(f"{what}: {type(error).__name__}", f"{error}"[:100])
        finally:
            if self.doing.get(pid) == what:
                del self.doing[pid]
            if disturbs:
                self.disturbing -= 1
                self.disturbed = self.world.now

    def note_event(self, event: flaxckpt.Event) -> None:
        """Notes the event of a trainer, as a sink of its `Checkpointer`."""
        error = str(event.details.get("error"))
        if event.kind == "failed" and f"file or directory: '{self.setting.staging}" in (
            error
        ):
            self.lost_uploads.append(f"step {event.step} is lost in staging: {error}")

    def check_uploads(self) -> None:
        """Checks that uploads have found their steps, which only they let go."""
        if self.lost_uploads:
            raise kernel.Violation(self.lost_uploads[0])

    def begin_save(self, step: int, directory: Path) -> Save:
        """Returns a new save."""
        loss = float(self.world.random.randrange(100))
        save = Save(len(self.saves) + 1, step, loss, directory)
        self.saves[save.token] = save
        return save

    def acknowledge(self, save: Save) -> None:
        """Notes that a save has succeeded."""
        save.is_acknowledged = True
        self.world.record(f"acknowledged: {save}")
        self.check_there(save)

    def forget_pin(self, step: int) -> None:
        """Notes that a step may lose its pin from now on."""
        for directory in (self.setting.run, self.setting.staging):
            if directory is not None:
                self.pinned[directory / str(step)] = False

    def check_state(self, state: dict[str, np.ndarray], what: str) -> Save:
        """Checks that a restored state is that of one save."""
        tokens = {int(np.asarray(state[name])[0]) for name in self.parts}
        if len(tokens) > 1 or not tokens <= self.saves.keys():
            raise kernel.Violation(f"{what} returns parts of the saves {tokens}")
        return self.saves[tokens.pop()]

    def surely_there(self) -> list[Save]:
        """Returns the acknowledged saves that are listed now."""
        return [
            save
            for save in self.saves.values()
            if save.is_acknowledged
            and (save.directory, save.token) not in self.left
            and save.directory == self.setting.run
        ]


class Trainer:
    """Saves, restores, and does with its steps what users do.

    Args:
        ledger: The ledger.
        size: The number of operations.
        staging: The staging directory, or None.
        operations: As `OPERATIONS`.
    """

    def __init__(
        self,
        ledger: Ledger,
        size: int,
        staging: Path | None,
        operations: Mapping[str, int] = OPERATIONS,
    ) -> None:
        self._ledger = ledger
        self._world = ledger.world
        self._size = size
        self._staging = staging
        self._operations = operations

    def __call__(self) -> None:
        names, weights = list(self._operations), list(self._operations.values())
        random = self._world.random
        self._open()
        for _ in range(self._size):
            self._world.sleep(random.choice((0.0, 0.1, 1.0, 20.0)) * random.random())
            (name,) = random.choices(names, weights)
            getattr(self, f"_{name}")()
            self._ledger.check_uploads()
        with self._ledger.operation("close"):
            self._checkpointer.close()
        self._ledger.check_uploads()

    def _open(self) -> None:
        setting = self._ledger.setting
        while True:
            with self._ledger.operation("open"):
                self._checkpointer = flaxckpt.Checkpointer(
                    setting.run,
                    keep=setting.keep,
                    staging=self._staging,
                    sinks=[self._ledger.note_event],
                )
                return
            self._world.sleep(1.0)

    def _steps(self) -> list[int]:
        with self._ledger.operation("list"):
            return self._checkpointer.steps()
        return []

    def _choose(self) -> int:
        return self._world.random.choice(self._steps() or [1])

    def _save(self) -> None:
        self._save_as(max(self._steps(), default=0) + 1)

    def _overwrite(self) -> None:
        self._save_as(self._choose(), overwrite=True)

    def _save_as(self, step: int, *, overwrite: bool = False) -> None:
        directory = self._staging or self._ledger.setting.run
        save = self._ledger.begin_save(step, directory)
        what = f"{save}{', overwriting' if overwrite else ''}"
        with self._ledger.operation(what, disturbs=overwrite):
            handle = self._checkpointer.save(
                step, save.state, metrics={"loss": save.loss}, overwrite=overwrite
            )
            if self._world.random.random() < 0.3:
                self._world.sleep(1.0)
            handle.wait()
            self._ledger.acknowledge(save)

    def _restore(self) -> None:
        there = self._ledger.surely_there()
        with self._ledger.operation("restore"):
            try:
                state = self._checkpointer.restore()
            except errors.CheckpointError:
                self._check_newest(there, None)
                raise
            save = self._ledger.check_state(state, "restore")
            self._check_newest(there, save)

    def _check_newest(self, there: list[Save], restored: Save | None) -> None:
        """Checks that the newest step was restored, if nobody touched it."""
        ledger = self._ledger
        if ledger.may_fail if restored is None else ledger.may_restore_older:
            return
        now = self._ledger.surely_there()
        steady = [save.step for save in there if save in now]
        if steady and (restored is None or restored.step < max(steady)):
            raise kernel.Violation(f"restores {restored} instead of step {max(steady)}")

    def _pin(self) -> None:
        step, pinned = self._choose(), self._ledger.pinned
        with self._ledger.operation(f"pin {step}"):
            self._checkpointer.pin(step)
            path = self._ledger.last_pinned[self._world.task.process.pid]
            pinned[path] = pinned.get(path, True)

    def _unpin(self) -> None:
        step = self._choose()
        with self._ledger.operation(f"unpin {step}", disturbs=True):
            self._ledger.forget_pin(step)
            self._checkpointer.unpin(step)

    def _delete(self) -> None:
        step = self._choose()
        with self._ledger.operation(f"delete {step}", disturbs=True):
            self._ledger.forget_pin(step)
            self._checkpointer.delete(step)

    def _measure(self) -> None:
        step = self._choose()
        with self._ledger.operation(f"measure {step}", disturbs=True):
            self._checkpointer.add_metrics(step, {"accuracy": 0.5})

    def _prune(self) -> None:
        with self._ledger.operation("prune"):
            self._checkpointer.prune()

    def _reopen(self) -> None:
        with self._ledger.operation("close"):
            self._checkpointer.close()
        self._open()


class Reader:
    """Reads new steps under leases, as an evaluation job does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._world = ledger.world

    def __call__(self) -> None:
        run = self._ledger.setting.run
        with self._ledger.operation("read new steps"):
            checkpointer = flaxckpt.Checkpointer(run, read_only=True)
            steps = checkpointer.new_steps(timeout_secs=30, poll_secs=5)
            with contextlib.closing(steps):
                for step in steps:
                    self._read(checkpointer, run / str(step), step)

    def _read(self, checkpointer: flaxckpt.Checkpointer, path: Path, step: int) -> None:
        ledger = self._ledger
        lease = ledger.leases.get(self._world.task.process.pid, "none")
        reading = ledger.find_reading(path, lease)
        if reading is None:
            return  # replaced, or the lease has expired
        ledger.readings.append(reading)
        self._world.record(f"reads save {reading.token} of step {step}")
        try:
            for _ in range(self._world.random.randrange(4)):
                self._world.sleep(30 * self._world.random.random())
            with ledger.operation(f"load {step}"):
                state = checkpointer.restore(step=step, fallback=False)
                ledger.check_state(state, "restore")
        finally:
            ledger.readings.remove(reading)


def reopen(ledger: Ledger) -> None:
    """Opens the run again after the faults, three times."""
    setting = ledger.setting
    for _ in range(3):
        with (
            ledger.operation("last"),
            flaxckpt.Checkpointer(
                setting.run, keep=setting.keep, staging=setting.staging
            ) as checkpointer,
        ):
            checkpointer.wait_for_uploads()
        ledger.world.sleep(700.0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences flaxckpt's log."""
    logger = logging.getLogger("flaxckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
