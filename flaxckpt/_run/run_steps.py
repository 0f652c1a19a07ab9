"""The steps of a run that saves them straight into its directory.

`staging.StagedSteps` has the same methods for a run with a staging directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from flaxckpt import _checkpoint, _steps, _storage, _util, errors, formats, policies
from flaxckpt._run import edit, retention
from flaxckpt._run.events import stream
from flaxckpt.formats import _locate

Tier = Literal["directory", "staging"]


class RunSteps:
    """Finds, keeps and deletes the steps of a run.

    Args:
        directory: Of the run.
        rules: What is to stay.
        step_format: Names of steps.
        read_only: Whether no journal is written.
        saves_in: Where steps are saved; None: in the directory.

    Attributes:
        directory: Of the run.
        saves_in: Where steps are saved.
        format: Names of steps.
        retention: What stays where steps are saved.
        events: What happens to the steps.
        has_staging: Whether steps are saved to a staging directory first.
    """

    has_staging = False

    def __init__(
        self,
        directory: Path,
        rules: retention.Rules,
        step_format: _steps.names.StepFormat,
        *,
        read_only: bool,
        saves_in: Path | None = None,
    ) -> None:
        self.directory = directory
        self.saves_in = directory if saves_in is None else saves_in
        self.format = step_format
        self.retention = retention.Retention(self.saves_in, step_format, rules)
        journal = None if read_only else self.saves_in / _steps.journal.NAME
        self.events = stream.Stream(directory, journal)

    def make_directory(self) -> None:
        """Makes where steps are saved, if it is missing.

        Raises:
            OptionError: It, or a new step in it, would be called like a file.
            SaveFailedError: It cannot be made.
        """
        self._check_names()
        try:
            self._make_directory()
        except OSError as error:
            raise errors.SaveFailedError(
                f"{self.saves_in} cannot be made: {error}; choose another directory,"
                " or pass read_only=True to look at one that is there"
            ) from error

    def _make_directory(self) -> None:
        _storage.local.make_directory(self.directory)

    def _check_names(self) -> None:
        """Raises OptionError for new directories that are named like files."""
        new = self.saves_in / self.format.name(0)
        for path in (self.directory, self.saves_in, new):
            try:
                _checkpoint.overwrite.check_name(path, "a run")
            except errors.OptionError:
                if not (self.has_any() if path == new else path.is_dir()):
                    raise

    # ---- finding ----------------------------------------------------------------

    def listed(self) -> dict[int, Path]:
        """The steps that are not marked as damaged, ascending."""
        return self.retention.steps.listed()

    def seen(self) -> dict[int, Path]:
        """The same, without a look at a directory behind staging."""
        return self.listed()

    def damaged(self) -> dict[int, Path]:
        """The steps that are marked as damaged, ascending."""
        return self.retention.steps.damaged()

    def metrics(self, path: Path) -> Mapping[str, float]:
        """The metrics that are stored with the step at `path`."""
        return self.retention.steps.metrics(path)

    def best(self, policy: policies.BestN) -> set[int]:
        """The steps that `policy` names."""
        return self.retention.steps.best(policy)

    def forget(self) -> None:
        """Reads everything anew from here on."""
        self.retention.steps.forget()

    def has_any(self) -> bool:
        """Whether there are steps, good or damaged."""
        return bool(self.listed() or self.damaged())

    def reasons(self) -> dict[int, str]:
        """Step -> why it is marked as damaged."""
        return {
            step: _steps.markers.why_damaged(p) for step, p in self.damaged().items()
        }

    def path(self, step: int) -> Path:
        """Where a step is, good or damaged.

        Raises:
            CheckpointNotFoundError: It is nowhere.
            OptionError: It is no number of a step.
        """
        step = _steps.names.check(step)
        listed = self.listed()
        if step not in listed:
            listed |= self.damaged()
        if step not in listed:
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no step {step}:"
                f" it has {_locate.summary(list(listed))}"
            )
        return listed[step]

    def candidates(self, step: int | None) -> list[tuple[int, Path]]:
        """The steps to restore, the best first: this one, or all from the newest.

        Raises:
            CheckpointNotFoundError: There is no step, or not this one.
            DamagedCheckpointError: There are damaged ones only.
        """
        if step is not None:
            step = _steps.names.check(step)
            return self.copies(step, self.path(step))
        candidates = self._newest_first()
        if not candidates and (damaged := self.reasons()):
            raise errors.DamagedCheckpointError(
                f"{self.directory} has damaged steps only:\n"
                + errors.rows(f"{step}: {why}" for step, why in damaged.items())
                + "\nrestore(step=…) tries one of them; delete(step) removes it, and"
                " without steps a run begins anew."
            )
        if not candidates:
            advice = "save one first, or check the directory and step_format"
            if self.saves_in.is_dir():
                advice = formats.advice_on_saves(self.saves_in) or advice
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no steps called like {self.format.template!r}:"
                f" {advice}"
            )
        return candidates

    def _newest_first(self) -> list[tuple[int, Path]]:
        return sorted(self.listed().items(), reverse=True)

    def copies(self, step: int, path: Path) -> list[tuple[int, Path]]:
        """The step at `path`, and a copy of it behind staging, if there is one."""
        return [(step, path)]

    # ---- saving -----------------------------------------------------------------

    def tier(self, path: Path) -> Tier:
        """Whether a step is in the directory of the run or in a staging directory."""
        return "directory"

    def check_free(self, step: int) -> None:
        """Refuses a new step that a directory behind staging is known to have.

        Raises:
            CheckpointExistsError: It has.
        """

    def check_replaceable(self, step: int) -> None:
        """Raises an error if the copy of a step behind staging has other files in it.

        Raises:
            CheckpointExistsError: It has.
        """

    def check_no_checkpoint(self) -> None:
        """Refuses a directory that is a checkpoint: who replaces that deletes the run.

        Raises:
            OptionError: It is.
        """
        if formats.recognises(self.saves_in):
            raise errors.OptionError(
                f"{self.saves_in} is one checkpoint, and steps saved into it would go"
                " with it: choose another directory for the run; source= has it begin"
                " from this checkpoint"
            )

    def marks_of_new(self, *, overwrite: bool) -> dict[str, bytes]:
        """The markers of a new step: file name -> content."""
        return {}

    def replacing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Lets no upload read a step in the `with` block."""
        return contextlib.nullcontext()

    def open_uploads(self) -> bool:
        """Uploads steps that a crash has left; returns whether it could begin."""
        return True

    def upload(self) -> None:
        """Starts to upload new steps from staging, in the background."""

    def wait_for_uploads(self, timeout_secs: float | None) -> None:
        """Waits until nothing is to be uploaded; see `Uploads.wait`."""

    # ---- keeping and deleting ---------------------------------------------------

    @contextlib.contextmanager
    def changing(self, step: int, *removed: str) -> Iterator[Path]:
        """Where a step is, to be changed in the `with` block.

        Args:
            step: It.
            *removed: Marks that are taken from it.
        """
        yield self.path(step)

    def make_permanent(self, step: int) -> None:
        """Has a temporary step stay as long as the policies say.

        Raises:
            SaveFailedError: That could not be written down.
        """
        if _util.processes.is_first():
            with self.changing(step, _steps.markers.UNTIL_NEXT) as path:
                edit.make_permanent(path)

    def retire(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes what nothing keeps where steps are saved; see `Retention.apply`."""
        deleted = self.retention.apply(just_saved=just_saved, is_awaited=is_awaited)
        for step in deleted:
            path = self.saves_in / self.format.name(step)
            self.events.emit("deleted", step, path=path, reason="no policy keeps it")
        return deleted

    def explain(self) -> dict[int, list[str]]:
        """Why each step stays, oldest first; a step without a reason would go."""
        return self.retention.explain()

    def prune(self) -> tuple[int, ...]:
        """Deletes what nothing keeps; returns the steps that are nowhere any more.

        Raises:
            SaveFailedError: The newest step is damaged.
        """
        return self.retire() if _util.processes.is_first() else ()

    def delete(self, step: int) -> None:
        """Deletes a step wherever it is.

        Raises:
            SaveFailedError: It could not be deleted.
        """
        step = _steps.names.check(step)
        path = self.path(step)
        self._delete(step, path)
        self.events.emit("deleted", step, path=path, reason="it was asked for")

    def _delete(self, step: int, path: Path) -> None:
        edit.delete(path)
