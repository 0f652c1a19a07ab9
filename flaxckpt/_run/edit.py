"""Changes of committed steps by users: metrics, markers and deletion."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxckpt import _checkpoint, _formats, _steps, _storage, errors
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._run import metrics as run_metrics
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)


def add_metrics(
    path: Path,
    metrics: Mapping[str, float],
    step: int | None,
    *,
    over_damage: bool = False,
) -> dict[str, float]:
    """Adds metrics to the step `path`, under a lock; returns them with joined names.

    With `over_damage`, `metrics` are all that the step has: they replace damaged ones.
    """
    added = run_metrics.as_metrics(metrics)
    with (
        _change(path, "add metrics to"),
        _storage.of(path).lock_file(_formats.items.file_to_lock(path), path),
    ):
        _check_not_being_deleted(path)
        try:
            stored = _formats.native_metadata.load_metrics(path, step)
        except errors.DamagedCheckpointError as error:
            is_there = _storage.of(path).is_taken(path / run_metrics.METRICS_FILE)
            if is_there and not over_damage:
                raise errors.SaveFailedError(
                    f"{path / run_metrics.METRICS_FILE} is damaged, so nothing can be"
                    " added to it: delete it, and add all metrics of the step again"
                ) from None
            _log.warning("only the metrics added now are kept: %s", error)
            stored = {}
        _formats.native_metadata.write_metrics(
            path, _formats.native_metadata.merge_metrics(stored, added), step
        )
    return added


def write_run_metadata(
    directory: Path, metadata: Mapping[str, JSON], mode: int | None
) -> None:
    """Replaces the run's metadata; raises SaveFailedError if it cannot be written."""
    try:
        _formats.native_metadata.write_run_metadata(directory, metadata, mode=mode)
    except (OSError, ValueError) as error:
        raise errors.SaveFailedError(
            f"cannot write the metadata of {directory}: {error}; check that the"
            " directory is writable and has space, then try again"
        ) from error


def pin(path: Path) -> None:
    with _change(path, "pin"):
        pinned = _steps.markers.pin(path)
        try:
            try:
                _check_there(path)
            except FileNotFoundError:  # or it is just being replaced, with its pin
                file = _formats.items.file_to_lock(path)
                with _storage.of(path).lock_file(file, path):
                    _check_there(path)
            _check_not_being_deleted(path)
        except (OSError, errors.CheckpointError) as error:
            # A pin that was there before stays, unless the step is gone.
            if pinned.is_new or isinstance(error, FileNotFoundError):
                pinned.undo()
            raise


def _check_there(path: Path) -> None:
    if _formats.identify(path) is None:
        raise FileNotFoundError(errno.ENOENT, "it was deleted", str(path))


def _check_not_being_deleted(path: Path) -> None:
    """Raises SaveFailedError if a deletion of a step in a bucket was announced.

    If its process has died, the request that removes the step may be on its way.
    """
    # Elsewhere, a deletion renames the step first.
    if not _storage.of(path).can_rename and _storage.leases.is_being_deleted(path):
        raise errors.SaveFailedError(
            f"{path} is being deleted by another process, or was until that process"
            " died: try again in 10 minutes, if the step is still there"
        )


def unpin(path: Path) -> None:
    with _change(path, "unpin"):
        _steps.markers.unpin(path)


def make_permanent(path: Path) -> None:
    """Makes a temporary step permanent: only policies delete the step."""
    with _change(path, "keep"):
        _steps.markers.make_permanent(path)


def delete(path: Path) -> None:
    """Deletes the step `path`, even if pinned, unless a reader holds a lease."""
    with _change(path, "delete"):
        _steps.delete.delete(
            path, find_foreign=_checkpoint.overwrite.find_foreign, even_pinned=True
        )


def delete_item(path: Path, item: str) -> None:
    """Deletes an item of the step `path`; see `Checkpointer.delete`."""
    stored = locate.read_stored(path, None)
    _check_deletable(path, item, stored)
    with _change(path, "delete an item of"):
        if (path / item).is_dir():
            _steps.delete.delete_item(
                path, item, find_foreign=_checkpoint.overwrite.find_foreign
            )
        else:
            _steps.markers.mark_item_deleted(path, item)


def _check_deletable(path: Path, item: str, stored: Stored) -> None:
    """Raises an error unless an item of the step `path` can be deleted."""
    metadata = stored.metadata
    dataset = _formats.items.find_dataset(path)
    others = {*metadata.json, *metadata.damaged_items}
    others |= set() if dataset is None else {dataset.name}
    if item in metadata.deleted_items:
        raise errors.CheckpointNotFoundError(
            f"the item {item} of {path} was deleted before"
        )
    if item in stored.left_out.keys() - others:
        raise errors.OptionError(
            f"{item} of {path} {stored.left_out[item]}: flaxckpt does not delete it;"
            f" remove {path / item} yourself"
        )
    if item not in {*metadata.items, *others}:
        raise errors.CheckpointNotFoundError(
            f"{path} has no item {item!r:.80}; it has"
            f" {', '.join([*metadata.items, *sorted(others)])}"
        )
    if metadata.items == (item,):
        raise errors.OptionError(
            f"{item} is the only item of {path} with arrays that can be read: delete"
            " the whole step"
        )


@contextlib.contextmanager
def _change(path: Path, action: str) -> Iterator[None]:
    """Converts OSError and ValueError of the block to SaveFailedError."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise errors.SaveFailedError(
            f"cannot {action} {path}: {error}; check that the step still exists and"
            " that its directory is writable and has space, then try again"
        ) from error
