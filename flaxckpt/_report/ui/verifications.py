"""Verification of checkpoints in the background, one at a time, for all open pages.

The results are kept until the server ends, and count until something newer is known of
the step: it was saved again or deleted, its files have changed, or it was marked as
damaged or found to be good by another program.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._inspect.listing import Step
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import integrity
from flaxckpt._report.data import Report
from flaxckpt._report.integrity import Verification
from flaxckpt._util import progress

_log = logging.getLogger(__name__)

_MOST_RESULTS = 20_000
_SHARE = 0.05
"""The share of the time in which the files of verified steps are looked at."""


class _StoppedError(Exception):
    """Ends a verification that is not wanted any more."""


class _Counter(progress.Counter):
    """A counter that ends the verification after `stop` was set."""

    def __init__(self, what: str, stop: threading.Event) -> None:
        super().__init__(what)
        self._stop = stop

    def add(self, size: int) -> None:
        """Adds `size`; raises if the verification is to stop."""
        if self._stop.is_set():
            raise _StoppedError
        super().add(size)


class Job:
    """The verification of some steps of a run, one after the other, on a thread."""

    def __init__(
        self,
        place: Location,
        steps: Sequence[Step],
        remember: Callable[[Location, Verification], None],
        end: Callable[[], None],
    ) -> None:
        self.place = place
        self.steps = tuple(steps)
        self.results: list[Verification] = []
        self.error: str | None = None
        self._remember, self._end = remember, end
        self._stop = threading.Event()
        self._counter = progress.Counter("")
        # No daemon thread: it may be in a library when Python ends.
        self._thread = threading.Thread(
            target=self._run, name="flaxckpt ui verification", daemon=False
        )

    @property
    def is_running(self) -> bool:
        """True until the last step is verified, or the job has stopped."""
        return self._thread.is_alive()

    @property
    def is_stopped(self) -> bool:
        """True after `stop`, although a request to a store may still be running."""
        return self._stop.is_set()

    @property
    def current(self) -> tuple[Step | None, int, int]:
        """The step that is being read, the bytes read and its bytes; 0 if unknown."""
        n = len(self.results)
        step = self.steps[n] if n < len(self.steps) else None
        return step, self._counter.done, self._counter.total

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the job after the parts of files that are being read."""
        self._stop.set()

    def _run(self) -> None:
        try:
            for step in self.steps:
                if self._stop.is_set():
                    return
                self._counter = _Counter(f"verifying {step.path}", self._stop)
                result = integrity.verify_step(step, self._counter)
                self._remember(self.place, result)
                self.results.append(result)
        except _StoppedError:
            return
        except Exception as error:
            _log.exception("verifying %s failed", self.place.path)
            self.error = str(error) or type(error).__name__
        finally:
            self._end()


class Verifications:
    """Verifies checkpoints, and remembers the results; thread-safe.

    Its `version` grows as results are found and end, for pages that show them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.job: Job | None = None
        self._results: dict[
            tuple[Path, int | None], Verification
        ] = {}  # the newest last
        self._changed: dict[tuple[Path, int | None], Verification] = {}
        self._looking = threading.Lock()
        self._due = 0.0
        self.version = 0

    def start(self, place: Location, steps: Sequence[Step]) -> None:
        """Starts to verify steps in order; raises OptionError if another job runs."""
        if not steps:
            raise errors.OptionError(f"{place.name} has no step to verify")
        with self._lock:
            if self.job is not None and self.job.is_running:
                raise errors.OptionError(
                    f"{self.job.place.name} is being verified: wait for it, or stop it"
                )
            self.job = Job(place, steps, self._remember, self._count_version)
            self.job.start()

    def stop(self) -> None:
        """Stops the verification that is running, if any."""
        if self.job is not None:
            self.job.stop()

    def find(
        self, place: Location, report: Report
    ) -> Mapping[int | None, Verification]:
        """Returns the last result for each step of a run, with what is known since."""
        self.look_again()
        with self._lock:
            results = [(k, r) for k, r in self._results.items() if k[0] == place.path]
            changed = [n for (p, n), r in results if self._changed.get((p, n)) is r]
        found = {step: result for (_, step), result in results}
        checks = {step: result.integrity for step, result in found.items()}
        news = {
            **dict.fromkeys(changed, "has changed on the disk"),
            **integrity.find_news(report, checks),
        }
        steps = {step.step: step for step in report.steps}
        for number, result in found.items():
            if number not in steps:
                news[number] = "was deleted"
            elif not _is_same(steps[number], result.step):
                news[number] = "was saved again"
        return {n: result._replace(news=news.get(n, "")) for n, result in found.items()}

    def update(self, place: Location, report: Report) -> Report:
        """Returns a report with the integrity that the verifications have found."""
        found = self.find(place, report)
        good = {n: result.integrity for n, result in found.items() if not result.news}
        if not good:
            return report
        checks = [
            integrity.merge(step, check, good.get(step.step, check))
            for step, check in zip(report.steps, report.integrity, strict=True)
        ]
        return report.with_integrity(checks)

    def look_again(self) -> None:
        """Finds the steps whose files have changed since they were read.

        Takes a small part of the time at most, however many files there are.
        """
        if time.monotonic() < self._due or not self._looking.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            with self._lock:
                results = [*self._results.items()]
            changed = {key: result for key, result in results if _has_changed(result)}
            if changed.keys() != self._changed.keys():
                self._count_version()
            self._changed = changed
            now = time.monotonic()
            self._due = now + (now - began) / _SHARE
        finally:
            self._looking.release()

    def _count_version(self) -> None:
        with self._lock:
            self.version += 1

    def _remember(self, place: Location, result: Verification) -> None:
        key = (place.path, result.step.step)
        with self._lock:
            self._results.pop(key, None)
            self._results[key] = result
            self.version += result.integrity.is_bad
            while len(self._results) > _MOST_RESULTS:
                del self._results[next(iter(self._results))]


def _is_same(step: Step, verified: Step) -> bool:
    """Returns True unless the step was saved again after it was verified."""
    return (step.path, step.created) == (verified.path, verified.created)


def _has_changed(result: Verification) -> bool:
    """Returns True if files of a step have changed since it was verified."""
    if result.files is None:
        return False
    path = _storage.paths.from_text(result.step.path)
    return integrity.stamp_files(path) != result.files
