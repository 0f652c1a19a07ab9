"""What is in the directory of one run: its steps, found and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from flaxckpt import _checkpoint, _steps, _storage, _util, errors, formats, policies
from flaxckpt._checkpoint.result import SaveResult
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._run import edit, index, retention, run_steps, watch
from flaxckpt._run import staging as run_staging
from flaxckpt._types import JSON, PathLike
from flaxckpt.formats import _locate, _native
from flaxckpt.formats._reader import CheckpointMetadata
from flaxckpt.policies import PreservationPolicy


class RunDirectory:
    """The part of a `Checkpointer` that neither saves nor restores.

    Of several processes, the first one writes and deletes what is asked for here.

    Args:
        directory: Of the run.
        rules: What is to stay.
        step_format: Names of steps.
        read_only: Refuses to write or delete.
        staging: Where steps are saved first; None: in the directory.
        keep_staging: What stays there.

    Attributes:
        directory: Of the run.
        saves_in: Where steps are saved.
        read_only: Whether it refuses to write or delete.
        events: What happens to its checkpoints.
    """

    def __init__(
        self,
        directory: PathLike,
        rules: retention.Rules,
        *,
        step_format: str,
        read_only: bool,
        staging: PathLike | None = None,
        keep_staging: Sequence[PreservationPolicy] = run_staging.KEEP,
    ) -> None:
        self._run = run_steps.RunSteps(
            directory,
            rules,
            step_format=step_format,
            read_only=read_only,
            staging=staging,
            keep_staging=keep_staging,
        )
        self.directory = self._run.directory
        self.saves_in = self._run.saves_in
        self.events = self._run.events
        self.read_only = read_only
        self._rules = rules

    def check_writable(self, what: str) -> None:
        """Refuses to do `what` if it was opened to be read only.

        Raises:
            ReadOnlyError: It was.
        """
        if self.read_only:
            raise errors.ReadOnlyError(
                f"cannot {what} in {self.directory}: it was opened with read_only=True"
            )

    def wait(self) -> SaveResult | None:
        """Waits for the save under way; there is none."""
        return None

    # ---- finding ----------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps that are not marked as damaged, ascending."""
        return list(self._run.listed())

    def damaged(self) -> dict[int, str]:
        """Step -> reason, of those that are marked as damaged, ascending.

        `restore` marks a step when it had to take an older one in its place. No policy
        counts or deletes it. A later save of the same step replaces it, `delete`
        deletes it, and `restore(step=…)` tries it all the same.
        """
        return self._run.reasons()

    def verify(self, step: int) -> VerifyReport:
        """Reads all of a step, and compares it with its checksums.

        See `flaxckpt.verify`.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        step = _steps.names.check(step)
        self.wait()
        return _checkpoint.verify.verify_checkpoint(self._run.path(step), step)

    def latest_step(self) -> int | None:
        """The newest of `steps()`; None if there is none."""
        return max(self._run.listed(), default=None)

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The step with the best finite `metric`, the newer of equals; None if none."""
        best = self._run.all.best(policies.BestN(1, metric, mode))
        return next(iter(best), None)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Describes a step without reading any array."""
        step = _steps.names.check(step)
        return _locate.read_stored(self._run.path(step), step).metadata

    def has_dataset(self, step: int) -> bool:
        """Whether the state of a dataset is there, by a look into the directory."""
        return (self._run.path(step) / _native.checkpoint.DATASET).is_dir()

    def metrics(self, step: int) -> Mapping[str, float]:
        """What was measured at a step and is stored with it."""
        return dict(self._run.all.metrics(self._run.path(step)))

    @property
    def run_metadata(self) -> Mapping[str, JSON]:
        """The metadata of the whole run."""
        for directory in (self.saves_in, self.directory):
            with _storage.permissions.explained(directory):
                if found := _native.checkpoint.read_run_metadata(directory):
                    return found
        return {}

    def check_other_names(self) -> None:
        """Refuses a directory whose steps are all called otherwise.

        A run that began anew there would hide them, and be mixed up with them.

        Raises:
            CheckpointFormatError: There are steps, and none is called as `step_format`
                says.
        """
        if self._run.listed() or not self.directory.is_dir():
            return
        others = _steps.index.with_any_name(self.directory, formats.recognises)
        if others:
            newest = others[max(others)][0]
            fitting = _steps_called_like(newest.name, max(others))
            raise errors.CheckpointFormatError(
                f"{self.directory} holds steps that are not called like"
                f" {self._run.format.template!r}, such as {newest.name}: go on with"
                f" step_format={fitting!r} if they are directories, or begin another"
                " run from them with source="
            )

    def reload(self) -> None:
        """Forgets what was read of steps, so that changes by others are seen."""
        self._run.all.forget()

    def new_steps(
        self, *, timeout_secs: float | None = None, poll_secs: float = 1.0
    ) -> Iterator[int]:
        """Yields every step, oldest first, and then each new one as it is committed.

        For a job that evaluates checkpoints while another one trains. Until the loop
        goes on, no policy of any process deletes the step: a file in it tells of the
        reader. Where nothing can be written, steps come unprotected, with a warning.

        Args:
            timeout_secs: Ends after so long without a new step; None never ends.
            poll_secs: How often the directory is looked at.
        """
        return watch.new_steps(
            self._run.listed,
            index.is_step,
            timeout_secs=timeout_secs,
            poll_secs=poll_secs,
        )

    # ---- keeping and deleting ---------------------------------------------------

    @property
    def keep(self) -> tuple[PreservationPolicy, ...]:
        """The policies that keep steps."""
        return self._rules.keep

    @property
    def keep_here(self) -> tuple[PreservationPolicy, ...]:
        """The policies that keep steps in `saves_in`."""
        return self._run.retention.rules.keep

    @property
    def steps_here(self) -> list[int]:
        """The steps that are there."""
        return list(self._run.retention.steps.listed())

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a committed step, as of an evaluation after its save.

        Raises:
            SaveFailedError: They could not be written.
        """
        self.check_writable("add metrics")
        self.wait()
        if _util.processes.is_first():
            with self._run.changing(step) as path:
                edit.add_metrics(path, metrics)

    def explain(self) -> dict[int, list[str]]:
        """Why each step stays, oldest first; a step without a reason would go.

        The reasons are those of `policies.decide`; "metrics damaged", of a step that
        may be the best for all that can be read; "dataset let go", which says that its
        dataset state did not stay with it; and "damaged: …", of a step that no policy
        counts, see `damaged`. With a staging directory, "staging: …" says why it stays
        there, and "staging: not uploaded" that it is still to be uploaded.
        """
        known = self._run.retention if self._run.tiers is None else self._run.tiers
        found = known.explain()
        found |= {step: [f"damaged: {why}"] for step, why in self.damaged().items()}
        return dict(sorted(found.items()))

    def prune(self, *, dry_run: bool = False) -> tuple[int, ...]:
        """Deletes the steps, and the dataset states, that no policy keeps.

        If there are any, the newest step is read first, all of it.

        Args:
            dry_run: Only say which steps: those to which `explain` gives no reason.

        Returns:
            The steps.

        Raises:
            SaveFailedError: The newest step is damaged or cannot be read, so that older
                ones stay.
        """
        self.wait()
        if dry_run:
            return tuple(step for step, why in self.explain().items() if not why)
        self.check_writable("prune")
        deleted = self._run.retire() if _util.processes.is_first() else ()
        if self._run.tiers is None:
            return deleted
        gone = {*deleted, *self._run.tiers.prune()} - self._run.listed().keys()
        return tuple(sorted(gone))

    def delete(self, step: int) -> None:
        """Deletes a step, even a pinned one.

        Raises:
            SaveFailedError: It is being read, by a loop over `new_steps` anywhere; or
                it could not be deleted.
        """
        self.check_writable("delete")
        self.wait()
        if _util.processes.is_first():
            self._run.delete(step)

    def make_permanent(self, step: int) -> None:
        """Has a temporary step stay as long as the policies say.

        Raises:
            SaveFailedError: That could not be written down.
        """
        self.check_writable("keep a step")
        self._run.make_permanent(step)

    def pin(self, step: int) -> None:
        """Keeps a step, whatever the policies say.

        Raises:
            SaveFailedError: That could not be written down.
        """
        self.check_writable("pin")
        if _util.processes.is_first():
            with self._run.changing(step) as path:
                edit.pin(path)

    def unpin(self, step: int) -> None:
        """Leaves a step to the policies again; raises as `pin` does."""
        self.check_writable("unpin")
        if _util.processes.is_first():
            with self._run.changing(step, _steps.markers.PIN) as path:
                edit.unpin(path)


def _steps_called_like(name: str, step: int) -> str:
    """The step format of which `name` is the directory of `step`."""
    before = name.rstrip("0123456789")
    digits = name.removeprefix(before)
    return before + ("{step}" if digits == str(step) else f"{{step:0{len(digits)}d}}")
