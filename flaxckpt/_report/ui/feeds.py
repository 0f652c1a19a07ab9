"""The newest report on each run that somebody looks at, gathered again as runs change.

Threads look at the journal and the names of the steps, and gather a report when they
have changed. Pages show the last report at once, whatever its size.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _steps, _storage, errors
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import gathering
from flaxckpt._report.data import Integrity, Report

_log = logging.getLogger(__name__)

_THREADS = 2
_POLL_SECS = 1.0
_POLL_SECS_IN_STORES = 10.0
_POLLS_PER_REPORT = 120
"""Polls after which a report is gathered again, changed or not: for pins and metrics
that were added, and files that were damaged."""

_WATCHED_SECS = 60.0
"""A run that nobody has asked for so long is not polled."""


class ReportSnapshot(NamedTuple):
    """A report on a run; `version` grows, and `news` says what has changed last."""

    version: int
    report: Report
    news: str
    is_bad: bool = False


class News(NamedTuple):
    """The last change of some runs: `step 300 saved`; each has another version."""

    version: str
    text: str
    is_bad: bool = False


class Feeds:
    """Reports on runs, kept current by threads until `close`."""

    def __init__(self) -> None:
        self._feeds: dict[Path, _Feed] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        for _ in range(_THREADS):
            threading.Thread(
                target=self._follow, name="flaxckpt ui", daemon=True
            ).start()

    def latest(self, place: Location) -> ReportSnapshot:
        """Returns the last report on a run; gathers the first.

        Raises CheckpointError if the run cannot be read, or does not exist any more.
        """
        return self._feed(place).latest()

    def available(self, place: Location) -> ReportSnapshot | None:
        """Returns the last report on a run, if any; see `latest` for errors."""
        return self._feed(place).available()

    def _feed(self, place: Location) -> _Feed:
        with self._lock:
            return self._feeds.setdefault(place.path, _Feed(place.path))

    def news(self, places: Sequence[Location]) -> News:
        """Returns the last change of some runs; skips runs without a report."""
        found = []
        for place in places:
            with contextlib.suppress(errors.CheckpointError, OSError):
                snapshot = self.available(place)
                if snapshot is not None:
                    found.append((place, snapshot))
        newest = max(found, key=lambda item: item[1].report.made, default=None)
        if newest is None:
            return News("0", "")
        place, snapshot = newest
        text = snapshot.news
        if text and len(places) > 1:
            text = f"{place.name}: {text}"
        version = str(sum(each.version for _, each in found))
        return News(version, text, snapshot.is_bad)

    def close(self) -> None:
        """Ends the threads, after the reports that they are gathering."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.wait(_POLL_SECS / 4):
            while (feed := self._next()) is not None and not self._closed.is_set():
                feed.refresh()

    def _next(self) -> _Feed | None:
        """Returns a feed that is to be polled, for one of the threads only."""
        with self._lock:
            return next((feed for feed in self._feeds.values() if feed.claim()), None)


class _Feed:
    """The reports on a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._snapshot: ReportSnapshot | None = None
        self._stamp: object = None
        self._error: Exception | None = None
        self._is_claimed = False
        self._polls = 0
        self._polled = self._asked = -float("inf")
        in_store = _storage.of(path).costs_requests
        self._poll_secs = _POLL_SECS_IN_STORES if in_store else _POLL_SECS

    def latest(self) -> ReportSnapshot:
        """Returns the last report; gathers the first."""
        is_watched = time.monotonic() - self._asked < _WATCHED_SECS
        self._asked = time.monotonic()
        if self._snapshot is None:
            with self._lock:
                if self._snapshot is None:
                    self._gather()
        elif not is_watched:
            self.refresh()
        assert self._snapshot is not None
        return self._snapshot

    def available(self) -> ReportSnapshot | None:
        """Returns the last report, or None; raises the error of the first."""
        self._asked = time.monotonic()
        if self._snapshot is None and self._error is not None:
            raise self._error
        return self._snapshot

    def claim(self) -> bool:
        """Returns True if the caller is to refresh this feed now."""
        now = time.monotonic()
        is_watched = now - self._asked < _WATCHED_SECS
        is_due = is_watched and now - self._polled >= self._poll_secs
        was_claimed, self._is_claimed = self._is_claimed, self._is_claimed or is_due
        return is_due and not was_claimed

    def refresh(self) -> None:
        """Gathers a new report if the run has changed, or has none."""
        with self._lock:
            self._polled = time.monotonic()
            self._polls += 1
            try:
                is_changed = _stamp(self._path) != self._stamp
                if self._snapshot is None or self._polls >= _POLLS_PER_REPORT:
                    self._gather()
                elif is_changed:
                    self._gather(self._snapshot.report.integrity)
            except (errors.CheckpointError, OSError) as error:
                self._error = error
                # Deleted steps are gone a moment later; else the page shows the last
                # report, and reading anything of it tells the error.
                _log.debug("cannot read %s", self._path, exc_info=True)
            finally:
                self._is_claimed = False

    def _gather(self, known: Sequence[Integrity] = ()) -> None:
        before = self._snapshot
        stamp = _stamp(self._path)
        options = gathering.ReportOptions(diff=False, known=known)
        report = gathering.gather(self._path, options)
        self._stamp, self._polls = stamp, 0
        if before is None:
            self._snapshot = ReportSnapshot(1, report, "")
            return
        news = changes(before.report, report)
        is_bad = bool(_damaged(report) - _damaged(before.report))
        if not news:  # right after a save, reports may differ in the journal only
            news, is_bad = before.news, before.is_bad
        self._snapshot = ReportSnapshot(before.version + 1, report, news, is_bad)


def _stamp(run: Path) -> object:
    """Returns a value that changes with the steps and the journal of a run."""
    journal = _storage.stamp(run / _steps.journal.NAME)
    names = _storage.of(run).names(run) if run.is_dir() else []
    return journal, _storage.stamp(run), tuple(names)


def changes(before: Report, after: Report) -> str:
    """Describes the difference between two reports on a run; empty if unknown."""
    old = {step.step for step in before.steps}
    new = {step.step for step in after.steps}
    was_bad, is_bad = _damaged(before), _damaged(after)
    texts = []
    for steps, what in (
        (new - old, "saved"),
        (old - new, "deleted"),
        (is_bad - was_bad, "damaged"),
        (was_bad & new - is_bad, "good again"),
    ):
        numbers = sorted(step for step in steps if step is not None)
        texts += [f"step {step} {what}" for step in numbers[-3:]]
    return ", ".join(texts)


def _damaged(report: Report) -> set[int | None]:
    return {step.step for step in report.steps if step.damage is not None}
