"""The steps of a run without a staging directory; `staging` has those with one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from flaxckpt import _checkpoint, _formats, _steps, _storage, _util, errors, policies
from flaxckpt._formats import locate
from flaxckpt._run import edit, events, judge, left_out, params_only, retention
from flaxckpt._run.run_index import RunStep
from flaxckpt._run.tiers.part_tier import PartTier

_log = logging.getLogger(__name__)

Tier = Literal["directory", "staging"]


class RunSteps:
    """Finds, keeps and deletes the steps of a run, which are saved in `saves_in`.

    `part_tier` are the parts of steps in the staging directories of several processes.
    """

    has_staging = False
    is_in_parts = False

    @property
    def changes_steps(self) -> bool:
        """True in the process that changes steps: the first, or each with a part."""
        return _util.job.is_first() or self.is_in_parts

    part_tier: PartTier | None = None

    def __init__(
        self,
        directory: Path,
        rules: judge.Rules,
        step_format: _steps.names.StepFormat,
        *,
        read_only: bool,
        mode: int | None = None,
        saves_in: Path | None = None,
    ) -> None:
        self.directory = directory
        self.saves_in = directory if saves_in is None else saves_in
        self.format = step_format
        self.rules = rules
        self.retention = retention.Retention(self.saves_in, step_format, rules)
        journal = None if read_only else self.saves_in / _steps.journal.NAME
        self.events = events.Stream(directory, journal, mode)
        self.mode = mode
        self._is_warned = False

    def make_directory(self) -> None:
        """Makes the directory where steps are saved, or raises SaveFailedError.

        Raises OptionError if it, or a new step in it, is named like a file.
        """
        self._check_names()
        try:
            self._make_directory()
        except OSError as error:
            raise errors.SaveFailedError(
                f"cannot make {self.saves_in}: {error}; choose another directory, or"
                " pass read_only=True to read an existing one"
            ) from error

    def close(self) -> None:
        """Ends what serves other processes."""
        if self.part_tier is not None:
            self.part_tier.close()

    def _make_directory(self) -> None:
        storage = _storage.of(self.directory)
        storage.make_directory(self.directory, mode=self.mode)

    def _check_names(self) -> None:
        """Raises OptionError for new directories with names of files."""
        new = self.saves_in / self.format.name(0)
        for path in (self.directory, self.saves_in, new):
            try:
                _checkpoint.overwrite.check_name(path, "a run")
            except errors.OptionError:
                if not (self.has_any() if path == new else path.is_dir()):
                    raise

    def tidy(self) -> None:
        """Removes files left by crashes, and starts pending uploads."""
        with _storage.paths.listing_cache(self.directory):
            items = (_formats.items.METRICS, "metadata")
            _steps.delete.tidy(self.saves_in, self.format, items)
            if self.open_uploads():
                params_only.ParamsOnly(self.directory, self.format).tidy()

    # ---- finding ----------------------------------------------------------------

    def paths(self) -> dict[int, Path]:
        return self.retention.index.paths()

    def known_paths(self) -> dict[int, Path]:
        """Returns the known steps without listing a directory behind staging."""
        return self.paths()

    def list_far(self) -> Mapping[int, Path]:
        """Lists the steps of the run directory, also behind staging."""
        return self.paths()

    def damaged_paths(self) -> dict[int, Path]:
        return self.retention.index.damaged_paths()

    def metrics(self, path: Path) -> Mapping[str, float]:
        return self.retention.index.metrics(path)

    def find_best(self, policy: policies.BestN) -> int | None:
        return max(policy.preserved(self._ranked_steps()), default=None)

    def _ranked_steps(self) -> list[RunStep]:
        steps = self.retention.index.read().values()
        return [step for step in steps if step.is_counted]

    def warn_of_unknown(self, metric: str) -> None:
        names = {name for path in self.paths().values() for name in self.metrics(path)}
        if names and metric not in names:
            _log.warning(
                "no step of %s has a metric %r, so none is the best; the steps have %s",
                self.directory,
                metric,
                errors.first_few([errors.printable(name) for name in sorted(names)]),
            )

    def forget(self) -> None:
        self.retention.index.forget()

    def has_any(self) -> bool:
        """Returns True if the run has steps, good or damaged."""
        return bool(self.paths() or self.damaged_paths())

    def find_left_out(
        self, steps: Collection[int] | None = None, *, only_usual: bool = False
    ) -> dict[int, Path]:
        """Returns the checkpoints after the newest of `steps` that are no steps."""
        latest = max(self.paths() if steps is None else steps, default=None)
        find = functools.partial(
            left_out.find, step_format=self.format, latest=latest, only_usual=only_usual
        )
        # Each process has a staging directory, but only one error.
        is_near = self.saves_in != self.directory and not self.is_in_parts
        near = find(self.saves_in) if is_near else {}
        return dict(sorted({**near, **find(self.directory)}.items()))

    def describe_left_out(self, found: Mapping[int, Path]) -> str:
        """Returns a sentence with what `find_left_out` has found, and what to do."""
        return f"{self.directory} has {left_out.describe(found, self.format)}"

    def warn_of_left_out(self, steps: Collection[int]) -> None:
        """Warns once of checkpoints after the newest of `steps` that are no steps."""
        if self._is_warned or not _util.job.is_first():
            return
        found: Mapping[int, Path] = {}
        with contextlib.suppress(errors.CheckpointError):  # looks again the next time
            found = self.find_left_out(steps)
            self._is_warned = bool(found or steps)
        if found:
            _log.warning("%s", self.describe_left_out(found))

    def damage_reasons(self) -> dict[int, str]:
        return {
            step: _steps.markers.damage_reason(path)
            for step, path in self.damaged_paths().items()
        }

    def path(self, step: int) -> Path:
        """Returns the path of a step, good or damaged.

        Raises CheckpointNotFoundError if the step does not exist.
        """
        step = _steps.names.check(step)
        paths = self.paths()
        if step not in paths:
            paths |= self.damaged_paths()
        if step not in paths:
            why = _steps.journal.describe_deletion(self.saves_in, step)
            if step in (found := self.find_left_out()):
                why = f", but {left_out.describe({step: found[step]}, self.format)}"
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no step {step}:"
                f" it has {locate.summarize(list(paths), step)}{why}"
            )
        return paths[step]

    def candidates(self, step: int | None) -> list[tuple[int, Path]]:
        """Returns the steps to try in a restore: `step`, or all if None, newest first.

        Raises CheckpointNotFoundError if the run has no steps, or not this step;
        DamagedCheckpointError if all steps are marked as damaged.
        """
        if step is not None:
            step = _steps.names.check(step)
            return self.copies(step, self.path(step))
        candidates = self._newest_first()
        if not candidates and (damaged := self.damage_reasons()):
            raise errors.DamagedCheckpointError(
                f"{self.directory} has only damaged steps:\n"
                + errors.rows(f"{step}: {why}" for step, why in damaged.items())
                + "\nrestore(step=…) tries one of them, and delete(step) removes it; a"
                " run without steps starts from the beginning."
            )
        if not candidates:
            if found := self.find_left_out():
                raise errors.CheckpointNotFoundError(
                    f"{self.directory} has no steps, but"
                    f" {left_out.describe(found, self.format)}"
                )
            advice = "save one first, or check the directory and step_format"
            if self.saves_in.is_dir():
                advice = _formats.advice_on_saves(self.saves_in) or advice
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no steps named like {self.format.template!r}:"
                f" {advice}"
            )
        self.warn_of_left_out({number for number, _ in candidates})
        return candidates

    def _newest_first(self) -> list[tuple[int, Path]]:
        return sorted(self.paths().items(), reverse=True)

    def copies(self, step: int, path: Path) -> list[tuple[int, Path]]:
        """Returns the step at `path`, and its copy behind staging if it exists."""
        return [(step, path)]

    # ---- saving -----------------------------------------------------------------

    def tier(self, path: Path) -> Tier:
        """Returns the tier of a step: the run directory or a staging directory."""
        return "directory"

    def check_free(self, step: int) -> None:
        """Raises CheckpointExistsError if a directory behind staging has a step."""

    def check_replaceable(self, step: int) -> None:
        """Raises CheckpointExistsError for foreign files in the copy behind staging."""

    def check_no_checkpoint(self) -> None:
        """Raises OptionError for a checkpoint: overwriting it would delete the run."""
        if _formats.recognises(self.saves_in):
            raise errors.OptionError(
                f"{self.saves_in} is itself a checkpoint; overwriting it would delete"
                " the steps inside: choose another directory for the run, and pass"
                " this one as source= to begin from it"
            )

    def markers_of_new(self, step: int, *, overwrite: bool) -> dict[str, bytes]:
        return {}

    def ensure_staging(self) -> None:
        """Makes a removed staging directory again, or raises OptionError."""

    def upload_pause(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Keeps uploads from reading a step during the `with` block."""
        return contextlib.nullcontext()

    def has_pending_uploads(self) -> bool:
        return False

    def open_uploads(self) -> bool:
        """Starts pending uploads; returns False without access to the run directory."""
        return True

    def upload(self) -> None:
        """Starts to upload new steps from staging, in the background."""

    def wait_for_uploads(self, timeout_secs: float | None) -> None:
        """Waits for all pending uploads; see `Uploads.wait`."""

    # ---- keeping and deleting ---------------------------------------------------

    @contextlib.contextmanager
    def step_change(self, step: int, *removed: str) -> Iterator[Path]:
        """Yields the path of a step, which the block changes; it removes markers."""
        yield self.path(step)

    def change(
        self, step: int, act: Callable[[Path], object], *removed: str
    ) -> Path | None:
        """Calls `act` where a step is changed, and returns its path; None elsewhere."""
        if not self.changes_steps:
            return None
        try:
            with self.step_change(step, *removed) as path:
                act(path)
        except errors.CheckpointNotFoundError:
            if _util.job.is_first():
                raise  # others may lack a part of it
            return None
        return path

    def pin(self, step: int) -> None:
        """Keeps a step regardless of policies, or raises SaveFailedError."""
        self.change(step, edit.pin)

    def unpin(self, step: int) -> None:
        self.change(step, edit.unpin, _steps.markers.PIN)

    def make_permanent(self, step: int) -> None:
        """Lets only policies delete a step, or raises SaveFailedError."""
        self.change(step, edit.make_permanent, _steps.markers.TEMPORARY)

    def delete_unkept(
        self,
        *,
        just_saved: int | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Deletes steps in `saves_in` that no policy keeps; see `Retention`."""
        deleted = self.retention.delete_unkept(
            just_saved=just_saved, is_awaited=is_awaited
        )
        reason = _steps.event.NOT_KEPT
        if just_saved is None:  # perhaps by policies other than those of the run
            used = ", ".join(map(str, self.rules.keep))
            reason = f"pruned, not kept by {used or 'any policy'}"
        for step in deleted:
            if not self.is_uploaded(step):
                path = self.saves_in / self.format.name(step)
                self.events.emit("deleted", step, path=path, reason=reason)
        return deleted

    def is_uploaded(self, step: int) -> bool:
        """Returns True if a step that leaves `saves_in` stays in the run directory."""
        return False

    def follow(self, deleted: Collection[int], left: Collection[int]) -> None:
        """Deletes parts of steps that process 0 deleted or lacks; logs failures.

        Steps that process 0 lacks stay if they are pinned or still to be uploaded, or
        if they may be whole, as the processes have not agreed on that yet.
        """
        for step, path in self.retention.index.paths().items():
            if step in left:
                continue
            try:
                is_kept = (
                    (self.part_tier is not None and not self.part_tier.has_agreed)
                    or _steps.markers.is_pinned(path)
                    or _steps.markers.is_marked_for_upload(path)
                )
                if step in deleted or not is_kept:
                    edit.delete(path)
            except (OSError, errors.CheckpointError) as error:
                _log.warning("step %d stays in %s: %s", step, self.saves_in, error)

    def explain(self, rules: judge.Rules | None = None) -> dict[int, list[str]]:
        """Returns step -> the reasons to keep it, oldest first; none if it is to go."""
        return self.retention.explain(rules)

    def explain_all(self, rules: judge.Rules | None = None) -> dict[int, list[str]]:
        """Returns the reasons of `explain`, and the damage of each damaged step."""
        return judge.with_damage(self.explain(rules), self.damage_reasons())

    def prune(self) -> tuple[int, ...]:
        """Deletes the steps that no policy keeps; returns the deleted steps.

        Raises SaveFailedError if the newest step is damaged.
        """
        return self.delete_unkept() if _util.job.is_first() else ()

    def delete(self, step: int) -> None:
        """Deletes a step and its copies, or raises SaveFailedError."""
        step = _steps.names.check(step)
        path = self.path(step)
        self._delete(step, path)
        self.events.emit("deleted", step, path=path, reason="deleted on request")

    def _delete(self, step: int, path: Path) -> None:
        edit.delete(path)
