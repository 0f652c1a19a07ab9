"""A staging directory on a faster disk, before the directory of the run.

Steps are committed in staging, with a mark that says that the directory has not got
them; `_run.uploads` sees to that. What is to change in a step that staging has is
changed there, and marks it again. So a crash forgets nothing: what is marked when the
directory is opened again is uploaded then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from flaxckpt import _checkpoint, _steps, _storage, _util, errors, policies
from flaxckpt._run import edit, upload_copies, uploads
from flaxckpt._run import retention as run_retention
from flaxckpt._run.events import stream
from flaxckpt._types import PathLike

_log = logging.getLogger(__name__)

KEEP = (policies.LatestN(1),)
"""What stays in staging, beside what is still to be uploaded."""

_OWNER = "STAGING_OF"
"""A file of this name in a staging directory says of which directory it is."""

Tier = Literal["directory", "staging"]


# ---- where staging is -------------------------------------------------------------


def resolve(staging: PathLike, directory: Path) -> Path:
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


def make(path: Path, directory: Path, listed: Mapping[int, Path]) -> None:
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


class Tiers:
    """The steps of a staging directory, and of the directory behind it.

    Args:
        staging: Where steps are saved.
        directory: Where they are uploaded to.
        step_format: How they are called.
        near: What stays in staging.
        far: What stays in the directory.
        events: Who is told.

    Attributes:
        uploads: What goes from one to the other.
    """

    def __init__(
        self,
        staging: Path,
        directory: Path,
        step_format: _steps.names.StepFormat,
        near: run_retention.Retention,
        far: run_retention.Retention,
        events: stream.Stream,
    ) -> None:
        self._staging = staging
        self._directory = directory
        self._format = step_format
        self._near = near
        self._far = far
        self.uploads = uploads.Uploads(
            staging, directory, step_format, near, far, events
        )

    # ---- finding ----------------------------------------------------------------

    def listed(self) -> dict[int, Path]:
        """The steps of both; where both have one, it is that of staging.

        But it is the directory's if the step was replaced there after its upload.
        """
        near, far = self._both()
        return dict(sorted((far | near).items()))

    def _both(self) -> tuple[dict[int, Path], dict[int, Path]]:
        """The steps of staging that nobody has replaced, and those of the directory."""
        near = self._near.steps.listed()  # first: what leaves it then is in the other
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
            return upload_copies.compare(path, self._directory / path.name) == "other"
        except errors.StoreError:
            raise
        except OSError:  # a file that cannot be read proves nothing
            return False

    def seen(self) -> dict[int, Path]:
        """The same as far as is known, without a look at the directory."""
        return dict(sorted((self.uploads.known | self._near.steps.listed()).items()))

    def damaged(self) -> dict[int, Path]:
        """The steps that are marked as damaged wherever they are, ascending."""
        found = _steps.names.damaged(self._directory, self._format)
        found |= _steps.names.damaged(self._staging, self._format)
        good = self.listed().keys()
        return {step: path for step, path in sorted(found.items()) if step not in good}

    def candidates(self) -> list[tuple[int, Path]]:
        """What to restore, the newest step first, and staging before the directory."""
        near, far = self._both()
        return [
            (step, found[step])
            for step in sorted(near.keys() | far.keys(), reverse=True)
            for found in (near, far)
            if step in found
        ]

    def path(self, step: int) -> Path | None:
        """Where a step is in staging; None if it is not, or was replaced since.

        If the directory is out of reach, nobody knows of a replacement.
        """
        path = self._near.steps.listed().get(step)
        with contextlib.suppress(OSError):
            if path is not None and self._is_stale(path):
                return None
        return path

    def copies(self, step: int, path: Path) -> list[tuple[int, Path]]:
        """The step at `path`, and the directory's copy of it, if there is one."""
        if self.tier(path) == "directory":
            return [(step, path)]
        found = [(step, path)]
        if step in self.uploads.known or not _steps.markers.is_waiting(path):
            with contextlib.suppress(OSError):
                if not self._is_another(path):
                    found.append((step, self._directory / path.name))
        return found

    def _wherever(self, step: int) -> list[Path]:
        """A step in both, good or damaged."""
        found = []
        for root, retention in (
            (self._staging, self._near),
            (self._directory, self._far),
        ):
            there = _steps.names.damaged(root, self._format) | retention.steps.listed()
            found += [there[step]] if step in there else []
        return found

    def tier(self, path: Path) -> Tier:
        """In which of both a step is."""
        return "staging" if path.parent == self._staging else "directory"

    def metrics(self, path: Path) -> dict[str, float]:
        """What is stored of a step, in both if they have the same."""
        found = self._near.steps.metrics(path)
        is_near = self.tier(path) == "staging"
        if is_near and not _steps.markers.is_settled(path) and self._is_another(path):
            return dict(found)
        return {**self._far.steps.metrics(self._directory / path.name), **found}

    def forget(self) -> None:
        """Reads everything anew from here on."""
        self._near.steps.forget()
        self._far.steps.forget()

    def best(self, policy: policies.BestN) -> set[int]:
        """The steps of both that `policy` names."""
        near, far = self._near.steps.ranked(), self._far.steps.ranked()
        ranked: dict[int, policies.Ranked] = {**far, **near}
        for step in near.keys() & far.keys():
            path = self._staging / self._format.name(step)
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
        for step, why in self._near.explain().items():
            found.setdefault(step, []).extend(f"staging: {reason}" for reason in why)
        return found

    # ---- changing -----------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, path: Path, *removed: str) -> Iterator[None]:
        """Has the directory follow what is changed of a step in the `with` block.

        Args:
            path: The step, in either.
            *removed: Marks that are removed there.

        Raises:
            SaveFailedError: It cannot be marked.
        """
        if self.tier(path) == "directory":
            yield
            return
        with self.uploads.changing.get():
            try:
                _steps.markers.wait_for_upload(path, removed)
            except OSError as error:
                raise errors.SaveFailedError(
                    f"{path} cannot be changed: {error}; see that the step is still"
                    " there, and that its disk has space, then try again"
                ) from error
            yield
        self.uploads.start()

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

    def delete(self, step: int) -> list[Path]:
        """Deletes a step wherever it is; returns where it was.

        Raises:
            SaveFailedError: It could not be deleted.
        """
        with self.uploads.busy.get():
            found = self._wherever(step)
            for path in found:
                edit.delete(path)
            self.uploads.known.pop(step, None)
        return found

    def prune(self) -> tuple[int, ...]:
        """Deletes what nothing keeps in the directory.

        Raises:
            SaveFailedError: Its newest step is damaged.
        """
        with self.uploads.busy.get():
            return self.uploads.retire()
