"""The runs, checkpoints and states that the page may open, by name.

Requests give names, never paths: a name that is not listed here opens nothing. Links
are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxckpt import _formats, _inspect, _state, _steps, _storage, errors
from flaxckpt._inspect import run_search
from flaxckpt._inspect.run_search import Location
from flaxckpt._report.ui import aside
from flaxckpt._types import PathLike

_MOST_ENTRIES = 500
"""Entries of a directory that are looked at for states."""

_MOST_FILES = 100
_MOST_FILE_BYTES = 16 * 2**20
_log = logging.getLogger(__name__)

_AFTER_ERROR_SECS = 30.0
_LEAST_SECS = 2.0
_SHARE = 0.05
"""How often, and for which share of the time, new runs are looked for."""


class Places:
    """The runs, checkpoints and states that may be opened; thread-safe.

    Views compare with checkpoints, and plan restores into states. These are the runs
    and checkpoints, what lies beside a single one, and abstract states in JSON files
    below or beside them.

    Attributes:
        root: The opened path: a run directory, a checkpoint, or a directory of runs.
        runs: Name -> a run or checkpoint below `root`, or `root` itself.
        version: Grows as runs appear and disappear.
        others: Name -> another checkpoint from the command line.
        files: Name -> a JSON file with a state from the command line, for plans only.
    """

    def __init__(
        self, root: Path, others: Mapping[str, Location], files: Mapping[str, Location]
    ) -> None:
        self.root = root
        self.others = others
        self.files = files
        self._searching = threading.Lock()
        self.version = 0
        self._due = 0.0
        self.runs: Mapping[str, Location] = {}
        self._beside: Mapping[str, Location] = {}
        self._with_steps: set[Path] = set()
        self._search()

    @property
    def is_single(self) -> bool:
        """True if `root` itself is the run or the checkpoint."""
        return any(place.path == self.root for place in self.runs.values())

    def checkpoints(self) -> Mapping[str, Location]:
        """Returns the runs and checkpoints to compare with, as of now, by name."""
        found = dict(self.runs)
        if self.is_single and not _storage.of(self.root).costs_requests:
            with contextlib.suppress(OSError):
                beside = run_search.search_below(
                    self.root.parent, self._beside, depth=1, most=_MOST_ENTRIES
                )
                self._beside = {each.name: each for each in beside}
            for name, place in self._beside.items():
                if place.path != self.root:
                    found.setdefault(name, place)
        return {**found, **self.others}

    def states(self) -> Mapping[str, Location]:
        """Returns the states to restore into, as of now, by name."""
        found = dict(self.checkpoints())
        if not _storage.of(self.root).costs_requests:
            below = self.root.parent if self.is_single else self.root
            folders = {below, *(p for r in self.runs.values() for p in r.path.parents)}
            inside = sorted(p for p in folders if p.is_relative_to(below))
            files = (file for folder in inside for file in _find_files(folder))
            for file in itertools.islice(files, _MOST_FILES):
                name = file.relative_to(below).as_posix()
                found.setdefault(name, Location(name, file, is_run=False))
        return {**found, **self.files}

    def without_steps(self, places: Mapping[str, Location]) -> set[str]:
        """Returns the names of the runs that have no step yet."""
        return {name for name, place in places.items() if not self._has_step(place)}

    def _has_step(self, place: Location) -> bool:
        """Returns True unless a run has no step; a run that had one is not read."""
        if not place.is_run or place.path in self._with_steps:
            return True
        try:
            index = _steps.index.StepIndex(place.path, _formats.identify)
            has_step = any(
                index.find(step) is not None or index.find_doubtful(step) is not None
                for step in reversed(index.numbers)
            )
        except (errors.CheckpointError, OSError):
            return True  # the view says what is wrong with it
        if has_step:
            self._with_steps.add(place.path)
        return has_step

    def find(self, name: str, among: Mapping[str, Location] | None = None) -> Location:
        """Returns the place of a name, or raises CheckpointNotFoundError."""
        place = (among or {}).get(name) or self.runs.get(name) or self.others.get(name)
        if place is None:
            raise errors.CheckpointNotFoundError(
                f"{self.root} has no run or checkpoint {name!r} that this page may"
                " open: it may have been deleted, or has no step yet"
            )
        return place

    def look_again(self) -> None:
        """Finds runs that have started since, and drops those that were deleted.

        Takes a small part of the time at most, however slow the storage is.
        """
        if time.monotonic() < self._due or not self._searching.acquire(blocking=False):
            return
        try:
            self._search()
        except (errors.CheckpointError, OSError):
            _log.debug("cannot search %s", self.root, exc_info=True)
            self._due = time.monotonic() + _AFTER_ERROR_SECS
        finally:
            self._searching.release()

    def _search(self) -> None:
        began = time.monotonic()
        # Looked at first, so that what appears during the search is found by the next.
        was_empty = self.root.is_dir() and run_search.is_empty(self.root)
        found = run_search.find(self.root, self.runs)
        if found != self.runs:
            self.runs, self.version = found, self.version + 1
        now = time.monotonic()
        self._due = now + max(_LEAST_SECS, (now - began) / _SHARE)
        if self.is_single and not was_empty:
            self._due = math.inf  # a run, or a checkpoint, for good


def find_places(root: PathLike, others: Sequence[PathLike] = ()) -> Places:
    """Finds the runs and checkpoints at or below a path.

    The others may be JSON files with states, too.

    Raises:
        CheckpointNotFoundError: A path does not exist.
        CheckpointFormatError: A path is none of these.
        OptionError: A JSON file does not describe a state.
    """
    path = _formats.follow(_storage.paths.resolve(root))
    further, files = dict[str, Location](), dict[str, Location]()
    for other in others:
        at, name = _storage.paths.resolve(other), str(other)
        if at.suffix == ".json" and at.is_file() and not _formats.recognises(at):
            aside.call(_describes_leaves, at)  # raises
            files[name] = Location(name, at, is_run=False)
            continue
        at = _formats.follow(at)
        if (kind := run_search.is_run(at)) is None:
            _formats.detect(at)  # raises
        further[name] = Location(name, at, bool(kind))
    found = Places(path, further, files)
    if not found.runs:
        _inspect.run_view.survey(path)  # raises: neither a run nor a checkpoint
    return found


def _find_files(folder: Path) -> list[Path]:
    """Returns the abstract files of a directory."""
    try:
        found = sorted(itertools.islice(folder.iterdir(), _MOST_ENTRIES))
    except OSError:
        return []
    return [*filter(is_abstract_file, found)]


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
        return aside.call(_describes_leaves, file)
    except (errors.CheckpointError, OSError):
        return False


def _describes_leaves(file: Path) -> bool:
    target = _inspect.abstract_file.read_target(file)
    leaves = _state.flax_state.leaves_by_path(target.state).values()
    return any(leaf not in ({}, [], ()) for leaf in leaves)
