"""A staging directory on a faster disk, before the directory of the run.

Steps are committed in staging, with a mark that says that the directory has not got
them; `_run.uploads` sees to that. What is to change in a step that staging has is
changed there, and marks it again. So a crash forgets nothing: what is marked when the
directory is opened again is uploaded then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, _util, errors, policies
from flaxckpt._run import edit, retention, run_steps, upload_copies, uploads
from flaxckpt._types import PathLike
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

KEEP = (policies.LatestN(1),)
"""What stays in staging, beside what is still to be uploaded."""

_OWNER = "STAGING_OF"
"""A file of this name in a staging directory says of which directory it is."""


# ---- where staging is -------------------------------------------------------------


def open_steps(
    directory: PathLike,
    rules: retention.Rules,
    *,
    step_format: str,
    read_only: bool,
    staging: PathLike | None,
    keep_staging: Sequence[PreservationPolicy],
) -> run_steps.RunSteps:
    """Returns the steps of a run.

    Args:
        directory: Of the run.
        rules: What is to stay.
        step_format: Names of steps.
        read_only: Whether no journal is written.
        staging: Where steps are saved first; None: in the directory.
        keep_staging: What stays there.

    Raises:
        OptionError: The options do not fit.
    """
    path = _storage.local.resolve(directory)
    named = _steps.names.StepFormat(step_format)
    keep = policies.checked(keep_staging, "keep_staging")
    if staging is not None:
        near = _resolve(staging, path)
        return StagedSteps(path, near, rules, keep, named, read_only=read_only)
    if keep != KEEP:
        raise errors.OptionError("keep_staging is for a staging directory: set it")
    return run_steps.RunSteps(path, rules, named, read_only=read_only)


def _resolve(staging: PathLike, directory: Path) -> Path:
    """The staging directory of a run.

    Raises:
        OptionError: It cannot be that, or is another run's.
    """
    path = _storage.local.resolve(staging)
    if not _storage.of(path).has_directories:
        raise errors.OptionError(
            f"staging wants a directory of this machine, got {path}: pass the path of"
            " a fast disk"
        )
    if _util.processes.is_together():
        raise errors.OptionError(
            f"staging={path} is for one process: a machine's disk would have only its"
            " part of a step. Leave staging out, so that all save to the directory"
        )
    if path == directory or path in directory.parents or directory in path.parents:
        raise errors.OptionError(
            f"staging={path} and {directory} must lie apart, neither in the other"
        )
    _check_owner(path, directory)
    return path


def _check_owner(path: Path, directory: Path) -> None:
    try:
        found = (path / _OWNER).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return
    if found != str(directory):
        raise errors.OptionError(
            f"staging={path} is that of {found}, not of {directory}: choose another"
            f" path. If the run has moved, correct {path / _OWNER}"
        )


def _make(path: Path, directory: Path, listed: Mapping[int, Path]) -> None:
    """Makes the staging directory of a run, or sees that it is that.

    Raises:
        OptionError: It has steps, and nobody knows of which run.
        OSError: It cannot be made.
    """
    _storage.local.make_directory(path)
    if (path / _OWNER).is_file():
        return
    if listed:
        raise errors.OptionError(
            f"staging={path} has steps, such as {max(listed)}, and no file {_OWNER}"
            " that says whose they are: choose an empty directory, or write"
            f" {directory} into that file if they are of this run"
        )
    _storage.local.replace(path / _OWNER, f"{directory}\n".encode())


# ---- both together ----------------------------------------------------------------


class _Measured(NamedTuple):
    """A step that both have, as policies see it."""

    step: int
    metrics: Mapping[str, float]
    created: float
    temporary: bool


class StagedSteps(run_steps.RunSteps):
    """The steps of a staging directory, and of the directory behind it.

    Args:
        directory: Where steps are uploaded to.
        staging: Where they are saved.
        rules: What is to stay in the directory.
        keep: What is to stay in staging.
        step_format: Names of steps.
        read_only: Whether no journal is written.

    Attributes:
        uploads: What goes from one to the other.
    """

    has_staging = True

    def __init__(
        self,
        directory: Path,
        staging: Path,
        rules: retention.Rules,
        keep: tuple[PreservationPolicy, ...],
        step_format: _steps.names.StepFormat,
        *,
        read_only: bool,
    ) -> None:
        near = rules._replace(keep=keep, keep_dataset=())
        super().__init__(
            directory, near, step_format, read_only=read_only, saves_in=staging
        )
        self._near = self.retention.steps
        self._far = retention.Retention(directory, step_format, rules)
        self.uploads = uploads.Uploads(
            staging, directory, step_format, self.retention, self._far, self.events
        )

    def _make_directory(self) -> None:
        _make(self.saves_in, self.directory, self._near.listed())

    # ---- finding ----------------------------------------------------------------

    def listed(self) -> dict[int, Path]:
        """The steps of both; where both have one, it is that of staging.

        But it is the directory's if the step was replaced there after its upload.
        """
        near, far = self._both()
        return dict(sorted((far | near).items()))

    def _both(self) -> tuple[dict[int, Path], dict[int, Path]]:
        """The steps of staging that nobody has replaced, and those of the directory."""
        near = self._near.listed()  # first: what leaves it then is in the other
        far = self.uploads.look()
        current = {
            step: path
            for step, path in near.items()
            if step not in far or not self._is_stale(path)
        }
        return current, far

    def _is_stale(self, path: Path) -> bool:
        """Whether a step of staging was replaced in the directory after its upload."""
        return _steps.markers.is_settled(path) and self._is_another(path)

    def _is_another(self, path: Path) -> bool:
        """Whether the directory has another step of the number of one in staging.

        Raises:
            StoreError: The directory is out of reach.
        """
        try:
            return upload_copies.compare(path, self.directory / path.name) == "other"
        except errors.StoreError:
            raise
        except OSError:  # a file that cannot be read proves nothing
            return False

    def seen(self) -> dict[int, Path]:
        """The same as far as is known, without a look at the directory."""
        return dict(sorted((self.uploads.known | self._near.listed()).items()))

    def damaged(self) -> dict[int, Path]:
        """The steps that are marked as damaged wherever they are, ascending."""
        found = self._far.steps.damaged() | self._near.damaged()
        good = self.listed().keys()
        return {step: path for step, path in sorted(found.items()) if step not in good}

    def _newest_first(self) -> list[tuple[int, Path]]:
        """The steps, the newest first, and staging before the directory."""
        near, far = self._both()
        return [
            (step, found[step])
            for step in sorted(near.keys() | far.keys(), reverse=True)
            for found in (near, far)
            if step in found
        ]

    def path(self, step: int) -> Path:
        """Where a step is: in staging, unless it was replaced in the directory since.

        If the directory is out of reach, nobody knows of a replacement.
        """
        step = _steps.names.check(step)
        path = self._near.listed().get(step)
        with contextlib.suppress(OSError):
            if path is not None and self._is_stale(path):
                path = None
        return super().path(step) if path is None else path

    def copies(self, step: int, path: Path) -> list[tuple[int, Path]]:
        """The step at `path`, and the directory's copy of it, if there is one."""
        if self.tier(path) == "directory":
            return [(step, path)]
        found = [(step, path)]
        if step in self.uploads.known or not _steps.markers.is_waiting(path):
            with contextlib.suppress(OSError):
                if not self._is_another(path):
                    found.append((step, self.directory / path.name))
        return found

    def _wherever(self, step: int) -> list[Path]:
        """A step in both, good or damaged."""
        found = []
        for steps in (self._near, self._far.steps):
            there = steps.damaged() | steps.listed()
            found += [there[step]] if step in there else []
        return found

    def tier(self, path: Path) -> run_steps.Tier:
        """In which of both a step is."""
        return "staging" if path.parent == self.saves_in else "directory"

    def metrics(self, path: Path) -> dict[str, float]:
        """What is stored of a step, in both if they have the same."""
        found = self._near.metrics(path)
        is_near = self.tier(path) == "staging"
        if is_near and not _steps.markers.is_settled(path) and self._is_another(path):
            return dict(found)
        return {**self._far.steps.metrics(self.directory / path.name), **found}

    def forget(self) -> None:
        """Reads everything anew from here on."""
        self._near.forget()
        self._far.steps.forget()

    def best(self, policy: policies.BestN) -> set[int]:
        """The steps of both that `policy` names."""
        near, far = self._near.ranked(), self._far.steps.ranked()
        ranked: dict[int, policies.Ranked] = {**far, **near}
        for step in near.keys() & far.keys():
            path = self.saves_in / self.format.name(step)
            if self._is_another(path):
                ranked[step] = (far if _steps.markers.is_settled(path) else near)[step]
                continue
            both = {**far[step].metrics, **near[step].metrics}
            is_temporary = near[step].temporary
            ranked[step] = _Measured(step, both, near[step].created, is_temporary)
        return policy.preserved([ranked[step] for step in sorted(ranked)])

    def explain(self) -> dict[int, list[str]]:
        """Why each step stays in the directory, and in staging."""
        found = self._far.explain()
        for step, why in self.retention.explain().items():
            found.setdefault(step, []).extend(f"staging: {reason}" for reason in why)
        return found

    # ---- changing -----------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, step: int, *removed: str) -> Iterator[Path]:
        """Where a step is; the directory follows what is changed in the `with` block.

        Args:
            step: It.
            *removed: Marks that are taken from it.

        Raises:
            SaveFailedError: It cannot be marked.
        """
        path = self.path(step)
        if self.tier(path) == "directory":
            yield path
            return
        with self.uploads.changing.get():
            try:
                _steps.markers.wait_for_upload(path, removed)
            except OSError as error:
                raise errors.SaveFailedError(
                    f"{path} cannot be changed: {error}; see that the step is still"
                    " there, and that its disk has space, then try again"
                ) from error
            yield path
        self.uploads.start()

    def marks_of_new(self, *, overwrite: bool) -> dict[str, bytes]:
        """The marker which says that a new step is still to be uploaded."""
        return {
            _steps.markers.NOT_UPLOADED: _steps.markers.Waiting(overwrite).content()
        }

    def open_uploads(self) -> bool:
        """Uploads steps that a crash has left; returns whether it could begin."""
        return self.uploads.open()

    def upload(self) -> None:
        """Starts to upload new steps from staging, in the background."""
        self.uploads.start()

    def wait_for_uploads(self, timeout_secs: float | None) -> None:
        """Waits until nothing is to be uploaded; see `Uploads.wait`."""
        self.uploads.wait(timeout_secs)

    def check_free(self, step: int) -> None:
        """Refuses a new step that the directory is known to have.

        Raises:
            CheckpointExistsError: It has.
        """
        if step in self.uploads.known:
            raise errors.CheckpointExistsError(
                f"{self.uploads.known[step]} exists: choose another step, or pass"
                " on_exists='overwrite'"
            )

    def check_replaceable(self, step: int) -> None:
        """Refuses to replace a step of the directory that has other files in it.

        A directory out of reach is looked at again when the step is uploaded.

        Raises:
            CheckpointExistsError: It has.
        """
        path = self.uploads.known.get(step)
        try:
            if path is None or not _storage.local.lexists(path):
                return
            if _storage.of(path).can_rename and _steps.markers.is_damaged(path):
                return  # it is set aside then
            _checkpoint.overwrite.check_replaceable(path)
        except errors.CheckpointExistsError:
            raise
        except OSError as error:
            _log.warning("%s could not be looked at for now: %s", path, error)

    @contextlib.contextmanager
    def replacing(self, path: Path) -> Iterator[None]:
        """Lets nobody read a step in staging for an upload in the `with` block."""
        with self.uploads.busy.get() if path.exists() else contextlib.nullcontext():
            yield

    def _delete(self, step: int, path: Path) -> None:
        """Deletes a step wherever it is.

        Raises:
            SaveFailedError: It could not be deleted.
        """
        with self.uploads.busy.get():
            for found in self._wherever(step):
                edit.delete(found)
            self.uploads.known.pop(step, None)

    def prune(self) -> tuple[int, ...]:
        """Deletes what nothing keeps; returns the steps that are nowhere any more.

        Raises:
            SaveFailedError: The newest step of one of both is damaged.
        """
        deleted = {*super().prune()}
        with self.uploads.busy.get():
            deleted |= {*self.uploads.retire()}
        return tuple(sorted(deleted - self.listed().keys()))
