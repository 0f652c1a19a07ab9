"""The states that views may compare with, and plans may restore into.

They are checkpoints, runs and, for plans, abstract files: those that the page may open,
abstract states in JSON files below the opened directory, and, if one run or checkpoint
was opened, what lies beside it. Requests give names: a name that is not found opens
nothing. Links are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxckpt import _inspect, _state, _storage, errors
from flaxckpt._report.ui import places
from flaxckpt._report.ui.places import Location, Places

_MOST_ENTRIES = 500
"""Entries of a directory that are looked at."""

_MOST_FILES = 100
_MOST_FILE_BYTES = 16 * 2**20


class Targets:
    """Finds the states to compare with, and to restore into; thread-safe."""

    def __init__(self, found: Places) -> None:
        self._found = found
        self._beside: Mapping[str, Location] = {}
        self._with_steps: set[Path] = set()

    def all(self) -> Mapping[str, Location]:
        """Returns the states by name, with those that have appeared since."""
        found = self._found
        targets = dict(self.checkpoints())
        if not _storage.of(found.root).costs_requests:
            below = found.root.parent if found.is_single else found.root
            for file in itertools.islice(_find_files(below, found), _MOST_FILES):
                name = file.relative_to(below).as_posix()
                targets.setdefault(name, Location(name, file, is_run=False))
        return {**targets, **found.files}

    def checkpoints(self) -> Mapping[str, Location]:
        """Returns the runs and checkpoints among the states, by name."""
        found = self._found
        targets = dict(found.runs)
        if found.is_single and not _storage.of(found.root).costs_requests:
            with contextlib.suppress(OSError):
                beside = places.search_below(
                    found.root.parent, self._beside, depth=1, most=_MOST_ENTRIES
                )
                self._beside = {each.name: each for each in beside}
            for name, place in self._beside.items():
                if place.path != found.root:
                    targets.setdefault(name, place)
        return {**targets, **found.others}

    def without_steps(self, targets: Mapping[str, Location]) -> set[str]:
        """Returns the names of the runs among `targets` that have no step yet."""
        return {name for name, place in targets.items() if not self._has_step(place)}

    def _has_step(self, place: Location) -> bool:
        """Returns True unless a run has no step; a run that had one is not read."""
        if not place.is_run or place.path in self._with_steps:
            return True
        try:
            has_step = places.has_step(place.path)
        except (errors.CheckpointError, OSError):
            return True  # the view says what is wrong with it
        if has_step:
            self._with_steps.add(place.path)
        return has_step

    def find(self, name: str, among: Mapping[str, Location] | None = None) -> Location:
        """Returns the state of a name, among all or these.

        Raises:
            CheckpointNotFoundError: No state has this name.
        """
        place = (self.all() if among is None else among).get(name)
        return self._found.find(name) if place is None else place  # find raises


def _list(directory: Path) -> list[Path]:
    try:
        return sorted(itertools.islice(directory.iterdir(), _MOST_ENTRIES))
    except OSError:
        return []


def _find_files(directory: Path, found: Places) -> Iterator[Path]:
    """Yields the abstract files of a directory, and of those above its runs."""
    folders = {directory}
    for place in found.runs.values():
        folders |= {p for p in place.path.parents if p.is_relative_to(directory)}
    for folder in sorted(folders):
        yield from filter(is_abstract_file, _list(folder))


def is_abstract_file(file: Path) -> bool:
    """Returns True for a JSON file, no link, that describes a state with leaves."""
    try:
        if file.suffix != ".json" or file.is_symlink() or not file.is_file():
            return False
        stat = file.stat()
    except OSError:
        return False
    if stat.st_size > _MOST_FILE_BYTES:
        return False
    return _describes_state(file, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(maxsize=256)
def _describes_state(file: Path, stamp: object) -> bool:
    try:
        target = _inspect.abstract_file.read_target(file)
    except (errors.CheckpointError, OSError):
        return False
    leaves = _state.flax_state.leaves_by_path(target.state).values()
    return any(leaf not in ({}, [], ()) for leaf in leaves)
