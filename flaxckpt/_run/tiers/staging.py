"""A staging directory on a faster disk, in front of the run directory.

Steps are committed in staging with a marker that an upload is pending; `uploads` makes
the uploads. A change of a step in staging is made there and marks the step again. After
a crash, the next start uploads all marked steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from flaxckpt import (
    _checkpoint,
    _distributed,
    _steps,
    _storage,
    _util,
    errors,
    policies,
)
from flaxckpt._run import edit, judge, retention, run_index, run_steps
from flaxckpt._run.tiers import upload_copies, uploads
from flaxckpt._run.tiers.part_tier import PartTier, PeerOptions, exists_error
from flaxckpt._types import PathLike
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

KEEP = (policies.LatestN(1),)
"""Default of `keep_staging`; steps with pending uploads stay as well."""

_OWNER = _steps.names.STAGING_OWNER


# ---- where staging is -------------------------------------------------------------


def open_steps(
    path: Path,
    rules: judge.Rules,
    *,
    step_format: str,
    read_only: bool,
    staging: Staging | None,
    keep_staging: Sequence[PreservationPolicy],
    peers: PeerOptions,
    processes: _distributed.agreement.Processes,
    mode: int | None,
) -> run_steps.RunSteps:
    """Returns the steps of a run.

    Args:
        path: The run directory.
        rules: Rules of retention.
        step_format: Template of the names of steps.
        read_only: True to write no journal.
        staging: Directory where steps are saved first; None for none.
        keep_staging: Policies for the steps in `staging`.
        peers: Options of the exchange with other processes.
        processes: The processes that save together.
        mode: Mode of new directories; None for the umask's.

    Raises:
        OptionError: The options are invalid or contradict each other.
    """
    named = _steps.names.StepFormat(step_format)
    keep = policies.check(keep_staging, "keep_staging")
    if staging is not None and read_only and _util.job.is_distributed():
        _log.info("read_only=True: only the steps in %s are read", path)
    elif staging is not None:
        near = _resolve(staging, path)
        return StagedSteps(
            path,
            near,
            rules,
            keep,
            named,
            peers,
            processes,
            read_only=read_only,
            mode=mode,
        )
    elif peers.copies > 0:
        raise errors.OptionError(
            "staging_copies needs a staging directory of each process: pass"
            " staging='/local/run-{process}'"
        )
    elif keep != KEEP:
        raise errors.OptionError(
            "keep_staging needs a staging directory: pass staging="
        )
    return run_steps.RunSteps(path, rules, named, read_only=read_only, mode=mode)


Staging: TypeAlias = "PathLike | Callable[[int], PathLike]"
"""A directory, a template with `{process}`, or a function of the process index."""


def _resolve(staging: Staging, directory: Path) -> Path:
    """Returns the resolved staging directory of a run, for this process.

    Raises:
        OptionError: The directory is unsuitable, or belongs to another run.
    """
    index = _util.processes.process_index() if _util.job.is_distributed() else 0
    named = staging(index) if callable(staging) else staging
    if not _util.arguments.is_path(named):
        raise errors.OptionError(
            "staging must be a directory, or a function of the process index that"
            f" returns one, got {named!r:.80}"
        )
    text = str(_storage.paths.resolve(named))
    path = _storage.paths.resolve(text.replace("{process}", str(index)))
    if _storage.paths.is_remote(path):
        raise errors.OptionError(
            f"staging must be a directory on this machine, got {path}: pass the path"
            " of a fast disk"
        )
    if _storage.paths.overlap(path, directory):
        raise errors.OptionError(
            f"staging={path} and {directory} must be separate directories, also behind"
            " links and mounts, and neither may contain the other: pass another path"
        )
    if _util.job.is_distributed() and not _distributed.operation.has_service():
        raise errors.OptionError(
            "staging with several processes needs jax's coordination service, which"
            " this version of jax does not show: leave out staging"
        )
    _check_owner(path, directory)
    return path


def _check_owner(path: Path, directory: Path) -> None:
    """Raises OptionError if the staging directory `path` belongs to another run."""
    try:
        with _storage.read_errors.explain_errors(path / _OWNER):
            text = (path / _OWNER).read_text(encoding="utf-8", errors="replace")
            owner = text.strip()
    except (FileNotFoundError, NotADirectoryError):
        return
    if owner != str(directory) and not _storage.paths.is_same(owner, directory):
        raise errors.OptionError(
            f"staging={path} belongs to {owner}, not to {directory}: choose another"
            f" path. If the run has moved, correct {path / _OWNER}"
        )


def _make_staging(
    path: Path, directory: Path, steps: Mapping[int, Path], mode: int | None
) -> None:
    """Makes the staging directory of a run, or checks an existing directory.

    Raises OptionError for steps of an unknown run, OSError if it cannot be made.
    """
    _storage.of(path).make_directory(path, mode=mode)
    if (path / _OWNER).is_file():
        return
    if steps:
        raise errors.OptionError(
            f"staging={path} has steps, such as {max(steps)}, but no file {_OWNER}"
            " that names their run: choose an empty directory, or, if the steps belong"
            f" to this run, write {directory} into that file"
        )
    _storage.of(path).replace(path / _OWNER, f"{directory}\n".encode(), mode=mode)


# ---- both directories ------------------------------------------------------------


class _NewestCopied(policies.PreservationPolicy):
    """Keeps the newest step of which other processes have copies."""

    def __str__(self) -> str:
        return "newest with copies"

    def preserved(self, checkpoints: Sequence[policies.Ranked], /) -> set[int]:
        steps = (c for c in checkpoints if isinstance(c, run_index.RunStep))
        return {*[step.step for step in steps if step.markers.copies][-1:]}


class StagedSteps(run_steps.RunSteps):
    """The steps of a staging directory and of the run directory.

    Args:
        directory: The run directory, to which steps are uploaded.
        staging: The directory where steps are saved.
        rules: Rules of retention in the run directory.
        keep: Policies for the steps in staging.
        step_format: Format of the names of steps.
        peers: Options of the exchange with other processes.
        processes: The processes that save together; several have a part of each step.
        read_only: True to write no journal.
        mode: Mode of new directories; None for the umask's.

    Attributes:
        uploads: The uploads from staging to the run directory.
    """

    has_staging = True
    part_tier: PartTier

    def __init__(
        self,
        directory: Path,
        staging: Path,
        rules: judge.Rules,
        keep: tuple[PreservationPolicy, ...],
        step_format: _steps.names.StepFormat,
        peers: PeerOptions,
        processes: _distributed.agreement.Processes,
        *,
        read_only: bool,
        mode: int | None,
    ) -> None:
        if peers.copies and keep:  # without policies, all steps stay
            keep = (*keep, _NewestCopied())
        near = rules._replace(keep=keep, keep_items={})
        super().__init__(
            directory,
            near,
            step_format,
            read_only=read_only,
            mode=mode,
            saves_in=staging,
        )
        self.rules = rules
        self._far_retention = retention.Retention(directory, step_format, rules)
        self._near, self._far = self.retention.index, self._far_retention.index
        self.uploads = uploads.Uploads(
            staging,
            directory,
            step_format,
            self.retention,
            self._far_retention,
            self.events,
            processes,
            mode,
        )
        self.is_in_parts = processes.are_several()
        self.part_tier = PartTier(
            staging, directory, self._near, step_format, self.events, peers, mode
        )

    def close(self) -> None:
        super().close()
        self.uploads.close()

    def _make_directory(self) -> None:
        _make_staging(self.saves_in, self.directory, self._near.paths(), self.mode)

    def ensure_staging(self) -> None:
        # Without a file that names their run, no later job would take the steps.
        # Of a disk that fails, a save or a restore says more.
        with contextlib.suppress(OSError, errors.DamagedCheckpointError):
            _check_owner(self.saves_in, self.directory)
            _make_staging(self.saves_in, self.directory, {}, self.mode)

    # ---- finding ----------------------------------------------------------------

    def paths(self) -> dict[int, Path]:
        """Returns the steps of both directories.

        Prefers the step in staging, unless the run directory replaced it after its
        upload.
        """
        near, far = self._both()
        return dict(sorted((far | near).items()))

    def _both(self) -> tuple[dict[int, Path], dict[int, Path]]:
        """Returns the current steps of staging, and the steps of the run directory."""
        near = self._near.paths()  # first: steps leave staging for `far`
        far = self.uploads.list_directory()
        current = {
            step: path
            for step, path in near.items()
            if step not in far or not self._is_stale(path)
        }
        return current, far

    def _is_stale(self, path: Path) -> bool:
        """Returns True if the run directory replaced a step after its upload."""
        return _steps.markers.is_settled(path) and self._is_another(path)

    def _is_another(self, path: Path) -> bool:
        """Returns True if the run directory has another step of the same number.

        Raises:
            StoreError: The run directory is out of reach.
        """
        try:
            return upload_copies.compare(path, self.directory / path.name) == "other"
        except errors.StoreError:
            raise
        except OSError:  # an unreadable file proves nothing
            return False

    def known_paths(self) -> dict[int, Path]:
        """Returns the known steps without listing the run directory."""
        return dict(sorted((self.uploads.last_listed | self._near.paths()).items()))

    def list_far(self) -> Mapping[int, Path]:
        return self.uploads.list_directory()

    def damaged_paths(self) -> dict[int, Path]:
        """Returns the steps marked as damaged in either directory, ascending."""
        paths = self._far.damaged_paths() | self._near.damaged_paths()
        good = self.paths().keys()
        return {step: path for step, path in sorted(paths.items()) if step not in good}

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Returns the steps, newest first; for the same step, staging comes first."""
        near, far = self._both()
        return [
            (step, paths[step])
            for step in sorted(near.keys() | far.keys(), reverse=True)
            for paths in (near, far)
            if step in paths
        ]

    def path(self, step: int) -> Path:
        """Returns the path of a step, preferring a current step in staging.

        With the run directory out of reach, the step in staging counts as current.
        """
        step = _steps.names.check(step)
        path = self._near.paths().get(step)
        with contextlib.suppress(OSError):
            if path is not None and self._is_stale(path):
                path = None
        return super().path(step) if path is None else path

    def copies(self, step: int, path: Path) -> list[tuple[int, Path]]:
        """Returns the step at `path`, and its copy in the run directory, if any."""
        if self.tier(path) == "directory":
            return [(step, path)]
        copies = [(step, path)]
        if step in self.uploads.last_listed or not _steps.markers.is_marked_for_upload(
            path
        ):
            with contextlib.suppress(OSError):
                if not self._is_another(path):
                    copies.append((step, self.directory / path.name))
        return copies

    def tier(self, path: Path) -> run_steps.Tier:
        return "staging" if path.parent == self.saves_in else "directory"

    def metrics(self, path: Path) -> dict[str, float]:
        """Returns the metrics of a step, merged if both directories have the step."""
        near = self._near.metrics(path)
        is_near = self.tier(path) == "staging"
        if is_near and not _steps.markers.is_settled(path) and self._is_another(path):
            return dict(near)
        return {**self._far.metrics(self.directory / path.name), **near}

    def forget(self) -> None:
        self._near.forget()
        self._far.forget()

    def _ranked_steps(self) -> list[run_index.RunStep]:
        near, far = (
            {n: step for n, step in index.read().items() if step.is_counted}
            for index in (self._near, self._far)
        )
        ranked = {**far, **near}
        for step in near.keys() & far.keys():
            path = self.saves_in / self.format.name(step)
            if not self._is_another(path):
                ranked[step] = near[step].with_metrics(far[step].metrics)
            elif _steps.markers.is_settled(path):
                ranked[step] = far[step]
        return [ranked[step] for step in sorted(ranked)]

    def explain(self, rules: judge.Rules | None = None) -> dict[int, list[str]]:
        """Returns the reasons for keeping steps in the run directory and in staging."""
        reasons = self._far_retention.explain(rules)
        for step, why in self.retention.explain().items():
            reasons.setdefault(step, []).extend(f"staging: {reason}" for reason in why)
        return reasons

    # ---- changing -----------------------------------------------------------------

    @contextlib.contextmanager
    def step_change(self, step: int, *removed: str) -> Iterator[Path]:
        path = self.path(step)
        if self.tier(path) == "directory":
            if not _util.job.is_first():
                raise errors.CheckpointNotFoundError(f"{path} is changed by process 0")
            yield path
            return
        with self.uploads.change_lock.get():
            self._mark_for_upload(path, removed)
            yield path
            with contextlib.suppress(OSError):  # the next upload or restore does it
                self.uploads.unmark_uploaded(path)
        self.uploads.start()

    def _mark_for_upload(self, path: Path, removed: tuple[str, ...] = ()) -> None:
        """Marks a step for upload; hold `change_lock`.

        Raises:
            SaveFailedError: The marker could not be written.
        """
        try:
            _steps.markers.mark_for_upload(path, removed)
        except OSError as error:
            raise errors.SaveFailedError(
                f"cannot change {path}: {error}; check that the step still exists and"
                " that its disk has space, then try again"
            ) from error

    def markers_of_new(self, step: int, *, overwrite: bool) -> dict[str, bytes]:
        upload = _steps.markers.UploadMarker(overwrite).content()
        pin = self._pin_of_uploaded(step) if overwrite else {}
        return {_steps.markers.NOT_UPLOADED: upload, **pin}

    def _pin_of_uploaded(self, step: int) -> dict[str, bytes]:
        """Returns the pin of a step that only the run directory has.

        With the directory out of reach, the upload looks for the pin.
        """
        uploaded = self.uploads.last_listed.get(step)
        if uploaded is None or (self.saves_in / self.format.name(step)).exists():
            return {}
        try:
            return _steps.markers.pin_of(uploaded)
        except OSError as error:
            _log.warning("%s cannot be checked before the upload: %s", uploaded, error)
            return {}

    def delete(self, step: int) -> None:
        self.part_tier.forget(step)
        try:
            super().delete(step)
        except errors.CheckpointNotFoundError:
            if _util.job.is_first():
                raise  # others may lack a part of it
        if _util.job.is_first():
            self.uploads.copy_journal()

    def is_uploaded(self, step: int) -> bool:
        return step in self.uploads.last_listed

    def has_pending_uploads(self) -> bool:
        return bool(self.uploads.pending())

    def open_uploads(self) -> bool:
        return self.uploads.open()

    def upload(self) -> None:
        self.uploads.start()

    def wait_for_uploads(self, timeout_secs: float | None) -> None:
        self.uploads.wait(timeout_secs)

    def check_free(self, step: int) -> None:
        if step in self.part_tier.whole:
            raise exists_error(self.saves_in / self.format.name(step))
        if step in self.uploads.last_listed:
            raise errors.CheckpointExistsError(
                f"{self.uploads.last_listed[step]} exists: choose another step, or pass"
                " on_exists='overwrite', or 'skip' to keep the step"
            )

    def check_replaceable(self, step: int) -> None:
        """Raises an error for a step with foreign files in the run directory.

        With the directory out of reach, the check is repeated at the upload.

        Raises:
            CheckpointExistsError: The step has files of others.
        """
        path = self.uploads.last_listed.get(step)
        try:
            if path is None or not _storage.of(path).exists(path):
                return
            if not _storage.paths.is_remote(path) and _steps.markers.is_damaged(path):
                return  # a damaged step is set aside
            _checkpoint.overwrite.check_replaceable(path)
        except errors.CheckpointExistsError:
            raise
        except OSError as error:
            _log.warning("%s cannot be checked before the upload: %s", path, error)

    @contextlib.contextmanager
    def upload_pause(self, path: Path) -> Iterator[None]:
        """Keeps uploads from reading a step in staging during the `with` block."""
        try:
            is_there = path.exists()
        except OSError:  # the save says more
            is_there = True
        with self.uploads.step_lock.get() if is_there else contextlib.nullcontext():
            yield

    def _delete(self, step: int, path: Path) -> None:
        """Deletes a step from both directories, the current copy last.

        A crash in between leaves the current copy, never an older one alone.

        Raises:
            SaveFailedError: The step could not be deleted.
        """
        is_first = _util.job.is_first()
        with self.uploads.step_lock.get():
            copies = [
                paths[step]
                for index in (self._near, self._far)[: 1 + is_first]
                if step in (paths := index.damaged_paths() | index.paths())
            ]
            if len(copies) > 1 and self.tier(path) == "staging":
                with self.uploads.change_lock.get():
                    self._mark_for_upload(path)
            for copy in sorted(copies, key=lambda copy: copy == path):
                edit.delete(copy)
                if self.tier(copy) == "directory":
                    self.uploads.last_listed.pop(step, None)

    def prune(self) -> tuple[int, ...]:
        """Deletes the steps that no policy keeps; returns the steps gone from both.

        With pending changes of uploaded steps, the run directory is pruned after the
        next upload of a step.

        Raises:
            SaveFailedError: The newest step of either directory is damaged.
        """
        # What others have of a step is known at saves only: they delete parts. A part
        # of a step that is not whole is no reason to delete an older step.
        is_known = not self.is_in_parts and not self.part_tier.lost
        deleted = {*super().prune()} if is_known else set()
        if not _util.job.is_first():
            return ()
        with self.uploads.step_lock.get():
            if not self.uploads.changed():
                deleted |= {*self.uploads.delete_unkept()}
        self.uploads.copy_journal()
        return tuple(sorted(deleted - self.paths().keys()))
