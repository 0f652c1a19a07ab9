"""The steps of a run wherever they are: in its directory, or in a staging one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flaxckpt import _checkpoint, _steps, _storage, _util, errors, formats, policies
from flaxckpt._run import edit, index, retention
from flaxckpt._run import staging as run_staging
from flaxckpt._run.events import stream
from flaxckpt._types import PathLike
from flaxckpt.formats import _locate
from flaxckpt.policies import PreservationPolicy


class RunSteps:
    """Finds, keeps and deletes the steps of a run.

    Args:
        directory: Of the run.
        rules: What is to stay.
        step_format: Names of steps.
        read_only: Whether no journal is written.
        staging: Where steps are saved first; None: in the directory.
        keep_staging: What stays there.

    Attributes:
        directory: Of the run.
        saves_in: Where steps are saved.
        format: Names of steps.
        retention: What stays where steps are saved.
        tiers: Staging and the directory as one; None without staging.
        events: What happens to the steps.
    """

    def __init__(
        self,
        directory: PathLike,
        rules: retention.Rules,
        *,
        step_format: str,
        read_only: bool,
        staging: PathLike | None,
        keep_staging: Sequence[PreservationPolicy],
    ) -> None:
        self.directory = self.saves_in = _storage.local.resolve(directory)
        self.format = _steps.names.StepFormat(step_format)
        self.retention = retention.Retention(self.directory, self.format, rules)
        keep = policies.checked(keep_staging, "keep_staging")
        if staging is not None:
            self.saves_in = run_staging.resolve(staging, self.directory)
        elif keep != run_staging.KEEP:
            raise errors.OptionError("keep_staging is for a staging directory: set it")
        journal = None if read_only else self.saves_in / _steps.journal.NAME
        self.events = stream.Stream(self.directory, journal)
        self.tiers = None if staging is None else self._two_tiers(rules, keep)

    def _two_tiers(
        self, rules: retention.Rules, keep: tuple[PreservationPolicy, ...]
    ) -> run_staging.Tiers:
        """Keeps other steps in staging than in the directory."""
        far, near = self.retention, rules._replace(keep=keep, keep_dataset=())
        self.retention = retention.Retention(self.saves_in, self.format, near)
        return run_staging.Tiers(
            self.saves_in, self.directory, self.format, self.retention, far, self.events
        )

    def make_directory(self) -> None:
        """Makes where steps are saved, if it is missing.

        Raises:
            OptionError: It, or a new step in it, would be called like a file.
            SaveFailedError: It cannot be made.
        """
        self._check_names()
        try:
            if self.tiers is None:
                _storage.local.make_directory(self.directory)
            else:
                listed = self.retention.steps.listed()
                run_staging.make(self.saves_in, self.directory, listed)
        except OSError as error:
            raise errors.SaveFailedError(
                f"{self.saves_in} cannot be made: {error}; choose another directory,"
                " or pass read_only=True to look at one that is there"
            ) from error

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

    @property
    def all(self) -> index.Inventory | run_staging.Tiers:
        """The steps of both."""
        return self.retention.steps if self.tiers is None else self.tiers

    def listed(self) -> dict[int, Path]:
        """The steps that are not marked as damaged, ascending."""
        return self.all.listed()

    def seen(self) -> dict[int, Path]:
        """The same, without a look at a directory behind staging."""
        if self.tiers is not None:
            return self.tiers.seen()
        return self.retention.steps.listed()

    def damaged(self) -> dict[int, Path]:
        """The steps that are marked as damaged, ascending."""
        if self.tiers is not None:
            return self.tiers.damaged()
        return _steps.names.damaged(self.directory, self.format)

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
        if self.tiers is not None and (near := self.tiers.path(step)) is not None:
            return near
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
            path = self.path(step)
            if self.tiers is not None:
                return self.tiers.copies(step, path)
            return [(step, path)]
        if self.tiers is not None:
            candidates = self.tiers.candidates()
        else:
            candidates = sorted(self.listed().items(), reverse=True)
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

    # ---- saving -----------------------------------------------------------------

    def tier(self, path: Path) -> run_staging.Tier:
        """In which of both a step is."""
        return "directory" if self.tiers is None else self.tiers.tier(path)

    def check_free(self, step: int) -> None:
        """Refuses a new step that a directory behind staging is known to have.

        Raises:
            CheckpointExistsError: It has.
        """
        if self.tiers is not None:
            self.tiers.check_free(step)

    def check_replaceable(self, step: int) -> None:
        """Raises an error if the directory's copy of a step has other files in it.

        Raises:
            CheckpointExistsError: It has.
        """
        if self.tiers is not None:
            self.tiers.check_replaceable(step)

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
        """What says of a new step that it is still to be uploaded."""
        if self.tiers is None:
            return {}
        return {
            _steps.markers.NOT_UPLOADED: _steps.markers.Waiting(overwrite).content()
        }

    def replacing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Lets no upload read a step in the `with` block."""
        if self.tiers is None:
            return contextlib.nullcontext()
        return self.tiers.replacing(path)

    def upload(self) -> None:
        """Has what is new be uploaded from staging, behind the caller."""
        if self.tiers is not None:
            self.tiers.uploads.start()

    # ---- keeping and deleting ---------------------------------------------------

    @contextlib.contextmanager
    def changing(self, step: int, *removed: str) -> Iterator[Path]:
        """Where a step is, to be changed in the `with` block.

        Args:
            step: It.
            *removed: Marks that are taken from it.
        """
        path = self.path(step)
        if self.tiers is None:
            yield path
            return
        with self.tiers.changing(path, *removed):
            yield path

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

    def delete(self, step: int) -> None:
        """Deletes a step wherever it is.

        Raises:
            SaveFailedError: It could not be deleted.
        """
        step = _steps.names.check(step)
        path = self.path(step)
        if self.tiers is None:
            edit.delete(path)
        else:
            self.tiers.delete(step)
        self.events.emit("deleted", step, path=path, reason="it was asked for")
