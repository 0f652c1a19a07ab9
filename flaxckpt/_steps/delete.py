"""The end of a step, its name first; and of what crashes have left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._steps import index, markers, names

_log = logging.getLogger(__name__)


def delete(path: Path, *, even_pinned: bool = False) -> None:
    """Removes a step: first its name, durably, then its files.

    Files that cannot be removed are swept another time.

    Raises:
        SaveFailedError: Somebody reads it, or has pinned it.
        OSError: It has its name still, or that it has not may not last.
    """
    if _storage.paths.is_remote(path):
        _delete_in_store(path, even_pinned=even_pinned)
        return
    aside = _storage.temporary.beside(path, _storage.temporary.DELETED)
    with _storage.temporary.claimed(path):
        with _storage.leases.deletion(path):
            if not even_pinned:
                _check_not_pinned(path, path)
            _storage.rename.withdraw(path, aside)
            try:
                # Only what has no name any more is sure to be neither read nor pinned.
                if late := _storage.leases.readers(aside):
                    raise _storage.leases.in_use(path, late)
                if not even_pinned:
                    _check_not_pinned(path, aside)
            except errors.SaveFailedError:
                aside.rename(path)
                _storage.local.sync_directory(path.parent)
                raise
        _storage.temporary.discard(aside)
    _log.info("deleted %s", path)


def _delete_in_store(path: _storage.paths.RemotePath, *, even_pinned: bool) -> None:
    with _storage.locks.held(path) as lock, _storage.leases.deletion(path):
        if not even_pinned:
            _check_not_pinned(path, path)
        marker = _storage.commit_marker.withdraw(path)
        try:
            # Whoever came before it counted no more is seen now.
            if late := _storage.leases.readers(path):
                raise _storage.leases.in_use(path, late)
            if not even_pinned:
                _check_not_pinned(path, path)
        except errors.SaveFailedError:
            _storage.commit_marker.put_back(path, marker)
            raise
        _storage.commit_marker.remove(lock)
    _log.info("deleted %s", path)


def _check_not_pinned(path: Path, now: Path) -> None:
    if markers.is_pinned(now):
        raise errors.SaveFailedError(f"{path} is not deleted: it is pinned")


def delete_dataset(path: Path, dataset: str) -> None:
    """Removes the dataset's state of a step: first it is marked as let go, durably.

    Args:
        path: The step.
        dataset: What the directory of that state is called in it.

    Raises:
        SaveFailedError: Somebody reads the step.
    """
    aside = _storage.temporary.beside(path, _storage.temporary.DELETED)
    with _storage.temporary.claimed(path / dataset):
        with _storage.leases.deletion(path):
            markers.let_dataset_go(path)
            if _storage.paths.is_remote(path):
                _storage.local.remove_tree(path / dataset)
                return
            (path / dataset).rename(aside)
            _storage.local.sync_directory(path)
        _storage.temporary.discard(aside)


def sweep(root: Path, step_format: names.StepFormat) -> None:
    """Removes what saves and deletions that were cut off have left under `root`.

    Raises:
        OSError: Something could not be removed.
    """
    _storage.temporary.sweep(root, lambda name: step_format.step(name) is not None)


def tidy(root: Path, step_format: names.StepFormat, items: Sequence[str]) -> None:
    """Removes all that crashes have left in a run directory; says what it cannot.

    Args:
        root: The directory.
        step_format: How its steps are called.
        items: The directories in it, and in each step, where files are replaced.
    """
    try:
        sweep(root, step_format)
        inside = (
            () if _storage.paths.is_remote(root) else items
        )  # no leftovers in there
        directories = [root / name for name in inside]
        for step in index.listed(root, step_format).values():
            directories += [step, *(step / name for name in inside)]
        for directory in directories:
            if not directory.is_symlink():
                _storage.temporary.sweep_files(directory)
    except OSError as error:
        _log.warning("what a crash has left in %s is there still: %s", root, error)
