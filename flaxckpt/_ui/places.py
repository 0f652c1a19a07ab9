"""The runs and checkpoints that the page may open, by name.

Requests give names, never paths: a name that is not listed here opens nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _inspect, _steps, _storage, errors, formats
from flaxckpt._types import PathLike

_MOST_PLACES = 500
_DEEPEST = 3
"""Levels of directories between the opened directory and a run."""


class Place(NamedTuple):
    """A run or a checkpoint.

    Attributes:
        name: The path relative to the opened directory.
        path: The run directory, or the checkpoint.
        is_run: True for a run directory.
    """

    name: str
    path: Path
    is_run: bool


class Places(NamedTuple):
    """The runs and checkpoints that may be opened.

    Attributes:
        root: The opened path.
        is_single: True if `root` itself is the run or the checkpoint.
        runs: Name -> a run or checkpoint below `root`, or `root` itself.
        others: Name -> another checkpoint from the command line.
    """

    root: Path
    is_single: bool
    runs: Mapping[str, Place]
    others: Mapping[str, Place]

    def find(self, name: str) -> Place:
        """Returns the place of a name.

        Raises:
            CheckpointNotFoundError: No run or checkpoint has this name.
        """
        place = self.runs.get(name) or self.others.get(name)
        if place is None:
            raise errors.CheckpointNotFoundError(
                f"{self.root} has no run or checkpoint {name!r} that this page may"
                " open: start flaxckpt ui again if it is new"
            )
        return place


def find_places(root: PathLike, others: Sequence[PathLike] = ()) -> Places:
    """Finds the runs and checkpoints at or below a path.

    Args:
        root: A run directory, a checkpoint, or a directory of runs.
        others: Further checkpoints and run directories.

    Raises:
        CheckpointNotFoundError: A path does not exist.
        CheckpointFormatError: A path is none of these.
    """
    path = _storage.paths.resolve(root)
    further = {str(other): _place(str(other), other) for other in others}
    is_run = _is_run(path)
    if is_run is not None:
        name = path.name or str(path)
        return Places(path, True, {name: Place(name, path, is_run)}, further)
    with _storage.paths.listing_cache(path):
        found = [*itertools.islice(_search(path, "", _DEEPEST), _MOST_PLACES)]
    if not found:
        _inspect.run_view.survey(path)  # raises: neither a run nor a checkpoint
    return Places(path, False, {place.name: place for place in found}, further)


def _place(name: str, other: PathLike) -> Place:
    path = _storage.paths.resolve(other)
    is_run = _is_run(path)
    if is_run is None:
        formats.detect(path)  # raises
    return Place(name, path, bool(is_run))


def _search(directory: Path, prefix: str, depth: int) -> Iterator[Place]:
    """Yields the runs and checkpoints below a directory, by name."""
    for child in sorted(directory.iterdir()):
        if child.is_symlink() or _storage.temporary.TEMPORARY in child.name:
            continue
        name = f"{prefix}{child.name}"
        try:
            is_run = _is_run(child)
            if is_run is False or (is_run and not _is_empty(child)):
                yield Place(name, child, is_run)
            elif is_run is None and depth > 1 and child.is_dir():
                yield from _search(child, f"{name}/", depth - 1)
        except OSError:  # deleted, or not readable
            continue


def _is_run(path: Path) -> bool | None:
    """Returns True for a run directory, False for a checkpoint; None for others."""
    if path.exists() and formats.recognises(path):
        return False
    try:
        _inspect.run_view.survey(path)
    except errors.CheckpointNotFoundError:
        if path.exists():
            return None
        raise
    except errors.CheckpointError:
        return None
    return True


def _is_empty(run: Path) -> bool:
    """Returns True for an empty directory, which might become a run."""
    return not (run / _steps.journal.NAME).is_file() and not any(run.iterdir())
