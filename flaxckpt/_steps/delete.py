"""Deletion of steps, and removal of leftovers of crashes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._steps import index, markers, names

_log = logging.getLogger(__name__)

_TEMPORARY_SECS = 60.0


def delete(
    path: Path,
    *,
    find_foreign: Callable[[Path], Sequence[str]],
    even_pinned: bool = False,
    is_unchanged: Callable[[Path], bool] = lambda path: True,
) -> None:
    """Deletes a step: first the name, durably, then the files; a sweep may remove some.

    `even_pinned` deletes a pinned step, too, or one that is not uploaded. Raises
    SaveFailedError if it is being read or kept by a marker, has foreign files, or
    `is_unchanged` returns False: another process has replaced it. Raises OSError if it
    still has its name, or may regain it in a crash.
    """

    def check_step(now: Path) -> None:
        if not is_unchanged(now):
            raise errors.SaveFailedError(f"{path} is not deleted: it was just replaced")
        if even_pinned:
            return
        if markers.is_pinned(now):
            raise errors.SaveFailedError(f"{path} is not deleted: it is pinned")
        # A change may have marked the step since a policy let it go. Staging is local.
        is_local = not _storage.of(now).costs_requests
        if is_local and markers.is_marked_for_upload(now):
            raise errors.SaveFailedError(
                f"{path} is not deleted: it is not uploaded yet"
            )

    check_foreign(str(path), find_foreign(path))
    _storage.transaction.delete(path, check_step)
    _log.info("deleted %s", path)


def delete_item(
    path: Path,
    item: str,
    *,
    find_foreign: Callable[[Path], Sequence[str]],
    is_unchanged: Callable[[Path], bool] = lambda path: True,
) -> None:
    """Deletes an item of a step after durably marking it as deleted; see `delete`."""

    def announce() -> None:
        if not is_unchanged(path):
            raise errors.SaveFailedError(
                f"{item} of {path} is not deleted: the step was just replaced"
            )
        markers.mark_item_deleted(path, item)

    check_foreign(f"{item} of {path}", in_item(find_foreign(path), item))
    _storage.transaction.delete_part(path, item, announce)


def in_item(files: Sequence[str], item: str) -> list[str]:
    return [name for name in files if f"{name}/".startswith(f"{item}/")]


def check_foreign(what: str, foreign: Sequence[str]) -> None:
    """Raises SaveFailedError if there are files that a deletion would take along."""
    if foreign:
        raise errors.SaveFailedError(
            f"{what} is not deleted: it contains files that do not belong to the"
            f" checkpoint and would be lost:\n{errors.rows(foreign)}\nMove them"
            " elsewhere, then try again."
        )


def sweep(root: Path, step_format: names.StepFormat) -> None:
    """Removes leftovers of saves and deletions; raises OSError if one remains."""
    _storage.transaction.sweep(root, lambda name: step_format.step(name) is not None)


def tidy(root: Path, step_format: names.StepFormat, items: Sequence[str]) -> None:
    """Removes leftovers of crashes in a run, its steps and `items`; logs failures."""
    try:
        sweep(root, step_format)
        # Replacing a file leaves temporary files only in storage with renames.
        inside = items if _storage.of(root).can_rename else ()
        directories = [root / name for name in inside]
        for step in index.list_committed(root, step_format, Path.is_dir):
            if not step.is_damaged:
                there = [step.path / name for name in inside if name in step.files]
                directories += [step.path, *there]
        if inside:  # files of the user beside the steps may have similar names
            for path in root.glob(f"{names.STAGING_OWNER}.*.tmp"):
                if _storage.leases.is_older(path, _TEMPORARY_SECS):
                    path.unlink(missing_ok=True)
        for directory in directories:
            if not directory.is_symlink():
                _storage.transaction.sweep_files(directory)
    except OSError as error:
        _log.warning("could not remove what a crash left in %s: %s", root, error)
