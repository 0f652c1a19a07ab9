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

    def check_not_pinned(now: Path) -> None:
        if not even_pinned and markers.is_pinned(now):
            raise errors.SaveFailedError(f"{path} is not deleted: it is pinned")

    _storage.of(path).delete(path, check_not_pinned)
    _log.info("deleted %s", path)


def delete_dataset(path: Path, dataset: str) -> None:
    """Removes the dataset's state of a step: first it is marked as let go, durably.

    Args:
        path: The step.
        dataset: What the directory of that state is called in it.

    Raises:
        SaveFailedError: Somebody reads the step.
    """
    _storage.of(path).delete_part(path, dataset, lambda: markers.let_dataset_go(path))


def sweep(root: Path, step_format: names.StepFormat) -> None:
    """Removes what saves and deletions that were cut off have left under `root`.

    Raises:
        OSError: Something could not be removed.
    """
    _storage.of(root).sweep(root, lambda name: step_format.step(name) is not None)


def tidy(root: Path, step_format: names.StepFormat, items: Sequence[str]) -> None:
    """Removes all that crashes have left in a run directory; says what it cannot.

    Args:
        root: The directory.
        step_format: How its steps are called.
        items: The directories in it, and in each step, where files are replaced.
    """
    try:
        sweep(root, step_format)
        # Replacing a file leaves something only where it takes a rename.
        inside = items if _storage.of(root).can_rename else ()
        directories = [root / name for name in inside]
        for step in index.listed(root, step_format).values():
            directories += [step, *(step / name for name in inside)]
        for directory in directories:
            if not directory.is_symlink():
                _storage.of(directory).sweep_files(directory)
    except OSError as error:
        _log.warning("what a crash has left in %s is there still: %s", root, error)
