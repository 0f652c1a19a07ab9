"""Finds the runs and checkpoints below a directory. Links are not followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _formats, _steps, _storage, errors
from flaxckpt._inspect import run_view

_MOST_PLACES = 500
_DEEPEST = 3
"""Levels of directories between the opened directory and a run."""


class Location(NamedTuple):
    """A run or a checkpoint; its name is the path relative to the opened directory."""

    name: str
    path: Path
    is_run: bool


def find(root: Path, known: Mapping[str, Location]) -> dict[str, Location]:
    """Returns the runs and checkpoints at or below a path, by name."""
    kind = is_run(root)
    if kind is not None:
        name = root.name or str(root)
        return {name: Location(name, root, kind)}
    if not root.is_dir():
        return {}
    with _storage.paths.listing_cache(root):
        search = search_below(root, known)
        return {place.name: place for place in itertools.islice(search, _MOST_PLACES)}


def search_below(
    directory: Path,
    known: Mapping[str, Location],
    prefix: str = "",
    depth: int = _DEEPEST,
    most: int | None = None,
) -> Iterator[Location]:
    """Yields the runs and checkpoints below a directory, by name.

    Only the names are looked at of those that are known, and of `most` entries, if
    given, the first ones.
    """
    for child in sorted(itertools.islice(directory.iterdir(), most)):
        if child.is_symlink() or _storage.temporary.TEMPORARY in child.name:
            continue
        name = f"{prefix}{child.name}"
        if name in known and known[name].path == child:
            yield known[name]
            continue
        try:
            kind = None if _formats.is_pointer(child) else is_run(child)
            if kind is False or (kind and not is_empty(child)):
                yield Location(name, child, kind)
            elif kind is None and depth > 1 and child.is_dir():
                yield from search_below(child, known, f"{name}/", depth - 1)
        except OSError:  # deleted, or not readable
            continue


def is_run(path: Path) -> bool | None:
    """Returns True for a run directory, False for a checkpoint; None for others."""
    if path.exists() and _formats.recognises(path):
        return False
    try:
        run_view.survey(path)
    except errors.CheckpointNotFoundError:
        if path.exists():
            return None
        raise
    except errors.CheckpointError:
        return None
    return True


def is_empty(run: Path) -> bool:
    """Returns True for an empty directory, which might become a run."""
    return not (run / _steps.journal.NAME).is_file() and not any(run.iterdir())
