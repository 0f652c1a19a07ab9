"""Uploads of steps from a staging directory to the run directory.

A step in staging has an upload marker until the run directory has the step with its
latest metrics and markers. A background thread uploads marked steps, newest first.
Changes made during an upload are written before the marker is removed. Steps of the run
directory are deleted when it has all changes: with older metrics or without a new pin,
policies would keep other steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flaxckpt import (
    _checkpoint,
    _distributed,
    _doors,
    _formats,
    _steps,
    _storage,
    _util,
    errors,
)
from flaxckpt._run import edit, retention
from flaxckpt._run import events as run_events
from flaxckpt._run import metrics as run_metrics
from flaxckpt._run.tiers import parts, upload_copies

_log = logging.getLogger(__name__)


class _TakenError(errors.CheckpointExistsError):
    """The run directory has another step of the same number."""


class _ElsewhereError(errors.CheckpointExistsError):
    """Another process uploads the step."""


_LISTENING_SECS = 0.2
"""Seconds between two looks for a call of process 0."""

_PATIENCE_SECS = 10.0
"""How long an upload waits for another process, or for the save, to leave a step."""


class _Turn:
    """A run of the upload thread, until no uploads are pending or it fails.

    Attributes:
        is_over: True if the run takes no more steps.
        ended: Set when the thread has finished.
        failures: Step -> error.
    """

    def __init__(self, run: Callable[[_Turn], object]) -> None:
        work = functools.partial(run, self)
        # Not a daemon: a script that ends still finishes its uploads.
        self._thread = _util.threads.background(work, "flaxckpt uploads")
        self._work = work
        self.is_over = False
        self.ended = _util.threads.Latch()
        self.failures: dict[int, Exception] = {}

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: upload on this one
            self._work()

    def wait(self, timeout_secs: float | None) -> bool:
        """Waits for the end of the run; returns False if it comes later."""
        if not _util.threads.wait_for(self.ended, self._thread, timeout_secs):
            self.is_over = True  # there was no memory for its thread
            self.ended.set()
        return self.ended.is_set()


class Uploads:
    """Uploads marked steps.

    Args:
        staging: The directory where steps are saved.
        directory: The run directory, to which steps are uploaded.
        step_format: Format of the names of steps.
        near: Retention in staging.
        far: Retention in the run directory.
        events: Stream for the events of uploads.
        processes: The processes that have parts of the steps; process 0 uploads, and
            calls the others. None for one process.
        mode: Mode of the run directory if made, of its journal and its metadata; None
            for the umask's.

    Attributes:
        last_listed: The steps of the run directory at its last listing.
        change_lock: Lock for changing a step in staging, or its marker.
        step_lock: Lock for working with a step in both directories.
    """

    def __init__(
        self,
        staging: Path,
        directory: Path,
        step_format: _steps.names.StepFormat,
        near: retention.Retention,
        far: retention.Retention,
        events: run_events.Stream,
        processes: _distributed.agreement.Processes,
        mode: int | None,
    ) -> None:
        self._staging = staging
        self._mode = mode
        self._directory = directory
        self._format = step_format
        self._near = near
        self._far = far
        self._events = events
        self.last_listed: dict[int, Path] = {}
        self.change_lock = _util.forks.PerProcess(threading.Lock)
        self.step_lock = _util.forks.PerProcess(threading.Lock)
        self._is_tidy = False
        self._unretired: tuple[int, Path] | None = None  # uploaded, nothing deleted yet
        self._guard = _util.forks.PerProcess(threading.Lock)
        self._turn: _Turn | None = None
        self._pid = os.getpid()
        self._is_left = False
        self._processes = processes if processes.are_several() else None
        self._listener: _util.threads.Heartbeat | None = None
        self._leave: Callable[[], None] = lambda: None
        # Step -> its save, and how many changes of it process 0 has uploaded.
        self._uploaded: dict[Path, tuple[str, int]] = {}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    def _help(self) -> bool:
        """Copies files if process 0 has called; returns False as the job ends."""
        try:
            assert self._processes is not None
            operation = self._processes.join("upload")
            if operation is None:
                return True
            listener = self._listener
            operation.is_wanted = lambda: not (listener and listener.is_stopped())
            with _distributed.agreement.closing_background(operation):
                upload_copies.help_copy(self._staging, operation, self._note_uploaded)
        except ConnectionError:
            return False
        except Exception as error:  # process 0 reports it, too
            _log.warning("a part was not uploaded: %s", errors.one_line(error))
        return True

    def _end_help(self) -> None:
        with contextlib.suppress(OSError):  # the job has ended
            self._leave()

    def _note_uploaded(self, path: Path, save: str, changes: int) -> None:
        """Removes the marker of a step whose changes process 0 has uploaded.

        Raises:
            ReplacedError: A save is replacing a step here, perhaps this one.
        """
        lock = self.step_lock.get()
        # The save may wait for process 0, which waits for this process.
        if not lock.acquire(blocking=False):
            raise parts.ReplacedError(f"a save replaces a step beside {path}")
        try:
            with self.change_lock.get():
                known = {p: row for p, row in self._uploaded.items() if p.exists()}
                self._uploaded = {**known, path: (save, changes)}
                self.unmark_uploaded(path)
        finally:
            lock.release()

    def unmark_uploaded(self, path: Path) -> None:
        """Removes the marker of changes known to be uploaded; hold `change_lock`."""
        # Process 0 may upload a change before this process makes the same one.
        save, changes = self._uploaded.get(path, (None, 0))
        marker = _steps.markers.read_upload_marker(path)
        if marker is None or save is None or parts.identify(path) != save:
            return
        # Else, there are later ones; or it cannot be read, and there may be.
        if marker.change and marker.changes <= changes:
            _steps.markers.unmark_upload(path)

    def pending(self) -> dict[int, Path]:
        paths = self._near.index.paths().items()
        return {
            step: path
            for step, path in paths
            if _steps.markers.is_marked_for_upload(path)
        }

    def changed(self) -> set[int]:
        """Returns the pending steps of which the run directory has an older state."""
        markers = {
            step: _steps.markers.read_upload_marker(path)
            for step, path in self.pending().items()
        }
        return {
            step
            for step, marker in markers.items()
            if marker is not None and (marker.settled or marker.overwrite)
        }

    def list_directory(self) -> dict[int, Path]:
        self.last_listed = self._far.index.paths()
        return self.last_listed

    def delete_unkept(self, just_saved: int | None = None) -> tuple[int, ...]:
        """Deletes steps that no policy keeps in the run directory; hold `step_lock`."""
        deleted = self._far.delete_unkept(just_saved=just_saved)
        for step in deleted:
            self.last_listed.pop(step, None)
            path = self._directory / self._format.name(step)
            self._events.emit("deleted", step, path=path, reason=_steps.event.NOT_KEPT)
        return deleted

    # ---- the upload thread ---------------------------------------------------

    def open(self) -> bool:
        """Lists the run directory, and starts uploads left by a crash.

        Returns:
            True if the run directory is in reach.
        """
        if self._processes is not None:
            self._leave = self._processes.listen("upload")
        if self._processes is not None and not _util.job.is_first():
            self.start()
            return False
        is_reached = True
        try:
            self._reach()
        except OSError as error:
            _log.warning(
                "cannot reach %s now, so steps stay in %s: %s",
                self._directory,
                self._staging,
                error,
            )
            is_reached = False
        self.start()
        return is_reached

    def _reach(self) -> None:
        """Lists the run directory, and removes leftovers the first time."""
        storage = _storage.of(self._directory)
        storage.make_directory(self._directory, mode=self._mode)
        self.list_directory()
        if not self._is_tidy:
            _steps.delete.tidy(
                self._directory, self._format, (_formats.items.METRICS, "metadata")
            )
            self._is_tidy = True

    def start(self) -> None:
        """Starts the uploads; a fork logs a warning, once: only its parent uploads."""
        if self._processes is not None and not _util.job.is_first():
            if self._listener is None:
                self._listener = _util.threads.Heartbeat(
                    self._help, _LISTENING_SECS, "flaxckpt part uploads", self._end_help
                )
            return
        if not self.pending():
            return
        if os.getpid() == self._pid:
            self._begin()
        elif not self._is_left:
            self._is_left = True
            _log.warning(
                "this process is a fork: the process that opened the run uploads the"
                " steps in %s",
                self._staging,
            )

    def wait(self, timeout_secs: float | None) -> None:
        """Waits for all pending uploads; see `Checkpointer.wait_for_uploads`."""
        if self._processes is not None:
            operation = self._processes.begin("uploads", "the wait for uploads")
            with _distributed.agreement.closing_background(operation):
                _distributed.agreement.broadcast(
                    operation,
                    "uploaded",
                    lambda: self._wait(timeout_secs),
                    is_patient=True,
                )
            return
        self._wait(timeout_secs)

    def _wait(self, timeout_secs: float | None) -> None:
        failures = self._await_uploads(timeout_secs)
        if self._is_left and (pending := self.pending()):
            raise errors.SaveFailedError(
                f"steps {errors.first_few([str(s) for s in pending])} stay in"
                f" {self._staging}: this process is a fork of the process that uploads"
                " them; call wait_for_uploads() there"
            )
        if failures is None:
            raise errors.CheckpointTimeoutError(
                f"steps of {self._staging} are still being uploaded to"
                f" {self._directory} after {timeout_secs} s; call wait_for_uploads()"
                " again to wait longer"
            )
        if failures:
            raise self._upload_error(failures) from failures[max(failures)]

    def _upload_error(
        self, failures: Mapping[int, Exception]
    ) -> errors.SaveFailedError:
        """Returns an error with the failed steps, the reasons and advice."""
        rows: list[str] = []
        advice: dict[str, list[int]] = {}
        for step in sorted(failures, reverse=True):
            advice.setdefault(_advice(failures[step]), []).append(step)
            text = _steps.event.first_lines(failures[step], 1 if rows else 3)
            rows.append(f"step {step} could not be uploaded: {text}")
        if len(rows) > 4:
            rows[4:] = [f"… and {len(rows) - 4} more"]
        pending = errors.first_few([str(step) for step in self.pending()], 8)
        rows.append(f"Steps {pending} stay in {self._staging}.")
        rows += [
            template.format(
                step=steps[0],
                names=errors.first_few([self._format.name(s) for s in steps], 8),
                staging=self._staging,
                directory=self._directory,
            )
            for template, steps in advice.items()
        ]
        return errors.SaveFailedError("\n".join(rows))

    def _begin(self) -> _Turn:
        """Starts the upload thread unless running; returns the current run."""
        with self._guard.get():
            if self._turn is not None and not self._turn.is_over:
                return self._turn
            self._turn = turn = _Turn(self._run)
        _doors.open_all()
        turn.start()
        return turn

    def _await_uploads(
        self, timeout_secs: float | None
    ) -> Mapping[int, Exception] | None:
        """Waits for uploads; returns the failures, or None after the timeout."""
        until = None if timeout_secs is None else time.monotonic() + timeout_secs
        earlier = self._turn  # its failures may be older than the latest changes
        while os.getpid() == self._pid:
            turn = self._begin() if self.pending() else self._turn
            left = None if until is None else max(0.0, until - time.monotonic())
            if turn is not None and not turn.wait(left):
                return None
            if not self.pending():
                break
            if turn is not None and turn.failures and turn is not earlier:
                return turn.failures
        return {}

    def _run(self, turn: _Turn) -> None:
        try:
            is_begin = True
            while (pending := self._next(turn)) is not None:
                step, path = pending
                try:
                    self._upload(step, path, is_begin=is_begin)
                    try:
                        self._retire()
                    finally:
                        self.copy_journal()
                except Exception as error:
                    turn.failures[step] = error
                    if self._report_failure(step, path, error):
                        return
                is_begin = False
        except errors.CheckpointError as error:
            _log.warning("uploads of %s stop for now: %s", self._staging, error)
        finally:
            with self._guard.get():
                turn.is_over = True
            turn.ended.set()

    def _next(self, turn: _Turn) -> tuple[int, Path] | None:
        """Returns the newest pending step; without any, ends the turn, returns None."""
        with self._guard.get():
            steps = [s for s in self.pending().items() if s[0] not in turn.failures]
            turn.is_over = not steps
            return max(steps, default=None)

    def _report_failure(self, step: int, path: Path, error: Exception) -> bool:
        """Reports a failure; returns True if other steps would fail the same way."""
        text = _steps.event.first_lines(error)
        path = self._directory / path.name
        self._events.emit("failed", step, path=path, what="upload", error=text)
        _log.warning("step %d was not uploaded and stays in staging: %s", step, text)
        of_step = errors.DamagedCheckpointError | parts.ReplacedError
        is_of_step = isinstance(error, of_step | FileExistsError | FileNotFoundError)
        return isinstance(error, OSError) and not is_of_step

    # ---- an upload -----------------------------------------------------------

    def _upload(self, step: int, path: Path, *, is_begin: bool) -> None:
        begun = time.monotonic()
        # A save has renamed its step a moment before it ends its claim.
        claim = _storage.temporary.claim(path, patience_secs=_PATIENCE_SECS)
        with self.step_lock.get(), claim as is_ours:
            save = parts.read_identity(path)
            with self.change_lock.get():  # wait for a change in progress
                marker = _steps.markers.read_upload_marker(path)
            if marker is None:
                return
            if not is_ours:
                raise _ElsewhereError(f"{path} is being uploaded by another process")
            if is_begin:
                self._reach()
            final = self._directory / path.name
            relation = upload_copies.compare(path, final)
            is_there = relation == "same" and upload_copies.is_whole(final, step)
            if relation == "other" and marker.settled:
                reason = f"another step {step} was saved in {self._directory} since"
                self._skip(step, path, save, marker, reason, logging.WARNING)
                return
            if not is_there:
                _checkpoint.completeness.check(path, step)
                if marker.overwrite:
                    self._inherit_pin(path, final)
                if not self._far.would_keep(step, self._near):
                    if marker.overwrite and relation in ("other", "damaged"):
                        self._delete_replaced(step, final)
                    reason = f"no policy would keep it in {self._directory}"
                    self._skip(step, path, save, marker, reason, logging.INFO)
                    return
                overwrite = marker.overwrite or relation == "same"
                overwrite |= relation == "damaged" and marker.settled
                size = self._copy(path, final, overwrite=overwrite)
                self.last_listed[step] = final
                secs = time.monotonic() - begun
                self._events.emit("uploaded", step, path=final, bytes=size, secs=secs)
                _log.info("uploaded step %d: %d bytes in %.3f s", step, size, secs)
                self._unretired = step, path
            self._settle(path, final, save, marker, is_new=not is_there)

    def _inherit_pin(self, path: Path, final: Path) -> None:
        """Pins a step that replaces a pinned one.

        The policies keep the step then; and in a bucket, where a replacement that is
        cut off loses the pin, the next upload brings it back.
        """
        if _steps.markers.is_pinned(final) and not _steps.markers.is_pinned(path):
            with self.change_lock.get():
                _steps.markers.pin(path)

    def _copy(self, path: Path, final: Path, *, overwrite: bool) -> int:
        """Copies a step to the run directory; returns its size in bytes.

        Raises:
            CheckpointExistsError: The run directory has another step of the same
                number, or files that are not a checkpoint.
        """
        if not overwrite:
            self._check_free(path, final)
        try:
            make = functools.partial(
                upload_copies.make,
                path,
                final,
                overwrite=overwrite,
                earlier=self._find_linkable(final),
                mode=self._mode,
            )
            is_in_parts = _steps.markers.read_parts(path) is not None
            if self._processes is None or not is_in_parts:
                return make()
            operation = self._processes.call("upload", f"the upload of {path.name}")
            with _distributed.agreement.closing(operation):
                size = make(operation=operation)
                operation.first("committed", str)
            return size
        except FileExistsError:
            # With overwrite, the error names the files of others in the way.
            if not overwrite:
                self._check_free(path, final)
            raise

    def _find_linkable(self, final: Path) -> Path | None:
        """Returns the newest other step of the run directory, to link its files."""
        if not _storage.of(final).can_rename:  # nor link
            return None
        others = {n: path for n, path in self.last_listed.items() if path != final}
        earlier = others[max(others)] if others else None
        with contextlib.suppress(OSError):
            # All names of a file share its mode.
            if earlier is not None and self._mode in (
                None,
                _storage.modes.of_directory(earlier),
            ):
                return earlier
        return None

    def _check_free(self, path: Path, final: Path) -> None:
        """Raises _TakenError if the run directory has another step of the number."""
        if not _steps.markers.is_damaged(final) and (
            upload_copies.compare(path, final) in ("other", "damaged")
        ):
            raise _TakenError(f"{final} was saved by another writer")

    def _delete_replaced(self, step: int, final: Path) -> None:
        """Deletes a step of the run directory whose replacement no policy keeps."""
        _checkpoint.overwrite.check_replaceable(final)
        edit.delete(final)
        self.last_listed.pop(step, None)

    def _retire(self) -> None:
        """Deletes steps after an upload, as soon as no changes are pending."""
        with self.step_lock.get():
            if self._unretired is None or self.changed():
                return
            (step, path), self._unretired = self._unretired, None
            try:
                self.delete_unkept(step)
            except errors.SaveFailedError:  # the copy is incomplete: upload it again
                with self.change_lock.get(), contextlib.suppress(FileNotFoundError):
                    _steps.markers.mark_for_upload(path)
                raise

    def _skip(
        self,
        step: int,
        path: Path,
        save: str | None,
        marker: _steps.markers.UploadMarker,
        reason: str,
        level: int,
    ) -> None:
        """Skips the upload of a step, unless the step has changed."""
        if self._remove_marker(path, save, marker) is None:
            self._events.emit("skipped", step, path=path, reason=reason)
            _log.log(level, "step %d is not uploaded: %s", step, reason)

    def _settle(
        self,
        path: Path,
        final: Path,
        save: str | None,
        marker: _steps.markers.UploadMarker,
        *,
        is_new: bool,
    ) -> None:
        """Uploads changes until the upload marker can be removed."""
        now: _steps.markers.UploadMarker | None = marker
        if is_new:
            now = self._remove_marker(path, save, marker)
        while now is not None:
            parts.check_save(path, {save})
            self._copy_changes(path, final, now)
            now = self._remove_marker(path, save, now)

    def _remove_marker(
        self, path: Path, save: str | None, marker: _steps.markers.UploadMarker
    ) -> _steps.markers.UploadMarker | None:
        """Removes the upload marker; returns None, or the marker of a later change.

        Removes those of the other processes first: if process 0 loses its disk then,
        none of them uploads the changes again. Raises ReplacedError for another save.
        """
        if self._processes is not None:
            operation = self._processes.call("upload", f"the upload of {path.name}")
            with _distributed.agreement.closing_background(operation):
                upload_copies.tell_uploaded(path, save, marker.changes, operation)
        with self.change_lock.get():
            parts.check_save(path, {save})
            now = _steps.markers.read_upload_marker(path)
            if now != marker:
                return now
            _steps.markers.unmark_upload(path)
            return None

    def _copy_changes(
        self, path: Path, final: Path, marker: _steps.markers.UploadMarker
    ) -> None:
        """Changes the copy in the run directory as the step in staging was changed."""
        step = self._format.step(path.name)
        metrics = run_metrics.read_metrics(path, step)
        if metrics and not metrics.items() <= self._far.index.metrics(final).items():
            # Damaged, if they changed in staging while the step was copied.
            edit.add_metrics(final, metrics, step, over_damage=True)
        if _steps.markers.is_pinned(path) and not _steps.markers.is_pinned(final):
            edit.pin(final)
        if _steps.markers.PIN in marker.removed and not _steps.markers.is_pinned(path):
            edit.unpin(final)
        if (
            _steps.markers.TEMPORARY in marker.removed
            and not _steps.markers.is_temporary(path)
        ):
            edit.make_permanent(final)
        if deleted := _deleted_items(path):
            for item in sorted(deleted - _deleted_items(final)):
                edit.delete_item(final, item)

    def copy_journal(self) -> None:
        """Writes the journal, statistics and run metadata to the run directory."""
        with self.step_lock.get():
            try:
                for name in (_steps.journal.NAME, _steps.journal.STATISTICS):
                    journal, there = self._staging / name, self._directory / name
                    _steps.journal.append_new_lines(journal, there, self._mode)
                self._copy_metadata()
            except OSError as error:
                _log.warning(
                    "cannot copy the journal to %s: %s", self._directory, error
                )

    def _copy_metadata(self) -> None:
        read = _formats.native_metadata.read_run_metadata
        custom = read(self._staging)
        if custom and custom != read(self._directory):
            _formats.native_metadata.write_run_metadata(
                self._directory, custom, mode=self._mode
            )


def _deleted_items(path: Path) -> frozenset[str]:
    return _steps.markers.deleted_items(_storage.of(path).names(path))


def _advice(error: Exception) -> str:
    """Returns the template of the advice for failed uploads."""
    match error:
        case _TakenError():
            return (
                "To keep the step of {directory}, delete the directory {names} in"
                " {staging}. To replace it, save the result of restore(step={step})"
                " again, with on_exists='overwrite'."
            )
        case _ElsewhereError() | parts.ReplacedError():
            return (
                "End the other process, or let it upload {names}, then call"
                " wait_for_uploads()."
            )
        case FileExistsError():
            return (
                "Move {names}, or the named files in it, out of {directory}, then call"
                " wait_for_uploads(). To drop the upload, delete {names} in {staging}."
            )
        case errors.DamagedCheckpointError():
            return "Delete {names} in {staging}; the run continues without."
    return (
        "Check that {directory} is reachable and writable, then call"
        " wait_for_uploads(), or open the run again with the same staging=."
    )
